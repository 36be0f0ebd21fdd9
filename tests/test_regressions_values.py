"""Numbers that other attention kernels and backends got wrong, one test a case.

Every expected number is derived by hand, or computed by the fp64 definition, never by a kernel.
"""

import math

import pytest
import torch
from adapter import Layer
from cases import DTYPES
from compare import assert_accurate
from regressions import (
    TOLERANCE,
    assert_finite,
    check,
    close,
    column,
    draw,
    large_number_for_minus_inf,
    no_maximum_subtracted,
    regression,
    run,
    softmax_of_minus_inf,
    top_left_causal,
    truth,
    window_one_wider,
    without,
)

from hf_flash_backend import functional
from hf_flash_backend.integration import attention_forward
from hf_flash_backend.reference import attention_eager, attention_fp64


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


@regression({"top_left": top_left_causal})
def test_causal_is_bottom_right(attend, device, dtype):
    """R8: kernels aligned the causal diagonal at the first key, wrong once Lq and Lk differ."""
    # q = 0: equal weights. Row 0 of 2 stands at key 3 of 5: mean(0..3) = 1.5; row 1: mean(0..4).
    out, lse = attend(
        column([0.0] * 2, device, dtype), column([0.0] * 5, device, dtype),
        column([0.0, 1.0, 2.0, 3.0, 4.0], device, dtype), is_causal=True,
    )  # fmt: skip
    close(out[0, 0, :, 0], [1.5, 2.0], TOLERANCE[dtype], "2 rows, 5 keys")
    close(lse[0, 0], [math.log(4), math.log(5)], 1e-5, "lse")
    # Rows 0 to 2 of 5 stand before the first of 2 keys.
    out, lse = attend(
        column([0.0] * 5, device, dtype), column([0.0] * 2, device, dtype),
        column([1.0, 3.0], device, dtype), is_causal=True,
    )  # fmt: skip
    close(out[0, 0, :, 0], [0.0, 0.0, 0.0, 1.0, 2.0], TOLERANCE[dtype], "5 rows, 2 keys")
    close(lse[0, 0], [-math.inf] * 3 + [0.0, math.log(2)], 1e-5, "lse")


def packed_forms(attend, monkeypatch, q, k, v, cu_q, cu_k):
    """Yields the packed call made by row limits, and by a layer with cu_seq_lens: [1, H, L, D]."""
    len_q, len_kv = (torch.tensor(cu).diff() for cu in (cu_q, cu_k))
    limits = [torch.repeat_interleave(torch.tensor(cu_k[i:][: len(len_q)]), len_q) for i in (0, 1)]
    row_start, row_end = (t[None].to(q.device, torch.int32) for t in limits)
    yield attend(q, k, v, row_start=row_start, row_end=row_end)[0]
    monkeypatch.setattr(functional, "attention", lambda *t, **a: attend(*t, **a)[0])
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=q.device) for cu in (cu_q, cu_k))
    out, _ = attention_forward(Layer(), q, k, v, None, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)
    yield out.transpose(1, 2)


def no_end(q, k, v, row_end, **arguments):
    """An empty range of keys that reaches into the next sequence."""
    return truth(q, k, v, row_end=row_end + 1, **arguments)


def nan_without_keys(q, k, v, **arguments):
    out, lse = truth(q, k, v, **arguments)
    return torch.where((lse == -math.inf)[..., None], math.nan, out), lse


@regression({"one_key_further": no_end, "uninitialised": nan_without_keys})
def test_sequences_of_length_zero(attend, device, dtype, monkeypatch):
    """R14: a packed sequence without queries or keys hung, crashed or left gradients unwritten."""
    q, k = draw((1, 1, 5, 8), (1, 1, 9, 8), device=device, dtype=dtype)
    v = torch.ones_like(k)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    # Rows 0 to 2 have no keys, rows 3 and 4 have keys 4 to 6; keys 0 to 3 and 7, 8 have no rows.
    bounds = ([0, 0, 3, 5, 5], [0, 4, 4, 7, 9])
    for out in packed_forms(attend, monkeypatch, *inputs, *bounds):
        close(out[0, 0], torch.tensor([0.0, 0, 0, 1, 1])[:, None], TOLERANCE[dtype], "out")
        assert (out[0, 0, :3] == 0).all()
        dq, dk, dv = torch.autograd.grad(out.float().sum(), inputs)
        unseen = [0, 1, 2, 3, 7, 8]
        assert (dv[0, 0, unseen] == 0).all() and (dk[0, 0, unseen] == 0).all()
        assert (dq[0, 0, :3] == 0).all()
        # v is constant, so no score matters: dk = 0. Two rows give their weights, 1 each, to dv.
        close(dk, 0.0, 8 * TOLERANCE[dtype], "dk")
        close(dv[0, 0].sum(dim=0), 2.0, TOLERANCE[dtype], "sum of dv")


