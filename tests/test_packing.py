"""Sequences side by side in one batch row: cu_seq_lens and position_ids, through the adapter."""

from __future__ import annotations

import pytest
import torch
from adapter import band, call, dense, everything, make_qkv
from models import assert_close

from hf_flash_backend import masks
from hf_flash_backend.structured_mask import StructuredMask


def varlen(lengths_q, lengths_k, total_q, total_k, is_causal, window):
    """Visible pairs of sequences side by side, by brute force."""
    visible = torch.zeros(total_q, total_k, dtype=torch.bool)
    begin_q = begin_k = 0
    for n, m in zip(lengths_q, lengths_k, strict=True):
        left, right = (None if window is None else window - 1), (0 if is_causal else None)
        if window is not None and not is_causal:
            right = window - 1
        part = band(n, m, left, right)[0, 0]
        visible[begin_q : begin_q + n, begin_k : begin_k + m] = part
        begin_q, begin_k = begin_q + n, begin_k + m
    return visible[None, None]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "tail"),
    [
        ([3, 1, 5], [3, 1, 5], 0),
        ([3, 1, 5], [7, 4, 5], 0),
        ([5, 2], [2, 6], 0),
        ([0, 3, 2, 0], [4, 0, 3, 2], 0),  # R14: sequences without rows or without keys
        ([0, 1, 0, 1], [0, 3, 0, 5], 0),  # R15
        ([3, 2], [4, 3], 3),  # rows and keys behind the last sequence
    ],
)
def test_sequences_side_by_side(lengths_q, lengths_k, tail, is_causal, window):
    total_q, total_k = sum(lengths_q) + tail, sum(lengths_k) + tail
    q, k, v = (t.requires_grad_() for t in make_qkv(total_q, total_k, batch=1))
    bounds = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lengths_q, lengths_k)]
    arguments = {"cu_seq_lens_q": bounds[0], "cu_seq_lens_k": bounds[1]}
    arguments |= {"max_length_q": max(lengths_q), "max_length_k": torch.tensor(max(lengths_k))}
    output = call(q, k, v, is_causal=is_causal, sliding_window=window, **arguments)
    visible = varlen(lengths_q, lengths_k, total_q, total_k, is_causal, window)
    expected = dense(q, k, v, visible)
    assert_close(output, expected)
    assert (output[0, sum(lengths_q) :] == 0).all()
    assert_close(torch.autograd.grad(output.sum(), v)[0], torch.autograd.grad(expected.sum(), v)[0])


def test_sequence_bounds_that_have_no_meaning():
    q, k, v = make_qkv(4, 4)
    bounds = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="cu_seq_lens_k: got None, expected a 1-D int tensor"):
        call(q, k, v, cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="cu_seq_lens_q: got a batch of 2, expected 1. Put the"):
        call(q, k, v, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


def test_packed_position_ids():
    q, k, v = make_qkv(5, 5)
    position_ids = torch.tensor([[0, 1, 2, 0, 1]])
    expected = dense(q, k, v, varlen([3, 2], [3, 2], 5, 5, True, None))
    assert_close(call(q, k, v, is_causal=True, position_ids=position_ids), expected)
    windowed = dense(q, k, v, varlen([3, 2], [3, 2], 5, 5, True, 2))
    arguments = {"position_ids": position_ids, "sliding_window": 2}
    assert_close(call(q, k, v, is_causal=True, **arguments), windowed)
    kept = position_ids._hfb_run_starts[1]
    assert masks.segment_starts(position_ids, q, k) is kept  # one read per forward
    position_ids.copy_(torch.arange(5))
    assert masks.segment_starts(position_ids, q, k) is None  # a new version is read again


@pytest.mark.parametrize(
    "position_ids",
    [
        torch.tensor([[2, 3, 4, 5, 6]]),  # one segment from a later position
        torch.zeros(3, 2, 5, dtype=torch.int64),  # of images
        torch.zeros(2, 12, dtype=torch.int64),  # of another length: shared keys
        torch.zeros(5, 2, dtype=torch.int64),  # two axes of an image
    ],
)
def test_position_ids_that_are_no_packing(position_ids):
    q, k, v = make_qkv(5, 5)
    expected = dense(q, k, v, band(5, 5, right=0))
    assert_close(call(q, k, v, is_causal=True, position_ids=position_ids), expected)


def test_packing_is_for_causal_layers_only():
    q, k, v = make_qkv(5, 5)
    restarting = torch.tensor([[0, 1, 0, 1, 2]])
    assert_close(call(q, k, v, position_ids=restarting), dense(q, k, v, everything(5, 5)))


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("kind", ["rule", "given"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_only_own_masks_without_padding_are_completed(is_padded, kind, is_copied):
    """With a sliding window and a cache, Transformers asks for a mask that knows no packing."""
    q, k, v = make_qkv(5, 5)
    restarting = torch.tensor([[0, 1, 2, 0, 1]])
    padding = torch.ones(2, 5, dtype=torch.bool)
    padding[0, 0] = not is_padded
    visible = band(5, 5, left=3, right=0) & padding[:, None, None]
    expected = dense(q, k, v, visible)
    arguments = {"is_causal": True, "position_ids": restarting}
    assert_close(call(q, k, v, visible, **arguments), expected)  # of the caller: the whole truth
    rule = {"window_left": 3, "window_right": 0} if kind == "rule" else {"given": visible}
    rule["key_padding"] = padding if is_padded else None
    mask = StructuredMask((2, 1, 5, 5), torch.empty(0), **rule)
    mask = mask.detach().clone() if is_copied else mask
    if not is_padded:
        expected = dense(q, k, v, visible & varlen([3, 2], [3, 2], 5, 5, True, None))
    for _ in range(2):
        assert_close(call(q, k, v, mask, **arguments), expected)
    if is_padded:
        assert_close(call(q, k, v, mask | False, **arguments), expected)  # a plain mask
