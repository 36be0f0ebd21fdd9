"""The accuracy rule: ours against the fp64 truth, measured by what torch does in the same dtype."""

from __future__ import annotations

import torch

LSE_ULPS = 8

# fp32 and fp64 keep the error of flash attention itself: backward recomputes P from the rounded lse
# and takes delta from the rounded out, where eager keeps P. In fp16 and bf16 that is invisible.
RECOMPUTE_ULPS = {torch.float32: (32, 2), torch.float64: (64, 8)}  # of max |truth|: max, mean error


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
    ours: torch.Tensor, truth: torch.Tensor, eager: torch.Tensor, what: str
) -> None:
    """max error <= 2 x and mean error <= 1 x that of eager, each plus the rounding floor.

    Args:
        ours: in the input dtype. truth: fp64. eager: the same maths by torch in the input dtype.
    """
    assert ours.shape == truth.shape, f"{what}: shape {ours.shape}, expected {truth.shape}"
    finite = _same_special(ours, truth, what)
    if not finite.any():
        return
    error = (ours.double() - truth).abs()[finite]
    normal = (eager.double() - truth).abs()[finite]
    normal = torch.where(torch.isfinite(normal), normal, 0.0)
    floor = _rounding_floor(truth, ours.dtype)[finite]
    ulp = torch.finfo(ours.dtype).eps * truth[finite].abs().max().item()
    max_ulps, mean_ulps = RECOMPUTE_ULPS.get(ours.dtype, (0, 0))
    allowed_max = 2 * normal.max().item() + floor.max().item() + max_ulps * ulp
    allowed_mean = normal.mean().item() + floor.mean().item() + mean_ulps * ulp
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