@regression({"one_key_further": no_end})
def test_single_queries_among_empty_sequences(attend, device, dtype, monkeypatch):
    """R15: with one query a sequence and some sequences empty, folding heads into rows failed."""
    q, k, v = draw((1, 4, 2, 16), (1, 1, 8, 16), (1, 1, 8, 16), device=device, dtype=dtype)
    alone = [
        attention_fp64(q[:, :, i : i + 1], k[:, :, keys], v[:, :, keys])[0]
        for i, keys in ((0, slice(0, 3)), (1, slice(3, 8)))
    ]
    for out in packed_forms(attend, monkeypatch, q, k, v, [0, 0, 1, 1, 2], [0, 0, 3, 3, 8]):
        assert out[0].transpose(0, 1).shape == (2, 4, 16)
        close(out, torch.cat(alone, dim=2), 2 * TOLERANCE[dtype], "out")


@regression({"one_wider": window_one_wider})
def test_sliding_window_counts_its_own_row(attend, device, dtype, monkeypatch):
    """R17: a window of w keys includes the row's own; backends let through w + 1 of them."""
    zeros, v = column([0.0] * 8, device, dtype), column([*range(8)], device, dtype)
    # Equal weights over keys max(0, i - 3) to i, and over key i alone.
    expected = {4: [0.0, 0.5, 1.0, 1.5, 2.5, 3.5, 4.5, 5.5], 1: [*range(8)]}
    monkeypatch.setattr(functional, "attention", lambda *t, **a: attend(*t, **a)[0])
    for width, want in expected.items():
        out, _ = attend(zeros, zeros, v, is_causal=True, window=(width - 1, None))
        close(out[0, 0, :, 0], want, TOLERANCE[dtype], f"window {width}")
        out, _ = attention_forward(
            Layer(is_causal=True), zeros, zeros, v, None, sliding_window=width
        )
        close(out[0, :, 0, 0], want, TOLERANCE[dtype], f"sliding_window {width} of a layer")
    q, k, v = draw(*[(1, 2, 8, 8)] * 3, device=device, dtype=dtype)
    full, _ = attend(q, k, v, is_causal=True)
    for width in (8, 9, 4096):
        assert torch.equal(attend(q, k, v, is_causal=True, window=(width - 1, None))[0], full)
        out, _ = attention_forward(Layer(is_causal=True), q, k, v, None, sliding_window=width)
        assert torch.equal(out.transpose(1, 2), full)


def sentinel_is_a_number(q, k, v, window=None, **arguments):
    window = (window, None) if isinstance(window, int) else window or (None, None)
    out, lse = attention_fp64(q, k, v, window=window, **arguments)
    return out.to(q.dtype), lse.float()


@regression({"number": sentinel_is_a_number})
def test_no_window(attend, device, dtype, monkeypatch):
    """R18: -1 or None for "no window" was used as a distance, and the output was all zeros."""
    q, k, v = draw(*[(1, 2, 5, 8)] * 3, device=device, dtype=dtype)
    full, _ = attention_fp64(q, k, v)
    for window in (None, (None, None), -1, (-1, -1)):
        try:
            out, _ = attend(q, k, v, window=window)
        except ValueError as error:  # -1 may be refused, never misread
            assert "hf_flash_backend: window" in str(error) and window not in (None, (None, None))
            continue
        close(out, full, 2 * TOLERANCE[dtype], f"window {window}")
    monkeypatch.setattr(functional, "attention", lambda *t, **a: attend(*t, **a)[0])
    for width in (None, -1, 0):
        out, _ = attention_forward(Layer(), q, k, v, None, sliding_window=width, scaling=8**-0.5)
        close(out.transpose(1, 2), full, 2 * TOLERANCE[dtype], f"sliding_window {width}")


def absolute_scale(q, k, v, scale, **arguments):
    return truth(q, k, v, scale=abs(scale), **arguments)


def default_for_zero_scale(q, k, v, scale, **arguments):
    return truth(q, k, v, scale=scale or 1.0, **arguments)


