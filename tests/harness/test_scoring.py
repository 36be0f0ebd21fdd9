"""The number itself: token weights, batch size, chunks of the head, and who computed it."""

import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_flash_backend
from eval import data, perplexity, worker


def tiny_gpt2(implementation: str = "eager") -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=67, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    model = GPT2LMHeadModel(config).eval()
    model.set_attn_implementation(implementation)
    return model


TOKENS = torch.randint(0, 67, (100,), generator=torch.Generator().manual_seed(1))


def test_perplexity_is_weighted_by_tokens():
    nll = np.array([1.0, 1.0, 1.0, 3.0])  # a window of three tokens and one of one
    assert perplexity.perplexity(nll) == pytest.approx(math.exp(1.5))
    assert perplexity.perplexity(nll) != pytest.approx(math.exp(2.0))


def test_paired_difference():
    mean, error = perplexity.paired_difference(np.array([1.0, 2.0, 3.5]), np.array([1.0, 2.0, 3.0]))
    assert mean == pytest.approx(0.5 / 3)
    assert error == pytest.approx(np.std([0, 0, 0.5], ddof=1) / math.sqrt(3))


@torch.inference_mode()
def test_every_batch_size_gives_the_same_value():
    head = worker.ChunkedHead(tiny_gpt2())
    windows = data.windows(100, 16, 16, has_bos=False)
    one, _, forwards = worker.score(head, TOKENS, windows, 1, None)
    four, _, fewer = worker.score(head, TOKENS, windows, 4, None)
    assert forwards > fewer and len(one) == len(four)
    np.testing.assert_allclose(one, four, atol=2e-6)


@torch.inference_mode()
def test_chunked_head_equals_the_models_own_loss():
    model = tiny_gpt2()
    head = worker.ChunkedHead(model)
    head.rows = 5
    assert head.matches(TOKENS[None, :16])
    nll, _, _ = worker.score(head, TOKENS, [data.Window(0, 16, 1)], 1, None)
    loss = model(input_ids=TOKENS[None, :16], labels=TOKENS[None, :16]).loss
    assert nll.mean() == pytest.approx(loss.item(), abs=1e-5)


@torch.inference_mode()
def test_a_head_that_is_not_the_models_is_noticed():
    head = worker.ChunkedHead(tiny_gpt2())
    head.cap = 0.01
    assert not head.matches(TOKENS[None, :16])


@torch.inference_mode()
def test_kernel_calls_are_layers_times_forwards():
    head = worker.ChunkedHead(tiny_gpt2(hf_flash_backend.IMPLEMENTATION))
    with hf_flash_backend.trace() as calls:
        _, _, forwards = worker.score(
            head, TOKENS, data.windows(100, 16, 16, has_bos=False), 2, None
        )
    worker.check_kernel_calls(len(calls), 2, forwards)


@torch.inference_mode()
def test_a_run_that_never_reached_the_kernel_is_refused():
    head = worker.ChunkedHead(tiny_gpt2("sdpa"))
    with hf_flash_backend.trace() as calls:
        _, _, forwards = worker.score(
            head, TOKENS, data.windows(100, 16, 16, has_bos=False), 2, None
        )
    with pytest.raises(worker.KernelNotReached, match="never reach the kernel: got 0 calls"):
        worker.check_kernel_calls(len(calls), 2, forwards)


def test_verdict():
    assert perplexity.is_accepted(1e-4, 0.0, 1e-4)
    assert not perplexity.is_accepted(1e-2, 1e-4, 1e-4)
