"""The mask function alone, through Transformers' own mask builders where it has them."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import transformers
from models import TRANSFORMERS
from packaging.version import Version
from transformers import masking_utils

from hf_flash_backend import masks

NEW_STYLE = Version("5.4") <= TRANSFORMERS  # q_length and q_offset instead of cache_position


def make_mask(rows, keys, *, q_offset=0, kv_offset=0, **arguments):
    """attention_mask as this Transformers calls it: all keywords, in its own style."""
    if NEW_STYLE:
        style = {"q_length": rows, "q_offset": q_offset, "device": "cpu"}
    else:
        style = {"cache_position": torch.arange(rows) + q_offset}
    arguments = {"batch_size": 2, "dtype": torch.float32, "config": None, **arguments}
    return masks.attention_mask(kv_length=keys, kv_offset=kv_offset, **style, **arguments)


def causal(rows, keys, q_offset=0, kv_offset=0, window=None):
    """[rows, keys] by brute force, true = visible."""
    visible = torch.zeros(rows, keys, dtype=torch.bool)
    for i in range(rows):
        for j in range(keys):
            distance = (i + q_offset) - (j + kv_offset)
            visible[i, j] = distance >= 0 and (window is None or distance < window)
    return visible


def assert_mask(mask, expected):
    """expected: [rows, keys] or [B, rows, keys]."""
    assert mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1
    assert torch.equal(mask[:, 0], expected.expand(2, -1, -1))


def test_square_and_plain_decode_need_no_mask():
    assert make_mask(7, 7) is None
    assert make_mask(1, 8, q_offset=7) is None


def test_static_prefill_is_never_none():
    """None would mean bottom-right; the rows stand at the first keys."""
    assert_mask(make_mask(7, 12), causal(7, 12))


def test_sdpa_mask_alone_is_ambiguous():
    """The reason for this mask function: None for the prefill of a static cache."""
    if Version("5.14") > TRANSFORMERS:
        pytest.skip("sdpa_mask returns a mask here up to Transformers 5.13")
    assert masking_utils.sdpa_mask(batch_size=2, q_length=7, kv_length=12) is None


def test_chunked_prefill():
    assert_mask(make_mask(3, 8, q_offset=5), causal(3, 8, q_offset=5))


def test_static_decode():
    mask = make_mask(1, 12, q_offset=7, allow_is_causal_skip=False)
    assert_mask(mask, causal(1, 12, q_offset=7))


@pytest.mark.skipif(not NEW_STYLE, reason="cache_position is never a 0-d offset")
def test_offset_tensor_is_read_at_once():
    """A static cache advances its 0-d offset in place after the mask was made."""
    offset = torch.tensor(7)
    for rows in (1, 2):
        mask = make_mask(rows, 12, q_offset=offset)
        offset.add_(3)
        assert_mask(mask, causal(rows, 12, q_offset=7))
        offset.sub_(3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[0, slice(0, 3) if side == "left" else slice(-3, None)] = False
    expected = causal(7, 7)[None] & padding[:, None, :]
    assert_mask(make_mask(7, 7, attention_mask=padding), expected)
    assert make_mask(7, 7, attention_mask=torch.ones(2, 7, dtype=torch.bool)) is None


def test_padding_of_unfilled_slots():
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[0, :2] = False
    filled = torch.cat([padding, torch.zeros(2, 5, dtype=torch.bool)], dim=1)
    expected = causal(7, 12)[None] & filled[:, None, :]
    assert_mask(make_mask(7, 12, attention_mask=padding), expected)


def test_sliding_window():
    function = masking_utils.sliding_window_causal_mask_function(4)
    mask = make_mask(9, 9, mask_function=function, local_size=4)
    assert_mask(mask, causal(9, 9, window=4))
    decode = {"q_offset": 9, "mask_function": function, "local_size": 4}
    assert_mask(make_mask(1, 5, kv_offset=5, **decode), causal(1, 5, 9, 5, window=4))
    assert make_mask(1, 4, kv_offset=6, **decode) is None  # the window holds every key of the cache


def test_packed_sequences():
    groups = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]])
    function = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(groups)
    )
    mask = make_mask(5, 5, mask_function=function, allow_is_causal_skip=False)
    assert_mask(mask, causal(5, 5)[None] & (groups[:, :, None] == groups[:, None, :]))


def test_unknown_arguments_are_swallowed():
    assert make_mask(7, 7, something_new=1) is None


@pytest.mark.parametrize(
    ("model_type", "is_outside"),
    [
        ("bloom", True),
        ("mpt", True),
        ("xglm", True),
        ("llama", False),
        ("gpt2", False),
        ("mistral", False),
        ("gemma2", False),
        ("bart", False),
    ],
)
def test_models_outside_the_interface_are_recognised(model_type, is_outside):
    config = transformers.AutoConfig.for_model(model_type)
    model_class = transformers.MODEL_MAPPING[type(config)]  # its module is imported with a model
    assert model_class.__module__ in sys.modules
    assert masks.needs_float_mask(config) is is_outside
    expected = torch.float32 if is_outside else torch.bool
    assert make_mask(3, 5, q_offset=2, config=config).dtype == expected


def test_float_mask_is_that_of_eager():
    config = transformers.AutoConfig.for_model("bloom")
    assert transformers.MODEL_MAPPING[type(config)]
    padding = torch.tensor([[False, True, True], [True, True, True]])
    mask = make_mask(3, 3, attention_mask=padding, config=config, dtype=torch.float16)
    visible = causal(3, 3)[None] & padding[:, None, :]
    assert mask.dtype == torch.float16
    assert torch.equal(mask[:, 0] == 0, visible)
    assert (mask[:, 0][~visible] == torch.finfo(torch.float16).min).all()
    assert make_mask(3, 3, config=config).shape[-2:] == (3, 3)  # never None for causal


def test_deepseek_v4_gets_a_float_mask():
    assert masks.needs_float_mask(types.SimpleNamespace(model_type="deepseek_v4"))


def test_a_config_without_a_modeling_module_gets_a_bool_mask():
    assert not masks.needs_float_mask(types.SimpleNamespace(model_type="mine"))
