"""Softmax and scores that other attention kernels got wrong, one test a case: rows far below 0 or
without keys, scales, softcap, sinks.

Every expected number is derived by hand, or computed by the fp64 definition, never by a kernel.
"""

import math

import pytest
import torch
from adapter import Layer
from cases import DTYPES
from regressions import (
    TOLERANCE,
    assert_finite,
    check,
    close,
    column,
    draw,
    large_number_for_minus_inf,
    no_maximum_subtracted,
    ours,
    regression,
    run,
    softmax_of_minus_inf,
    truth,
    without,
)

from hf_flash_backend import functional
from hf_flash_backend.integration import attention_forward
from hf_flash_backend.reference import attention_fp64


def negative_scores(len_q, len_kv, device, dtype):
    """All scores near q_0 k_0 / sqrt(64) = -960 / 8 = -120, so exp(-lse) overflows fp32."""
    q, k, v, dout = draw(
        (1, 2, len_q, 64), (1, 2, len_kv, 64), (1, 2, len_kv, 64), (1, 2, len_q, 64),
        device="cpu", dtype="fp32",
    )  # fmt: skip
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -960.0
    return [t.to(device, DTYPES[dtype]) for t in (q, k, v, dout)]


# length: lse from, to, and the largest |dq|, |dk|, |dv|, computed in fp64 from the bf16 inputs.
NEGATIVE_LSE = {
    64: (-119.997, -115.840, 0.19255, 0.99118, 2.98380),
    704: (-120.017, -113.443, 0.19824, 0.57301, 3.58643),
}


@pytest.mark.parametrize("form", ["flag", "mask", "all-true mask"])
@pytest.mark.parametrize("length", NEGATIVE_LSE)
@regression({"no_maximum": no_maximum_subtracted}, dtypes=("bf16",))
def test_very_negative_lse(attend, device, dtype, length, form):
    """R1: a backward that forms exp(-lse) overflowed to NaN once every score lay below -88."""
    q, k, v, dout = negative_scores(length, length, device, dtype)
    mask = torch.ones(length, length, dtype=torch.bool, device=device)[None, None]
    arguments = {
        "flag": dict(is_causal=True),
        "mask": dict(mask=mask.tril()),
        "all-true mask": dict(mask=mask),
    }[form]
    result = run(attend, q, k, v, dout, **arguments)
    assert_finite(result)
    check(result, q, k, v, dout, **arguments)
    if form != "all-true mask":
        lowest, highest, *largest = NEGATIVE_LSE[length]
        close(torch.stack(result.lse.aminmax()), [lowest, highest], 1e-5, "lse")
        want = run(attention_fp64, q, k, v, dout, **arguments)
        for name, number in zip(("dq", "dk", "dv"), largest, strict=True):
            close(getattr(want, name).abs().max(), number, 2.0**-8, name)


@pytest.mark.parametrize("len_kv", [128, 97])
@regression({"no_maximum": no_maximum_subtracted}, dtypes=("bf16",))
def test_very_negative_lse_of_one_query(attend, device, dtype, len_kv):
    """R2: the same overflow came back in the path for a single query, in dk and dv."""
    q, k, v, dout = negative_scores(1, len_kv, device, dtype)
    dout = torch.ones_like(dout)
    result = run(attend, q, k, v, dout)
    assert_finite(result)
    check(result, q, k, v, dout)
    # dout = 1, so dv[j] is the weight of key j in every channel; weights sum to 1. P and dv are
    # rounded to bf16, each by at most 2^-9 of itself.
    close(result.dv.double().sum(dim=2), 1.0, 2.0**-8, "sum of dv")
    if len_kv == 128:
        close(result.lse, [[[-115.1477], [-115.1471]]], 1e-5, "lse")
        close(result.dk.abs().max(), 0.02532, 2.0**-7, "dk")


SIZES = [(5, 8), (33, 64), (129, 128), (512, 64)]


@pytest.mark.parametrize("length, dim", SIZES, ids=str)
@regression({"nan": softmax_of_minus_inf, "mean_of_values": large_number_for_minus_inf})
def test_row_hidden_by_a_bool_mask(attend, device, dtype, length, dim):
    """R5: a row whose mask is all false gave NaN, or the mean of values that it must not see."""
    q, k, v = draw(*[(2, 2, length, dim)] * 3, device=device, dtype=dtype)
    mask = torch.ones(2, 1, length, length, dtype=torch.bool, device=device)
    mask[1, :, 2] = False
    dout = torch.ones_like(q)
    result = run(attend, q, k, v, dout, mask=mask)
    assert (result.out[1, :, 2] == 0).all() and (result.dq[1, :, 2] == 0).all()
    assert torch.equal(result.lse == -math.inf, ~mask[..., 0].expand_as(result.lse))
    assert_finite(result)
    check(result, q, k, v, dout, mask=mask)


def smallest_number_hides(q, k, v, mask, **arguments):
    return truth(q, k, v, mask=mask > torch.finfo(mask.dtype).min, **arguments)


