"""One implementation of one model, scored in a process of its own: `python -m eval.worker
JOB.json`.

eval/perplexity.py writes the job (see Job) and the token stream, starts one such process per
implementation, and reads `result` (JSON) and `nll` (float64 [targets], one negative log-likelihood
per scored token in nats) back. A process of its own means that no implementation inherits another's
caches, memory peak or registration.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from eval import models
from eval.data import Window

MIB = 2**20
HEAD_ROWS = 1024  # upper bound of rows per chunk of the LM head
HEAD_CHUNK_BYTES = 64 * MIB  # of fp32 logits; with a large vocabulary it allows fewer rows


@dataclass(frozen=True)
class Job:
    model: str  # folder or Hub id
    implementation: str
    dtype: str  # "bfloat16", "float16", "float32"
    device: str  # "cpu" or "cuda"
    batch_size: int
    seed: int
    bos: int | None  # put before every window
    tokens: str  # .npy, int64 [tokens]
    windows: list[list[int]]  # begin, end, first_target
    label: str  # of the progress bar


class KernelNotReached(RuntimeError):
    """hf_fused was asked for and another attention ran, at least in part."""


def check_kernel_calls(calls: int, layers: int, forwards: int) -> None:
    """Raises KernelNotReached unless every attention layer of every forward called the kernel once."""
    if calls != layers * forwards:
        raise KernelNotReached(
            f"hf_flash_backend: hf_fused {'never' if calls == 0 else 'did not always'} reach the kernel: got "
            f"{calls} calls, expected {layers * forwards} ({layers} layers x {forwards} forwards). "
            f"`python -m hf_flash_backend` says what is built and why not."
        )


def batches(windows: Sequence[Window], batch_size: int) -> Iterator[list[Window]]:
    """Consecutive windows of equal length, at most batch_size together: nothing is ever padded."""
    group: list[Window] = []
    for window in windows:
        length = window.end - window.begin
        if group and (len(group) == batch_size or group[0].end - group[0].begin != length):
            yield group
            group = []
        group.append(window)
    if group:
        yield group


class ChunkedHead:
    """Logits of some rows of hidden states, so that the [tokens, vocabulary] logits never exist at
    once.

    Does what the known causal models do after their body: the output matrix, then Granite's
    division or Cohere's multiplication, then Gemma's cap. `matches` tells whether that is all this
    model does.
    """

    def __init__(self, model: Any):
        config = model.config.get_text_config()
        self.model = model
        self.body = model.base_model
        self.matrix = model.get_output_embeddings()
        self.divisor = getattr(config, "logits_scaling", None)
        self.factor = getattr(config, "logit_scale", None)
        self.cap = getattr(config, "final_logit_softcapping", None)
        vocabulary = config.vocab_size
        self.rows = max(1, min(HEAD_ROWS, HEAD_CHUNK_BYTES // (4 * vocabulary)))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, length, hidden] of ids [batch, length]."""
        return self.body(input_ids=ids, use_cache=False).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of hidden states [rows, hidden]."""
        logits = self.matrix(hidden)
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.factor is not None:
            logits = logits * self.factor
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits

    def matches(self, ids: torch.Tensor) -> bool:
        """Whether the chunks give the model's own logits for ids [1, length], up to rounding of the
        matrix product.
        """
        if self.matrix is None or self.body is self.model:
            return False
        own = self.model(input_ids=ids, use_cache=False).logits[0]
        hidden = self.hidden(ids)[0]
        # 8 roundings: another row count makes the matrix product sum in another order.
        tolerance = 8 * torch.finfo(own.dtype).eps * own.float().abs().max()
        return all(
            bool((self.logits(part).float() - reference.float()).abs().max() <= tolerance)
            for part, reference in zip(hidden.split(self.rows), own.split(self.rows), strict=True)
        )


def token_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[target] in nats: logits [rows, vocabulary], targets int64 [rows] -> fp32
    [rows].
    """
    return F.cross_entropy(logits.float(), targets, reduction="none")


