"""Fine-tune a causal language model with accelerate, on any attention implementation.

    python examples/finetune.py --model HuggingFaceTB/SmolLM2-135M --dataset my_text.txt \
        --attn-implementation hf_fused --steps 200 --output runs/mine
    accelerate launch examples/finetune.py …            # several GPUs

The loop stops after --steps. A loss or gradient that is not finite, or a loss far above the recent
ones, rolls the model and the optimiser back to the last good checkpoint, halves the learning rate
and draws new batches; after --max-rollbacks of them it gives up and says so. The output folder
holds the model, metadata.json (seeds, versions, command, losses, rollbacks) and
train_manifest.json, the hashes of the training documents, which `python -m eval perplexity` refuses
to evaluate on.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval import data, models, records

LOSS_HISTORY = 20  # losses whose median a spike is measured against
LR_CUT = 0.5  # learning-rate factor of each rollback
WARMUP_SHARE = 0.1


@dataclass
class Settings:
    steps: int
    batch_size: int  # sequences per process and step
    context: int  # tokens per sequence
    learning_rate: float
    seed: int
    max_rollbacks: int = 3
    checkpoint_every: int = 20
    spike_factor: float = 2.0
    clip_norm: float = 1.0


@dataclass
class Rollback:
    step: int
    reason: str
    resumed_from: int
    learning_rate_scale: float


@dataclass
class History:
    losses: list[float] = field(default_factory=list)  # one per completed step
    rollbacks: list[Rollback] = field(default_factory=list)
    seconds: float = 0.0


class TrainingDiverged(RuntimeError):
    """Raised after max_rollbacks; `history` tells what happened."""

    def __init__(self, message: str, history: History):
        super().__init__(message)
        self.history = history


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def fault(loss: float, losses: Sequence[float], spike_factor: float) -> str | None:
    """Why a step with this loss must not be taken, or None. A spike needs a full history to be
    judged by.
    """
    if not math.isfinite(loss):
        return f"loss is {loss}"
    recent = losses[-LOSS_HISTORY:]
    if len(recent) == LOSS_HISTORY and loss > spike_factor * statistics.median(recent):
        return f"loss {loss:.3f} is over {spike_factor} x the median of the last {LOSS_HISTORY}"
    return None


def random_batch(tokens: np.ndarray, settings: Settings, *draw: int) -> torch.Tensor:
    """[batch, context] int64, sequences at random offsets of the stream [tokens]; a function of the
    seed and `draw`.
    """
    random = np.random.default_rng((settings.seed, *draw))
    starts = random.integers(0, len(tokens) - settings.context + 1, settings.batch_size)
    return torch.from_numpy(np.stack([tokens[s : s + settings.context] for s in starts]))


def train(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    tokens: np.ndarray,
    settings: Settings,
    checkpoint: Path,
    on_step: Callable[[int, float, float], None] = lambda step, loss, rate: None,
) -> History:
    """Runs the loop; `model` and `optimizer` are prepared by `accelerator` and end at the last
    step's state.

    A checkpoint is written before a step is taken, when its loss has just shown the weights to be
    good.

    Raises: TrainingDiverged after settings.max_rollbacks rollbacks; the model is then at its last
    good checkpoint.
    """
    history = History()
    good_step, scale, step = 0, 1.0, 0
    accelerator.save_state(str(checkpoint), safe_serialization=False)
    start = time.perf_counter()
    while step < settings.steps:
        rate = scale * learning_rate_at(step, settings.steps, settings.learning_rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        draw = (step, len(history.rollbacks), accelerator.process_index)
        batch = random_batch(tokens, settings, *draw).to(accelerator.device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        shared = accelerator.reduce(loss.detach().float(), "mean").item()
        problem = fault(shared, history.losses, settings.spike_factor)
        if problem is None:
            if step % settings.checkpoint_every == 0 and step != good_step:
                accelerator.save_state(str(checkpoint), safe_serialization=False)
                good_step = step
            accelerator.backward(loss)
            norm = float(accelerator.clip_grad_norm_(model.parameters(), settings.clip_norm))
            if not math.isfinite(norm):
                problem = f"gradient norm is {norm}"
        if problem is None:
            optimizer.step()
            optimizer.zero_grad()
            history.losses.append(shared)
            step += 1
            on_step(step, shared, rate)
            continue
        optimizer.zero_grad()
        accelerator.load_state(str(checkpoint))
        history.seconds = time.perf_counter() - start
        if len(history.rollbacks) == settings.max_rollbacks:
            tried = "; ".join(f"step {r.step}: {r.reason}" for r in history.rollbacks)
            raise TrainingDiverged(
                f"hf_flash_backend: training gave up at step {step}: got {problem} after "
                f"{settings.max_rollbacks} rollbacks ({tried}), expected a finite, steady loss. Lower "
                f"--learning-rate (was {settings.learning_rate}, last {rate:.2e}) or look at the data.",
                history,
            )
        scale *= LR_CUT
        history.rollbacks.append(Rollback(step, problem, good_step, scale))
        accelerator.print(
            f"step {step}: {problem}; back to step {good_step}, learning rate x {scale}",
            file=sys.stderr,
        )
        del history.losses[good_step:]
        step = good_step
    history.seconds = time.perf_counter() - start
    return history


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--model", required=True, help="Hub id, folder, smollm2, or gpt2-mini (from scratch)"
    )
    parser.add_argument(
        "--dataset", nargs="+", default=["stdlib"], help="stdlib, text files, or a Hub id[:config]"
    )
    parser.add_argument("--attn-implementation", default="hf_fused", help="eager, sdpa or hf_fused")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per process")
    parser.add_argument("--context", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--max-rollbacks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        return finetune(options, [Path(__file__).name, *(sys.argv[1:] if argv is None else argv)])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def finetune(options: argparse.Namespace, command: list[str]) -> int:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from tqdm import tqdm

    accelerator = Accelerator()
    set_seed(options.seed)
    corpus = data.load(options.dataset, None, default_split="train")
    if options.model == "gpt2-mini":
        model, tokenizer = models.new_gpt2_mini(corpus.documents)
        if options.attn_implementation == "hf_fused":
            import hf_flash_backend  # noqa: F401  (registers the implementation)
        model.set_attn_implementation(options.attn_implementation)
        inherited = None
    else:
        source = models.resolve(options.model)
        tokenizer = models.load_tokenizer(source)
        model = models.load_model(source.location, options.attn_implementation, "float32", "cpu")
        inherited = data.read_manifest(source.folder) if source.folder else None
    tokens = training_stream(corpus, tokenizer)
    if len(tokens) < options.context:
        raise ValueError(
            f"hf_flash_backend: --dataset is too short: got {len(tokens)} tokens, expected at least "
            f"--context {options.context}."
        )
    settings = Settings(
        steps=options.steps,
        batch_size=options.batch_size,
        context=options.context,
        learning_rate=options.learning_rate,
        seed=options.seed,
        max_rollbacks=options.max_rollbacks,
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    options.output.mkdir(parents=True, exist_ok=True)

    per_step = settings.batch_size * settings.context * accelerator.num_processes
    started = time.perf_counter()
    with tqdm(total=settings.steps, unit="step", disable=not accelerator.is_main_process) as bar:

        def on_step(step: int, loss: float, rate: float) -> None:
            bar.n = step
            speed = per_step * step / (time.perf_counter() - started)
            bar.set_postfix_str(f"loss {loss:.3f}, lr {rate:.1e}, {speed:,.0f} tokens/s")

        checkpoint = options.output / "checkpoint"
        try:
            history = train(accelerator, model, optimizer, tokens, settings, checkpoint, on_step)
            outcome, message = "finished", ""
        except TrainingDiverged as error:
            history, outcome, message = error.history, "gave up", str(error)
    if accelerator.is_main_process:
        metadata = {
            "outcome": outcome,
            "message": message,
            "command": records.portable_command(["python", *command]),
            "model": Path(options.model).name if Path(options.model).is_dir() else options.model,
            "attn_implementation": options.attn_implementation,
            "dataset": {"name": corpus.name, "split": corpus.split, "sha256": corpus.sha256},
            "settings": asdict(settings),
            "seeds": {
                "python, numpy, torch": options.seed,
                "batches": "(seed, step, rollbacks, process)",
            },
            "processes": accelerator.num_processes,
            "device": accelerator.device.type,
            "versions": {
                "python": platform.python_version(),
                **{
                    name: version(name)
                    for name in ("torch", "transformers", "accelerate", "tokenizers")
                },
            },
            "tokens_per_second": per_step * len(history.losses) / max(history.seconds, 1e-9),
            "seconds": history.seconds,
            "losses": history.losses,
            "rollbacks": [asdict(rollback) for rollback in history.rollbacks],
        }
        (options.output / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
        if outcome == "finished":
            accelerator.unwrap_model(model).save_pretrained(options.output)
            tokenizer.save_pretrained(options.output)
            data.write_manifest(options.output, corpus, inherited)
            shutil.rmtree(checkpoint)
    if outcome != "finished":
        print(message, file=sys.stderr)
        return 1
    accelerator.print(
        f"{options.output.name}: loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}, "
        f"{len(history.rollbacks)} rollbacks, {history.seconds:.0f} s"
    )
    return 0


def training_stream(corpus: data.Corpus, tokenizer: Any) -> np.ndarray:
    """All documents tokenised one by one (in parallel), joined as in data.JOIN_RULE: [tokens]
    int64.
    """
    texts = [document.text + data.JOIN for document in corpus.documents]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.asarray(row, dtype=np.int64) for row in ids])


if __name__ == "__main__":
    sys.exit(main())
