"""The short list of GPU calls under compute-sanitizer: `python tests/sanitize.py [tool ...]`.

Tools: memcheck (default), racecheck, synccheck, initcheck. Exits 1 at the first tool that finds an
error. torch's caching allocator is off, so that every tensor has its own bounds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
HERE = Path(__file__).resolve()


def short_list() -> None:
    """Every kernel, head dim and kind of mask once, at lengths that end inside a tile."""
    import torch
    from cases import HEAD_DIMS, Case, smoke
    from op_checks import check_case

    cases = smoke(("bf16", "fp16", "fp32"))
    cases += [Case(dtype="fp32", Lq=67, Lk=45, D=D, Dv=D, kind="causal") for D in (64, 128, 256)]
    cases += [Case(B=1, Hq=2, Hkv=1, Lq=131, Lk=65, D=D, Dv=D, kind="causal") for D in HEAD_DIMS]
    for case in cases:
        check_case(case, "cuda")
    torch.cuda.synchronize()
    print(f"{len(cases)} calls")


def main(tools: list[str]) -> int:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    paths = [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = dict(
        os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1", PYTHONPATH=os.pathsep.join(paths)
    )
    for tool in tools:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        command += ["--kernel-name", "kernel_substring=hfb"] if tool != "memcheck" else []
        run = subprocess.run([*command, sys.executable, str(HERE), "--calls"], env=environment)
        print(f"{tool}: {'clean' if run.returncode == 0 else f'exit {run.returncode}'}")
        if run.returncode != 0:
            return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--calls"]:
        short_list()
    else:
        sys.exit(main(sys.argv[1:] or ["memcheck"]))
