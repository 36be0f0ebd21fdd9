"""What every device must satisfy: the checks that test_op_cpu.py and test_op_gpu.py share."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from cases import Case, Inputs, make_inputs
from compare import assert_accurate, assert_lse_accurate, recompute_noise

from hf_flash_backend import attention
from hf_flash_backend.reference import attention_eager, attention_fp64

HIDDEN_NAN_KINDS = "causal padding mask bias rows".split()


def check_case(case: Case, device: str) -> None:
    """Forward, lse and every gradient (through out and lse) against fp64 by the accuracy rule."""
    x = make_inputs(case, device)
    learned = [n for n, t in x.arguments.items() if torch.is_tensor(t) and t.is_floating_point()]

    def run(function, *inputs, **options):
        inputs = [t.detach().requires_grad_() for t in inputs]
        arguments = {
            n: t.detach().requires_grad_() if n in learned else t for n, t in x.arguments.items()
        }
        out, lse = function(*inputs, **arguments, **options)
        seen = torch.where(lse == -math.inf, 0.0, lse)
        loss = (out * x.dout.to(out.dtype)).sum() + (seen * x.dlse.to(lse.dtype)).sum()
        inputs += [arguments[n] for n in learned]
        return out.detach(), lse.detach(), torch.autograd.grad(loss, inputs)

    poison_allocator(x)
    options = dict(return_lse=True, deterministic=case.deterministic)
    ours, lse, grads = run(attention, x.q, x.k, x.v, **options)
    truth, truth_lse, truth_grads = run(attention_fp64, x.q.double(), x.k.double(), x.v.double())
    eager, _, eager_grads = run(attention_eager, x.q, x.k, x.v)
    assert is_dense(ours)
    noise = noise_of(x, truth, truth_lse)
    assert_accurate(ours, truth, eager, "out", noise["out"])
    scale = abs(x.arguments.get("scale") or case.D**-0.5)
    absolute_k = x.k.double().abs().repeat_interleave(case.Hq // case.Hkv, dim=1)
    magnitude = scale * (x.q.double().abs() @ absolute_k.transpose(-1, -2)).amax(dim=-1)
    if "alibi_slopes" in x.arguments:
        magnitude = magnitude + x.arguments["alibi_slopes"].max() * max(case.Lq, case.Lk)
    assert_lse_accurate(lse, truth_lse, magnitude)
    for name, got, want, normal in zip(
        ("dq", "dk", "dv", *learned), grads, truth_grads, eager_grads, strict=True
    ):
        assert_accurate(got, want.double(), normal, name, noise[name])


def is_dense(out: torch.Tensor) -> bool:
    """Whether out [B, Hq, Lq, Dv] lies in memory as models want it, (B, Lq, Hq, Dv)."""
    return out.transpose(1, 2).is_contiguous()


def noise_of(
    x: Inputs, truth: torch.Tensor, truth_lse: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """compare.recompute_noise of a case, for the results whose dtype does not hide it.

    In 16 bits eager rounds more than that, but for two kinds of results: sums over all rows (sinks,
    slopes), where its roundings cancel, and dropout, where a row of one key is exact in eager only.
    """
    noise = defaultdict(lambda: None)
    is_exposed = x.q.dtype.itemsize > 2 or "dropout_p" in x.arguments
    if not is_exposed and not {"sinks", "alibi_slopes"} & x.arguments.keys():
        return noise
    len_kv = x.k.shape[2]
    one_hot = torch.eye(len_kv, device=x.q.device).expand(*x.k.shape[:2], len_kv, len_kv)
    plain = {n: t for n, t in x.arguments.items() if not n.startswith("dropout")}
    weights, _ = attention_fp64(x.q, x.k, one_hot, **plain)
    every = recompute_noise(x, weights, truth, truth_lse)
    return noise | {n: t for n, t in every.items() if is_exposed or n in ("sinks", "alibi_slopes")}


def poison_allocator(x: Inputs) -> None:
    """Leaves NaN in freed memory of the sizes that outputs and gradients will get."""
    for like in (x.dout, x.q, x.k, x.v, x.dlse):
        tensors = [torch.full(like.shape, math.nan, dtype=like.dtype, device=like.device)] * 2
        del tensors


def check_hidden_nan(device: str, dtype: torch.dtype, kind: str) -> None:
    """NaN in keys that no scored row sees changes not one bit of their output and gradients."""
    g = torch.Generator().manual_seed(3)
    B, H, L, D = 2, 4, 200, 64
    q, k, v = (torch.randn(B, H, L, D, generator=g).to(device, dtype) for _ in range(3))
    hidden = torch.zeros(B, L, dtype=torch.bool, device=device)
    scored = slice(0, L)
    if kind == "causal":
        arguments, scored = dict(is_causal=True), slice(0, 130)
        hidden[:, 130:] = True
    elif kind == "padding":
        hidden[0, :77] = hidden[1, 150:] = True
        arguments = dict(mask=~hidden)
    elif kind == "mask":
        hidden[:, 100:150] = True
        mask = torch.rand(B, 1, L, L, generator=g).to(device) > 0.5
        arguments = dict(mask=mask & ~hidden[:, None, None, :])
    elif kind == "bias":
        hidden[:, 100:150] = True
        arguments = dict(bias=torch.where(hidden[:, None, None, :], -math.inf, 0.0).to(dtype))
    else:
        hidden[0, 150:] = hidden[1, 199:] = True
        ends = torch.tensor([[150], [199]], dtype=torch.int32, device=device)
        arguments = dict(row_end=ends)

    def run(k, v):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = attention(*inputs, return_lse=True, **arguments)
        grads = torch.autograd.grad(out[:, :, scored].float().square().sum(), inputs)
        if kind == "causal":  # the rows that do see NaN put it into dk and dv, by right
            grads = (grads[0][:, :, scored],)
        return out[:, :, scored], lse[:, :, scored], grads

    poison = hidden[:, None, :, None]
    clean = run(k, v)
    nans = run(torch.where(poison, math.nan, k), torch.where(poison, math.nan, v))
    assert torch.equal(clean[0], nans[0]) and torch.equal(clean[1], nans[1])
    for name, a, b in zip(("dq", "dk", "dv"), clean[2], nans[2], strict=False):
        assert torch.isfinite(b).all(), name
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def check_unseen_rows(device: str, dtype: torch.dtype) -> None:
    """A row that sees no key: out 0, lse -inf, no gradient, even if it and its dout hold NaN."""
    g = torch.Generator().manual_seed(6)
    q, k, v, dout = (torch.randn(2, 4, 150, 64, generator=g).to(device, dtype) for _ in range(4))
    mask = torch.ones(2, 1, 150, 150, dtype=torch.bool, device=device)
    mask[0, :, 3:9] = mask[1, :, 149] = False
    unseen = ~mask.any(dim=-1, keepdim=True)

    def run(function, q, dout):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = function(*inputs, mask=mask)
        return out, lse, torch.autograd.grad(out, inputs, dout.to(out.dtype))

    poisoned = [torch.where(unseen, math.nan, t) for t in (q, dout)]
    out, lse, grads = run(lambda *t, **a: attention(*t, return_lse=True, **a), *poisoned)
    truth, truth_lse, truth_grads = run(attention_fp64, *poisoned)
    eager, _, eager_grads = run(attention_eager, q, dout)
    assert (out.masked_select(unseen) == 0).all() and (grads[0].masked_select(unseen) == 0).all()
    assert torch.equal(lse == -math.inf, unseen[..., 0].expand_as(lse))
    assert_accurate(out, truth, eager, "out")
    assert_lse_accurate(lse, truth_lse, 8.0)
    for name, got, want, normal in zip(
        ("dq", "dk", "dv"), grads, truth_grads, eager_grads, strict=True
    ):
        assert_accurate(got, want, normal, name)
