"""Command line of the evaluation: `python -m eval perplexity|report|demo`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eval import perplexity, records, report

IMPLEMENTATIONS = "eager,sdpa,hf_fused"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval", description="Evaluate attention implementations end to end."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser(
        "perplexity", help="perplexity, memory and speed of one model per implementation"
    )
    one.add_argument("--model", required=True, help="Hub id, local folder, smollm2 or gpt2-mini")
    one.add_argument(
        "--implementations",
        default=IMPLEMENTATIONS,
        help=f"comma-separated (default {IMPLEMENTATIONS})",
    )
    one.add_argument(
        "--dataset",
        nargs="+",
        default=["stdlib"],
        help="stdlib (default), text files, or Hub id[:config]",
    )
    one.add_argument("--split", help="default: validation of stdlib, test of a Hub dataset")
    one.add_argument(
        "--context", type=positive, help="tokens per window (default: the model's, at most 1024)"
    )
    one.add_argument(
        "--stride", type=positive, help="tokens from window to window (default: the context)"
    )
    limit = one.add_mutually_exclusive_group()
    limit.add_argument(
        "--tokens",
        type=positive_or_all,
        default=8192,
        help="length of the text, or 'all' (default 8192)",
    )
    limit.add_argument("--windows", type=positive, help="number of windows instead")
    one.add_argument(
        "--batch-size", type=positive, default=1, help="windows per forward (default 1)"
    )
    one.add_argument(
        "--dtype", choices=list(perplexity.DTYPES), help="default: bf16 on CUDA, fp32 on a CPU"
    )
    one.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument(
        "--results",
        type=Path,
        default=records.RESULTS,
        help="folder of the records (default eval/results)",
    )
    one.add_argument("--commit", help="commit of this copy of the project, where it has no .git")

    two = commands.add_parser(
        "report", help="render the tables in Markdown files from the newest clean records"
    )
    two.add_argument(
        "files",
        nargs="*",
        type=Path,
        default=[records.ROOT / "README.md"],
        help="default README.md",
    )
    two.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 if a table is stale"
    )
    two.add_argument("--results", type=Path, default=records.RESULTS)

    commands.add_parser(
        "demo", help="gpt2-mini and smollm2 with every implementation on this machine"
    )
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number from 1")
    return value


def positive_or_all(text: str) -> int | None:
    return None if text == "all" else positive(text)


def run_perplexity(options: argparse.Namespace, command: str) -> int:
    text, accepted = perplexity.evaluate(
        perplexity.Options(
            model=options.model,
            implementations=tuple(options.implementations.split(",")),
            dataset=tuple(options.dataset),
            split=options.split,
            context=options.context,
            stride=options.stride,
            tokens=None if options.windows else options.tokens,
            windows=options.windows,
            batch_size=options.batch_size,
            dtype=options.dtype,
            device=options.device,
            seed=options.seed,
            command=command,
            commit=options.commit,
            results=options.results,
        )
    )
    print(text)
    return 0 if accepted else 1


def run_report(options: argparse.Namespace) -> int:
    stale = report.update(options.files, records.read(options.results), check=options.check)
    for path in stale:
        print(f"{path.name}: {'stale, run python -m eval report' if options.check else 'updated'}")
    return 1 if stale and options.check else 0


def run_demo() -> int:
    """Both offline models on whatever device is there; prints the tables last and records nothing."""
    started = time.perf_counter()
    shared = perplexity.Options(
        model="gpt2-mini",
        implementations=tuple(IMPLEMENTATIONS.split(",")),
        dataset=("stdlib",),
        context=1024,
        tokens=8192,
        command="python -m eval demo",
    )
    larger = dataclasses.replace(shared, model="smollm2", context=512, tokens=2048)
    results = [perplexity.evaluate(options) for options in (shared, larger)]
    print("\n" + "\n\n".join(text for text, _ in results))
    print(f"\nDemo took {time.perf_counter() - started:.0f} s.")
    return 0 if all(accepted for _, accepted in results) else 1


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(arguments)
    try:
        if options.command == "perplexity":
            return run_perplexity(
                options, records.portable_command(["python", "-m", "eval", *arguments])
            )
        if options.command == "report":
            return run_report(options)
        return run_demo()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
