"""Runs one nvcc command, keeps ptxas' report beside the object, and fails where the compiler gave
up on wgmma.

Lines C7507 to C7519 of ptxas say that it serialised the asynchronous matrix instructions of a
kernel: the result is correct and several times slower, so it is an error here. Usage:
checked_nvcc.py OBJECT COMMAND...
"""

import re
import subprocess
import sys
from pathlib import Path


def main() -> int:
    target, command = Path(sys.argv[1]), sys.argv[2:]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    report = run.stderr
    target.with_suffix(".ptxas").write_text(report)
    if run.returncode != 0:
        sys.stderr.write(report)
        return run.returncode
    serialised = [line for line in report.splitlines() if re.search(r"\bC75\d\d\b", line)]
    for line in serialised or [line for line in report.splitlines() if "warning" in line]:
        sys.stderr.write(f"{target.stem}: {line}\n")
    if serialised:
        target.unlink(missing_ok=True)
        sys.stderr.write(
            f"{target.stem}: ptxas serialised wgmma (C75xx above); see docs on register pressure.\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
