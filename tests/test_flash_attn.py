"""The functions of the package flash_attn: signatures, layouts, values."""

import inspect
import math

import pytest
import torch

import hf_flash_backend
from hf_flash_backend.reference import attention_fp64

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHARED = [
    ("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)),
    ("softcap", 0.0), ("alibi_slopes", None), ("deterministic", False),
    ("return_attn_probs", False),
]  # fmt: skip
NONE = inspect.Parameter.empty
VARLEN = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": [("q", NONE), ("k", NONE), ("v", NONE), *SHARED],
    "flash_attn_qkvpacked_func": [("qkv", NONE), *SHARED],
    "flash_attn_kvpacked_func": [("q", NONE), ("kv", NONE), *SHARED],
    "flash_attn_varlen_func": [
        *((name, NONE) for name in ("q", "k", "v", *VARLEN)), *SHARED, ("block_table", None)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attn_2_8(name):
    parameters = inspect.signature(getattr(hf_flash_backend, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]


def tensors(device, *shapes):
    g = torch.Generator().manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def close(ours, truth):
    tolerance = 1e-5 if ours.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.double(), truth.double(), atol=tolerance, rtol=tolerance)


CALLS = {
    "full": dict(),
    "causal": dict(causal=True, softmax_scale=0.3),
    "window": dict(window_size=(5, 0)),
    "softcap": dict(softcap=4.0, causal=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
def test_dense(call, device):
    q, k, v = tensors(device, (2, 33, 4, 16), (2, 47, 2, 16), (2, 47, 2, 16))
    arguments = CALLS[call]
    out, lse, probabilities = hf_flash_backend.flash_attn_func(
        q, k, v, return_attn_probs=True, **arguments
    )
    left, right = arguments.get("window_size", (None, None))
    truth, truth_lse = attention_fp64(
        *(t.transpose(1, 2) for t in (q, k, v)), scale=arguments.get("softmax_scale"),
        is_causal=arguments.get("causal", False), window=(left, right),
        softcap=arguments.get("softcap", 0.0),
    )  # fmt: skip
    close(out, truth.transpose(1, 2))
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-4, rtol=1e-5)
    assert probabilities.shape == (2, 4, 33, 47)
    weighted = probabilities.double() @ v.transpose(1, 2).double().repeat_interleave(2, dim=1)
    close(weighted.to(out.dtype), truth)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_forms_equal_the_plain_one(device):
    (qkv,) = tensors(device, (2, 40, 3, 4, 16))
    q, k, v = qkv.unbind(2)
    plain = hf_flash_backend.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(hf_flash_backend.flash_attn_qkvpacked_func(qkv, causal=True), plain)
    kv = torch.stack([k, v], dim=2)
    assert torch.equal(hf_flash_backend.flash_attn_kvpacked_func(q, kv, causal=True), plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (True, (9, 0))])
def test_varlen_equals_each_sequence_alone(causal, window, alibi, device):
    lengths_q, lengths_k, tail = (5, 0, 70, 1, 33), (9, 4, 70, 200, 12), 3
    total_q, total_k = sum(lengths_q) + tail, sum(lengths_k)
    q, k, v = tensors(device, (total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 16))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    bounds = [
        torch.tensor([0, *n], device=device).cumsum(0).int() for n in (lengths_q, lengths_k)
    ]
    slopes = torch.linspace(0.05, 0.4, 4, device=device) if alibi else None
    shared = dict(causal=causal, window_size=window, alibi_slopes=slopes)
    out = hf_flash_backend.flash_attn_varlen_func(
        q, k, v, *bounds, max(lengths_q), max(lengths_k), **shared
    )
    begin_q = begin_k = 0
    parts = []
    for n, m in zip(lengths_q, lengths_k, strict=True):
        rows, keys = slice(begin_q, begin_q + n), slice(begin_k, begin_k + m)
        alone = (t[None].transpose(1, 2).double() for t in (q[rows], k[keys], v[keys]))
        left, right = (None if w < 0 else w for w in window)
        part, _ = attention_fp64(
            *alone, is_causal=causal, window=(left, right), alibi_slopes=slopes
        )
        parts.append(part[0].transpose(0, 1))
        begin_q, begin_k = begin_q + n, begin_k + m
    truth = torch.cat(parts)
    close(out[:-tail], truth)
    assert (out[-tail:] == 0).all()
    weight = torch.linspace(-1, 1, 16, device=device)
    ours = torch.autograd.grad((out[:-tail] * weight.to(out.dtype)).sum(), (q, k, v))
    want = torch.autograd.grad((truth * weight).sum(), (q, k, v))
    for a, b in zip(ours, want, strict=True):
        close(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_shows_what_it_dropped(device):
    q, k, v = tensors(device, *[(2, 64, 4, 16)] * 3)
    out, _, probabilities = hf_flash_backend.flash_attn_func(
        q, k, v, dropout_p=0.25, return_attn_probs=True
    )
    kept = probabilities.double().clamp(min=0) / 0.75
    close(out.transpose(1, 2), kept @ v.transpose(1, 2).double())
    share = (probabilities < 0).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / probabilities.numel())


def test_what_differs_is_refused_by_name():
    q, bounds = torch.zeros(4, 1, 8), torch.tensor([0, 4])
    varlen = hf_flash_backend.flash_attn_varlen_func
    with pytest.raises(NotImplementedError, match="block_table is not implemented"):
        varlen(q, q, q, bounds, bounds, 4, 4, block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match=r"alibi_slopes: got shape \[1, 1\]"):
        varlen(q, q, q, bounds, bounds, 4, 4, alibi_slopes=torch.zeros(1, 1))
    with pytest.raises(ValueError, match="cu_seqlens_k: got shape"):
        varlen(q, q, q, bounds, bounds[:1], 4, 4)
