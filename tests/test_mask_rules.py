"""Every mask function of Transformers that is recognised, against its own dense ``sdpa_mask``."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import TRANSFORMERS
from packaging.version import Version
from transformers import masking_utils
from transformers.masking_utils import and_masks, causal_mask_function

from hf_flash_backend import mask_rules, masks, structured_mask
from hf_flash_backend.structured_mask import StructuredMask

NEW_STYLE = Version("5.4") <= TRANSFORMERS  # q_length and q_offset instead of cache_position
BATCH = 3
# Query rows, position of row 0, keys, position of key 0.
SIZES = [
    (6, 0, 6, 0),  # prefill
    (6, 0, 11, 0),  # prefill of a static cache
    (1, 7, 8, 0),  # decode
    (1, 7, 11, 0),  # of a static cache
    (3, 5, 8, 0),  # chunked prefill, prompt lookup
    (3, 5, 11, 0),
    (1, 9, 4, 6),  # sliding window caches
    (4, 9, 7, 6),
    (2, 9, 9, 4),
    (5, 3, 4, 0),  # rows behind the last key
]


def style(rows, q_offset):
    if NEW_STYLE:
        return {"q_length": rows, "q_offset": q_offset}
    return {"cache_position": torch.arange(rows) + q_offset}


def paddings(seen):
    """None and bool [B, seen]: left, right, and holes; a row of padding alone; nothing padded."""
    left = torch.arange(seen) >= torch.tensor([0, 2, seen])[:, None]
    holes = torch.rand(BATCH, seen, generator=torch.Generator().manual_seed(seen)) < 0.7
    return [None, torch.ones(BATCH, seen, dtype=torch.bool), left, left.flip(-1), holes]


def functions():
    """name -> mask function, all that a rule can say."""
    made = {"causal": causal_mask_function}
    for window in (1, 2, 4, 50):
        made[f"window {window}"] = masking_utils.sliding_window_causal_mask_function(window)
        if hasattr(masking_utils, "sliding_window_bidirectional_mask_function"):
            both = masking_utils.sliding_window_bidirectional_mask_function(window)
            made[f"both sides {window}"] = both
    if hasattr(masking_utils, "bidirectional_mask_function"):
        made["everything"] = masking_utils.bidirectional_mask_function
    for size in (1, 3, 4, 50):
        shifts = torch.tensor([0, 2, 5])
        chunks = masking_utils.chunked_causal_mask_function(size, shifts)
        made[f"chunks of {size}"] = chunks
        window = masking_utils.sliding_window_overlay(3)
        made[f"chunks of {size} and a window"] = and_masks(chunks, window)
    for query, key in ((0, 0), (3, 1), (1, 3)):
        base = masking_utils.sliding_window_causal_mask_function(3)
        moved = masking_utils.add_offsets_to_mask_function(base, query, key)
        made[f"moved by {query} and {key}"] = moved
    padding = masking_utils.padding_mask_function(paddings(40)[-1])
    made["padding"] = and_masks(causal_mask_function, padding)
    return made


FUNCTIONS = functions()
# Those that no rule can say, and so are kept dense: an offset that hides the row's own key.
DENSE = {"moved by 1 and 3"}


def check(function, rows, q_offset, keys, kv_offset, padding, as_tensor=False):
    """Compares with sdpa_mask; returns what attention_mask gave."""
    sizes = {"batch_size": BATCH, "kv_length": keys, "kv_offset": kv_offset}
    sizes |= {"mask_function": function, "attention_mask": padding}
    dense = masking_utils.sdpa_mask(allow_is_causal_skip=False, **style(rows, q_offset), **sizes)
    offset = torch.tensor(q_offset) if as_tensor else q_offset
    mask = masks.attention_mask(
        allow_is_causal_skip=False, dtype=torch.float32, **style(rows, offset), **sizes
    )
    if as_tensor and NEW_STYLE:
        offset.add_(3)  # as a static cache does later
    assert mask.shape == dense.shape and mask.dtype == torch.bool
    assert torch.equal(mask & True, dense), f"{rows, q_offset, keys, kv_offset, padding}"
    arguments = structured_mask.arguments(mask, rows, keys)
    assert torch.equal(visible(rows, keys, **arguments).expand_as(dense), dense)
    return mask


def visible(
    rows, keys, *, mask, row_start=None, row_end=None, window=(None, None), query_offset=None
):
    """[1|B, 1, rows, keys]: what functional.attention makes of its arguments."""
    offset = keys - rows if query_offset is None else query_offset
    key = torch.arange(keys)
    distance = key - (torch.arange(rows)[:, None] + offset)
    seen = torch.ones(1, 1, rows, keys, dtype=torch.bool)
    seen = seen if mask is None else seen & (mask[:, None, None] if mask.dim() == 2 else mask)
    seen = seen if window[0] is None else seen & (distance >= -window[0])
    seen = seen if window[1] is None else seen & (distance <= window[1])
    seen = seen if row_start is None else seen & (key >= row_start[:, None, :, None])
    return seen if row_end is None else seen & (key < row_end[:, None, :, None])


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_recognised_functions_are_exact(name, as_tensor):
    for rows, q_offset, keys, kv_offset in SIZES:
        for seen in {q_offset + rows, kv_offset + keys}:
            for padding in paddings(seen):
                mask = check(FUNCTIONS[name], rows, q_offset, keys, kv_offset, padding, as_tensor)
                assert (mask.given is not None) == (name in DENSE)


@pytest.mark.parametrize("is_remapped", [False, True])
@pytest.mark.parametrize("base", ["causal", "window 2", "chunks of 3", "window 50"])
def test_packed_sequences_are_exact(base, is_remapped):
    if is_remapped and not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("positions within packed sequences are newer")
    positions = torch.tensor(
        [[0, 1, 2, 3, 4, 0, 1, 2, 3], [3, 4, 5, 0, 1, 2, 7, 8, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8]]
    )
    groups = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    function = FUNCTIONS[base]
    if is_remapped:
        function = masking_utils.remap_positions_for_packed_sequence(function, positions)
    function = and_masks(function, masking_utils.packed_sequence_mask_function(groups))
    for padding in paddings(9):
        mask = check(function, 9, 0, 9, 0, padding)
        assert mask.given is None and mask.is_packed


def test_one_group_alone_limits_no_row():
    packed = masking_utils.packed_sequence_mask_function(torch.full((BATCH, 6), 2))
    mask = check(and_masks(causal_mask_function, packed), 6, 0, 6, 0, None)
    assert mask.is_packed and mask.row_start is None


def test_groups_that_are_no_runs_stay_exact():
    """Groups that come back, and positions that jump within a group."""
    groups = torch.tensor([[0, 1, 0, 1, 2, 2]] * BATCH)
    packed = masking_utils.packed_sequence_mask_function(groups)
    assert check(and_masks(causal_mask_function, packed), 6, 0, 6, 0, None).given is not None
    assert check(packed, 6, 0, 6, 0, None).given is not None  # not causal
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        groups = torch.tensor([[0, 0, 0, 1, 1, 1]] * BATCH)
        jumps = torch.tensor([[0, 1, 5, 0, 1, 2]] * BATCH)
        window = masking_utils.remap_positions_for_packed_sequence(FUNCTIONS["window 2"], jumps)
        packed = masking_utils.packed_sequence_mask_function(groups)
        assert check(and_masks(window, packed), 6, 0, 6, 0, None).given is not None
        assert check(window, 6, 0, 6, 0, None).given is not None  # remapped without groups


def test_unknown_functions_stay_dense():
    def mine(batch, head, query, key):
        return (key <= query) & (key % 2 == 0)

    def causal_mask_function(batch, head, query, key):  # the name proves nothing
        return key < query

    blocks = masking_utils.or_masks(masking_utils.causal_mask_function, mine)
    for function in (mine, causal_mask_function, blocks, and_masks(mine, FUNCTIONS["window 2"])):
        assert mask_rules.recognise(function) is None
        for rows, q_offset, keys, kv_offset in SIZES:
            mask = check(function, rows, q_offset, keys, kv_offset, None)
            assert mask.given is not None


def broken(**changes):
    """The rule of a recogniser that reads a parameter wrongly."""

    def recognise(function, right=mask_rules.recognise):
        rule = right(function)
        for name, change in changes.items():
            setattr(rule, name, change(getattr(rule, name)))
        return rule

    return recognise


def swap(chunks):
    """A chunk taken for a window of as many keys."""
    return []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("window 4", {"left": lambda left: left + 1}),
        ("window 4", {"left": lambda left: left - 1}),
        ("window 4", {"left": lambda left: None}),
        ("causal", {"right": lambda right: 1}),
        ("causal", {"right": lambda right: None}),
        ("moved by 3 and 1", {"right": lambda right: 0}),
        ("chunks of 3", {"chunks": swap, "left": lambda left: 2}),
        ("chunks of 3", {"chunks": lambda chunks: [(4, *chunks[0][1:])]}),
        ("padding", {"paddings": lambda paddings: []}),
    ],
)
def test_check_rejects_wrong_rules(monkeypatch, name, changes):
    monkeypatch.setattr(mask_rules, "recognise", broken(**changes))
    with pytest.raises(AssertionError):
        test_recognised_functions_are_exact(name, as_tensor=False)


@pytest.mark.parametrize("wrong", [{"rows": 1}, {"kv_offset": 1}, {"key_padding": 0}])
def test_check_rejects_wrong_offsets(monkeypatch, wrong):
    def build(rule, shape, device, *, right=mask_rules.build, **arguments):
        for name, change in wrong.items():
            arguments[name] = None if name == "key_padding" else arguments[name] + change
        return right(rule, shape, device, **arguments)

    monkeypatch.setattr(mask_rules, "build", build)
    with pytest.raises(AssertionError):
        test_recognised_functions_are_exact("causal", as_tensor=False)


def test_none_is_said_only_where_it_is_the_mask():
    """None means bottom-right causal here, or everything; never where either differs."""
    names = ["causal", "everything", *(n for n in FUNCTIONS if n.startswith(("window", "both")))]
    count = 0
    for name, size in itertools.product((n for n in names if n in FUNCTIONS), SIZES):
        rows, q_offset, keys, kv_offset = size
        is_causal = name == "causal" or name.startswith("window")
        for padding in paddings(kv_offset + keys):
            sizes = {"batch_size": BATCH, "kv_length": keys, "kv_offset": kv_offset}
            sizes |= {"mask_function": FUNCTIONS[name], "attention_mask": padding}
            sizes |= style(rows, q_offset)
            if not NEW_STYLE and rows == 1 and q_offset + 1 != kv_offset + keys:
                continue  # a static cache: these versions forbid None for it
            mask = masks.attention_mask(
                allow_is_causal_skip=is_causal,
                allow_is_bidirectional_skip=not is_causal,
                dtype=torch.float32,
                **sizes,
            )
            dense = masking_utils.sdpa_mask(allow_is_causal_skip=False, **sizes)
            if mask is None:
                count += 1
                mask = torch.ones_like(dense)
                mask = mask.tril(keys - rows) if is_causal else mask
            assert torch.equal(mask & True, dense)
    assert count > 10


def test_padded_masks_of_32k_tokens_take_no_memory(monkeypatch):
    """Four rows, padded on the left: dense it would be 4 GiB."""
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **_: pytest.fail("a dense mask"))
    monkeypatch.setattr(StructuredMask, "materialise", lambda _: pytest.fail("a dense mask"))
    length = 32768
    padding = torch.arange(length) >= torch.tensor([0, 100, 5000, 32000])[:, None]
    shifts = (~padding).sum(-1)
    chunks = masking_utils.chunked_causal_mask_function(8192, shifts)
    for function in (causal_mask_function, FUNCTIONS["window 4"], chunks):
        mask = masks.attention_mask(
            batch_size=4,
            kv_length=length,
            mask_function=function,
            attention_mask=padding,
            dtype=torch.bfloat16,
            **style(length, 0),
        )
        fields = [getattr(mask, name) for name in mask.__tensor_flatten__()[0]]
        assert sum(field.untyped_storage().nbytes() for field in fields) < 2**20
