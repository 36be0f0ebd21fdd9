"""The adapter between Transformers and :func:`functional.attention`, under the name ``hf_fused``.

Transformers' words (query, key, value, scaling) are used here and in masks.py only. Nothing is
dropped silently: an argument that would change the result is honoured or refused by name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from . import functional, masks, structured_mask
from .structured_mask import StructuredMask

logger = logging.getLogger("hf_flash_backend")

# Free of "flash", "sdpa", "flex_attention", "/" and "|", which Transformers takes for other things.
IMPLEMENTATION = "hf_fused"

# Tensors a model is called with and passes on; about attention they say nothing beyond the mask.
HARMLESS_TENSORS = frozenset(
    "cache_position token_type_ids mm_token_type_ids position_embeddings input_ids inputs_embeds "
    "decoder_input_ids encoder_hidden_states labels shift_labels num_items_in_batch seq_idx "
    "logits_to_keep logits_indices logits_processor_args max_length_q max_length_k pixel_values "
    "pixel_values_videos pixel_position_ids image_sizes image_grid_thw video_grid_thw "
    "input_features input_values".split()
)
_USE_EAGER = 'Use attn_implementation="eager" for this model.'
_USE_GENERATE = 'Use generate(), or attn_implementation="sdpa" for generate_batch().'
# Arguments that change the result and that no kernel takes yet, and what to do without them.
UNSUPPORTED = {
    "indices": _USE_EAGER,
    "block_indices": _USE_EAGER,
    "head_mask": _USE_EAGER,
    "block_table": _USE_GENERATE,
    "k_cache": _USE_GENERATE,
    "v_cache": _USE_GENERATE,
    "read_index": _USE_GENERATE,
    "write_index": _USE_GENERATE,
}
_MODELING = "transformers.modeling_utils"


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    block_table: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    output_attentions: bool | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as Transformers calls it.

    Which keys a row sees, the first that applies:

    1. a 4-D mask is the whole truth: is_causal, sliding_window, cu_seq_lens and position_ids are
       in it (a StructuredMask of ``masks.attention_mask`` may know no packing: see
       ``masks.segment_starts``);
    2. a 2-D mask is key padding, on top of is_causal and sliding_window;
    3. cu_seq_lens: sequences side by side, is_causal and sliding_window within each;
    4. position_ids of a causal layer that do not grow by one: packed sequences, likewise;
    5. is_causal (bottom-right) or everything, and sliding_window.

    Args:
        module: the layer; its ``is_causal`` counts where the argument is None (False where it has
            none), its ``training`` decides whether dropout is on.
        query: [1|B, Hq, Lq, D]; key: [1|B, Hkv, Lk, D]; value: [1|B, Hkv, Lk, Dv]. Any strides,
            any head dims, mixed dtypes: inside autocast its dtype is used, else that of value.
        attention_mask: None; bool or int [B, keys]; bool, or float added to the scores,
            [1|B, 1|Hq, 1|Lq, Lk].
        scaling: multiplies the scores; None = 1 / sqrt(D).
        sliding_window: w = the w keys that end at the row's own (causal), or w - 1 keys to either
            side; None or below 1 = off.
        softcap: scores become softcap * tanh(scores / softcap); None or 0 = off.
        dropout: probability of dropping a weight.
        position_bias: float [1|B, 1|Hq, 1|Lq, Lk] added to the scores.
        s_aux, sinks: [Hq], or [B, Hq, Lq, 1] for each row: the score of one more key of value 0;
            at most one of them.
        cu_seq_lens_q, cu_seq_lens_k: int [n + 1], bounds of n sequences; B = 1.
        position_ids: int [1|B, L]; other shapes are no packing.
        output_attentions: one warning; the weights never exist.
        deterministic: reproducible gradients; None = what torch says.

    Returns:
        output [B, Lq, Hq, Dv], contiguous, and None.

    Raises:
        NotImplementedError: an argument that would change the result and is not supported.
        ValueError: a mask or cu_seq_lens without a meaning here.
    """
    _refuse_unsupported(
        indices=indices,
        block_indices=block_indices,
        block_table=block_table,
        k_cache=k_cache,
        v_cache=v_cache,
        **kwargs,
    )
    _refuse_paged_cache(cache)
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"hf_flash_backend: attention_mask: got {masks.describe(attention_mask)}, expected a "
            f'tensor or None. Load the model with attn_implementation="{IMPLEMENTATION}", which '
            "makes its own masks."
        )
    if s_aux is not None and sinks is not None:
        raise ValueError(
            "hf_flash_backend: s_aux and sinks: got both, expected at most one. Leave one out."
        )
    if output_attentions:
        masks.warn_once(f"output_attentions=True gives None instead of weights. {_USE_EAGER}")

    query, key, value = _common_batch(_common_dtype((query, key, value)))
    is_causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    window = sliding_window if sliding_window is not None and sliding_window > 0 else None
    visible: dict[str, Any] = {}
    if isinstance(attention_mask, StructuredMask):
        visible = structured_mask.arguments(attention_mask, query.shape[2], key.shape[2])
        if is_causal:
            starts = masks.segment_starts(position_ids, query, key, attention_mask)
            visible["row_start"] = masks.later_start(visible.get("row_start"), starts)
        if not (
            cu_seq_lens_q is None and cu_seq_lens_k is None
        ):  # the mask function never sees them
            starts, ends = masks.sequence_limits(
                query, cu_seq_lens_q, cu_seq_lens_k, is_causal=is_causal, window=None
            )
            visible["row_start"] = masks.later_start(visible.get("row_start"), starts)
            earlier = visible.get("row_end")
            visible["row_end"] = ends if earlier is None else torch.minimum(earlier, ends)
    elif attention_mask is not None and attention_mask.dim() != 2:
        visible["mask"] = attention_mask
    elif attention_mask is None and not (cu_seq_lens_q is None and cu_seq_lens_k is None):
        visible["row_start"], visible["row_end"] = masks.sequence_limits(
            query, cu_seq_lens_q, cu_seq_lens_k, is_causal=is_causal, window=window
        )
    else:
        visible["is_causal"] = is_causal
        if attention_mask is not None:
            key, value, visible["mask"] = masks.key_padding(key, value, attention_mask)
        elif is_causal:
            visible["row_start"] = masks.segment_starts(position_ids, query, key)
        if window is not None and key.shape[2] > window:
            visible["window"] = (window - 1, 0 if is_causal else window - 1)

    output = functional.attention(
        _pad_head_dim(query),
        _pad_head_dim(key),
        _pad_head_dim(value),
        scale=_default_scale(module, query.shape[-1]) if scaling is None else scaling,
        bias=position_bias,
        softcap=softcap or 0.0,
        sinks=s_aux if sinks is None else sinks,
        dropout_p=dropout if getattr(module, "training", True) else 0.0,
        deterministic=deterministic,
        **visible,
    ).transpose(1, 2)
    if output.shape[-1] != value.shape[-1]:
        output = output[..., : value.shape[-1]].contiguous()
    return output, None


