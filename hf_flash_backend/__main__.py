"""``python -m hf_flash_backend``: what is installed, what was built, and what can run here.

With ``--support`` the support matrix of docs/support.md instead.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

import torch

from . import IMPLEMENTATION, __version__, ops, support, support_table

HEAD_DIMS = (64, 128, 256)


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def devices() -> list[str]:
    """The devices that could hold q, k and v: cpu, cuda:0, ..."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def report() -> Iterator[str]:
    """One line a fact, the reason wherever something cannot run."""
    yield f"hf_flash_backend {__version__}, attn_implementation={IMPLEMENTATION!r}"
    yield (
        f"python {platform.python_version()}, torch {torch.__version__} (CUDA "
        f"{torch.version.cuda}), transformers {installed('transformers')}"
    )
    yield f"built: {ops.build_info() or 'nothing'}"
    try:
        ops.load_library()
    except RuntimeError as error:
        yield str(error)
        return
    for device in devices():
        name = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
        yield f"{device} ({name})"
        for dtype in ops.DTYPE_NAMES:
            yield f"  {ops.DTYPE_NAMES[dtype]}: {usable(dtype, device)}"


def usable(dtype: torch.dtype, device: str) -> str:
    """The kernels of a dtype on a device, or why there are none."""
    kernels = []
    for direction in ("forward", "backward"):
        for head_dim in HEAD_DIMS:
            reason = support.why_not(
                head_dim=head_dim, dtype=dtype, device=device, direction=direction
            )
            if reason is not None:
                return f"no: {reason}"
        shape = (1, 1, 1, 1, 1, head_dim, head_dim)
        call = support.explain(shape=shape, dtype=dtype, device=device, direction=direction)
        kernels.append(call["kernel"] + (f" ({call['reason']})" if call["reason"] else ""))
    return ", ".join(dict.fromkeys(kernels))


if __name__ == "__main__":
    if sys.argv[1:] == ["--support"]:
        print(support_table.render(), end="")
    else:
        print("\n".join(report()))
