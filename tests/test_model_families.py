"""Encoders, encoder-decoders, vision, models outside the interface, and models that are refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from models import TRANSFORMERS, assert_close, expect_calls, make_pair
from packaging.version import Version
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import hf_flash_backend

IMPLEMENTATION = hf_flash_backend.IMPLEMENTATION
HAS_BERT = Version("5.0") <= TRANSFORMERS  # before that BERT knows three names and no others
HAS_T5 = Version("5.15") <= TRANSFORMERS  # before that T5 has attention of its own


def bert(hidden_size=32):
    return transformers.BertConfig(
        vocab_size=61,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def bart():
    return transformers.BartConfig(
        vocab_size=61,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=32,
        init_std=0.2,
        dropout=0.0,
    )


def t5():
    return transformers.T5Config(
        vocab_size=61,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )


def vit():
    return transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=24,
        patch_size=8,
        initializer_range=0.2,
    )


def deepseek():
    """Head dims 12 for q and k, 8 for v."""
    return transformers.DeepseekV3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        initializer_range=0.2,
    )


def ids(batch=2, length=9):
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(3))


def right_padded(length=9, kept=5):
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, kept:] = 0
    return mask


def check(make_config, auto_class, arguments, calls, real=None):
    """Equal first outputs and gradients of all parameters; calls = kernel calls of one forward."""
    results = []
    for model in make_pair(make_config, auto_class):
        is_ours = model.config._attn_implementation == IMPLEMENTATION
        with expect_calls(calls if is_ours else 0):
            output = model(**arguments)[0]
        output = output if real is None else output[real]
        output.square().mean().backward()
        results.append((output, {n: p.grad for n, p in model.named_parameters()}))
    (expected, expected_grads), (actual, grads) = results
    assert_close(actual, expected)
    for name, grad in expected_grads.items():
        if grad is not None:
            assert_close(grads[name], grad, f"gradient of {name}")


@pytest.mark.skipif(not HAS_BERT, reason="BERT takes no registered names before Transformers 5.0")
@pytest.mark.parametrize("hidden_size", [32, 20], ids=["head_dim_8", "head_dim_5"])
def test_bert(hidden_size):
    mask = right_padded()
    arguments = {"input_ids": ids(), "attention_mask": mask}
    check(lambda: bert(hidden_size), AutoModel, arguments, calls=2, real=mask.bool())


def test_bart():
    arguments = {"input_ids": ids(), "attention_mask": right_padded()}
    arguments |= {"decoder_input_ids": ids(length=6), "use_cache": False}
    check(bart, AutoModelForSeq2SeqLM, arguments, calls=2 + 2 * 2)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("make_config", [bart, t5])
def test_encoder_decoder_generates_the_same_tokens(make_config, cache):
    eager, ours = make_pair(make_config, AutoModelForSeq2SeqLM)
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    settings |= {"attention_mask": right_padded(), "eos_token_id": None}
    expected = eager.generate(ids(), **settings)
    assert ours.generate(ids(), **settings).tolist() == expected.tolist()


@torch.no_grad()
def test_t5_inference():
    eager, ours = make_pair(t5, AutoModelForSeq2SeqLM)
    arguments = {"input_ids": ids(), "attention_mask": right_padded()}
    arguments |= {"decoder_input_ids": ids(length=6)}
    with expect_calls(2 + 2 * 2 if HAS_T5 else 0):
        actual = ours(**arguments).logits
    assert_close(actual, eager(**arguments).logits)


@pytest.mark.skipif(not HAS_T5, reason="T5 is outside the attention interface before 5.15")
def test_t5_training():
    """The bias of relative positions is learned: its gradient sums over the batch."""
    arguments = {"input_ids": ids(), "attention_mask": right_padded()}
    arguments |= {"decoder_input_ids": ids(length=6), "use_cache": False}
    check(t5, AutoModelForSeq2SeqLM, arguments, calls=2 + 2 * 2)


def test_vit():
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(4))
    check(vit, AutoModel, {"pixel_values": pixels}, calls=2)


def test_deepseek_value_head_dim_differs():
    arguments = {"input_ids": ids(), "use_cache": False}
    check(deepseek, AutoModelForCausalLM, arguments, calls=2)


@pytest.mark.skipif(Version("5.4") > TRANSFORMERS, reason="is_causal as a model argument is newer")
@torch.no_grad()
def test_llama_as_an_encoder():
    eager, ours = make_pair("llama")
    arguments = {"input_ids": ids(), "use_cache": False}
    expected = eager(**arguments, is_causal=False).logits
    with expect_calls(3):
        assert_close(ours(**arguments, is_causal=False).logits, expected)
    assert (expected - eager(**arguments).logits).abs().max() > 1e-2


def bloom():
    return transformers.BloomConfig(
        vocab_size=61, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2
    )


def mpt():
    return transformers.MptConfig(
        vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=32, initializer_range=0.2
    )


def xglm():
    return transformers.XGLMConfig(
        vocab_size=61,
        d_model=32,
        ffn_dim=48,
        num_layers=2,
        attention_heads=4,
        init_std=0.2,
        dropout=0.0,
        attention_dropout=0.0,
    )


@pytest.mark.parametrize("padding", [False, True], ids=["full", "left_padded"])
@pytest.mark.parametrize("make_config", [bloom, mpt, xglm])
def test_models_outside_the_interface_stay_right(make_config, padding):
    """They never call the backend; its mask function hands them the float mask that they add."""
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, : 4 * padding] = 0
    arguments = {"input_ids": ids(), "attention_mask": mask, "use_cache": False}
    check(make_config, AutoModelForCausalLM, arguments, calls=0, real=mask.bool())


@pytest.mark.parametrize("make_config", [bloom, mpt])
def test_models_outside_the_interface_generate_the_same_tokens(make_config):
    eager, ours = make_pair(make_config)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    settings["attention_mask"] = torch.ones(2, 9, dtype=torch.int64)
    assert ours.generate(ids(), **settings).tolist() == eager.generate(ids(), **settings).tolist()


def test_checker_rejects_a_bool_mask_outside_the_interface(monkeypatch):
    if Version("5.1") > TRANSFORMERS:
        pytest.skip("Bloom makes its own masks before Transformers 5.1")
    monkeypatch.setattr(hf_flash_backend.masks, "needs_float_mask", lambda config: False)
    with pytest.raises(AssertionError, match="output: error .* allowed"):
        test_models_outside_the_interface_stay_right(bloom, padding=True)


@torch.no_grad()
def gpt_oss():
    return transformers.GptOssConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        initializer_range=0.2,
        rope_scaling={"rope_type": "default", "rope_theta": 10000.0},
    )


@pytest.mark.parametrize("padding", [False, True], ids=["full", "left_padded"])
def test_gpt_oss_with_sinks(padding):
    """Sinks are parameters: check compares their gradients too."""
    arguments, real = {"input_ids": ids(), "use_cache": False}, None
    if padding:
        mask = right_padded().flip(1)
        arguments["attention_mask"], real = mask, mask.bool()
    check(gpt_oss, AutoModelForCausalLM, arguments, calls=2, real=real)


def test_gpt_oss_checker_rejects_dropped_sinks(monkeypatch):
    right = hf_flash_backend.functional.attention

    def wrong(*tensors, **arguments):
        return right(*tensors, **{**arguments, "sinks": None})

    monkeypatch.setattr(hf_flash_backend.functional, "attention", wrong)
    with pytest.raises(AssertionError, match="error .* allowed"):
        test_gpt_oss_with_sinks(padding=False)
