"""Result records: one JSON object per line, appended to eval/results/*.jsonl and never edited.

One record is one number (`metric`, `unit`, `value`) of one implementation in one run. `FIELDS` is
the whole schema. Only records of a clean checkout (`dirty` false) reach the README; eval/report.py
renders them.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "results"
SCHEMA = 1

NUMBER = (int, float, type(None))
FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "run": (str,),  # shared by all records of one command
    "id": (str,),  # the case in words; equal ids are comparable
    "seed": (int,),
    "data": (dict,),  # name, sha256 of the text, split, tokens scored
    "when_utc": (str,),
    "commit": (str, type(None)),
    "dirty": (bool,),
    "command": (str,),
    "machine": (dict,),
    "case": (dict,),
    "impl": (str,),
    "metric": (str,),
    "unit": (str,),
    "value": NUMBER,  # None: the implementation gave no value; case["outcome"] says why
    "p20": NUMBER,
    "p80": NUMBER,
    "n": (int, type(None)),
    "verified": (bool,),
    "max_err_ratio": NUMBER,
}
DATA_FIELDS = ("name", "sha256", "split", "tokens")
MACHINE_FIELDS = ("gpu", "sm", "driver", "cuda", "torch", "transformers")


def validate(record: dict[str, Any]) -> None:
    """Raises ValueError unless `record` has exactly the fields of the schema with their types."""
    for problem, names in (
        ("lacks", FIELDS.keys() - record.keys()),
        ("has unknown", record.keys() - FIELDS.keys()),
    ):
        if names:
            raise ValueError(
                f"hf_flash_backend: record {problem} fields: got {sorted(names)}, "
                f"expected exactly {list(FIELDS)}."
            )
    for name, types in FIELDS.items():
        value = record[name]
        is_bool_as_number = isinstance(value, bool) and bool not in types
        if not isinstance(value, types) or is_bool_as_number:
            raise ValueError(
                f"hf_flash_backend: record field {name} has the wrong type: got {value!r}, "
                f"expected {' or '.join(t.__name__ for t in types)}."
            )
    if record["schema"] != SCHEMA:
        raise ValueError(
            f"hf_flash_backend: record schema is unknown: got {record['schema']}, expected {SCHEMA}."
        )
    for name, needed in (("data", DATA_FIELDS), ("machine", MACHINE_FIELDS)):
        if missing := [key for key in needed if key not in record[name]]:
            raise ValueError(
                f"hf_flash_backend: record field {name} lacks keys: got {sorted(record[name])}, "
                f"expected also {missing}."
            )


def append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Validates all records, then appends them to `path` in one write."""
    lines = []
    for record in records:
        validate(record)
        lines.append(json.dumps(record, allow_nan=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All records of the folder's *.jsonl files, in file order; a line that breaks the schema is an
    error.
    """
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                validate(record)
            except ValueError as error:
                raise ValueError(f"{path.name}:{number}: {error}") from error
            records.append(record)
    return records


def provenance(root: Path = ROOT, stated_commit: str | None = None) -> tuple[str | None, bool]:
    """(commit, dirty) of the checkout; changes under eval/results do not count as dirty.

    `stated_commit` is for a copied tree without .git, and is refused where git can answer itself.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    is_checkout = git("rev-parse", "--show-toplevel") == str(root)
    if stated_commit is not None:
        if is_checkout:
            raise ValueError(
                f"hf_flash_backend: --commit is only for a copy without .git: got {stated_commit}, "
                f"expected no --commit here. Leave it out; git is asked."
            )
        return stated_commit, False
    commit = git("rev-parse", "HEAD") if is_checkout else None
    changes = git("status", "--porcelain", "--", ".", ":!eval/results")
    return commit, commit is None or changes != ""


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on. `device` is "cpu" or "cuda"; the GPU keys are None on a
    CPU.
    """
    import torch

    try:
        transformers_version = version("transformers")
    except PackageNotFoundError:
        transformers_version = None
    facts: dict[str, Any] = dict.fromkeys(MACHINE_FIELDS)
    facts.update(
        torch=torch.__version__,
        transformers=transformers_version,
        python=platform.python_version(),
        cpu=_cpu_name(),
        threads=torch.get_num_threads(),
    )
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        facts.update(
            gpu=torch.cuda.get_device_name(),
            sm=f"{major}.{minor}",
            driver=_driver_version(),
            cuda=torch.version.cuda,
        )
    return facts


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n", 1)[0].strip()


def portable_command(argv: Sequence[str], root: Path = ROOT) -> str:
    """The command line without paths of this machine: inside the repository relative, elsewhere the
    last name.
    """

    def portable(word: str) -> str:
        option, equals, path = word.rpartition("=")
        if not os.path.isabs(path) and not path.startswith("~"):
            return word
        absolute = Path(path).expanduser()
        inside = absolute.is_relative_to(root)
        return option + equals + str(absolute.relative_to(root) if inside else absolute.name)

    return shlex.join(portable(word) for word in argv)


def run_header(device: str, command: str, seed: int, stated_commit: str | None) -> dict[str, Any]:
    """The fields shared by all records of one run."""
    commit, dirty = provenance(stated_commit=stated_commit)
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "schema": SCHEMA,
        "run": uuid.uuid4().hex[:12],
        "seed": seed,
        "when_utc": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit,
        "dirty": dirty,
        "command": command,
        "machine": machine(device),
    }
