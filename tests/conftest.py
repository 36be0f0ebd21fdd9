"""GPU tests run where a usable GPU is, and a GPU run that collects none of them is a failure."""

import pytest
import torch

from hf_flash_backend import why_not


def _problem() -> str | None:
    if not torch.cuda.is_available():
        return "no NVIDIA GPU"
    return why_not(head_dim=64, device="cuda")


def pytest_collection_modifyitems(config, items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    problem = _problem() if gpu_items or config.option.markexpr == "gpu" else None
    if config.option.markexpr == "gpu" and problem is None and not gpu_items:
        raise pytest.UsageError("a GPU is present, but no GPU test was collected")
    for item in gpu_items:
        if problem is not None:
            item.add_marker(pytest.mark.skip(reason=problem))
