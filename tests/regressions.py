"""What the regression tests share: every case runs on our attention, on the truth, and on attention
that is wrong on purpose.

A test body takes ``attend``, a function of q, k, v and the keywords of ``attention`` that returns
(out, lse), a device and a dtype. It must pass for our attention and for the fp64 definition rounded
to that dtype, which shows that the expected numbers are right, and must fail for every wrong one,
which shows that it can.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases import DTYPES
from compare import assert_accurate, assert_lse_accurate

from hf_flash_backend import attention
from hf_flash_backend.reference import attention_eager, attention_fp64

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# Numbers derived by hand: two roundings of a 16-bit result (of P, of the output), one of the printed
# digits in fp32 and fp64.
TOLERANCE = {"fp64": 1e-5, "fp32": 1e-5, "fp16": 2.0**-9, "bf16": 2.0**-6}
_ON_CUDA = ("bf16", "fp16")


def ours(q, k, v, **arguments):
    return attention(q, k, v, return_lse=True, **arguments)


def truth(q, k, v, **arguments):
    """attention_fp64 with the dtypes of the op and its forms of "nothing": None, -1, no flag."""
    arguments.pop("deterministic", None)
    arguments.pop("return_lse", None)
    if arguments.get("dropout_p") == 0.0:
        del arguments["dropout_p"]
    if isinstance(arguments.get("window"), int):
        arguments["window"] = (arguments["window"], None)
    if arguments.get("window") is not None:
        left, right = ((None if w is None or w < 0 else w) for w in arguments["window"])
        arguments["window"] = (left, right)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    out, lse = attention_fp64(q, k, v, **arguments)
    return out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def regression(
    wrong: dict[str, Attend],
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16"),
    raises: tuple[type[Exception], ...] = (AssertionError,),
    with_truth: bool = True,
) -> Callable:
    """Parametrises a body(attend, device, dtype, ...) as the module says.

    Args:
        wrong: attention that must fail the body, on the CPU in the first of dtypes.
        dtypes: names of :data:`cases.DTYPES`; CUDA takes the 16-bit ones among them.
        raises: how a wrong one may fail.
        with_truth: False where the body is not about numbers.
    """
    params = [pytest.param(ours, "cpu", name, id=f"cpu-{name}") for name in dtypes]
    params += [
        pytest.param(ours, "cuda", name, id=f"cuda-{name}", marks=pytest.mark.gpu)
        for name in dtypes
        if name in _ON_CUDA
    ]
    exact = "fp64" if "fp32" in dtypes else dtypes[0]
    if with_truth:
        params += [pytest.param(truth, "cpu", exact, id=f"truth-{exact}")]
    params += [
        pytest.param(function, "cpu", dtypes[0], id=f"wrong-{name}")
        for name, function in wrong.items()
    ]

    def decorate(body: Callable) -> Callable:
        @pytest.mark.parametrize("attend, device, dtype", params)
        @functools.wraps(body)
        def test(attend, **arguments):
            if attend in (ours, truth):
                return body(attend, **arguments)
            with pytest.raises(raises):
                body(attend, **arguments)

        assert list(inspect.signature(body).parameters)[:3] == ["attend", "device", "dtype"]
        return test

    return decorate


@dataclass(frozen=True)
class Result:
    """One call and its gradients for dout, all detached."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def run(attend: Attend, q, k, v, dout, **arguments) -> Result:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = attend(*inputs, **arguments)
    grads = torch.autograd.grad(out, inputs, dout.to(out.dtype))
    return Result(out.detach(), lse.detach(), *grads)


def assert_finite(result: Result) -> None:
    for name in ("out", "dq", "dk", "dv"):
        assert torch.isfinite(getattr(result, name)).all(), f"{name} is not finite"
    assert not torch.isnan(result.lse).any(), "lse is NaN"


def check(result: Result, q, k, v, dout, **arguments) -> None:
    """Against the fp64 definition: 1e-5 in fp32 and fp64, else by the rule of compare.py."""
    want = run(attention_fp64, q.double(), k.double(), v.double(), dout.double(), **arguments)
    assert_lse_accurate(result.lse, want.lse, _magnitude(q, k, arguments))
    names = ("out", "dq", "dk", "dv")
    if q.dtype.itemsize > 2:
        for name in names:
            close(getattr(result, name), getattr(want, name), 1e-5, name)
        return
    normal = run(attention_eager, q, k, v, dout, **arguments)
    for name in names:
        assert_accurate(*(getattr(r, name) for r in (result, want, normal)), name)


def _magnitude(q, k, arguments) -> torch.Tensor:
    """The largest scale * sum |q_d k_d| of a row, for assert_lse_accurate."""
    scale = arguments.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    absolute_k = k.double().abs().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return scale * (q.double().abs() @ absolute_k.transpose(-1, -2)).amax(dim=-1)


def close(got: torch.Tensor, want: torch.Tensor | list | float, tolerance: float, what: str):
    """Equal to numbers derived by hand, or to fp64, within tolerance (absolute and relative)."""
    want = torch.as_tensor(want, dtype=torch.float64).cpu().expand(got.shape)
    torch.testing.assert_close(
        got.detach().double().cpu(),
        want,
        atol=tolerance,
        rtol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )


def column(values: list[float], device: str, dtype: str, heads: int = 1) -> torch.Tensor:
    """[1, heads, n, 8]: a head_dim of 1, filled up with zeros to the 8 that the op wants."""
    t = torch.zeros(1, heads, len(values), 8)
    t[..., 0] = torch.tensor(values)
    return t.to(device, DTYPES[dtype])


def draw(*shapes: tuple[int, ...], device: str, dtype: str, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(device, DTYPES[dtype]) for shape in shapes]


# Wrong on purpose.


def no_maximum_subtracted(q, k, v, **arguments):
    """exp(S) / sum exp(S) as written: 0 / 0 where all scores are below -104."""
    visible = arguments.get("mask", torch.ones((), dtype=torch.bool))
    if arguments.get("is_causal"):
        visible = visible & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = torch.where(visible, scores.exp(), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / total @ v.float()).to(q.dtype), total.log()[..., 0]


def softmax_of_minus_inf(q, k, v, mask=None, bias=None, **arguments):
    """NaN in a row that sees no key."""
    hide = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5 + hide.float()
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def large_number_for_minus_inf(q, k, v, mask=None, **arguments):
    """Hidden keys score -1e30: a row that sees no key gets the mean of all values."""
    hide = torch.where(mask, 0.0, -1e30) if mask.dtype == torch.bool else mask.float()
    return truth(q, k, v, bias=hide.clamp(min=-1e30), **arguments)


def top_left_causal(q, k, v, **arguments):
    if arguments.get("is_causal"):
        arguments["query_offset"] = 0
    return truth(q, k, v, **arguments)


def window_one_wider(q, k, v, window=None, **arguments):
    left, right = window or (None, None)
    return truth(q, k, v, window=(None if left is None else left + 1, right), **arguments)


def without(name: str) -> Attend:
    """Attention that takes a keyword and drops it."""

    def attend(q, k, v, **arguments):
        arguments.pop(name, None)
        return truth(q, k, v, **arguments)

    return attend
