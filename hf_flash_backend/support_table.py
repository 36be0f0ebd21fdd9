"""The support matrix as Markdown, docs/support.md: ``python -m hf_flash_backend --support``.

Every line comes from :func:`support.matrix`, which asks the library; rows that say the same are
joined.
"""

from __future__ import annotations

from . import ops, support

# Facts of GPUs that stand for their generation, and the CPU.
_CUDA = {"is_cuda": 1, "driver_version": 13000, "runtime_version": 13000}
DEVICES = {
    "CPU": dict.fromkeys(support.DEVICE_FACTS, 0),
    "NVIDIA sm_80 (A100)": {**_CUDA, "sm": 80, "num_sms": 108, "smem_optin_bytes": 166912},
    "NVIDIA sm_89 (L4, RTX 4090)": {**_CUDA, "sm": 89, "num_sms": 128, "smem_optin_bytes": 101376},
    "NVIDIA sm_90 (H100, H200)": {**_CUDA, "sm": 90, "num_sms": 132, "smem_optin_bytes": 232448},
}
HEADER = "| dtype | direction | head dims up to | features | kernel | remark |\n|---|---|---|---|---|---|\n"
INTRODUCTION = """# What runs where

Rendered by `python -m hf_flash_backend --support`, which asks the library's own plan; a test
launches every row on the device at hand or gets that row's reason. Head dims are multiples of 8
(the Transformers adapter pads others), D and Dv may differ, any numbers of grouped heads.
"""


def render() -> str:
    parts = [INTRODUCTION]
    for name, facts in DEVICES.items():
        parts.append(f"## {name}\n\n{HEADER}{''.join(_lines(facts))}")
    return "\n".join(parts)


def _lines(facts: dict[str, int]) -> list[str]:
    """Table lines of a device: features with one answer joined, head dims as ranges."""
    by_call: dict[tuple, dict[tuple, list[str]]] = {}
    for row in support.matrix(facts):
        group = by_call.setdefault((row["dtype"], row["direction"], row["head_dim"]), {})
        group.setdefault((row["kernel"], row["reason"]), []).append(row["feature"])
    ranges: list[tuple] = []
    for (dtype, direction, head_dim), group in by_call.items():
        for (kernel, reason), features in group.items():
            entry = (dtype, direction, tuple(features), kernel, reason)
            same = [r for r in ranges if r[0] == entry]
            if same:
                same[0][1].append(head_dim)
            else:
                ranges.append((entry, [head_dim]))
    lines = []
    for (dtype, direction, features, kernel, reason), head_dims in ranges:
        named = "all" if len(features) == len(support.FEATURES) else ", ".join(features)
        limit = "any" if max(head_dims) == support.HEAD_DIMS[-1] and kernel != "none" else (
            f"above {support.HEAD_DIMS[-2]}" if kernel == "none" and len(head_dims) == 1
            else str(max(head_dims))
        )  # fmt: skip
        if kernel == "none" and len(head_dims) == len(support.HEAD_DIMS):
            limit = "any"
        lines.append(
            f"| {ops.DTYPE_NAMES[dtype]} | {direction} | {limit} | {named} | "
            f"{'–' if kernel == 'none' else kernel} | {reason} |\n"
        )
    return lines
