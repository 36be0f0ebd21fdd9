"""From the mask functions of Transformers to the rule of a :class:`StructuredMask`.

A mask function ``(batch, head, query position, key position) -> bool`` is a closure that
``transformers.masking_utils`` made. Its code object says which one it is and its closure cells hold
the parameters; nothing else can tell: a window and a chunk both arrive as ``local_size``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from .structured_mask import StructuredMask


@dataclass
class Rule:
    """What a recognised mask function demands, all of it at once.

    Attributes:
        left, right: -left <= key position - query position <= right; None = unlimited.
        paddings: bool [B, positions], true = visible.
        chunks: size, int [B] start of the first chunk, and the positions [B, L] that count instead
            of the index, or None.
        groups: int [B, L], a pair is visible within a group.
        remapped: int [B, L], positions that count instead of the index within the groups.
    """

    left: int | None = None
    right: int | None = None
    paddings: list[torch.Tensor] = field(default_factory=list)
    chunks: list[tuple[int, torch.Tensor, torch.Tensor | None]] = field(default_factory=list)
    groups: list[torch.Tensor] = field(default_factory=list)
    remapped: list[torch.Tensor] = field(default_factory=list)

    def limit(self, left: int | None, right: int | None) -> bool:
        """Narrows the band; False for limits that the op has no words for."""
        if (left is not None and left < 0) or (right is not None and right < 0):
            return False
        self.left, self.right = _smaller(self.left, left), _smaller(self.right, right)
        return True


def _smaller(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def recognise(mask_function: Callable[..., Any]) -> Rule | None:
    """The rule of a mask function, None for one that is not known here.

    While tracing only functions without a closure are known: dynamo cannot read the cells of a
    function made inside the traced code.
    """
    if torch.compiler.is_compiling():
        from transformers import masking_utils

        if mask_function is masking_utils.causal_mask_function:
            return Rule(right=0)
        is_everything = mask_function is getattr(masking_utils, "bidirectional_mask_function", None)
        return Rule() if is_everything else None
    rule = Rule()
    return rule if _collect(mask_function, rule, shift=0, positions=None) else None


def _collect(
    function: Callable[..., Any], rule: Rule, shift: int, positions: torch.Tensor | None
) -> bool:
    """Adds a function to the rule; False if it is not known.

    shift: query positions are this far further on than key positions, by offsets on the way here.
    positions: int [B, L], count instead of the index.
    """
    form = _known_forms().get(getattr(function, "__code__", None))
    if form == "causal":
        return rule.limit(None, shift)
    if form == "everything":
        return positions is None
    if form is None:
        return False
    cells = dict(
        zip(
            function.__code__.co_freevars,
            (cell.cell_contents for cell in function.__closure__),
            strict=True,
        )
    )
    if form == "and":
        return all(_collect(part, rule, shift, positions) for part in cells["mask_functions"])
    if form == "window":
        window = cells["sliding_window"]
        return _is_int(window) and rule.limit(window - 1 - shift, None)
    if form == "both sides":
        window = cells["sliding_window"]
        return _is_int(window) and rule.limit(window - shift, window + shift)
    if form == "offsets":
        query, key = cells["q_offset"], cells["kv_offset"]
        if not (_is_int(query) and _is_int(key) and query >= 0 and positions is None):
            return False
        return _collect(cells["mask_function"], rule, shift + query - key, positions)
    if shift != 0:
        return False
    if form == "chunk":
        if not _is_int(cells["chunk_size"]) or cells["chunk_size"] < 1:
            return False
        rule.chunks.append((cells["chunk_size"], cells["left_padding"], positions))
        return True
    if positions is not None:
        return False
    if form == "padding":
        rule.paddings.append(cells["padding_mask"])
    elif form == "packed":
        rule.groups.append(cells["packed_sequence_mask"])
    else:  # remapped
        rule.remapped.append(cells["position_ids"])
        return _collect(cells["mask_function"], rule, shift, cells["position_ids"])
    return True


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@functools.cache
def _known_forms() -> dict[CodeType, str]:
    """Code object -> what it does, for the installed Transformers (older ones lack some)."""
    from transformers import masking_utils

    forms = {
        masking_utils.causal_mask_function.__code__: "causal",
        masking_utils.and_masks(masking_utils.causal_mask_function).__code__: "and",
    }
    makers = {
        "sliding_window_overlay": ("window", 1),
        "sliding_window_bidirectional_overlay": ("both sides", 1),
        "chunked_overlay": ("chunk", 2),
        "padding_mask_function": ("padding", 1),
        "packed_sequence_mask_function": ("packed", 1),
        "remap_positions_for_packed_sequence": ("remapped", 2),
        "add_offsets_to_mask_function": ("offsets", 3),
    }
    for name, (form, arity) in makers.items():
        if hasattr(masking_utils, name):
            forms[getattr(masking_utils, name)(*[None] * arity).__code__] = form
    if hasattr(masking_utils, "bidirectional_mask_function"):
        forms[masking_utils.bidirectional_mask_function.__code__] = "everything"
    return forms


def is_implied(
    rule: Rule, len_kv: int, ends_together: bool, causal: bool, bidirectional: bool
) -> bool:
    """Whether None means this rule: bottom-right causal, or everything, and allowed to be None.

    ends_together: the last row stands at the last key.
    """
    if rule.paddings or rule.chunks or rule.groups or rule.remapped:
        return False
    if rule.left is None and rule.right is None:
        return bidirectional
    reaches_all = rule.left is None or rule.left >= len_kv - 1
    if rule.right == 0:
        return causal and ends_together and reaches_all
    reaches_all = reaches_all and (rule.right is None or rule.right >= len_kv - 1)
    return bidirectional and ends_together and reaches_all


def build(
    rule: Rule,
    shape: tuple[int, int, int, int],
    device: torch.device,
    *,
    rows: int | torch.Tensor,
    kv_offset: int,
    key_padding: torch.Tensor | None,
) -> StructuredMask | None:
    """The mask of a rule; None if it takes more than a StructuredMask can say.

    Args:
        shape: [B, 1, Lq, Lk].
        rows: position of row 0; or int [Lq], the position of each row, where it is known on the
            device only. Then the band becomes row limits, so that the host never waits.
        kv_offset: position of key 0.
        key_padding: bool [B, Lk], besides what the rule says.
    """
    batch, _, len_q, len_kv = shape
    if (rule.chunks or rule.groups) and rule.right != 0:
        return None  # their ends are the row itself only in a causal mask
    if rule.remapped and not rule.groups:
        return None
    for padding in rule.paddings:
        if padding.shape[0] != batch or padding.dtype != torch.bool:
            return None
        padding = visible_keys(padding, kv_offset, len_kv)
        key_padding = padding if key_padding is None else key_padding & padding
    shift = None if isinstance(rows, torch.Tensor) else rows - kv_offset - (len_kv - len_q)
    if shift is not None and shift != 0 and torch.compiler.is_compiling():
        shift = None  # symbolic, and so no constant of a graph
    if not isinstance(rows, torch.Tensor) and (shift is None or rule.chunks or rule.groups):
        rows = torch.arange(len_q, device=device) + rows
    stands_at = rows[None] - kv_offset if isinstance(rows, torch.Tensor) else None
    settings, starts, row_end = {}, [], None
    if shift is not None:
        settings = {"window_left": rule.left, "window_right": rule.right}
        settings["shift"] = 0 if shift == 0 else shift  # the constant, also where it is symbolic
    else:
        if rule.left is not None:
            starts.append(stands_at - rule.left)
        if rule.right is not None:
            row_end = (stands_at + (rule.right + 1)).to(torch.int32)
    for size, left_padding, positions in rule.chunks:
        if left_padding.shape != (batch,):
            return None
        counted = stands_at + kv_offset if positions is None else positions
        starts.append(stands_at - (counted - left_padding[:, None]).remainder(size))
    if rule.groups:
        are_runs, group_starts = _group_starts(rule, shape, stands_at, kv_offset)
        if not are_runs:
            return None
        if group_starts is not None:
            starts.append(group_starts)
    row_start = functools.reduce(torch.maximum, starts).to(torch.int32) if starts else None
    return StructuredMask(
        shape,
        torch.empty(0, device=device),
        is_packed=bool(rule.groups),
        key_padding=key_padding,
        row_start=row_start,
        row_end=row_end,
        **settings,
    )


def visible_keys(padding: torch.Tensor, kv_offset: int, kv_length: int) -> torch.Tensor:
    """The columns of padding, bool [B, positions], that stand for keys: a copy, bool [B, Lk].

    Positions behind the last column are not filled yet, and so not visible.
    """
    missing = kv_offset + kv_length - padding.shape[1]
    if missing > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    return padding[:, kv_offset : kv_offset + kv_length].clone()


def run_starts(is_start: torch.Tensor) -> torch.Tensor:
    """bool [B, L], true where a run starts, to the index where the run of each row started."""
    index = torch.arange(is_start.shape[1], device=is_start.device)
    return torch.where(is_start, index, 0).cummax(dim=-1).values.to(torch.int32)


def _group_starts(
    rule: Rule, shape: tuple[int, int, int, int], stands_at: torch.Tensor, kv_offset: int
) -> tuple[bool, torch.Tensor | None]:
    """Whether groups are runs of rows, and int32 [B, L], where the group of each row starts.

    The starts are None if there is one group only: Transformers 4 asks for that by default.

    They are runs if the groups never decrease, the rows stand at their own keys, and remapped
    positions grow by one within a group, so that distances are those of the index. One read on the
    host; Transformers has read as much to find the groups.
    """
    batch, _, len_q, len_kv = shape
    if len_q != len_kv or kv_offset != 0 or not is_readable(stands_at):
        return False, None
    if any(ids.shape != (batch, len_q) for ids in (*rule.groups, *rule.remapped)):
        return False, None
    is_new = torch.zeros(batch, len_q, dtype=torch.bool, device=stands_at.device)
    is_run = stands_at == torch.arange(len_q, device=stands_at.device)
    for groups in rule.groups:
        step = groups.diff(dim=-1, prepend=groups[:, :1])
        is_new, is_run = is_new | (step != 0), is_run & (step >= 0)
    for positions in rule.remapped:
        is_run = is_run & (is_new | (positions.diff(dim=-1, prepend=positions[:, :1] - 1) == 1))
    are_runs, are_several = torch.stack([is_run.all(), is_new.any()]).tolist()
    return are_runs, run_starts(is_new) if are_several else None


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether the host may look into a tensor: not while tracing or capturing a graph."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or tensor.device.type == "meta":
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
