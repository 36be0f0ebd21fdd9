"""What runs, why, and what ran: :func:`explain`, :func:`why_not`, :func:`trace`. All three ask the
library itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from . import ops

# Facts of a device that a plan depends on, in the order the op wants them.
DEVICE_FACTS = (
    "is_cuda", "sm", "num_sms", "smem_optin_bytes", "driver_version", "runtime_version",
)  # fmt: skip
# Each feature of attention() as arguments of explain().
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (4, 4)},
    "row_limits": {"features": ("row_limits",)},
    "query_offsets": {"features": ("query_offsets",), "is_causal": True},
    "sinks": {"features": ("sinks",)},
    "mask": {"features": ("mask",)},
    "bias": {"features": ("bias",)},
    "alibi": {"features": ("alibi",)},
    "softcap": {"softcap": 10.0},
    "dropout": {"features": ("dropout",)},
    "deterministic": {"features": ("deterministic",)},
}
HEAD_DIMS = (8, 64, 96, 128, 192, 256, 264)
_BYTES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}


def device_facts(device: torch.device | str | int | None = None) -> dict[str, int]:
    """Facts of a device as the library sees them: CUDA or not, compute capability times 10,
    multiprocessors, shared memory a block may ask for (bytes), CUDA version of the driver and of
    the library's runtime (13000 = 13.0; 0 = none).
    """
    device = torch.device("cpu" if device is None else device)
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"hf_flash_backend: device {device.type} is not supported: expected cpu or cuda. "
            'Use attn_implementation="sdpa".'
        )
    index = -1 if device.type == "cpu" else device.index
    if index is None:  # the current device; 0 until CUDA is initialised, which no question does
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    ops.load_library()
    return dict(zip(DEVICE_FACTS, torch.ops.hf_flash_backend.device_facts(index), strict=True))


def explain(
    *,
    shape: tuple[int, int, int, int, int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | dict[str, int] | None = None,
    direction: str = "forward",
    is_causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float = 1.0,
    softcap: float = 0.0,
    features: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The plan of one call: kernel, tiles, shared memory (bytes), grid, workspace (bytes), FLOPs
    and least bytes moved.

    Args:
        shape: (B, Hq, Hkv, Lq, Lk, D, Dv).
        device: where it would run, or the facts of a device that is not here (see
            :func:`device_facts`).
        direction: "forward" or "backward".
        features: any of "mask", "bias", "row_limits", "query_offsets", "alibi", "sinks",
            "dropout", "deterministic".

    Returns:
        ``kernel`` ("none" if nothing runs), ``reason`` (why nothing, or why a slower kernel than
        the device could use), ``block_m``, ``block_n``, ``smem_bytes``, ``num_blocks``,
        ``workspace_bytes``, ``flops`` (pairs the band leaves), ``min_bytes`` (each operand once),
        and the call itself.
    """
    b, hq, hkv, lq, lk, d, dv = shape
    if min(b, hq, lq, lk) < 0 or min(hkv, d, dv) < 1 or hq % hkv:
        raise ValueError(
            f"hf_flash_backend: shape: got {tuple(shape)}, expected (B, Hq, Hkv, Lq, Lk, D, Dv), "
            "no negative size, Hkv, D and Dv at least 1, Hq a multiple of Hkv."
        )
    facts = device if isinstance(device, dict) else device_facts(device)
    left, right = window
    if is_causal:
        right = 0 if right is None else min(right, 0)
    ops.load_library()
    call = json.loads(
        torch.ops.hf_flash_backend.explain(
            direction, [int(facts[name]) for name in DEVICE_FACTS],
            ops.DTYPE_NAMES[dtype], list(shape),
            ",".join(features), scale, softcap, left, right,
        )
    )  # fmt: skip
    products = 2 if direction == "forward" else 5
    call["flops"] = products * b * hq * _visible_pairs(lq, lk, left, right) * (d + dv)
    operands = b * (hq * lq * (d + dv) + hkv * lk * (d + dv)) * _BYTES[dtype]
    call["min_bytes"] = (
        operands if direction == "forward" else 2 * operands + b * hq * lq * dv * _BYTES[dtype]
    )
    return call


