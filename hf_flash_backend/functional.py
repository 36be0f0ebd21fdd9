"""The user's function: :func:`attention`, on tensors of shape [B, H, L, D]."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import ops
from .reference import masked_scores


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = (None, None),
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    row_start: torch.Tensor | None = None,
    row_end: torch.Tensor | None = None,
    query_offset: int | torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention in memory linear in the sequence length; the same on CPU and CUDA.

    ``dropout(softmax(softcap(scale * q k^T) + bias, over visible keys)) v``. A row that sees no key
    gives 0. Masked keys never influence anything, even if they hold NaN. Causal is bottom-right
    aligned (x = visible), for Lq, Lk = 2, 5 and 5, 2::

        x x x x .        . .
        x x x x x        . .
                         . .
                         x .
                         x x

    Args:
        q: [B, Hq, Lq, D]. k: [B, Hkv, Lk, D]. v: [B, Hkv, Lk, Dv]. One dtype (fp64 on the CPU
            only), one device, Hq a multiple of Hkv (grouped heads are never expanded), D and Dv
            multiples of 8, at most 256 on CUDA.
        scale: default 1 / sqrt(D).
        is_causal: row i sees keys j <= i + Lk - Lq.
        window: (left, right), inclusive distances from i + Lk - Lq; None = unlimited, for one side
            or both. With is_causal right becomes 0.
        mask: bool, true = visible: [B, Lk] (key padding) or 4-D broadcastable to [B, Hq, Lq, Lk];
            or a float 4-D mask, which is added like bias.
        bias: float, 4-D broadcastable to [B, Hq, Lq, Lk], added to the scores; -inf = not visible.
            Its gradient is summed over the broadcast dimensions inside the kernel.
        softcap: 0 = off.
        row_start, row_end: int32 [1|B, 1|Lq]: row i sees keys row_start <= j < row_end (packed
            sequences, cache fill).
        query_offset: key position of row 0, default Lk - Lq; or an int32 tensor [B] or
            [1|B, 1|Lq] of them on the device: row i stands at key i + query_offset[b, i].
        sinks: the score of one more key whose value is 0, for each head [Hq] or for each row
            [1|B, 1|Hq, 1|Lq, 1] (gpt-oss; arXiv:2309.17453); lse includes it.
        alibi_slopes: [Hq] or [B, Hq]; adds -slope * |position of the row - key| to the scores
            (arXiv:2108.12409).
        dropout_p: probability of dropping a weight, rounded to 1/65,536; kept weights are divided
            by the probability of keeping them. lse knows no dropout.
        dropout_seed: int64 tensor of one number on the device; None = drawn from torch's generator
            of the device, so torch.manual_seed, checkpointing and CUDA graphs do what they should.
        deterministic: bitwise reproducible gradients; None = what
            torch.use_deterministic_algorithms says. The forward pass and the whole CPU path always
            are.
        return_lse: also return lse [B, Hq, Lq], natural log of the sum of exponentials, fp32 (fp64
            for fp64 inputs), -inf for a row that sees no key; differentiable.

    Returns:
        out [B, Hq, Lq, Dv] in the dtype of q; ``out.transpose(1, 2)`` is contiguous. Or (out, lse).

    Raises:
        ValueError: wrong shape, dtype, device, window. NotImplementedError: valid but not
        implemented, named. RuntimeError: the library is missing, or a CUDA error.
    """
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"hf_flash_backend: q, k, v: got {q.dim()}-D, {k.dim()}-D and {v.dim()}-D tensors, "
            "expected 4-D [batch, heads, length, head_dim]."
        )
    if window is not None and not (isinstance(window, tuple | list) and len(window) == 2):
        raise ValueError(
            f"hf_flash_backend: window: got {window!r}, expected (left, right) or None. "
            "A window of w keys that ends at the row's own is (w - 1, 0)."
        )
    window_left, window_right = window or (None, None)
    if is_causal:
        window_right = 0 if window_right is None else min(window_right, 0)
    mask, bias = _score_tensors(q, k, mask, bias)
    query_offsets = None
    if isinstance(query_offset, torch.Tensor):
        query_offset, query_offsets = None, query_offset
        if query_offsets.dim() == 1:
            query_offsets = query_offsets[:, None]
    if dropout_p > 0.0 and dropout_seed is None:
        dropout_seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    out, lse = ops.forward(
        q, k, v,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        mask=mask, bias=bias, row_start=row_start, row_end=row_end, query_offsets=query_offsets,
        sinks=_sinks(q, sinks), alibi_slopes=_slopes(q, alibi_slopes), softcap=softcap,
        window_left=window_left, window_right=window_right, query_offset=query_offset,
        dropout_p=dropout_p, dropout_seed=dropout_seed if dropout_p > 0.0 else None,
        deterministic=bool(deterministic),
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_weights(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, **arguments: Any
) -> torch.Tensor:
    """The probabilities that a call of :func:`attention` used, exp(scores - lse), before dropout.

    They are computed again from lse: O(Lq * Lk) memory, which :func:`attention` itself avoids.

    Args:
        q, k, lse: of that call. arguments: its scale, is_causal, window, mask, bias, softcap,
            row_start, row_end, query_offset and alibi_slopes. Sinks are in lse already.

    Returns:
        [B, Hq, Lq, Lk] fp32 (fp64 for fp64); 0 where hidden. Rows sum to 1, or less with sinks.
    """
    dtype = _compute_dtype(q)
    scores, _ = masked_scores(q.to(dtype), k.to(dtype), **arguments)
    return torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])


