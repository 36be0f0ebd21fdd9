"""Calls the adapter as a model would, and the dense fp64 formula to compare with."""

from __future__ import annotations

import math

import torch

from hf_flash_backend.integration import attention_forward


class Layer(torch.nn.Module):
    """What attention_forward looks at in a module."""

    def __init__(self, is_causal=False):
        super().__init__()
        self.is_causal = is_causal
        self.eval()


def make_qkv(lq, lk, heads=4, heads_kv=2, dim=8, dim_v=None, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (batch, heads, lq, dim),
        (batch, heads_kv, lk, dim),
        (batch, heads_kv, lk, dim_v or dim),
    )
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def dense(q, k, v, visible, bias=None, scale=None, softcap=None):
    """[B, Lq, Hq, Dv] in fp64 by the formula; visible broadcasts to [B, Hq, Lq, Lk]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(groups, 1) for t in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.double()
    scores = scores.masked_fill(~visible, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


def everything(lq, lk):
    return torch.ones(1, 1, lq, lk, dtype=torch.bool)


def band(lq, lk, left=None, right=None):
    """Bottom-right aligned."""
    distance = torch.arange(lk)[None, :] - (torch.arange(lq)[:, None] + lk - lq)
    visible = torch.ones(lq, lk, dtype=torch.bool)
    visible &= distance >= -left if left is not None else visible
    visible &= distance <= right if right is not None else visible
    return visible[None, None]


def call(q, k, v, mask=None, layer=None, **arguments):
    output, weights = attention_forward(layer or Layer(), q, k, v, mask, **arguments)
    assert weights is None
    assert output.is_contiguous()
    return output
