"""Perplexity of one model under several attention implementations, each in a fresh process.

The fp32 eager run is the reference and is always made. Every implementation scores the same tokens,
so differences are
taken token by token: dNLL = mean(nll - nll_reference) in nats per token, standard error of that
    paired difference.
Perplexity is exp(sum of nll / number of scored tokens), never a mean of window means.

An implementation is accepted if |dNLL| <= 2 |dNLL of same-dtype eager| + 2 SE + RESOLUTION.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval import data, models, records
from eval.worker import Job

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
REFERENCE = "fp32 eager"
ABSOLUTE_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")  # of this machine, in error messages
# One fp32 rounding (2^-24) of logits up to 16: below it two fp32 runs are not different. It matters
# only for fp32, where same-dtype eager is the reference itself and two standard errors alone would
# reject one honest run in twenty.
RESOLUTION = 2.0**-20


@dataclass(frozen=True)
class Options:
    model: str
    implementations: tuple[str, ...]
    dataset: tuple[str, ...]
    command: str  # as recorded
    split: str | None = None
    context: int | None = None  # tokens per window; None: the model's, at most 1024
    stride: int | None = None  # None: equal to the context
    tokens: int | None = None  # limit on the stream
    windows: int | None = None  # limit on the windows, instead
    batch_size: int = 1
    dtype: str | None = None  # None: bf16 on CUDA, fp32 on a CPU
    device: str = "auto"  # or "cpu", "cuda"
    seed: int = 0
    commit: str | None = None  # see records.provenance
    results: Path | None = None  # folder for the records; None: none are written


@dataclass(frozen=True)
class Run:
    """What one process reported. `nll` float64 [targets], empty unless outcome is "ok"."""

    implementation: str
    dtype: str
    outcome: str  # "ok", "out of memory", "failed"
    message: str
    nll: np.ndarray
    facts: dict[str, Any]


def perplexity(nll: np.ndarray) -> float:
    """exp(mean) of nats per token [targets]: every token weighs the same, whatever its window."""
    with np.errstate(over="ignore"):
        return float(np.exp(math.fsum(nll) / len(nll)))


def paired_difference(nll: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """(mean of nll - reference, its standard error), nats per token; both [targets]."""
    difference = nll - reference
    mean = math.fsum(difference) / len(difference)
    spread = float(np.std(difference, ddof=1)) if len(difference) > 1 else math.inf
    return mean, spread / math.sqrt(len(difference))


def is_accepted(delta: float, standard_error: float, eager_delta: float) -> bool:
    """The verdict's rule; all in nats per token."""
    return abs(delta) <= 2 * abs(eager_delta) + 2 * standard_error + RESOLUTION


def evaluate(options: Options) -> tuple[str, bool]:
    """Runs all implementations and records them: (the report as text, whether hf_fused, if asked
    for, was accepted).
    """
    device = _device(options.device)
    dtype = options.dtype or ("bf16" if device == "cuda" else "fp32")
    source = models.resolve(options.model)
    corpus = data.load(options.dataset, options.split, default_split="validation")
    manifest = data.read_manifest(source.folder) if source.folder else None
    data.refuse_overlap(corpus, manifest, source.name)

    from transformers import AutoConfig

    tokenizer = models.load_tokenizer(source)
    config = AutoConfig.from_pretrained(source.location)
    context = options.context or models.context_limit(config)
    bos = data.default_bos(tokenizer)
    stride = options.stride or context - (bos is not None)
    limit = options.tokens
    if options.windows is not None:
        limit = stride * (options.windows - 1) + context
    stream = data.token_stream(corpus, tokenizer, limit)
    windows = data.windows(len(stream), context, stride, has_bos=bos is not None)[: options.windows]
    targets = sum(window.end - window.first_target for window in windows)
    if not windows:
        raise ValueError(
            f"hf_flash_backend: --dataset gives nothing to score: got {len(stream)} tokens, expected at least 2."
        )

    case = {
        "model": source.name,
        "model_revision": source.revision or getattr(config, "_commit_hash", None),
        "device": device,
        "dtype": dtype,
        "context": context,
        "stride": stride,
        "windows": len(windows),
        "batch_size": options.batch_size,
        "bos": "none" if bos is None else "before every window",
        "join": data.JOIN_RULE,
        "mask": "causal",
    }
    print(_heading(source, corpus, case, targets), file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "tokens.npy"), stream)
        base = Job(
            model=source.location,
            implementation="eager",
            dtype="float32",
            device=device,
            batch_size=options.batch_size,
            seed=options.seed,
            bos=bos,
            tokens=str(Path(folder, "tokens.npy")),
            windows=[[w.begin, w.end, w.first_target] for w in windows],
            label="",
        )
        reference = start(base, "eager", "fp32", Path(folder))
        runs = [
            reference
            if (name, dtype) == ("eager", "fp32")
            else start(base, name, dtype, Path(folder))
            for name in options.implementations
        ]
    report, accepted = summarise(runs, reference, dtype)
    text = f"{_heading(source, corpus, case, targets)}\n\n{report}"
    if options.results is not None:
        header = records.run_header(device, options.command, options.seed, options.commit)
        header["data"] = {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "split": corpus.split,
            "tokens": targets,
        }
        lines = [line for run in runs for line in run_records(header, case, run, reference, runs)]
        records.append(options.results / "perplexity.jsonl", lines)
        text += f"\nRecorded: {len(lines)} lines, {'dirty' if header['dirty'] else header['commit'][:12]}."
    return text, accepted