def _sinks(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks in the op's form, [1|B, 1|Hq, 1|Lq] fp32 (fp64 for fp64)."""
    if sinks is None:
        return None
    if sinks.dim() == 1:
        sinks = sinks[None, :, None]
    elif sinks.dim() == 4 and sinks.shape[3] == 1:
        sinks = sinks[..., 0]
    else:
        raise ValueError(
            f"hf_flash_backend: sinks: got shape {list(sinks.shape)}, expected [{q.shape[1]}] or "
            f"[1 or {q.shape[0]}, 1 or {q.shape[1]}, 1 or {q.shape[2]}, 1]."
        )
    return sinks.to(_compute_dtype(q))


def _slopes(q: torch.Tensor, slopes: torch.Tensor | None) -> torch.Tensor | None:
    """ALiBi slopes in the op's form, [1|B, Hq] fp32 (fp64 for fp64)."""
    if slopes is None:
        return None
    return (slopes[None] if slopes.dim() == 1 else slopes).to(_compute_dtype(q))


def _compute_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _score_tensors(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Brings mask and bias to the op's form: 4-D, dense last dimension of length Lk, bias in the
    dtype of q or fp32.
    """
    if mask is not None and mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise ValueError(
                f"hf_flash_backend: mask: got dtype {mask.dtype}, "
                "expected torch.bool or a float dtype."
            )
        bias = mask if bias is None else bias + mask
        mask = None
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
    len_kv = k.shape[2]
    for name, tensor in (("mask", mask), ("bias", bias)):
        if tensor is not None and tensor.dim() != 4:
            raise ValueError(
                f"hf_flash_backend: {name}: got {tensor.dim()}-D shape {list(tensor.shape)}, "
                f"expected 4-D broadcastable to {[*q.shape[:3], len_kv]}, "
                "or for a bool mask [batch, length of k]."
            )
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias.to(_compute_dtype(q))
    return _dense_last_dim(mask, len_kv), _dense_last_dim(bias, len_kv)


def _dense_last_dim(tensor: torch.Tensor | None, len_kv: int) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.shape[-1] == 1 and len_kv > 1:
        tensor = tensor.expand(*tensor.shape[:-1], len_kv)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
