"""The adapter alone: attention_forward called as a model would, against a dense fp64 formula."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import transformers
from adapter import Layer, band, call, dense, everything, make_qkv
from models import assert_close

import hf_flash_backend
from hf_flash_backend import integration, masks
from hf_flash_backend.integration import attention_forward

IMPLEMENTATION = hf_flash_backend.IMPLEMENTATION


def test_causal_argument_attribute_and_default():
    q, k, v = make_qkv(3, 5)
    causal, full = dense(q, k, v, band(3, 5, right=0)), dense(q, k, v, everything(3, 5))
    assert_close(call(q, k, v), full)
    assert_close(call(q, k, v, layer=Layer(True)), causal)
    assert_close(call(q, k, v, is_causal=True), causal)
    assert_close(call(q, k, v, layer=Layer(True), is_causal=False), full)
    assert_close(call(q, k, v, layer=torch.nn.Module()), full)  # has no is_causal: not causal


def test_causal_is_bottom_right():
    """R8, with a head dim of 1."""
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 5, 1)
    v = torch.arange(5.0).reshape(1, 1, 5, 1)
    assert call(q, k, v, is_causal=True).flatten().tolist() == pytest.approx([1.5, 2.0])
    v = torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1)
    output = call(torch.zeros(1, 1, 5, 1), torch.zeros(1, 1, 2, 1), v, is_causal=True)
    assert output.flatten().tolist() == [0, 0, 0, 1, 2]


def test_sliding_window():
    """R17: Transformers counts the row itself, the op counts distances."""
    q, v = torch.zeros(1, 1, 8, 1), torch.arange(8.0).reshape(1, 1, 8, 1)
    rows = call(q, q, v, is_causal=True, sliding_window=4).flatten().tolist()
    assert rows == pytest.approx([0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5])
    assert call(q, q, v, is_causal=True, sliding_window=1).flatten().tolist() == list(range(8))
    q, k, v = make_qkv(9, 9)
    both_sides = dense(q, k, v, band(9, 9, 3, 3))
    assert_close(call(q, k, v, sliding_window=4), both_sides)


@pytest.mark.parametrize("window", [None, -1, 0, 8, 100])
def test_windows_that_are_none(window):
    """R18: a sentinel never means that nothing is visible."""
    q, k, v = make_qkv(8, 8)
    expected = call(q, k, v, is_causal=True)
    assert torch.equal(call(q, k, v, is_causal=True, sliding_window=window), expected)


def test_scales():
    q, k, v = make_qkv(3, 5)
    visible = everything(3, 5)
    for scale in (-2.0, 0.0, 0.0625, 1.0):
        assert_close(call(q, k, v, scaling=scale), dense(q, k, v, visible, scale=scale))
    assert_close(call(q, k, v, softcap=1.5), dense(q, k, v, visible, softcap=1.5))
    assert torch.equal(call(q, k, v, softcap=None), call(q, k, v, softcap=0.0))


@pytest.mark.parametrize("shape", [(2, 1, 3, 5), (1, 1, 3, 5), (2, 4, 3, 5), (2, 1, 1, 5)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_four_dimensional_masks_are_the_whole_truth(shape, kind):
    q, k, v = make_qkv(3, 5)
    generator = torch.Generator().manual_seed(1)
    if kind == "bool":
        mask = torch.rand(shape, generator=generator) < 0.6
        expected = dense(q, k, v, mask)
    else:
        mask = torch.randn(shape, generator=generator)
        expected = dense(q, k, v, everything(3, 5), bias=mask)
    assert_close(call(q, k, v, mask), expected)
    ignored = {"is_causal": True, "sliding_window": 2, "position_ids": torch.tensor([[0, 0, 0]])}
    bounds = torch.tensor([0, 1, 3], dtype=torch.int32)
    ignored |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    assert_close(call(q, k, v, mask, **ignored), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_see_nothing(dtype):
    """R5: zero output, zero and finite gradients."""
    q, k, v = (t.requires_grad_() for t in make_qkv(5, 5, dtype=dtype))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 2] = False
    output = call(q, k, v, mask)
    output.sum().backward()
    assert (output[1, 2] == 0).all() and (q.grad[1, :, 2] == 0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize(
    ("dtype", "row", "is_mean"),
    [
        (torch.float32, [torch.finfo(torch.float32).min], True),
        (torch.bfloat16, [torch.finfo(torch.bfloat16).min], True),
        (torch.float16, [torch.finfo(torch.float16).min, -16.0], False),
        (torch.bfloat16, 2 * [torch.finfo(torch.bfloat16).min], False),
    ],
)
def test_rows_masked_by_numbers(dtype, row, is_mean):
    """R6: the least number is a number, its overflow to -inf is a mask; never NaN."""
    q, k, v = make_qkv(5, 5, dtype=dtype)
    mask = torch.zeros(2, 1, 5, 5, dtype=dtype)
    for number in row:
        mask[0, :, 2] += number
    output = call(q, k, v, mask)
    mean = v[0].float().mean(1).repeat_interleave(2, 0)
    expected = mean if is_mean else torch.zeros_like(mean)
    assert (output[0, 2].float() - expected).abs().max() < 0.02
    assert output.isfinite().all()


@pytest.mark.parametrize("keys", [5, 4, 8], ids=["equal", "shorter", "longer"])
def test_key_padding(keys):
    """A shorter mask ends where a static cache is filled; NaN behind it changes nothing."""
    q, k, v = make_qkv(2, 5)
    mask = torch.ones(2, keys, dtype=torch.int64)
    mask[0, keys - min(keys, 5)] = 0  # the first key that counts
    seen = min(keys, 5)
    visible = band(2, seen, right=0) & mask[:, None, None, keys - seen :].bool()
    expected = dense(q, k[:, :, :seen], v[:, :, :seen], visible)
    k[:, :, seen:] = v[:, :, seen:] = math.nan
    assert_close(call(q, k, v, mask, is_causal=True), expected)
    assert_close(call(q, k, v, mask.bool(), is_causal=True), expected)


def test_learned_queries_of_batch_one():
    q, k, v = make_qkv(3, 5)
    expected = dense(q[:1].expand(2, -1, -1, -1), k, v, everything(3, 5))
    q = q[:1].clone().requires_grad_()
    output = call(q, k, v)
    assert_close(output, expected)
    output.sum().backward()
    assert q.grad.shape == (1, 4, 3, 8)


@pytest.mark.parametrize(("dim", "dim_v"), [(5, 5), (7, 7), (12, 8), (8, 12), (15, 3)])
def test_any_head_dim(dim, dim_v):
    q, k, v = (t.requires_grad_() for t in make_qkv(3, 5, dim=dim, dim_v=dim_v))
    output = call(q, k, v)
    expected = dense(q, k, v, everything(3, 5))
    assert_close(output, expected)
    assert_close(
        torch.autograd.grad(output.square().sum(), q)[0],
        torch.autograd.grad(expected.square().sum(), q)[0],
    )


def test_mixed_dtypes_become_that_of_value_or_autocast():
    q, k, v = make_qkv(3, 5)
    assert call(q, k, v.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert call(q, k, v).dtype == torch.bfloat16
        assert call(q, k, v.bfloat16()).dtype == torch.bfloat16
    assert call(q.bfloat16(), k.bfloat16(), v).dtype == torch.float32
    assert call(q.double(), k.double(), v.double()).dtype == torch.float64


def test_position_bias_joins_every_mask():
    q, k, v = make_qkv(5, 5)
    bias = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    causal = band(5, 5, right=0)
    expected = dense(q, k, v, causal, bias=bias)
    assert_close(call(q, k, v, is_causal=True, position_bias=bias), expected)
    assert_close(call(q, k, v, causal, position_bias=bias), expected)
    added = torch.where(causal, 0.0, -math.inf)
    assert_close(call(q, k, v, added, position_bias=bias), expected)
    bias.requires_grad_()
    expected = dense(q, k, v, everything(5, 5), bias=bias)
    (truth,) = torch.autograd.grad(expected.square().sum(), bias)
    for output in (call(q, k, v, position_bias=bias), call(q, k, v, bias)):
        assert_close(torch.autograd.grad(output.square().sum(), bias)[0], truth)


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks_are_one_more_key_of_value_zero(name):
    q, k, v = make_qkv(3, 5)
    for shape in ((4,), (2, 4, 3, 1)):
        sinks = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        column = sinks if len(shape) == 4 else sinks.view(1, 4, 1, 1)
        scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = torch.cat([scores, column.expand(2, 4, 3, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :-1]
        expected = (weights @ v.repeat_interleave(2, dim=1)).transpose(1, 2)
        assert_close(call(q, k, v, **{name: sinks}), expected)
    with pytest.raises(ValueError, match="s_aux and sinks: got both, expected at most one"):
        call(q, k, v, s_aux=torch.zeros(4), sinks=torch.zeros(4))


@pytest.mark.parametrize("name", sorted(integration.UNSUPPORTED))
def test_unsupported_arguments_are_refused(name):
    q, k, v = make_qkv(3, 5)
    with pytest.raises(NotImplementedError) as error:
        call(q, k, v, **{name: torch.zeros(4)})
    assert str(error.value) == (
        f"hf_flash_backend: {name} is not supported yet: got a tensor of shape [4] and dtype "
        f"torch.float32, expected None. {integration.UNSUPPORTED[name]}"
    )
    call(q, k, v, **{name: None})


def test_unknown_tensors_are_refused_and_harmless_ones_are_not():
    q, k, v = make_qkv(3, 5)
    with pytest.raises(NotImplementedError) as error:
        call(q, k, v, alibi=torch.zeros(4))
    assert str(error.value) == (
        "hf_flash_backend: alibi is not known to this backend: got a tensor of shape [4] and "
        "dtype torch.float32, expected None. Leave it out of the call, or use "
        'attn_implementation="eager".'
    )
    harmless = {name: torch.zeros(4) for name in integration.HARMLESS_TENSORS}
    call(q, k, v, use_cache=True, output_router_logits=False, layer_head_mask=None, **harmless)


def test_dropout_counts_in_training_only():
    q, k, v = make_qkv(3, 5)
    assert torch.equal(call(q, k, v, dropout=0.1), call(q, k, v))
    torch.manual_seed(3)
    dropped = call(q, k, v, dropout=0.5, layer=Layer().train())
    assert not torch.equal(dropped, call(q, k, v))
    torch.manual_seed(3)
    assert torch.equal(call(q, k, v, dropout=0.5, layer=Layer().train()), dropped)


def test_paged_cache_is_refused():
    class PagedAttentionCache:
        pass

    q, k, v = make_qkv(3, 5)
    with pytest.raises(NotImplementedError) as error:
        call(q, k, v, cache=PagedAttentionCache())
    assert str(error.value) == (
        "hf_flash_backend: cache is not supported yet: got a PagedAttentionCache, expected None. "
        'Use generate(), or attn_implementation="sdpa" for generate_batch().'
    )
    call(q, k, v, cache=transformers.DynamicCache())


def test_masks_without_a_meaning():
    q, k, v = make_qkv(3, 5)
    with pytest.raises(ValueError, match="attention_mask: got a dict, expected a tensor or None"):
        call(q, k, v, {})
    with pytest.raises(ValueError, match="expected bool or int for a 2-D mask. Pass mask.bool"):
        call(q, k, v, torch.zeros(2, 5))


def test_unregister_and_register():
    interface = transformers.AttentionInterface._global_mapping
    hf_flash_backend.unregister()
    assert IMPLEMENTATION not in interface
    assert IMPLEMENTATION not in transformers.AttentionMaskInterface._global_mapping
    hf_flash_backend.unregister()
    hf_flash_backend.register()
    hf_flash_backend.register()
    assert interface[IMPLEMENTATION] is attention_forward
    mapping = transformers.AttentionMaskInterface._global_mapping
    assert mapping[IMPLEMENTATION] is masks.attention_mask


IMPORT_SCRIPT = """
import sys, torch, hf_flash_backend
assert not [name for name in sys.modules if name.split(".")[0] == "transformers"]
assert not torch.cuda.is_initialized()
import transformers
model = transformers.AutoModelForCausalLM.from_config(
    transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1),
    attn_implementation="hf_fused",
)
assert model.config._attn_implementation == "hf_fused"
assert "hf_fused" in transformers.AttentionMaskInterface._global_mapping
assert not torch.cuda.is_initialized()
"""


def test_import_is_cheap_and_registers_when_transformers_comes():
    subprocess.run([sys.executable, "-c", IMPORT_SCRIPT], check=True, timeout=120)
