"""Models under `hf_fused` against Transformers' eager attention: logits, gradients, generation."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import transformers
from models import (
    BATCHES,
    DECODERS,
    LENGTH,
    TRANSFORMERS,
    WINDOW,
    assert_close,
    build,
    cache_argument,
    check_generation,
    check_logits_and_gradients,
    expect_calls,
    left_padding,
    make_pair,
    packed,
    plain,
    returned_cache,
)
from packaging.version import Version

import hf_flash_backend
from hf_flash_backend import functional, masks

IMPLEMENTATION = hf_flash_backend.IMPLEMENTATION
pair = functools.cache(make_pair)  # models are not changed by the tests that use it


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients(name, batch):
    check_logits_and_gradients(*pair(name), BATCHES[batch]())


def wrong_top_left(attention, q, k, v, **arguments):
    return attention(q, k, v, **{**arguments, "query_offset": 0})


def wrong_no_mask(attention, q, k, v, **arguments):
    limits = dict.fromkeys(("mask", "row_start", "row_end"))
    arguments = {**arguments, **limits, "window": (None, 0), "is_causal": True}
    return attention(q, k, v, **arguments)


def wrong_no_packing(attention, q, k, v, **arguments):
    return attention(q, k, v, **{**arguments, "row_start": None})


def wrong_not_causal(attention, q, k, v, **arguments):
    arguments = {**arguments, "is_causal": False, "window": (None, None)}
    return attention(q, k, v, **{**arguments, "mask": None, "row_end": None})


def wrong_no_softcap(attention, q, k, v, **arguments):
    return attention(q, k, v, **{**arguments, "softcap": 0.0})


def wrong_scale(attention, q, k, v, **arguments):
    return attention(q, k, v, **{**arguments, "scale": 1.02 * arguments["scale"]})


def wrong_layout(attention, q, k, v, **arguments):
    out = attention(q, k, v, **arguments)
    return out.reshape(out.shape[0], out.shape[2], out.shape[1], out.shape[3]).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "batch", "wrong"),
    [
        ("llama", plain, wrong_not_causal),
        ("llama", left_padding, wrong_no_mask),
        ("mistral", plain, wrong_no_mask),
        ("gemma2", plain, wrong_no_softcap),
        ("gemma2", plain, wrong_scale),
        ("gpt2", plain, wrong_layout),
        ("llama", packed, wrong_no_mask),
    ],
)
def test_checker_rejects_wrong_attention(monkeypatch, name, batch, wrong):
    monkeypatch.setattr(functional, "attention", functools.partial(wrong, functional.attention))
    with pytest.raises(AssertionError, match="error .* allowed"):
        check_logits_and_gradients(*pair(name), batch())


def test_checker_rejects_missing_mask_function(monkeypatch):
    mapping = transformers.AttentionMaskInterface._global_mapping
    monkeypatch.delitem(mapping, IMPLEMENTATION)
    arguments, real = left_padding()
    del arguments["position_ids"]  # they would be honoured as packed sequences: also exact
    with pytest.raises(AssertionError, match="logits: error .* allowed"):
        check_logits_and_gradients(*pair("llama"), (arguments, real))


def test_checker_rejects_another_implementation():
    eager, ours = pair("llama")
    with pytest.raises(AssertionError, match="forward ran 3 times, expected 0"):
        check_logits_and_gradients(ours, eager, plain())


def _segments_alone(model, arguments):
    """Logits of every packed segment run by itself, put back side by side."""
    rows = []
    for ids, positions in zip(arguments["input_ids"], arguments["position_ids"], strict=True):
        cuts = [0, *((positions.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(ids)]
        parts = [
            model(ids[None, a:b], position_ids=positions[None, a:b], use_cache=False).logits[0]
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("use_cache", [False, True], ids=["no_cache", "cache"])
@pytest.mark.parametrize("all_ones_mask", [False, True], ids=["no_mask", "ones"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_packed_sequences_never_leak(name, all_ones_mask, use_cache):
    if name == "gpt2" and Version("5.0") > TRANSFORMERS and (use_cache or all_ones_mask):
        pytest.skip("GPT-2 in Transformers 4 hands no position_ids to its layers")
    eager, ours = pair(name)
    arguments, _ = packed(use_cache, all_ones_mask)
    assert_close(ours(**arguments).logits, _segments_alone(eager, arguments), "logits")


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_cu_seq_lens_alone_separate_sequences(name):
    """Layers that get a mask (windows) honour them as well as layers that get none."""
    _, ours = pair(name)
    ids = plain()[0]["input_ids"][:1]
    bounds = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    packed_logits = ours(ids, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).logits
    starts = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8]])
    alone = ours(ids[:, 5:], use_cache=False, position_ids=starts[:, 5:]).logits
    assert_close(packed_logits[:, 5:], alone, "logits")


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_checker_rejects_a_leak(monkeypatch, name):
    monkeypatch.setattr(
        functional, "attention", functools.partial(wrong_no_packing, functional.attention)
    )
    with pytest.raises(AssertionError, match="logits: error .* allowed"):
        test_packed_sequences_never_leak(name, all_ones_mask=True, use_cache=True)


@torch.no_grad()
def test_packed_sequences_are_warned_about_once(caplog, monkeypatch):
    monkeypatch.setattr(masks, "_warned", set())
    _, ours = pair("llama")
    ids = plain()[0]["input_ids"][:1, :4]
    ours(ids, position_ids=torch.tensor([[2, 3, 4, 5]]))  # one segment, from a later position
    assert not caplog.records
    for _ in range(2):
        ours(ids, position_ids=torch.tensor([[0, 1, 0, 1]]))
    assert [r.getMessage() for r in caplog.records] == [
        "hf_flash_backend: position_ids do not grow by one along each row and no mask says why: "
        "each run of consecutive positions attends to itself only (packed sequences)."
    ]


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_chunked_prefill(name):
    eager, ours = pair(name)
    ids = plain()[0]["input_ids"]
    cache, parts = None, []
    with expect_calls(3 * ours.config.num_hidden_layers):
        for chunk in ids.split([5, 3, 1], dim=1):
            output = ours(chunk, use_cache=True, **cache_argument(ours, cache))
            cache = returned_cache(output)
            parts.append(output.logits)
    assert_close(torch.cat(parts, dim=1), eager(ids, use_cache=False).logits, "logits")


def test_chunked_prefill_checker_rejects_dropped_mask(monkeypatch):
    monkeypatch.setattr(
        functional, "attention", functools.partial(wrong_no_mask, functional.attention)
    )
    test_chunked_prefill("llama")  # bottom-right causal is the mask
    monkeypatch.setattr(
        functional, "attention", functools.partial(wrong_top_left, functional.attention)
    )
    with pytest.raises(AssertionError, match="logits: error .* allowed"):
        test_chunked_prefill("llama")


@pytest.mark.parametrize("padding", [False, True], ids=["full", "left_padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache, padding):
    """Mistral and Gemma-2 use sliding window caches, dynamic and static; the prompt is longer."""
    assert LENGTH > WINDOW
    arguments, _ = left_padding() if padding else plain()
    mask = arguments.get("attention_mask", torch.ones_like(arguments["input_ids"]))
    settings = {"attention_mask": mask, "cache_implementation": cache}
    check_generation(*pair(name), arguments["input_ids"], **settings)


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_generate_by_beam_search(name):
    check_generation(*pair(name), plain()[0]["input_ids"], num_beams=3)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_by_prompt_lookup(name):
    ids = plain()[0]["input_ids"][:1, :4].repeat(1, 3)
    check_generation(*pair(name), ids, prompt_lookup_num_tokens=2, eos_token_id=1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_unfilled_cache_slots_are_never_read(name):
    """R9: NaN in the slots of a static cache that are not filled yet changes no bit."""
    _, ours = pair(name)
    ids = plain()[0]["input_ids"][:1]
    results = []
    for filler in (0.0, float("nan")):
        cache = transformers.StaticCache(config=ours.config, max_cache_len=LENGTH + 5)
        heads = getattr(ours.config, "num_key_value_heads", ours.config.num_attention_heads)
        cache.early_initialization(1, heads, 8, torch.float32, torch.device("cpu"))
        for layer in cache.layers:
            layer.keys.fill_(filler)
            layer.values.fill_(filler)
        parts = []
        for begin, end in ((0, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
            position = torch.arange(begin, end)
            extra = {"cache_position": position} if Version("5.4") > TRANSFORMERS else {}
            chunk = {"input_ids": ids[:, begin:end], "position_ids": position[None], **extra}
            parts.append(ours(**chunk, **cache_argument(ours, cache)).logits)
        results.append(torch.cat(parts, dim=1))
    assert results[1].isfinite().all()
    assert torch.equal(*results)


def test_gradient_checkpointing():
    eager, ours = make_pair("llama")
    for model in (eager, ours):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
    arguments, _ = plain()
    layers = ours.config.num_hidden_layers
    eager(**arguments).logits.square().mean().backward()
    with expect_calls(2 * layers):  # once more in the backward pass
        ours(**arguments).logits.square().mean().backward()
    for (name, theirs), mine in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, f"gradient of {name}")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_autocast_runs_the_kernel_in_bf16(name):
    """fp32 weights: RoPE hands over fp32 query and key with a bf16 value."""
    eager, ours = pair(name)
    arguments, real = left_padding()
    truth = eager(**arguments).logits[real]
    with torch.autocast("cpu", torch.bfloat16):
        with hf_flash_backend.trace() as calls:
            actual = ours(**arguments).logits[real].float()
        yardstick = eager(**arguments).logits[real].float()
    assert {call["dtype"] for call in calls} == {"bf16"}
    error, allowed = ((x - truth).abs().max().item() for x in (actual, yardstick))
    assert 0 < error <= 2 * allowed
    assert not torch.equal(actual, yardstick), "this compared a model with itself"


@pytest.mark.parametrize("inverse", [False, True], ids=["scale", "scale_by_layer"])
def test_gpt2_scales(inverse):
    models = make_pair(
        "gpt2", scale_attn_by_inverse_layer_idx=inverse, scale_attn_weights=not inverse
    )
    check_logits_and_gradients(*models, plain())


def test_save_and_load(tmp_path):
    _, ours = pair("llama")
    ours.save_pretrained(tmp_path)
    assert IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=IMPLEMENTATION
    ).eval()
    assert loaded.config._attn_implementation == IMPLEMENTATION
    arguments, _ = plain()
    with torch.no_grad(), expect_calls(2 * ours.config.num_hidden_layers):
        assert torch.equal(loaded(**arguments).logits, ours(**arguments).logits)


@torch.no_grad()
def test_switching_a_live_model():
    eager, _ = pair("llama")
    model = build(DECODERS["llama"](), "eager")
    model.load_state_dict(eager.state_dict())
    arguments, real = left_padding()
    expected = eager(**arguments).logits[real]
    model.set_attn_implementation(IMPLEMENTATION)
    with expect_calls(model.config.num_hidden_layers):
        assert_close(model(**arguments).logits[real], expected, "logits")
    model.set_attn_implementation("eager")
    with expect_calls(0):
        assert torch.equal(model(**arguments).logits[real], expected)


def test_name_is_one_that_transformers_leaves_alone():
    """R10: on 5.23 and later a registered name with "flash" in it cannot be loaded."""
    for word in ("flash", "sdpa", "flex_attention", "/", "|"):
        assert word not in IMPLEMENTATION
    assert IMPLEMENTATION in transformers.AttentionInterface._global_mapping
    assert IMPLEMENTATION in transformers.AttentionMaskInterface._global_mapping
    if Version("5.23") <= TRANSFORMERS:
        functions = transformers.AttentionInterface._global_mapping
        functions["my_flash"] = functions[IMPLEMENTATION]
        try:
            with pytest.raises(ValueError, match="my_flash"):
                build(DECODERS["llama"](), "my_flash")
        finally:
            del functions["my_flash"]


def test_dropout_in_training_has_the_mean_of_eager():
    """One layer, so that the mean over dropouts is the output without: 400 draws, 5 sigma."""
    model = build(DECODERS["gpt2"](attn_pdrop=0.2, n_layer=1), IMPLEMENTATION)
    arguments, _ = plain()
    with torch.no_grad():
        attention = model.transformer.h[0].attn
        hidden = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(5))
        expected = attention(hidden)[0]
        torch.manual_seed(0)
        attention.train()
        draws = torch.stack([attention(hidden)[0] for _ in range(400)])
    error = draws.std(dim=0) / 400**0.5
    assert ((draws.mean(dim=0) - expected).abs() <= 5 * error + 1e-6).all()
    assert (draws.std(dim=0) > 0).any()
    model.train()(**arguments).logits.sum().backward()


@torch.no_grad()
def test_output_attentions_gives_none_and_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(masks, "_warned", set())
    q = torch.randn(1, 2, 3, 8)
    forward = hf_flash_backend.integration.attention_forward
    for _ in range(2):
        assert forward(torch.nn.Module(), q, q, q, None, output_attentions=True)[1] is None
    assert [r.getMessage() for r in caplog.records] == [
        "hf_flash_backend: output_attentions=True gives None instead of weights. "
        'Use attn_implementation="eager" for this model.'
    ]


@torch.no_grad()
def test_compiles_without_graph_break():
    eager, ours = pair("llama")
    arguments, real = left_padding()
    expected = eager(**arguments).logits[real]
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_close(compiled(**arguments).logits[real], expected, "logits")
    arguments, _ = packed(use_cache=True)
    assert_close(compiled(**arguments).logits, _segments_alone(eager, arguments), "logits")
