"""Sizes, scales and numbers at the edge: large grids, 64-bit offsets, empty rows, extreme logits."""

from __future__ import annotations

import math

import pytest
import torch
from compare import assert_accurate

from hf_flash_backend import attention
from hf_flash_backend.reference import attention_eager, attention_fp64

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MANY = 65_537  # one more than the second and third dimension of a CUDA grid hold


def randn(device: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(shape) + shape[-1])
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    return torch.randn(shape, generator=g).to(device, dtype)


def check(q, k, v, **arguments) -> None:
    """out and all gradients by the accuracy rule."""
    results = []
    for function, dtype in (
        (attention, q.dtype), (attention_fp64, torch.float64), (attention_eager, q.dtype)
    ):  # fmt: skip
        inputs = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = function(*inputs, **arguments)
        out = out if torch.is_tensor(out) else out[0]
        weight = torch.linspace(-1, 1, v.shape[-1], device=q.device).to(out.dtype)
        results.append((out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)))
    for name, ours, truth, eager in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        slack = None
        if ours.dtype == torch.float32:  # see compare.recompute_noise: exact cancellation of eager
            slack = torch.full_like(truth, 4e-6 * truth.abs().max().clamp(min=1).item())
        assert_accurate(ours, truth, eager, name, slack)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch, heads", [(MANY, 1), (1, MANY)], ids=["batch", "heads"])
def test_more_batches_or_heads_than_a_grid_dimension(batch, heads, device):
    q, k, v = (randn(device, batch, heads, 2, 8) for _ in range(3))
    check(q, k, v, is_causal=True)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    heads, length = 132, 131_072
    q = torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    k, v = (randn("cuda", 1, 1, length, 128) for _ in range(2))
    out, lse = attention(q, k, v, is_causal=True, window=(100, None), return_lse=True)
    for head, begin in ((0, 0), (heads - 1, length - 256), (70, 66_000)):
        first = max(0, begin - 100)
        rows, keys = slice(begin, begin + 256), slice(first, begin + 256)
        part = q[:, head : head + 1, rows], k[:, :, keys], v[:, :, keys]
        truth, truth_lse = attention_fp64(*part, is_causal=True, window=(100, None))
        eager, _ = attention_eager(*part, is_causal=True, window=(100, None))
        assert_accurate(out[:, head : head + 1, rows], truth, eager, f"head {head}")
        torch.testing.assert_close(
            lse[:, head : head + 1, rows].double(), truth_lse, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("len_q, len_kv", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_keys(len_q, len_kv, device):
    q = randn(device, 2, 2, len_q, 64).requires_grad_()
    k, v = (randn(device, 2, 2, len_kv, 64).requires_grad_() for _ in range(2))
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (2, 2, len_q, 64) and (out == 0).all() and (lse == -math.inf).all()
    for gradient, like in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert gradient.shape == like.shape and (gradient == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_many_more_rows_than_keys(device):
    """Causal, bottom-right: only the last three rows see anything."""
    q, k, v = randn(device, 1, 2, 3000, 64), randn(device, 1, 1, 3, 64), randn(device, 1, 1, 3, 64)
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    assert (out[:, :, :-3] == 0).all() and (lse[:, :, :-3] == -math.inf).all()
    check(q, k, v, is_causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-6, 3.0])
def test_scales(scale, device):
    q, k, v = randn(device, 1, 4, 70, 64), randn(device, 1, 2, 90, 64), randn(device, 1, 2, 90, 64)
    check(q, k, v, scale=scale, is_causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "window", [(None, None), (0, 0), (0, None), (None, 0), (1000, 1000), (3, 2)], ids=str
)
def test_windows(window, device):
    q, k, v = (
        randn(device, 1, 2, 80, 64),
        randn(device, 1, 2, 101, 64),
        randn(device, 1, 2, 101, 64),
    )
    check(q, k, v, window=window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [3e5, -3e5])
def test_huge_logits(size, device):
    """Logits around +-3e5: exponentials overflow unless the maximum is taken off first."""
    q, k = torch.full((1, 1, 40, 64), 1.0), torch.full((1, 1, 70, 64), size / 64)
    k[:, :, 5] *= 1.01
    q, k, v = (t.to(device, torch.float32) for t in (q, k, torch.randn(1, 1, 70, 64)))
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    truth, truth_lse = attention_fp64(q, k, v, scale=1.0)
    torch.testing.assert_close(out.double(), truth, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse.double(), truth_lse, atol=0.5, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_lse_far_below_zero(device):
    """exp(-lse) overflows below -88; nothing may form it."""
    q, k, v = randn(device, 1, 1, 40, 64), randn(device, 1, 1, 50, 64), randn(device, 1, 1, 50, 64)
    bias = torch.full((1, 1, 1, 50), -500.0, device=device)
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    assert (lse < -100).all() and out.isfinite().all()
    check(q, k, v, bias=bias)
