"""The build's own judgement: what makes it stop, and what it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_flash_backend import __main__ as diagnostics

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ROOT / "csrc" / "cuda" / "checked_nvcc.py"
SERIALISED = (
    "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
)


def compile_with(tmp_path, report: str, status: int = 0):
    """Runs checked_nvcc.py on a compiler that writes an object, says report and exits."""
    target = tmp_path / "kernel.o"
    script = (
        f"import sys; open({str(target)!r}, 'w').close(); "
        f"sys.stderr.write({report!r}); sys.exit({status})"
    )
    command = [sys.executable, str(CHECKED), str(target), sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True)
    return run, target


def test_a_serialised_kernel_fails_the_build(tmp_path):
    run, target = compile_with(tmp_path, SERIALISED)
    assert run.returncode == 1 and not target.exists()
    assert "ptxas serialised wgmma" in run.stderr


def test_a_clean_compile_passes_and_keeps_the_report(tmp_path):
    report = "ptxas info : Used 168 registers, 0 bytes spill stores"
    run, target = compile_with(tmp_path, report)
    assert run.returncode == 0 and target.exists() and not run.stderr
    assert target.with_suffix(".ptxas").read_text() == report


def test_a_compile_error_is_shown_whole(tmp_path):
    run, _ = compile_with(tmp_path, "error: expected a ';'", status=2)
    assert run.returncode == 2 and run.stderr == "error: expected a ';'"


@pytest.mark.parametrize(
    "environment, text",
    [
        ({"HFB_BUILD": "gpu"}, "HFB_BUILD: got 'gpu', expected auto, cpu or cuda."),
        ({"HFB_BUILD": "cuda", "CUDA_HOME": "/nowhere"}, "HFB_BUILD=cuda but nvcc was not found."),
        ({"HFB_CUDA_ARCHS": "75", "CUDA_HOME": "."}, "HFB_CUDA_ARCHS: got '75'"),
    ],
    ids=["unknown mode", "no nvcc", "old arch"],
)
def test_wrong_settings_are_named(tmp_path, environment, text):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    if environment.get("CUDA_HOME") == ".":
        nvcc.touch()
        environment = {**environment, "CUDA_HOME": str(tmp_path)}
    elif Path("/usr/local/cuda/bin/nvcc").is_file() and "cuda" in environment.values():
        pytest.skip("nvcc is installed at its standard place")
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path)]
    paths = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("HFB_")}
    run = subprocess.run(
        command, cwd=ROOT, env={**inherited, "PATH": paths, **environment},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode != 0
    assert text in run.stderr + run.stdout


def test_importing_never_initialises_cuda():
    script = "import torch, transformers, hf_flash_backend; print(torch.cuda.is_initialized())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr


def test_diagnostics_name_every_device():
    lines = list(diagnostics.report())
    assert any(line.startswith("cpu (") for line in lines)
    assert "  fp32: cpu" in lines
    assert sum(line.startswith("cuda:") for line in lines) == torch.cuda.device_count()
