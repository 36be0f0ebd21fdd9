"""Which keys a row sees, where other attention kernels and backends got it wrong: causal alignment,
empty sequences, windows; and which head it reads.

Every expected number is derived by hand, or computed by the fp64 definition, never by a kernel.
"""

import math

import pytest
import torch
from adapter import Layer
from compare import assert_accurate
from regressions import (
    TOLERANCE,
    close,
    column,
    draw,
    regression,
    run,
    top_left_causal,
    truth,
    window_one_wider,
)

from hf_flash_backend import flash_attn, functional
from hf_flash_backend.integration import attention_forward
from hf_flash_backend.reference import attention_eager, attention_fp64


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
    """Yields the packed call made in all three ways, [1, H, L, D]: by row limits, by a layer with
    cu_seq_lens, by flash_attn_varlen_func.
    """
    len_q, len_kv = (torch.tensor(cu).diff() for cu in (cu_q, cu_k))
    limits = [torch.repeat_interleave(torch.tensor(cu_k[i:][: len(len_q)]), len_q) for i in (0, 1)]
    row_start, row_end = (t[None].to(q.device, torch.int32) for t in limits)
    yield attend(q, k, v, row_start=row_start, row_end=row_end)[0]
    monkeypatch.setattr(functional, "attention", lambda *t, **a: attend(*t, **a)[0])
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=q.device) for cu in (cu_q, cu_k))
    out, _ = attention_forward(Layer(), q, k, v, None, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)
    yield out.transpose(1, 2)
    monkeypatch.setattr(flash_attn, "attention", lambda *t, return_lse, **a: attend(*t, **a))
    tokens = (t[0].transpose(0, 1) for t in (q, k, v))
    out = flash_attn.flash_attn_varlen_func(*tokens, cu_q, cu_k, max_seqlen_q=0, max_seqlen_k=0)
    yield out.transpose(0, 1)[None]


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
    monkeypatch.setattr(flash_attn, "attention", lambda *t, return_lse, **a: attend(*t, **a))
    one_sided, _ = attention_fp64(q, k, v, window=(None, 1))
    for window, want in (((-1, -1), full), ((-1, 1), one_sided)):
        out = flash_attn.flash_attn_func(
            *(t.transpose(1, 2) for t in (q, k, v)), window_size=window
        )
        close(out.transpose(1, 2), want, 2 * TOLERANCE[dtype], f"window_size {window}")


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
