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
HEADER = (
    "| dtype | direction | head dims | features | kernel | remark |\n|---|---|---|---|---|---|\n"
)
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
    """Table lines of a device: features, head dims and dtypes with one answer joined."""
    answers: dict[tuple, dict[tuple, list[int]]] = {}  # (dtype, direction) -> answer -> head dims
    by_call: dict[tuple, dict[tuple, list[str]]] = {}
    for row in support.matrix(facts):
        group = by_call.setdefault((row["dtype"], row["direction"], row["head_dim"]), {})
        group.setdefault((row["kernel"], row["reason"]), []).append(row["feature"])
    for (dtype, direction, head_dim), group in by_call.items():
        for (kernel, reason), features in group.items():
            answer = (tuple(features), kernel, reason)
            of_call = answers.setdefault((dtype, direction), {})
            of_call.setdefault(answer, []).append(head_dim)
    lines: dict[str, list[str]] = {}
    for (dtype, direction), of_call in answers.items():
        for (features, kernel, reason), head_dims in of_call.items():
            named = "all" if len(features) == len(support.FEATURES) else ", ".join(features)
            line = (
                f"{direction} | {_head_dims(head_dims)} | {named} | "
                f"{'–' if kernel == 'none' else kernel} | {reason} |\n"
            )
            lines.setdefault(line, []).append(ops.DTYPE_NAMES[dtype])
    return [f"| {', '.join(dtypes)} | {line}" for line, dtypes in lines.items()]


def _head_dims(head_dims: list[int]) -> str:
    if len(head_dims) == len(support.HEAD_DIMS):
        return "any"
    above = head_dims[0] > support.HEAD_DIMS[0]
    return f"above {support.HEAD_DIMS[-2]}" if above else f"up to {head_dims[-1]}"