def score(
    head: ChunkedHead,
    tokens: torch.Tensor,
    windows: Sequence[Window],
    batch_size: int,
    bos: int | None,
    *,
    is_chunked: bool = True,
    progress: Callable[[int], object] = lambda tokens: None,
) -> tuple[np.ndarray, list[float], int]:
    """Scores the windows' targets.

    Args:
        tokens: int64 [stream], on the CPU.
        bos: put before every window, or None.
        is_chunked: False takes the model's own logits, for models whose head ChunkedHead does not
            know.
        progress: told the number of tokens fed after each batch.

    Returns: float64 [targets] nats in the order of the windows, tokens per second of each batch,
    forwards.
    """
    device = next(head.model.parameters()).device
    lead = 0 if bos is None else 1
    result, rates, forwards = [], [], 0
    for group in batches(windows, batch_size):
        start = time.perf_counter()
        ids = torch.stack([tokens[w.begin : w.end] for w in group]).to(device)
        if bos is not None:
            ids = F.pad(ids, (1, 0), value=bos)
        if is_chunked:
            states = head.hidden(ids)
        else:
            states = head.model(input_ids=ids, use_cache=False).logits
        forwards += 1
        parts = []
        for row, window in enumerate(group):
            first, last = (
                position - window.begin + lead for position in (window.first_target, window.end)
            )
            for begin in range(first, last, head.rows):
                end = min(begin + head.rows, last)
                part = states[row, begin - 1 : end - 1]  # position i predicts token i + 1
                parts.append(
                    token_nll(head.logits(part) if is_chunked else part, ids[row, begin:end])
                )
        result.append(torch.cat(parts).double().cpu())  # .cpu() waits for the device
        rates.append(ids.numel() / (time.perf_counter() - start))
        progress(ids.numel())
    return torch.cat(result).numpy(), rates, forwards


class PeakMemory:
    """Peak memory above what is held at `reset`: torch's allocator on CUDA, the process's resident
    set on a CPU.
    """

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"
        self.base = 0
        self.method = "torch.cuda.max_memory_allocated"

    def reset(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
            return
        try:
            ctypes.CDLL(None).malloc_trim(
                0
            )  # freed pages that glibc kept would hide part of the peak
            Path("/proc/self/clear_refs").write_text(
                "5"
            )  # sets the high-water mark to the present size
            self.base = _status_bytes("VmRSS")
            self.method = "peak resident set (VmHWM reset after loading)"
        except (OSError, AttributeError):
            self.base = _lifetime_peak()
            self.method = "peak resident set above the peak of loading (a lower bound)"

    def read(self) -> tuple[float, float]:
        """(MiB above the base, MiB of the base)."""
        if self.is_cuda:
            peak = torch.cuda.max_memory_allocated()
        elif "VmHWM" in self.method:
            peak = _status_bytes("VmHWM")
        else:
            peak = _lifetime_peak()
        return (peak - self.base) / MIB, self.base / MIB


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _lifetime_peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out (the CPU allocator raises a plain RuntimeError)."""
    text = str(error)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError)
        and ("can't allocate memory" in text or "out of memory" in text)
    )


@torch.inference_mode()
def measure(job: Job) -> tuple[dict[str, Any], np.ndarray]:
    """Loads, checks the head, then scores under the memory and kernel-call counters: (result, nll)."""
    torch.manual_seed(job.seed)
    model = models.load_model(job.model, job.implementation, job.dtype, job.device)
    for parameter in model.parameters():
        parameter.sum()  # touches weights that are only mapped from the file, so that they count as held
    tokens = torch.from_numpy(np.load(job.tokens))
    windows = [Window(*window) for window in job.windows]
    head = ChunkedHead(model)
    first = tokens[windows[0].begin : windows[0].end].to(job.device)[None]
    is_chunked = head.matches(first)  # also the warm-up

    fed = sum(w.end - w.begin + (job.bos is not None) for w in windows)
    memory = PeakMemory(job.device)
    memory.reset()
    with _trace(job.implementation) as calls, tqdm(total=fed, unit="token", desc=job.label) as bar:
        nll, rates, forwards = score(
            head,
            tokens,
            windows,
            job.batch_size,
            job.bos,
            is_chunked=is_chunked,
            progress=bar.update,
        )
    peak_mib, base_mib = memory.read()
    forward_calls = [call for call in calls if call["op"] == "forward"]
    layers = models.attention_layers(model.config)
    if job.implementation == "hf_fused":
        check_kernel_calls(len(forward_calls), layers, forwards)
    result = {
        "outcome": "ok",
        "message": "",
        "peak_mib": peak_mib,
        "base_mib": base_mib,
        "memory_method": memory.method,
        "rates": rates,
        "forwards": forwards,
        "layers": layers,
        "kernel_calls": len(forward_calls),
        "kernels": sorted({call["kernel"] for call in forward_calls}),
        "head": f"in chunks of {head.rows} rows"
        if is_chunked
        else "unchunked (this model's logits are not its output matrix times its last states)",
    }
    return result, nll


def _trace(implementation: str) -> contextlib.AbstractContextManager[list[dict[str, Any]]]:
    if implementation != "hf_fused":
        return contextlib.nullcontext([])
    import hf_flash_backend

    return hf_flash_backend.trace()


def main(path: str) -> int:
    """Runs the job file; failures become its result, except those that end the process."""
    file = Path(path)
    job = Job(**json.loads(file.read_text()))
    nll = np.empty(0)
    try:
        result, nll = measure(job)
    except Exception as error:
        outcome = "out of memory" if is_out_of_memory(error) else "failed"
        result = {"outcome": outcome, "message": f"{type(error).__name__}: {error}"}
    np.save(file.with_suffix(".npy"), nll)
    file.with_suffix(".result.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
