"""Tiny models for the tests: one per implementation, with the same weights and a config of its own.

A checker compares what `hf_fused` computes with Transformers' own eager attention in fp32; the
tests also break the attention on purpose and require that the same checker fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_flash_backend

TRANSFORMERS = Version(transformers.__version__)
WINDOW = 4
PAD = 0
TOLERANCE = 1e-5  # fp32, relative to the largest number of the reference

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # large enough that a wrong mask is far outside the tolerance
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _gpt2(**changes: Any) -> transformers.PretrainedConfig:
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    tokens = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None}
    settings = {**sizes, **no_dropout, **tokens, "initializer_range": 0.2, **changes}
    return transformers.GPT2Config(**settings)


def _llama(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**{**_SIZES, **changes})


def _mistral(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.MistralConfig(**{**_SIZES, "sliding_window": WINDOW, **changes})


def _gemma2(**changes: Any) -> transformers.PretrainedConfig:
    capped = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "head_dim": 8}
    settings = {**_SIZES, **capped, "sliding_window": WINDOW, **changes}
    return transformers.Gemma2Config(**settings)


DECODERS: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "gemma2": _gemma2,
}


def build(
    config: transformers.PretrainedConfig,
    implementation: str,
    auto_class: type = AutoModelForCausalLM,
) -> PreTrainedModel:
    """A model in eval mode whose config says the implementation, and nothing else changed it."""
    torch.manual_seed(0)
    model = auto_class.from_config(config, attn_implementation=implementation).eval()
    assert model.config._attn_implementation == implementation
    return model


def make_pair(
    make_config: Callable[..., transformers.PretrainedConfig] | str,
    auto_class: type = AutoModelForCausalLM,
    **changes: Any,
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(eager, ours): the same weights, configs of their own."""
    make_config = DECODERS[make_config] if isinstance(make_config, str) else make_config
    eager = build(make_config(**changes), "eager", auto_class)
    ours = build(make_config(**changes), hf_flash_backend.IMPLEMENTATION, auto_class)
    assert eager.config is not ours.config
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@contextmanager
def expect_calls(count: int, op: str = "forward") -> Iterator[None]:
    """Fails unless the kernels ran exactly count times: layers x forwards."""
    with hf_flash_backend.trace() as calls:
        yield
    seen = sum(call["op"] == op for call in calls)
    assert seen == count, f"{op} ran {seen} times, expected {count}"


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str = "output") -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    assert actual.isfinite().all(), f"{what} is not finite"
    error = (actual - expected).abs().max().item()
    limit = TOLERANCE * max(1.0, expected.abs().max().item())
    assert error <= limit, f"{what}: error {error:.2e}, allowed {limit:.2e}"


def cache_argument(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """The keyword that takes a cache: `past_key_values`, from Transformers 5.24 on `cache`."""
    parameters = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in parameters else "past_key_values": cache}


def returned_cache(output: Any) -> Any:
    cache = getattr(output, "cache", None)
    return cache if cache is not None else output.past_key_values


# Batches. Each is (model arguments, real): real [B, L] bool says which logits are compared.
Batch = tuple[dict[str, Any], torch.Tensor]
LENGTH = 9


def _ids(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, 61, (batch, length), generator=generator)


def plain() -> Batch:
    ids = _ids()
    return {"input_ids": ids, "use_cache": False}, torch.ones_like(ids, dtype=torch.bool)


def _padded(real: torch.Tensor) -> Batch:
    ids = torch.where(real, _ids(), PAD)
    position_ids = (real.cumsum(-1) - 1).clamp(min=0)
    mask = real.to(torch.int64)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids}
    return {**batch, "use_cache": False}, real


def left_padding() -> Batch:
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, :4] = False
    return _padded(real)


def right_padding() -> Batch:
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, -3:] = False
    return _padded(real)


def packed(use_cache: bool = False, all_ones_mask: bool = False) -> Batch:
    """Two batch rows with different splits; the second continues and restarts away from zero."""
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [3, 4, 5, 0, 1, 2, 7, 8, 9]])
    ids = _ids()
    batch = {"input_ids": ids, "position_ids": position_ids, "use_cache": use_cache}
    if all_ones_mask:
        batch["attention_mask"] = torch.ones_like(ids)
    return batch, torch.ones_like(ids, dtype=torch.bool)


BATCHES: dict[str, Callable[[], Batch]] = {
    "plain": plain,
    "left_padding": left_padding,
    "right_padding": right_padding,
    "packed": packed,
}


def check_logits_and_gradients(
    eager: PreTrainedModel, ours: PreTrainedModel, batch: Batch, forwards: int = 1
) -> None:
    """Compares the logits of real tokens and the gradient of every parameter."""
    arguments, real = batch
    layers = ours.config.num_hidden_layers
    weight = torch.randn(61, generator=torch.Generator().manual_seed(2))
    results = []
    for model in (eager, ours):
        model.zero_grad()
        with expect_calls(layers * forwards if model is ours else 0):
            logits = model(**arguments).logits[real]
        with expect_calls(layers if model is ours else 0, op="backward"):
            (logits.log_softmax(-1) * weight).sum().backward()
        results.append((logits.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (expected, expected_grads), (actual, grads) = results
    assert_close(actual, expected, "logits")
    for name, grad in expected_grads.items():
        assert_close(grads[name], grad, f"gradient of {name}")


def check_generation(
    eager: PreTrainedModel, ours: PreTrainedModel, ids: torch.Tensor, **settings: Any
) -> None:
    """Generates greedily with both and requires the same tokens."""
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, **settings}
    expected = eager.generate(ids, **settings)
    with hf_flash_backend.trace() as calls:
        actual = ours.generate(ids, **settings)
    forwards, rest = divmod(len(calls), ours.config.num_hidden_layers)
    assert rest == 0 and forwards >= 2, f"{len(calls)} kernel calls"
    assert actual.tolist() == expected.tolist()
