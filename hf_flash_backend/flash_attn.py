"""The functions of the package flash_attn (2.8) on this backend, for code that already calls them.

Names, argument order, defaults, layouts and return values are flash_attn's. What differs:

* They also run on the CPU, in fp32 and fp64, and at every head dim that :func:`attention` takes.
* ``deterministic=False`` still follows ``torch.use_deterministic_algorithms``.
* With ``return_attn_probs`` the third value is exact and always there: the probabilities after
  dropout's selection, before its rescaling, negative where dropped. It takes O(L^2) memory.
* A row that sees no key has lse -inf (flash_attn: +inf) and output 0.
* ``max_seqlen_q`` and ``max_seqlen_k`` are not needed; rows behind the last sequence give 0.
* ``block_table`` (paged keys) is refused.
"""

from __future__ import annotations

import torch

from .functional import attention, attention_weights
from .reference import dropout_keep

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Attention of dense batches.

    Args:
        q: [B, Lq, Hq, D]. k, v: [B, Lk, Hkv, D]; Hq a multiple of Hkv.
        softmax_scale: default 1 / sqrt(D).
        causal: bottom-right aligned, as in :func:`attention`.
        window_size: keys seen to either side, -1 = unlimited.
        softcap: 0 = off. alibi_slopes: fp32 [Hq] or [B, Hq].

    Returns:
        out [B, Lq, Hq, D]; with return_attn_probs also lse [B, Hq, Lq] and the probabilities
        [B, Hq, Lq, Lk].
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    arguments = _arguments(
        q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    out, lse = attention(q, k, v, return_lse=True, **arguments)
    out = out.transpose(1, 2)
    return (out, lse, _probabilities(q, k, lse, arguments)) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """:func:`flash_attn_func` of qkv [B, L, 3, H, D], read in place."""
    return flash_attn_func(
        *qkv.unbind(dim=2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """:func:`flash_attn_func` of q [B, Lq, Hq, D] and kv [B, Lk, 2, Hkv, D], read in place."""
    return flash_attn_func(
        q, *kv.unbind(dim=2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Output:
    """Attention of sequences side by side, without padding and without a host sync.

    Args:
        q: [total_q, Hq, D]. k, v: [total_k, Hkv, D].
        cu_seqlens_q, cu_seqlens_k: int [n + 1], where each of the n sequences begins and ends;
            empty sequences are allowed. Causality and windows are per sequence, bottom-right.
        alibi_slopes: fp32 [Hq]; distances are within a sequence.
        The rest: as in :func:`flash_attn_func`.

    Returns:
        out [total_q, Hq, D]; with return_attn_probs also lse [Hq, total_q] and the probabilities
        [Hq, total_q, total_k], 0 between sequences.
    """
    if block_table is not None:
        raise NotImplementedError(
            "hf_flash_backend: block_table is not implemented: got a tensor, expected None. "
            "Pass keys and values side by side."
        )
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        raise NotImplementedError(
            f"hf_flash_backend: alibi_slopes: got shape {list(alibi_slopes.shape)}, expected "
            f"[{q.shape[1]}]. Slopes of each sequence need a dense batch: use flash_attn_func."
        )
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    arguments = _arguments(
        q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    arguments |= sequence_rows(cu_seqlens_q, cu_seqlens_k, q.shape[2])
    out, lse = attention(q, k, v, return_lse=True, **arguments)
    out = out[0].transpose(0, 1)
    if not return_attn_probs:
        return out
    return out, lse[0], _probabilities(q, k, lse, arguments)[0]


def sequence_rows(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int
) -> dict[str, torch.Tensor]:
    """row_start, row_end, query_offset of sequences side by side, int32 [1, total_q], on the device.

    Row i of a sequence sees that sequence's keys and stands at the key that is as far from their
    end as the row is from its sequence's end. Rows behind the last sequence see nothing.
    """
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if bounds.dim() != 1 or bounds.is_floating_point() or bounds.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"hf_flash_backend: {name}: got shape {list(bounds.shape)} and dtype "
                f"{bounds.dtype}, expected int [sequences + 1], both of one length."
            )
    row = torch.arange(total_q, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    following = torch.searchsorted(cu_seqlens_q, row, right=True)  # passes over empty sequences
    is_inside = (following > 0) & (following < cu_seqlens_q.shape[0])
    following = following.clamp(1, max(1, cu_seqlens_q.shape[0] - 1))
    start, end = cu_seqlens_k[following - 1], cu_seqlens_k[following]
    limits = {
        "row_start": start,
        "row_end": torch.where(is_inside, end, start),
        "query_offset": end - cu_seqlens_q[following],
    }
    return {name: t.to(torch.int32)[None] for name, t in limits.items()}


def _arguments(
    q: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
) -> dict:
    """The keywords of :func:`attention`; the seed is drawn here, so that the mask can be redone."""
    left, right = (None if size < 0 else size for size in window_size)
    seed = None
    if dropout_p > 0.0:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    return {
        "dropout_p": dropout_p,
        "dropout_seed": seed,
        "scale": softmax_scale,
        "is_causal": causal,
        "window": (left, right),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, arguments: dict
) -> torch.Tensor:
    """[B, Hq, Lq, Lk] in the dtype of q, negative where dropped."""
    unused = ("deterministic", "dropout_p", "dropout_seed")
    rest = {name: value for name, value in arguments.items() if name not in unused}
    weights = attention_weights(q.detach(), k.detach(), lse.detach(), **rest)
    if arguments["dropout_p"] > 0.0:
        seed, rate = int(arguments["dropout_seed"]), arguments["dropout_p"]
        keep = dropout_keep(seed, rate, *weights.shape).to(weights.device)
        weights = torch.where(keep, weights, -weights)
    return weights.to(q.dtype)