def maximum_before_scale(q, k, v, scale, **arguments):
    """The row's maximum is taken of q k^T and multiplied by scale later: wrong side if scale < 0."""
    products = q.float() @ k.float().transpose(-1, -2)
    weights = torch.exp(scale * (40 * products - 40 * products.amax(-1, keepdim=True)))
    return (weights / weights.sum(-1, keepdim=True) @ v.float()).to(q.dtype), products[..., 0]


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
    # Scores -60 and 0 in a row of its own: far from 0, where a maximum of the wrong sign overflows.
    out, _ = attend(30 * q, k, v, scale=-2.0)
    close(out[0, 0, 0, 0], 0.0, TOLERANCE[dtype], "scores -60 and 0")


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
        try:
            got, got_lse = attend(q, k, v, sinks=sinks)
        except NotImplementedError as error:
            assert "sinks" in str(error)
            with pytest.raises(NotImplementedError, match="s_aux"):
                attention_forward(Layer(), q, k, v, None, s_aux=sinks)
            pytest.skip(str(error))
        close(got[0, 0, 0, 0], out, TOLERANCE[dtype], "out")
        close(got_lse[0, 0, 0], lse, 1e-5 + rounded, "lse")
        (gradient,) = torch.autograd.grad(got[0, 0, 0, 0], sinks)
        assert gradient.dtype == sinks.dtype and gradient.shape == sinks.shape
        close(gradient[0], dsink, TOLERANCE[dtype], "dsink")


def heads_in_turn(q, k, v, **arguments):
    """Query head h reads kv head h % Hkv."""
    repeats = (1, q.shape[1] // k.shape[1], 1, 1)
    return truth(q, k.repeat(repeats), v.repeat(repeats), **arguments)


def first_head_of_the_group(q, k, v, **arguments):
    """dk and dv of one query head in place of the sum over its group."""
    group = q.shape[1] // k.shape[1]

    def expand(t):
        heads = [
            t[:, h // group] if h % group == 0 else t[:, h // group].detach()
            for h in range(q.shape[1])
        ]
        return torch.stack(heads, dim=1)

    return truth(q, expand(k), expand(v), **arguments)


@pytest.mark.parametrize("form", ["full", "mask"])
@pytest.mark.parametrize("heads_kv", [1, 2, 8])
@regression({})
def test_grouped_heads(attend, device, dtype, heads_kv, form):
    """R22: grouped heads fell back to a slow path with a mask, or summed dk and dv in 16 bits."""
    check_grouped_heads(attend, device, dtype, heads_kv, form)


@pytest.mark.parametrize("form", ["full", "mask"])
@pytest.mark.parametrize("heads_kv", [2])
@regression({"in_turn": heads_in_turn, "first_head": first_head_of_the_group}, dtypes=("bf16",))
def test_grouped_heads_can_fail(attend, device, dtype, heads_kv, form):
    """R22: the check refuses a wrong order of heads and a gradient of one head in place of all."""
    check_grouped_heads(attend, device, dtype, heads_kv, form)


def check_grouped_heads(attend, device, dtype, heads_kv, form):
    q, k, v, dout = draw(
        (2, 8, 17, 64), (2, heads_kv, 33, 64), (2, heads_kv, 33, 64), (2, 8, 17, 64),
        device=device, dtype=dtype,
    )  # fmt: skip
    arguments = {}
    if form == "mask":
        mask = torch.rand(2, 8, 17, 33, generator=torch.Generator().manual_seed(1)) > 0.3
        arguments["mask"] = mask.to(device)
    heads = [h // (8 // heads_kv) for h in range(8)]
    result = run(attend, q, k, v, dout, **arguments)

    def expanded(function, *tensors):
        """Every query head with a copy of its own: (out, dq, dk, dv), the last two summed."""
        leaves = [tensors[0], tensors[1][:, heads], tensors[2][:, heads]]
        r = run(function, *leaves, tensors[3], **arguments)
        sums = [
            t.to(torch.promote_types(t.dtype, torch.float32)).unflatten(1, (heads_kv, -1)).sum(2)
            for t in (r.dk, r.dv)
        ]
        return r.out, r.dq, *sums

    want = expanded(attention_fp64, *(t.double() for t in (q, k, v, dout)))
    yardstick = expanded(attention_eager, q, k, v, dout)
    got = (result.out, result.dq, result.dk, result.dv)
    for name, a, b, normal in zip(("out", "dq", "dk", "dv"), got, want, yardstick, strict=True):
        if q.dtype.itemsize > 2:
            close(a, b, 1e-5, name)
        else:
            assert_accurate(a, b, normal, name)
