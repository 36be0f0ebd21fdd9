"""Models in bf16 at lengths of several tiles, on every device: no further from fp32 than eager is.

Truth is eager in fp32, the yardstick eager in bf16; all three have configs of their own and the
same weights (bf16 numbers, so that fp32 holds them exactly).
"""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from models import DECODERS, build, cache_argument, expect_calls, make_pair, returned_cache

import hf_flash_backend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTH, WINDOW, LAYERS = 150, 40, 3
SIZES = {
    "gpt2": {"n_embd": 256, "n_positions": 256},
    "llama": {"hidden_size": 256, "head_dim": 64},
    "mistral": {"hidden_size": 256, "head_dim": 64, "sliding_window": WINDOW},
    "gemma2": {"hidden_size": 256, "head_dim": 64, "sliding_window": WINDOW},
}
BATCHES = ["plain", "left_padding", "right_padding", "packed"]


@functools.cache
def models(name: str, device: str) -> list[transformers.PreTrainedModel]:
    """[eager fp32, eager bf16, ours bf16]."""
    sizes = {**SIZES[name], "initializer_range": 0.05}
    eager, ours = (m.to(device, torch.bfloat16) for m in make_pair(name, **sizes))
    exact = build(DECODERS[name](**sizes), "eager").to(device)
    exact.load_state_dict(eager.state_dict())
    return [exact, eager, ours]


def batch_of(kind: str, device: str) -> tuple[dict, torch.Tensor]:
    """(model arguments, real [2, LENGTH] bool: whose logits count)."""
    ids = torch.randint(2, 61, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    arguments = {"input_ids": ids, "use_cache": False}
    if kind == "packed":
        sizes = ((70, 80), (1, 149))
        rows = [torch.cat([torch.arange(n) for n in row]) for row in sizes]
        arguments["position_ids"] = torch.stack(rows)
    elif kind != "plain":
        real[1, 93:] = False
        real = real.flip(1) if kind == "left_padding" else real
        arguments["attention_mask"] = real.to(torch.int64)
        arguments["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0)
    return {k: t.to(device) if torch.is_tensor(t) else t for k, t in arguments.items()}, real


def assert_no_further(ours, eager, truth, what: str) -> None:
    """Mean and max error at most twice eager's, plus one bf16 rounding of the largest number."""
    assert ours.isfinite().all(), f"{what} is not finite"
    floor = torch.finfo(torch.bfloat16).eps * truth.abs().max().item()
    error, normal = ((t.float() - truth).abs() for t in (ours, eager))
    for name, got, allowed in (
        ("max", error.max().item(), 2 * normal.max().item() + floor),
        ("mean", error.mean().item(), 2 * normal.mean().item() + floor / 16),
    ):
        assert got <= allowed, f"{what}: {name} error {got:.2e}, allowed {allowed:.2e}"


def check_logits_and_gradients(name: str, kind: str, device: str) -> None:
    arguments, real = batch_of(kind, device)
    results = []
    for model in models(name, device):
        model.zero_grad()
        is_ours = model.config._attn_implementation == hf_flash_backend.IMPLEMENTATION
        with expect_calls(LAYERS * is_ours), expect_calls(LAYERS * is_ours, op="backward"):
            logits = model(**arguments).logits[real.to(device)].float()
            logits.log_softmax(-1)[:, 7].mean().backward()
        results.append((logits.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (truth, truth_grads), (eager, eager_grads), (ours, grads) = results
    assert_no_further(ours, eager, truth, "logits")
    for parameter, grad in truth_grads.items():
        got, normal = grads[parameter], eager_grads[parameter]
        assert_no_further(got, normal, grad, f"gradient of {parameter}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", SIZES)
def test_logits_and_gradients(name, kind, device):
    check_logits_and_gradients(name, kind, device)


def test_checker_rejects_a_dropped_mask(monkeypatch):
    right = hf_flash_backend.functional.attention

    def wrong(q, k, v, **arguments):
        return right(q, k, v, **{**arguments, "mask": None, "is_causal": True})

    monkeypatch.setattr(hf_flash_backend.functional, "attention", wrong)
    with pytest.raises(AssertionError, match="logits: m.* error .*, allowed"):
        check_logits_and_gradients("llama", "left_padding", "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_prefill_chunks_and_decode_through_a_cache(name, kind, device):
    """Given tokens in pieces of 77, 60 and single steps; windows of the models are passed."""
    arguments, _ = batch_of("plain", device)
    ids = arguments["input_ids"][:, :142]
    results = []
    for model in models(name, device):
        cache, parts = None, []
        if kind == "static":
            cache = transformers.StaticCache(config=model.config, max_cache_len=160)
        for chunk in ids.split([77, 60, 1, 1, 1, 1, 1], dim=1):
            output = model(chunk, use_cache=True, **cache_argument(model, cache))
            cache = returned_cache(output)
            parts.append(output.logits.float())
        results.append(torch.cat(parts, dim=1))
    truth, eager, ours = results
    assert_no_further(ours, eager, truth, "logits")
    whole = models(name, device)[0](ids, use_cache=False).logits
    assert (whole - truth).abs().max() < 1e-3 * whole.abs().max()