def _refuse_unsupported(**arguments: Any) -> None:
    """Raises for an argument that would change the result, and for a tensor not known here."""
    for name, argument in arguments.items():
        if argument is None:
            continue
        if name in UNSUPPORTED:
            raise NotImplementedError(
                f"hf_flash_backend: {name} is not supported yet: got {masks.describe(argument)}, "
                f"expected None. {UNSUPPORTED[name]}"
            )
        if isinstance(argument, torch.Tensor) and name not in HARMLESS_TENSORS:
            raise NotImplementedError(
                f"hf_flash_backend: {name} is not known to this backend: got "
                f"{masks.describe(argument)}, expected None. Leave it out of the call, or use "
                'attn_implementation="eager".'
            )


def _refuse_paged_cache(cache: Any) -> None:
    if type(cache).__name__ == "PagedAttentionCache":
        raise NotImplementedError(
            f"hf_flash_backend: cache is not supported yet: got {masks.describe(cache)}, expected "
            f"None. {_USE_GENERATE}"
        )


def _common_dtype(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """query, key, value in one dtype: that of autocast inside it, else that of value.

    Inside autocast with fp32 weights, RoPE leaves query and key in fp32 and value in bf16.
    """
    dtype, device_type = tensors[-1].dtype, tensors[-1].device.type
    if dtype != torch.float64 and device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    return [tensor.to(dtype) for tensor in tensors]


def _common_batch(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """query, key, value with one batch size: learned queries of batch 1 meet keys of batch B."""
    batch = max(tensor.shape[0] for tensor in tensors)
    return [t.expand(batch, -1, -1, -1) if t.shape[0] == 1 < batch else t for t in tensors]


def _default_scale(module: torch.nn.Module, head_dim: int) -> float:
    """1 / sqrt(D), unless the layer says otherwise.

    GPT-2 in Transformers 4 passes no scaling and applies these settings in its eager code only.
    """
    scale = 1.0 / math.sqrt(head_dim) if getattr(module, "scale_attn_weights", True) else 1.0
    if getattr(module, "scale_attn_by_inverse_layer_idx", False):
        scale /= module.layer_idx + 1
    return scale


def _pad_head_dim(tensor: torch.Tensor) -> torch.Tensor:
    """[..., D] filled up to a multiple of 8 with zeros: they change no score and are cut off."""
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def register() -> None:
    """Makes ``attn_implementation="hf_fused"`` known to Transformers.

    Importing hf_flash_backend does this by itself.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, masks.attention_mask)


def unregister() -> None:
    """Takes the name out again: models loaded with it raise KeyError at their next forward."""
    if _registrar in sys.meta_path:
        sys.meta_path.remove(_registrar)
    if _MODELING in sys.modules:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface._global_mapping.pop(IMPLEMENTATION, None)
        AttentionMaskInterface._global_mapping.pop(IMPLEMENTATION, None)


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Registers as soon as ``transformers.modeling_utils`` has been imported.

    Importing it right away would double the time of ``import hf_flash_backend`` (3 s on top of
    torch's 3 s) and would tie :func:`functional.attention` to a working Transformers.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODELING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register_or_explain()

            spec.loader.exec_module = execute_and_register
        return spec


_registrar = _RegisterAfterImport()


def register_when_imported() -> None:
    """Registers now if the models of Transformers are imported, else as soon as they are."""
    if _MODELING in sys.modules:
        _register_or_explain()
    elif _registrar not in sys.meta_path:
        sys.meta_path.insert(0, _registrar)


def _register_or_explain() -> None:
    try:
        register()
    except (ImportError, AttributeError) as error:  # Transformers itself stays usable
        logger.warning(
            'hf_flash_backend: attn_implementation="%s" is not available: %s. '
            "Install transformers>=4.56.",
            IMPLEMENTATION,
            error,
        )
