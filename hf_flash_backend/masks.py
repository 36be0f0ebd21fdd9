"""Which keys a row sees: the mask function of ``hf_fused``, and row limits for packed sequences.

Transformers calls :func:`attention_mask` once per forward and kind of mask (full, sliding,
chunked). What it returns reaches :func:`hf_flash_backend.integration.attention_forward`:

* ``None`` where bottom-right causal, or everything, is exactly the mask;
* else a :class:`StructuredMask`, bool [B, 1, Lq, Lk], true = visible: causality, window, chunks,
  packing, padding together;
* float (0 and the least number) for models that add the mask to the scores themselves.

Row limits are int32 [1|B, Lq]: row i sees keys row_start <= j < row_end.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import torch

from . import mask_rules
from .structured_mask import StructuredMask

logger = logging.getLogger("hf_flash_backend")

# This model casts a float bias to the dtype of the mask and joins them: a bool mask inverts it.
FLOAT_MASK_MODEL_TYPES = ("deepseek_v4",)

_is_outside_interface: dict[type, bool] = {}
_warned: set[str] = set()


def attention_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    cache_position: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **arguments: Any,
) -> torch.Tensor | None:
    """The mask of one forward, in the calling conventions of Transformers 4.56 to 5.24.

    Args:
        kv_length, kv_offset: keys there will be, and the position of the first one.
        q_length, q_offset: query rows, and the position of the first one. A static cache passes
            q_offset as a 0-d tensor that it advances in place later; the mask made here has read it
            by then.
        cache_position: [q_length] int64, positions of the query rows; up to 5.3, instead of
            q_length and q_offset.
        allow_is_causal_skip: whether a causal mask may be None.
        config: of the model; decides between bool and float masks.
        arguments: the rest, as ``transformers.masking_utils.sdpa_mask`` takes it (mask_function,
            attention_mask [B, seen] bool, allow_is_bidirectional_skip, dtype, device, ...).

    Returns:
        None, a StructuredMask (bool [B, 1, Lq, Lk]), or float [B, 1, Lq, Lk] for models that need
        one.
    """
    from transformers import masking_utils

    arguments |= {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset}
    if cache_position is None:
        arguments |= {"q_length": q_length, "q_offset": q_offset}
        rows, device = q_offset, torch.device(arguments.get("device", "cpu"))
        if isinstance(rows, torch.Tensor):
            rows = torch.arange(q_length, device=device) + rows.to(device)
        ends_together = _rows_end_with_keys(q_length, kv_length, q_offset, kv_offset)
    else:
        arguments["cache_position"] = cache_position
        q_length, rows, device = cache_position.shape[0], cache_position, cache_position.device
        # One row sees every key of a dynamic cache; for a static one these versions never skip.
        ends_together = q_length in (1, kv_length)
    if config is not None and needs_float_mask(config):
        return masking_utils.eager_mask(**arguments)

    allow_is_causal_skip = allow_is_causal_skip and ends_together
    padding = arguments.get("attention_mask")
    is_ours = not torch.jit.is_tracing() and not isinstance(kv_offset, torch.Tensor)
    if padding is not None:
        is_ours = is_ours and padding.dtype == torch.bool and padding.shape[0] == batch_size
    if not is_ours:
        return masking_utils.sdpa_mask(allow_is_causal_skip=allow_is_causal_skip, **arguments)
    skips = (allow_is_causal_skip, arguments.get("allow_is_bidirectional_skip", False))
    if padding is not None:
        padding = mask_rules.visible_keys(padding, kv_offset, kv_length)
        # Not read where a static cache decodes: the host would wait for the device at every token.
        if (any(skips) or q_length > 1) and mask_rules.is_readable(padding) and bool(padding.all()):
            padding = None

    shape = (batch_size, 1, q_length, kv_length)
    rule = mask_rules.recognise(arguments.get("mask_function", masking_utils.causal_mask_function))
    if rule is not None:
        if padding is None and mask_rules.is_implied(rule, kv_length, ends_together, *skips):
            return None
        mask = mask_rules.build(
            rule, shape, device, rows=rows, kv_offset=kv_offset, key_padding=padding
        )
        if mask is not None:
            return mask
    mask = masking_utils.sdpa_mask(allow_is_causal_skip=allow_is_causal_skip, **arguments)
    if mask is None:
        return None
    # Kept as it is, but known as ours: segment_starts may complete it.
    return StructuredMask(shape, mask.new_empty(0), key_padding=padding, given=mask)


def _rows_end_with_keys(
    q_length: int, kv_length: int, q_offset: int | torch.Tensor, kv_offset: int
) -> bool:
    """Whether the last row stands at the last key, so that bottom-right causal is the mask.

    ``sdpa_mask`` alone also returns None for the prefill of a static cache, where the rows stand
    at the first keys: None would then mean either alignment, and no choice is right for all models.
    """
    if isinstance(q_offset, torch.Tensor):
        return q_length == kv_length  # a static cache that the prefill fills
    return q_length in (1, kv_length) and q_offset + q_length == kv_offset + kv_length


def needs_float_mask(config: Any) -> bool:
    """Whether the model of this config adds the mask to its scores: 0 and the least number.

    True for models outside the attention interface, whose own eager code gets this mask: the
    modeling module beside their configuration module has no ``ALL_ATTENTION_FUNCTIONS``. Cached
    per config class.
    """
    if getattr(config, "model_type", None) in FLOAT_MASK_MODEL_TYPES:
        return True
    config_class = type(config)
    if config_class not in _is_outside_interface:
        modeling = _modeling_module(config_class)
        if modeling is None:
            return False
        _is_outside_interface[config_class] = not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS")
    return _is_outside_interface[config_class]


def _modeling_module(config_class: type) -> ModuleType | None:
    """The module modeling_x beside configuration_x: imported already if there is a model."""
    package, _, name = config_class.__module__.rpartition(".")
    return sys.modules.get(f"{package}.{name.replace('configuration_', 'modeling_', 1)}")


def key_padding(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """key, value [B, Hkv, Lk, D] and a 2-D mask brought to one length; the mask as bool.

    A mask longer than the keys began before a sliding window cache does: its last columns count.
    A shorter one ends where a static cache is filled: the keys behind are cut off, so that the
    rows stand at the end of what is left.
    """
    if mask.is_floating_point():
        raise ValueError(
            f"hf_flash_backend: attention_mask: got {describe(mask)}, expected bool or int for a "
            "2-D mask. Pass mask.bool() if 1 = visible, or numbers to add to the scores as a 4-D "
            "mask."
        )
    length = min(mask.shape[1], key.shape[2])
    mask = mask[:, mask.shape[1] - length :].bool()
    return key[:, :, :length], value[:, :, :length], mask


def sequence_limits(
    query: torch.Tensor,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
    *,
    is_causal: bool,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row limits of sequences side by side in one batch row, computed on the device.

    The rows of a sequence see its keys only; causality and the window count from the end of its
    keys (bottom-right). Rows behind the last sequence see nothing.

    Args:
        query: [1, Hq, Lq, D].
        cu_seq_lens_q, cu_seq_lens_k: int [n + 1], bounds of the n sequences in rows and keys.
        window: keys up to window - 1 away are seen.

    Returns:
        row_start, row_end: int32 [1, Lq].
    """
    for name, bounds in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if not isinstance(bounds, torch.Tensor) or bounds.dim() != 1:
            raise ValueError(
                f"hf_flash_backend: {name}: got {describe(bounds)}, expected a 1-D int tensor of "
                "sequence bounds. Pass both cu_seq_lens_q and cu_seq_lens_k, or neither."
            )
    if query.shape[0] != 1:
        raise ValueError(
            f"hf_flash_backend: cu_seq_lens_q: got a batch of {query.shape[0]}, expected 1. "
            "Put the sequences side by side in one batch row, or pass no cu_seq_lens."
        )
    bounds_q, bounds_k = cu_seq_lens_q.to(query.device), cu_seq_lens_k.to(query.device)
    row = torch.arange(query.shape[2], device=query.device, dtype=bounds_q.dtype)
    following = torch.searchsorted(bounds_q, row, right=True)  # passes over empty sequences
    in_sequence = (following > 0) & (following < bounds_q.shape[0])
    following = following.clamp(1, bounds_q.shape[0] - 1)
    start, end = bounds_k[following - 1], bounds_k[following]
    position = end - (bounds_q[following] - row)  # the key that the row stands at
    if is_causal:
        end = torch.minimum(end, position + 1)
    if window is not None:
        start = torch.maximum(start, position - (window - 1))
        end = torch.minimum(end, position + window)
    end = torch.where(in_sequence, torch.maximum(end, start), start)
    return start.to(torch.int32)[None], end.to(torch.int32)[None]