@regression({"hidden": smallest_number_hides})
def test_row_of_the_smallest_number(attend, device, dtype):
    """R6a: a mask of the lowest finite number was taken for -inf (or became it: times log2 e)."""
    q, k, v = draw(*[(1, 2, 5, 8)] * 3, device=device, dtype=dtype)
    mask = torch.zeros(1, 1, 5, 5, device=device, dtype=q.dtype)
    mask[:, :, 2] = torch.finfo(q.dtype).min
    dout = torch.ones_like(q)
    result = run(attend, q, k, v, dout, mask=mask)
    assert_finite(result)
    # -3e38 swallows the scores, so the weights are equal. -65504 does not: they stay what they are.
    mean = v.double().mean(dim=2)
    if dtype == "fp16":
        mean = attention_fp64(q, k, v)[0][:, :, 2]
    close(result.out[:, :, 2], mean, TOLERANCE[dtype], "out")
    others = [0, 1, 3, 4]
    rest, rest_lse = attention_fp64(q[:, :, others], k, v)
    close(result.out[:, :, others], rest, TOLERANCE[dtype], "other rows")
    close(result.lse[:, :, others], rest_lse, 1e-5, "lse of other rows")


@pytest.mark.xfail(
    strict=True, reason="backward takes exp(score - lse), and lse = -3e38 has no room for ln(keys)"
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradient_of_a_row_of_the_smallest_number(device):
    """R6a, backward: weights made again from a lse that swallowed their sum are too large."""
    q, k, v = draw(*[(1, 2, 5, 8)] * 3, device=device, dtype="bf16")
    mask = torch.full((1, 1, 5, 5), torch.finfo(q.dtype).min, device=device, dtype=q.dtype)
    dout = torch.ones_like(q)
    # Five rows of five equal weights: every key gets 5 x 1/5 of dout.
    close(run(truth, q, k, v, dout, mask=mask).dv, 1.0, TOLERANCE["bf16"], "truth")
    close(run(ours, q, k, v, dout, mask=mask).dv, 1.0, TOLERANCE["bf16"], "dv")


# The sum of two masks leaves the range: -65504 - 16 rounds to -inf (- 8 would not); so does 2 min.
OVERFLOWING_MASKS = {
    "fp16": torch.tensor(-65504.0, dtype=torch.float16) + torch.tensor(-16.0, dtype=torch.float16),
    "bf16": 2 * torch.tensor(torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16),
}


@regression(
    {"nan": softmax_of_minus_inf, "mean_of_values": large_number_for_minus_inf},
    dtypes=("fp16", "bf16"),
)
def test_row_hidden_by_an_overflowing_mask(attend, device, dtype):
    """R6b, R6c: two added masks overflowed to -inf in 16 bits and the whole row became NaN."""
    assert OVERFLOWING_MASKS[dtype] == -math.inf
    q, k, v = draw(*[(1, 2, 5, 8)] * 3, device=device, dtype=dtype)
    mask = torch.zeros(1, 1, 5, 5, device=device, dtype=q.dtype)
    mask[:, :, 2] = OVERFLOWING_MASKS[dtype].to(device)
    dout = torch.ones_like(q)
    result = run(attend, q, k, v, dout, mask=mask)
    assert_finite(result)
    assert (result.out[:, :, 2] == 0).all() and (result.dq[:, :, 2] == 0).all()
    assert (result.lse[:, :, 2] == -math.inf).all()
    check(result, q, k, v, dout, mask=mask)


def absolute_scale(q, k, v, scale, **arguments):
    return truth(q, k, v, scale=abs(scale), **arguments)


def default_for_zero_scale(q, k, v, scale, **arguments):
    return truth(q, k, v, scale=scale or 1.0, **arguments)


def maximum_before_scale(q, k, v, scale, **arguments):
    """Subtracts the largest q k times scale, which is the smallest score if scale < 0."""
    products = q.float() @ k.float().transpose(-1, -2)
    shift = scale * products.amax(-1, keepdim=True)
    weights = torch.exp(scale * products - shift)
    total = weights.sum(-1, keepdim=True)
    return (weights / total @ v.float()).to(q.dtype), (shift + total.log())[..., 0]


@regression(
    {"abs": absolute_scale, "default": default_for_zero_scale, "maximum": maximum_before_scale}
)
def test_scale_of_any_sign(attend, device, dtype):
    """R18: with a scale of 0 or below, the maximum was taken before the sign, or a default used."""
    q, k = column([1.0], device, dtype), column([1.0, 0.0], device, dtype)
    v = column([1.0, 0.0], device, dtype)
    # Scores -2 and 0: 1 / (1 + e^2) = 0.119203, lse ln(1 + e^-2) = 0.126928. Scale 0: one half.
    for scale, weight, want_lse in ((-2.0, 0.119203, 0.126928), (0.0, 0.5, math.log(2))):
        out, lse = attend(q, k, v, scale=scale)
        close(out[0, 0, 0, 0], weight, TOLERANCE[dtype], f"scale {scale}")
        close(lse[0, 0, 0], want_lse, 1e-5, f"lse, scale {scale}")
        check(run(attend, q, k, v, v[:, :, :1], scale=scale), q, k, v, v[:, :, :1], scale=scale)
    # Scores -120 and 0: exp(120), from a maximum on the wrong side, is no fp32 number.
    out, _ = attend(60 * q, k, v, scale=-2.0)
    close(out[0, 0, 0, 0], 0.0, TOLERANCE[dtype], "scores -120 and 0")


# softcap: out, lse, dq, dk, dv of q = 1, k = (30, 20), v = (1, 0), scale 1, dout = 1. With
# t = tanh(k / cap), scores are cap t, P = softmax, dS = P (dP - out) and dk = dS (1 - t^2) q.
SOFTCAPS = {
    15.0: (0.803685, 14.67896, -0.432356, [0.011147, -0.038338], [0.803685, 0.196315]),
    50.0: (0.999612, 26.85287, 0.00164087, [2.757334e-4, -3.315564e-4], [0.999612, 0.000388]),
    0.0: (0.999955, 30.00005, None, None, [0.999955, 0.000045]),
}


def multiplied_by_tanh(q, k, v, softcap, **arguments):
    scores = q.float() @ k.float().transpose(-1, -2)
    scores = scores * torch.tanh(scores / softcap) if softcap else scores
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def no_derivative_of_tanh(q, k, v, softcap, **arguments):
    scores = q.float() @ k.float().transpose(-1, -2)
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores + (capped - scores).detach()
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


@regression(
    {
        "dropped": without("softcap"),
        "formula": multiplied_by_tanh,
        "no_derivative": no_derivative_of_tanh,
    }
)
def test_softcap(attend, device, dtype):
    """R19: the cap was dropped, or multiplied the scores, or had no derivative in backward."""
    q, k = column([1.0], device, dtype), column([30.0, 20.0], device, dtype)
    v = column([1.0, 0.0], device, dtype)
    dout = column([1.0], device, dtype)
    for softcap, (out, lse, dq, dk, dv) in SOFTCAPS.items():
        arguments = dict(scale=1.0, softcap=softcap)
        result = run(attend, q, k, v, dout, **arguments)
        close(result.out[0, 0, 0, 0], out, TOLERANCE[dtype], f"out, cap {softcap}")
        close(result.lse[0, 0, 0], lse, 1e-6, f"lse, cap {softcap}")
        close(result.dv[0, 0, :, 0], dv, TOLERANCE[dtype], f"dv, cap {softcap}")
        if dq is None:
            check(result, q, k, v, dout, **arguments)
            continue
        # Backward takes dP - out from the rounded output, off by half an eps. dS is off by P times
        # that, where it cancels, and so are dk and dq. In fp32 that is nothing.
        half = torch.finfo(q.dtype).eps / 2
        slope = [1 - math.tanh(score / softcap) ** 2 for score in (30.0, 20.0)]
        slack = [half * p * s for p, s in zip(dv, slope, strict=True)]
        relative = 1e-4 if q.dtype.itemsize > 2 else TOLERANCE[dtype]
        for name, got, want, absolute in (
            ("dq", result.dq[0, 0, 0, 0], dq, 30.0 * slack[0] + 20.0 * slack[1]),
            ("dk of key 0", result.dk[0, 0, 0, 0], dk[0], slack[0]),
            ("dk of key 1", result.dk[0, 0, 1, 0], dk[1], slack[1]),
        ):
            error = abs(got.item() - want)
            assert error <= relative * abs(want) + absolute, f"{name}, cap {softcap}: {got}"


@regression({"dropped": without("sinks")})
def test_sinks(attend, device, dtype, monkeypatch):
    """R20: models with attention sinks ran on kernels that dropped them, without a word."""
    q, k = column([0.0], device, dtype), column([0.0] * 3, device, dtype)
    v = column([1.0, 2.0, 5.0], device, dtype)
    monkeypatch.setattr(functional, "attention", lambda *t, **a: attend(*t, **a)[0])
    # Three keys of weight 1 and a sink of weight s: out 8 / (3 + s), dsink = -out s / (3 + s).
    for number, out, lse, dsink in (
        (0.0, 2.0, math.log(4), -0.5),
        (math.log(3), 8 / 6, math.log(6), -2 / 3),
    ):
        sinks = torch.full((1,), number, device=device, dtype=q.dtype, requires_grad=True)
        rounded = abs(sinks.item() - number)  # ln 3 is no 16-bit number
        got, got_lse = attend(q, k, v, sinks=sinks)
        close(got[0, 0, 0, 0], out, TOLERANCE[dtype], "out")
        close(got_lse[0, 0, 0], lse, 1e-5 + rounded, "lse")
        (gradient,) = torch.autograd.grad(got[0, 0, 0, 0], sinks)
        assert gradient.dtype == sinks.dtype and gradient.shape == sinks.shape
        close(gradient[0], dsink, TOLERANCE[dtype], "dsink")
        try:
            of_layer, _ = attention_forward(Layer(), q, k, v, None, s_aux=sinks)
        except NotImplementedError as error:  # refused, never dropped
            assert "s_aux" in str(error)
        else:
            close(of_layer[0, 0, 0, 0], out, TOLERANCE[dtype], "out of a layer")