def _device(name: str) -> str:
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError(
            "hf_flash_backend: --device is not there: got 'cuda', expected a CUDA device torch can use. "
            "Use --device cpu."
        )
    return "cuda" if name == "cuda" or (name == "auto" and has_cuda) else "cpu"


def _heading(
    source: models.ModelSource, corpus: data.Corpus, case: dict[str, Any], targets: int
) -> str:
    note = f" ({source.note})" if source.note else ""
    return (
        f"{source.name}{note}, {case['dtype']} on {case['device']}, {corpus.name} {corpus.split}: "
        f"{targets:,} tokens scored, {case['windows']} windows, context {case['context']}, "
        f"stride {case['stride']}, batch {case['batch_size']}, BOS {case['bos']}; {case['join']}"
    )


def start(base: Job, implementation: str, dtype: str, folder: Path) -> Run:
    """One implementation in a fresh process; its progress bar goes to this terminal."""
    label = f"{implementation:>8} {dtype}"
    job = {
        **asdict(base),
        "implementation": implementation,
        "dtype": DTYPES[dtype],
        "label": label,
    }
    path = folder / f"{implementation}-{dtype}.json"
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "eval.worker", str(path)], cwd=records.ROOT, check=False
    )
    result_path = path.with_suffix(".result.json")
    if not result_path.is_file():
        killed = done.returncode == -9
        outcome = "out of memory" if killed else "failed"
        why = (
            "killed by the system (signal 9)"
            if killed
            else f"process ended with status {done.returncode}"
        )
        return Run(implementation, dtype, outcome, why, np.empty(0), {})
    facts = json.loads(result_path.read_text())
    outcome, message = facts.pop("outcome"), facts.pop("message")
    return Run(implementation, dtype, outcome, message, np.load(path.with_suffix(".npy")), facts)


