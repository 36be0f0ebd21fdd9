"""The accuracy rule: ours against the fp64 truth, measured by what torch does in the same dtype."""

from __future__ import annotations

import math

import torch
from cases import Inputs

from hf_flash_backend.reference import row_positions

LSE_ULPS = 8
NOISE_MAX = 4


def _rounding_floor(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2 |t + 0.3 - 0.3 - t| in the input dtype: the error of any arithmetic at all."""
    rounded = truth.to(dtype)
    return 2 * ((rounded + 0.3 - 0.3).double() - rounded.double()).abs()


def _same_special(ours: torch.Tensor, truth: torch.Tensor, what: str) -> torch.Tensor:
    """Asserts that inf and NaN stand at the same places; returns where both are finite."""
    for name, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = test(ours) != test(truth)
        if differs.any():
            at = differs.nonzero()[0].tolist()
            raise AssertionError(
                f"{what}: {name} differs at {int(differs.sum())} of {ours.numel()} places, first "
                f"{at}: got {ours[tuple(at)].item()}, expected {truth[tuple(at)].item()}"
            )
    return torch.isfinite(truth)


def assert_accurate(
    ours: torch.Tensor,
    truth: torch.Tensor,
    eager: torch.Tensor,
    what: str,
    noise: torch.Tensor | None = None,
) -> None:
    """max error <= 2 x and mean error <= 1 x that of eager, each plus the rounding floor.

    Args:
        ours: in the input dtype. truth: fp64. eager: the same maths by torch in the input dtype.
        noise: fp32 and fp64 only, the rounding error that flash attention has where eager has
            none (:func:`recompute_noise`); allowed on top, 4 x for max and 1 x for mean.
    """
    assert ours.shape == truth.shape, f"{what}: shape {ours.shape}, expected {truth.shape}"
    finite = _same_special(ours, truth, what)
    if not finite.any():
        return
    error = (ours.double() - truth).abs()[finite]
    normal = (eager.double() - truth).abs()[finite]
    normal = torch.where(torch.isfinite(normal), normal, 0.0)
    floor = _rounding_floor(truth, ours.dtype)[finite]
    allowed_max = 2 * normal.max().item() + floor.max().item()
    allowed_mean = normal.mean().item() + floor.mean().item()
    if noise is not None:
        allowed_max += NOISE_MAX * noise[finite].max().item()
        allowed_mean += noise[finite].mean().item()
    for name, got, allowed in (
        ("max", error.max().item(), allowed_max),
        ("mean", error.mean().item(), allowed_mean),
    ):
        if not got <= allowed:
            worst = torch.where(finite, (ours.double() - truth).abs(), 0.0).flatten().argmax()
            at = [int(i) for i in torch.unravel_index(worst, truth.shape)]
            raise AssertionError(
                f"{what}: {name} error {got:.3e}, allowed {allowed:.3e}; worst at {at}: got "
                f"{ours[tuple(at)].item():.6g}, expected {truth[tuple(at)].item():.6g}"
            )


def assert_lse_accurate(
    ours: torch.Tensor,
    truth: torch.Tensor,
    magnitude: torch.Tensor | float = 1.0,
    what: str = "lse",
) -> None:
    """Within 8 ulp (of ours' dtype) of max(1, |lse|, magnitude).

    magnitude: the largest scale * sum |q_d k_d| of a row. A sum in fp32 cannot be more exact than
    its largest terms, however much of them cancels in the score.
    """
    finite = _same_special(ours, truth, what)
    if not finite.any():
        return
    size = torch.maximum(truth.abs(), torch.as_tensor(magnitude).to(truth)).clamp(min=1.0)
    allowed = LSE_ULPS * torch.finfo(ours.dtype).eps * size
    ratio = ((ours.double() - truth).abs() / allowed)[finite].max().item()
    assert ratio <= 1.0, f"{what}: error {LSE_ULPS * ratio:.1f} ulp, allowed {LSE_ULPS}"


def recompute_noise(
    x: Inputs, weights: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Typical rounding error of each result in the dtype of q, from the algorithm alone.

    Backward recomputes P = exp(S - lse) from a rounded lse, and dS = P (dP - delta) subtracts two
    sums rounded apart, where eager keeps P and cancels exactly (a row that sees one key has dS = 0
    there). Both errors are independent from element to element, so they add up by squares:
    P is off by eps (1 + |lse| + scale |q| |k|), dP - delta by eps |dout| (|v| + |out|) + eps |dlse|.

    Args:
        out, lse: the truth in fp64. weights: [B, Hq, Lq, Lk], the probabilities before dropout.

    Returns:
        out, dq, dk, dv, and the gradients of the arguments that have one, by name.
    """
    eps, group = torch.finfo(x.q.dtype).eps, x.q.shape[1] // x.k.shape[1]
    q, k, v, dout, dlse = (t.double() for t in (x.q, x.k, x.v, x.dout, x.dlse))
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scale = abs(x.arguments.get("scale") or q.shape[-1] ** -0.5)
    keep = 1 / (1 - x.arguments.get("dropout_p", 0.0))  # what dropout multiplies at most

    def norm(t: torch.Tensor) -> torch.Tensor:
        return t.norm(dim=-1, keepdim=True)

    def sum_group(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(t.shape[0], -1, group, *t.shape[2:]).sum(dim=2)

    size_lse = torch.where(lse == -math.inf, 0.0, lse).abs()[..., None]
    size_scores = scale * norm(q) * norm(k).transpose(-1, -2)
    p_error = (eps * keep * weights * (1 + size_lse + size_scores)) ** 2
    size_dp = norm(dout) * (keep * norm(v).transpose(-1, -2) + norm(out)) + dlse.abs()[..., None]
    ds_error = (eps * weights * size_dp) ** 2
    noise = {
        "out": (p_error @ v**2).sqrt(),
        "dq": scale * (ds_error @ k**2).sqrt(),
        "dk": scale * sum_group(ds_error.transpose(-1, -2) @ q**2).sqrt(),
        "dv": sum_group(p_error.transpose(-1, -2) @ dout**2).sqrt(),
    }
    if "bias" in x.arguments:
        noise["bias"] = ds_error.sum_to_size(x.arguments["bias"].shape).sqrt()
    if "alibi_slopes" in x.arguments:
        row = row_positions(
            q.shape[2], k.shape[2], x.arguments.get("query_offset"), device=q.device
        )
        distance = (row - torch.arange(k.shape[2], device=q.device)).double()
        slopes = x.arguments["alibi_slopes"]
        by_head = (ds_error * distance**2).sum(dim=(-1, -2))
        noise["alibi_slopes"] = by_head.sum_to_size(slopes.shape).sqrt()
    if "sinks" in x.arguments:
        sinks = x.arguments["sinks"]
        column = sinks if sinks.dim() == 4 else sinks[:, None, None]
        weight = torch.exp(column.double() - lse[..., None])
        size = norm(dout) * norm(out) + dlse.abs()[..., None]
        error = (eps * weight * size * (1 + size_lse)) ** 2
        noise["sinks"] = error.sum_to_size(column.shape).sqrt().view(sinks.shape)
    return noise
