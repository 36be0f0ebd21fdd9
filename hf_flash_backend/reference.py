"""Small reference implementations: the truth, the yardstick, and the algorithm.

* :func:`attention_fp64` defines the semantics that every kernel is tested against.
* :func:`attention_eager` is the same maths by torch in the input dtype: how much error is normal.
* :func:`attention_tiled` is online softmax over key tiles, readable; it needs no library.
"""

from __future__ import annotations

import math

import torch


def visible_keys(
    len_q: int,
    len_kv: int,
    *,
    device: torch.device | str = "cpu",
    is_causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    query_offset: int | torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    row_start: torch.Tensor | None = None,
    row_end: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which key each row sees: bool, broadcastable to [B, Hq, Lq, Lk].

    Row i stands at key i + query_offset (default Lk - Lq: bottom-right) and sees window[0] keys to
    its left, window[1] to its right. Causal, window[1] = 0, for (Lq, Lk) = (2, 5) and (5, 2)::

        x x x x .        . .
        x x x x x        . .
                         . .
                         x .
                         x x
    """
    left, right = window
    if is_causal:
        right = 0 if right is None else min(right, 0)
    position = row_positions(len_q, len_kv, query_offset, device)
    key = torch.arange(len_kv, device=device)[None, :]
    visible = torch.ones(1, 1, len_q, len_kv, dtype=torch.bool, device=device)
    if left is not None:
        visible = visible & (key >= position - left)
    if right is not None:
        visible = visible & (key <= position + right)
    if row_start is not None:
        visible = visible & (key >= row_start[:, None, :, None])
    if row_end is not None:
        visible = visible & (key < row_end[:, None, :, None])
    if mask is not None:
        visible = visible & (mask[:, None, None, :] if mask.dim() == 2 else mask)
    return visible


def row_positions(
    len_q: int,
    len_kv: int,
    query_offset: int | torch.Tensor | None,
    device: torch.device | str,
) -> torch.Tensor:
    """The key that each row stands at, int64 [1|B, 1, Lq, 1]; query_offset as in attention()."""
    row = torch.arange(len_q, device=device)[None, None, :, None]
    if isinstance(query_offset, torch.Tensor):
        offset = query_offset[:, None] if query_offset.dim() == 1 else query_offset
        return row + offset[:, None, :, None].to(device)
    return row + (len_kv - len_q if query_offset is None else query_offset)


def dropout_keep(
    seed: int, dropout_p: float, batch: int, heads: int, len_q: int, len_kv: int
) -> torch.Tensor:
    """Which weights dropout keeps, bool [B, Hq, Lq, Lk]: Philox4x32-7 by position (csrc/dropout.h)."""
    head = torch.arange(batch * heads).view(batch, heads, 1, 1)
    row, key = torch.arange(len_q)[:, None], torch.arange(len_kv)
    word = 2**32 - 1
    counter = [head, row // 16 * 8 + row % 8, key // 16 * 4 + key % 8 // 2, torch.tensor(0)]
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & word, seed >> 32 & word
    for _ in range(7):
        a0, a1 = _multiply_32(0xD2511F53, c0)
        b0, b1 = _multiply_32(0xCD9E8D57, c2)
        c0, c1, c2, c3 = b1 ^ c1 ^ k0, b0, a1 ^ c3 ^ k1, a0
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    draw = row // 8 % 2 * 4 + key // 8 % 2 * 2 + key % 2
    words = torch.stack([c0, c1, c2, c3], dim=-1)
    index = (draw // 2).expand(words.shape[:-1])[..., None]
    bits = words.gather(-1, index)[..., 0] >> draw % 2 * 16 & 0xFFFF
    return bits < round((1.0 - dropout_p) * 65536)


def _multiply_32(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high) 32 bits of a * b, in int64 without overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = (low >> 16) + high
    return (low & 0xFFFF) | (middle & 0xFFFF) << 16, middle >> 16


def attention_fp64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of the semantics, in fp64, differentiable by autograd.

    ``S = scale q k^T -> softcap -> + bias, ALiBi -> hidden keys to -inf -> softmax with the sink
    column -> P v``. Hidden keys are selected away, never multiplied, so NaN there reaches nothing,
    forward and backward. A row that sees no key has out 0, lse -inf and no gradient, whatever it
    holds. A -inf in the bias hides a key.

    Args:
        q, k, v: [B, Hq, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv], any float dtype; query head h
            reads kv head h // (Hq // Hkv).
        arguments: the keywords of :func:`hf_flash_backend.attention`.

    Returns:
        out [B, Hq, Lq, Dv] and lse [B, Hq, Lq] (natural log, sinks included), both fp64.
    """
    return _attention(q.double(), k.double(), v.double(), **arguments)


def attention_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maths of :func:`attention_fp64` by torch in the dtype of q, scale applied to q.

    Scores, probabilities and output are each rounded to that dtype; lse is fp32 (fp64 for fp64).
    """
    out, lse = _attention(q, k, v, scale_q_first=True, **arguments)
    return out, lse if q.dtype == torch.float64 else lse.float()


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    **arguments,
) -> tuple[torch.Tensor, torch.Tensor]:
    len_kv = k.shape[2]
    v = v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores, visible = masked_scores(q, k, **arguments)
    if sinks is not None:
        column = sinks if sinks.dim() == 4 else sinks[None, :, None, None]
        column = column.to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    is_empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    lse = torch.logsumexp(torch.where(is_empty, 0.0, scores), dim=-1)
    lse = torch.where(is_empty[..., 0], -math.inf, lse)
    weights = torch.softmax(torch.where(is_empty, 0.0, scores), dim=-1)[..., :len_kv]
    weights = torch.where(visible & ~is_empty, weights, 0.0)
    if dropout_p > 0.0:
        keep = dropout_keep(int(dropout_seed), dropout_p, *q.shape[:3], len_kv).to(q.device)
        rate = round((1.0 - dropout_p) * 65536) / 65536  # 0 keeps nothing
        weights = torch.where(keep, weights / rate if rate else weights, 0.0)
    sees_a_key = visible.any(dim=-1, keepdim=True)
    return torch.where(sees_a_key, _weighted_values(weights, visible, v), 0.0), lse


def masked_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale_q_first: bool = False,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    **structure,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the softmax is taken of, without sinks, in the dtype of q: (scores [B, Hq, Lq, Lk], -inf
    where hidden; visible, bool broadcastable to that).
    """
    len_q, len_kv = q.shape[2], k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is not None and mask.dtype != torch.bool:
        mask, bias = None, mask if bias is None else bias + mask
    visible = visible_keys(len_q, len_kv, device=q.device, mask=mask, **structure)
    if bias is not None:
        visible = visible & (bias != -math.inf)
        bias = torch.where(visible, bias.to(q.dtype), 0.0)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    q = torch.where(visible.any(dim=-1, keepdim=True), q, 0.0)
    scores = _scores(q * scale, k, visible) if scale_q_first else _scores(q, k, visible) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if alibi_slopes is not None:
        row = row_positions(len_q, len_kv, structure.get("query_offset"), q.device)
        distance = (row - torch.arange(len_kv, device=q.device)).abs()
        scores = scores - alibi_slopes.to(q.dtype)[..., :, None, None] * distance
    return torch.where(visible, scores, -math.inf), visible


def _scores(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """q @ k^T in which a hidden key counts as finite, whatever it holds; likewise its gradient."""
    finite = torch.isfinite(k)
    if finite.all():
        return q @ k.transpose(-1, -2)
    scores = q @ torch.where(finite, k, 0.0).transpose(-1, -2)
    columns = torch.arange(k.shape[2], device=k.device)
    for key in (~finite).any(dim=-1).any(dim=0).any(dim=0).nonzero().flatten().tolist():
        rest = torch.where(finite[:, :, key], 0.0, k[:, :, key])[:, :, None, :]
        seen = visible[..., key].expand(scores.shape[:-1])[..., None]
        term = (q * torch.where(seen, rest, 0.0)).sum(dim=-1, keepdim=True)
        scores = torch.where(columns == key, scores + term, scores)
    return scores


def _weighted_values(weights: torch.Tensor, visible: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """weights @ v in which a hidden key's value counts as 0, whatever it holds."""
    finite = torch.isfinite(v)
    if finite.all():
        return weights @ v
    out = weights @ torch.where(finite, v, 0.0)
    for key in (~finite).any(dim=-1).any(dim=0).any(dim=0).nonzero().flatten().tolist():
        rest = torch.where(finite[:, :, key], 0.0, v[:, :, key])[:, :, None, :]
        seen = visible[..., key].expand(out.shape[:-1])[..., None]
        out = out + torch.where(seen, weights[..., key][..., None] * rest, 0.0)
    return out


def attention_tiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_n: int = 64, **arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention in PyTorch: one pass over tiles of ``block_n`` keys, O(Lq) extra memory.

    Online softmax (arXiv:1805.02867, Algorithm 3): m is the largest score so far, l the sum of
    exp(score - m); a tile with a larger maximum first rescales l. The output is rescaled alike and
    divided by l once, at the end (arXiv:2307.08691, Algorithm 1, lines 8 to 12). Takes the
    structural keywords, scale and mask of :func:`attention_fp64`; computes in the dtype of q.
    """
    scale = arguments.pop("scale", None)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    group, len_q, len_kv = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    visible = visible_keys(len_q, len_kv, device=q.device, **arguments)
    m = q.new_full((*q.shape[:3], 1), -math.inf)
    l = q.new_zeros((*q.shape[:3], 1))  # noqa: E741 (the papers' name)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    for begin in range(0, len_kv, block_n):
        tile = slice(begin, min(begin + block_n, len_kv))
        k_tile = k[:, :, tile].repeat_interleave(group, dim=1)
        v_tile = v[:, :, tile].repeat_interleave(group, dim=1)
        scores = q @ k_tile.transpose(-1, -2) * scale
        scores = torch.where(visible[..., tile], scores, -math.inf)
        m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
        shift = torch.where(m_new == -math.inf, 0.0, m_new)  # no key seen yet: exp(-inf - 0) = 0
        p = torch.exp(scores - shift)
        rescale = torch.exp(m - shift)
        l = l * rescale + p.sum(dim=-1, keepdim=True)  # noqa: E741
        out = out * rescale + _weighted_values(p, visible[..., tile], v_tile)
        m = m_new
    lse = torch.where(l == 0, -math.inf, m + torch.log(l))[..., 0]
    return torch.where(l == 0, 0.0, out / l), lse


def merge_partials(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys from the attention over each.

    out [..., L, Dv] and lse [..., L] as returned by the functions above; associative and
    commutative up to rounding. A side with lse -inf saw no key and counts nothing.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    weight_a = torch.exp(lse_a - shift)[..., None]
    weight_b = torch.exp(lse_b - shift)[..., None]
    return out_a * weight_a + out_b * weight_b, lse