def segment_starts(
    position_ids: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """row_start, int32 [1|B, L], of packed sequences told by position_ids; None if not packed.

    Each run of positions that grow by one is a sequence. Only int [1|B, L] with L = Lq = Lk > 1
    can tell: not the 3-D positions of images, nor rows that continue a cache. Whether there is
    more than one run is read on the host once per forward and kept on the tensor. Where nothing
    can be read (tracing, graph capture) the answer is always a tensor, exact for one run as well.

    A 4-D mask of the caller is the whole truth. A :class:`StructuredMask` is not where nothing is
    padded: Transformers looks for packed sequences only if there is no cache and no 2-D mask at
    all, so with a sliding window a cache would make them leak.
    """
    if (
        not isinstance(position_ids, torch.Tensor)
        or position_ids.dim() != 2
        or not 1 < query.shape[2] == key.shape[2] == position_ids.shape[1]
        or position_ids.shape[0] not in (1, query.shape[0])
        or not (mask is None or isinstance(mask, StructuredMask) and not mask.is_packed)
    ):
        return None
    padding = None if mask is None else mask.key_padding
    if not mask_rules.is_readable(position_ids):
        starts = _run_starts(position_ids)
        return starts if padding is None else starts * padding.all()
    if padding is not None:  # attention_mask drops one that hides nothing
        return None
    starts = _run_starts_if_several(position_ids)
    if starts is not None:
        warn_once(
            "position_ids do not grow by one along each row and no mask says why: each run of "
            "consecutive positions attends to itself only (packed sequences)."
        )
    return starts


def later_start(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """The later of two row limits, int32 [1|B, Lq]; None starts with the first key."""
    if first is None or second is None:
        return second if first is None else first
    return torch.maximum(first, second)


def _run_starts_if_several(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Run starts, None if each row is one run; kept on the tensor with its version."""
    version = None if position_ids.is_inference() else position_ids._version
    kept = getattr(position_ids, "_hfb_run_starts", None)
    if kept is not None and version is not None and kept[0] == version:
        return kept[1]
    is_packed = bool((position_ids.diff(dim=-1) != 1).any())
    starts = _run_starts(position_ids) if is_packed else None
    position_ids._hfb_run_starts = (version, starts)
    return starts


def _run_starts(position_ids: torch.Tensor) -> torch.Tensor:
    is_start = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
    return mask_rules.run_starts(is_start)


def describe(argument: Any) -> str:
    """An argument in an error message."""
    if isinstance(argument, torch.Tensor):
        return f"a tensor of shape {list(argument.shape)} and dtype {argument.dtype}"
    return "None" if argument is None else f"a {type(argument).__name__}"


def warn_once(text: str) -> None:
    """Logs a warning the first time; never while tracing."""
    if text not in _warned and not torch.compiler.is_compiling():
        _warned.add(text)
        logger.warning("hf_flash_backend: %s", text)