def _visible_pairs(len_q: int, len_kv: int, left: int | None, right: int | None) -> int:
    """Query-key pairs inside the band, bottom-right aligned.

    In closed form and without torch: a fake mode, a default device or a CUDA graph capture that
    happens to be active must not see it.
    """

    def sum_clamped(first: int) -> int:
        """Of clamp(first + i, 0, len_kv) over the rows i."""

        def up_to(n: int) -> int:
            inside = max(0, min(n, len_kv))
            return inside * (inside + 1) // 2 + max(0, n - len_kv) * len_kv

        return up_to(first + len_q - 1) - up_to(first - 1)

    offset = len_kv - len_q
    end = len_q * len_kv if right is None else sum_clamped(offset + right + 1)
    return end - (0 if left is None else sum_clamped(offset - left))


def why_not(
    *,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | dict[str, int] | None = None,
    direction: str = "forward",
) -> str | None:
    """Why a call with this head dim, dtype and device cannot run, or None when it can."""
    if head_dim <= 0 or head_dim % 8 != 0:
        return (
            f"head_dim: got {head_dim}, expected a positive multiple of 8; "
            "pad q, k and v with zeros."
        )
    if dtype not in ops.DTYPE_NAMES:
        return f"dtype: got {dtype}, expected one of {', '.join(str(d) for d in ops.DTYPE_NAMES)}."
    try:
        call = explain(
            shape=(1, 1, 1, 1, 1, head_dim, head_dim),
            dtype=dtype,
            device=device,
            direction=direction,
        )
    except (RuntimeError, NotImplementedError) as error:
        return str(error).removeprefix("hf_flash_backend: ")
    return call["reason"] if call["kernel"] == "none" else None


def matrix(
    device: torch.device | str | int | dict[str, int] | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for each dtype, head dim, direction and feature on a device: the kernel that runs
    ("none" if nothing) and the reason (why nothing, or why not a faster one).
    """
    facts = device if isinstance(device, dict) else device_facts(device)
    for dtype in _BYTES:
        for head_dim in HEAD_DIMS:
            for direction in ("forward", "backward"):
                for feature, arguments in FEATURES.items():
                    call = explain(
                        shape=(2, 4, 2, 64, 64, head_dim, head_dim), dtype=dtype, device=facts,
                        direction=direction, **arguments,
                    )  # fmt: skip
                    yield {
                        "dtype": dtype, "head_dim": head_dim, "direction": direction,
                        "feature": feature, "kernel": call["kernel"], "reason": call["reason"],
                    }  # fmt: skip


class Calls(list):
    """The calls seen by one :func:`trace`, read from the library whenever the list is looked at
    while tracing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin: int | None = torch.ops.hf_flash_backend.trace_start()

    def refresh(self) -> Calls:
        """Reads what has run so far."""
        if self._begin is not None:
            self[:] = json.loads(torch.ops.hf_flash_backend.trace_read(self._begin))
        return self

    def stop(self) -> None:
        self.refresh()
        self._begin = None
        torch.ops.hf_flash_backend.trace_stop()


@contextlib.contextmanager
def trace() -> Iterator[Calls]:
    """Lists every call of the backend in the block: ``with trace() as calls: model(...)``.

    Counted inside the library, so calls of compiled graphs are seen; a replayed CUDA graph runs no
    host code and is not. Each entry is a dict: op ("forward" | "backward"), kernel, device, dtype,
    B, Hq, Hkv, Lq, Lk, D, Dv, features, block_m, block_n, smem_bytes, workspace_bytes, num_blocks,
    reason. The list is complete when the block ends; ``calls.refresh()`` reads it earlier.
    """
    ops.load_library()
    calls = Calls()
    try:
        yield calls
    finally:
        calls.stop()
