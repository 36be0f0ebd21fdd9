"""Tables in Markdown files, rendered from the records: the text between `<!-- eval:begin NAME -->`
and `<!-- eval:end NAME -->`.

NAME is a table of TABLES, optionally narrowed to a device: `perplexity`, `perplexity:cpu`,
`perplexity:cuda`. Only records of clean checkouts are shown, and of each case only the newest run,
so that a table's rows belong together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
BLOCK = re.compile(
    r"(?P<begin><!-- eval:begin (?P<name>[\w:-]+) -->\n)(?P<body>.*?)(?P<end><!-- eval:end (?P=name) -->)",
    re.DOTALL,
)
BEGIN = re.compile(r"<!-- eval:begin ([\w:-]+) -->")
NOTHING = "_No clean records yet._\n"


def newest_clean_runs(records: Sequence[Record]) -> list[list[Record]]:
    """The records with dirty false, grouped by case id in order of id; of each id only the newest
    run's.
    """
    newest: dict[str, tuple[str, str]] = {}
    clean = [record for record in records if not record["dirty"]]
    for record in clean:  # file order decides between runs of the same second
        stamp = (record["when_utc"], record["run"])
        if record["id"] not in newest or stamp[0] >= newest[record["id"]][0]:
            newest[record["id"]] = stamp
    return [
        [record for record in clean if record["id"] == case and record["run"] == newest[case][1]]
        for case in sorted(newest)
    ]


def perplexity_table(records: Sequence[Record]) -> str:
    """One table per case: a line that says what was measured and where, then a row per
    implementation.
    """
    chosen = [record for record in records if record["id"].startswith("perplexity-")]
    parts = []
    for run in newest_clean_runs(chosen):
        first = run[0]
        case, machine, text = first["case"], first["machine"], first["data"]
        where = machine["gpu"] or f"{machine.get('cpu')}, {machine.get('threads')} threads"
        parts.append(
            f"**{case['model']}**, {case['dtype']}, {where}: {text['name']} {text['split']}, {text['tokens']:,} tokens "
            f"scored, context {case['context']}, stride {case['stride']}, batch {case['batch_size']}, "
            f"BOS {case['bos']}; {case['join']}; torch {machine['torch']}, transformers "
            f"{machine['transformers']}, commit {first['commit'][:12]}, {first['when_utc'][:10]}.\n\n"
            "| implementation | perplexity | ΔNLL/token vs fp32 eager "
            "| peak MiB above weights | tokens/s | kernel calls | verified |\n"
            "|---|---:|---:|---:|---:|---:|---|\n"
        )
        for impl in dict.fromkeys(record["impl"] for record in run):
            own = {record["metric"]: record for record in run if record["impl"] == impl}
            parts[-1] += _perplexity_row(impl, own)
    return "\n".join(parts) or NOTHING


def _perplexity_row(impl: str, own: dict[str, Record]) -> str:
    def shown(metric: str, form: str) -> str:
        value = own[metric]["value"] if metric in own else None
        return "–" if value is None else form.format(value)

    perplexity = own["perplexity"]
    outcome = perplexity["case"]["outcome"]
    if outcome != "ok":
        return f"| {impl} | {outcome} | – | – | – | – | no |\n"
    error = shown("delta_nll_standard_error", " ± {:.1e}")
    return (
        f"| {impl} | {shown('perplexity', '{:.4f}')} | {shown('delta_nll', '{:+.2e}')}{error} "
        f"| {shown('peak_memory_above_weights', '{:,.1f}')} | {shown('throughput', '{:,.0f}')} "
        f"| {shown('kernel_calls', '{:,}')} | {'yes' if perplexity['verified'] else 'no'} |\n"
    )


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {"perplexity": perplexity_table}


def render(text: str, records: Sequence[Record]) -> str:
    """`text` with every marked block replaced by its table.

    Raises: ValueError for a begin marker without its end, or a name that is no table.
    """
    opened, complete = BEGIN.findall(text), [match["name"] for match in BLOCK.finditer(text)]
    if opened != complete:
        unclosed = [name for name in opened if name not in complete] or opened
        raise ValueError(
            f"hf_flash_backend: report marker is not closed: got eval:begin {unclosed[0]}, expected "
            f"<!-- eval:end {unclosed[0]} --> after it."
        )

    def fill(match: re.Match[str]) -> str:
        name, _, device = match["name"].partition(":")
        if name not in TABLES:
            raise ValueError(
                f"hf_flash_backend: report marker names no table: got {name!r}, expected one of "
                f"{sorted(TABLES)}."
            )
        chosen = [record for record in records if device in ("", record["case"].get("device"))]
        return match["begin"] + "\n" + TABLES[name](chosen) + "\n" + match["end"]

    return BLOCK.sub(fill, text)


def update(paths: Sequence[Path], records: Sequence[Record], *, check: bool) -> list[Path]:
    """Renders the files and returns those whose text was stale; `check` leaves them as they are."""
    stale = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        rendered = render(text, records)
        if rendered != text:
            stale.append(path)
            if not check:
                path.write_text(rendered, encoding="utf-8")
    return stale