def summarise(runs: Sequence[Run], reference: Run, dtype: str) -> tuple[str, bool]:
    """(table, remarks and verdict as Markdown, whether hf_fused was accepted or not asked for)."""
    lines = [
        "| implementation | perplexity | ΔNLL/token vs fp32 eager "
        "| peak memory above weights | tokens/s | kernel calls |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    shown = [*runs] if reference in runs else [reference, *runs]
    remarks: list[str] = []
    for run in shown:
        name = f"{run.implementation} {run.dtype}" + (" (reference)" if run is reference else "")
        if run.outcome != "ok":
            lines.append(f"| {name} | {run.outcome} | | | | |")
            remarks.append(f"{name}: {run.outcome}. {run.message}")
            continue
        facts = run.facts
        called = (
            f"{facts['kernel_calls']} = {facts['layers']} x {facts['forwards']} ({', '.join(facts['kernels'])})"
            if facts["kernel_calls"]
            else "none"
        )
        difference = "0"
        if run is not reference and reference.outcome == "ok":
            difference = "{:+.2e} ± {:.1e}".format(*paired_difference(run.nll, reference.nll))
        elif reference.outcome != "ok":
            difference = "no reference"
        lines.append(
            f"| {name} | {perplexity(run.nll):.4f} | {difference} | {facts['peak_mib']:,.1f} MiB "
            f"| {np.median(facts['rates']):,.0f} | {called} |"
        )
        remarks.append(f"{name}: LM head {facts['head']}; memory: {facts['memory_method']}")
    verdict, accepted = judge(runs, reference, dtype)
    unique = dict.fromkeys(remark for remark in remarks)
    return "\n".join([*lines, "", *unique, verdict]), accepted


def same_dtype_eager(runs: Sequence[Run], reference: Run, dtype: str) -> Run | None:
    """The eager run in `dtype` that gave a result; for fp32 the reference serves."""
    for run in (*runs, reference):
        if (run.implementation, run.dtype, run.outcome) == ("eager", dtype, "ok"):
            return run
    return None


def judge(runs: Sequence[Run], reference: Run, dtype: str) -> tuple[str, bool]:
    """(noise floor and verdict lines, whether hf_fused was accepted or not asked for)."""
    by_name = {run.implementation: run for run in runs if run.outcome == "ok"}
    asked = any(run.implementation == "hf_fused" for run in runs)
    eager = same_dtype_eager(runs, reference, dtype)
    lines = []
    if eager and "sdpa" in by_name:
        mean, error = paired_difference(by_name["sdpa"].nll, eager.nll)
        lines.append(
            f"Noise floor ({dtype} sdpa against {dtype} eager): {mean:+.2e} ± {error:.1e} nats/token."
        )
    if not asked:
        return "\n".join(lines), True
    fused = by_name.get("hf_fused")
    results = {"hf_fused": fused, REFERENCE: reference.outcome == "ok", f"{dtype} eager": eager}
    if missing := [name for name, result in results.items() if not result]:
        lines.append(f"Verdict: none, no result of {', '.join(missing)}.")
        return "\n".join(lines), fused is not None
    delta, error = paired_difference(fused.nll, reference.nll)
    eager_delta, _ = paired_difference(eager.nll, reference.nll)
    accepted = is_accepted(delta, error, eager_delta)
    bound = 2 * abs(eager_delta) + 2 * error + RESOLUTION
    lines.append(
        f"Verdict: {'same' if accepted else 'NOT the same'} perplexity: |ΔNLL(hf_fused)| {abs(delta):.2e} "
        f"{'<=' if accepted else '>'} {bound:.2e} = 2 x {abs(eager_delta):.2e} ({dtype} eager) "
        f"+ 2 x SE {error:.1e} + {RESOLUTION:.1e} (fp32 resolution)."
    )
    return "\n".join(lines), accepted


def run_records(
    header: dict[str, Any], case: dict[str, Any], run: Run, reference: Run, runs: Sequence[Run]
) -> list[dict[str, Any]]:
    """The records of one implementation, one per metric."""
    name = f"perplexity-{case['model']}-{header['data']['name']}-{case['dtype']}-{case['device']}"
    facts = run.facts
    shared = {
        **header,
        "id": f"{name}-B{case['batch_size']}-L{case['context']}-S{case['stride']}-T{header['data']['tokens']}",
        "case": {
            **case,
            "outcome": run.outcome,
            "message": ABSOLUTE_FOLDERS.sub("", run.message),
            **{
                key: facts[key]
                for key in ("head", "memory_method", "kernels", "layers", "forwards")
                if key in facts
            },
        },
        "impl": run.implementation,
    }

    def record(
        metric: str, unit: str, value: float | None, verified: bool, **more: Any
    ) -> dict[str, Any]:
        rest = {"p20": None, "p80": None, "n": None, "max_err_ratio": None, **more}
        value = value if value is not None and math.isfinite(value) else None
        return {
            **shared,
            "metric": metric,
            "unit": unit,
            "value": value,
            "verified": verified,
            **rest,
        }

    if run.outcome != "ok":
        return [record("perplexity", "1", None, False)]
    ok, count = True, len(run.nll)
    accuracy: list[dict[str, Any]] = []
    if reference.outcome == "ok":
        delta, error = paired_difference(run.nll, reference.nll)
        eager = same_dtype_eager(runs, reference, run.dtype)
        eager_delta = paired_difference(eager.nll, reference.nll)[0] if eager else 0.0
        ok = eager is not None and is_accepted(delta, error, eager_delta)
        ratio = abs(delta / eager_delta) if eager_delta else None
        accuracy = [
            record("delta_nll", "nats/token", delta, ok, n=count, max_err_ratio=ratio),
            record("delta_nll_standard_error", "nats/token", error, ok, n=count),
        ]
    p20, p50, p80 = (float(np.percentile(facts["rates"], q)) for q in (20, 50, 80))
    return [
        record("perplexity", "1", perplexity(run.nll), ok, n=count),
        *accuracy,
        record("peak_memory_above_weights", "MiB", facts["peak_mib"], ok),
        record("base_memory", "MiB", facts["base_mib"], ok),
        record("throughput", "tokens/s", p50, ok, p20=p20, p80=p80, n=len(facts["rates"])),
        record("kernel_calls", "1", facts["kernel_calls"], ok),
    ]
