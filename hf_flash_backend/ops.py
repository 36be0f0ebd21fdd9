"""The op contract: loads the compiled library, gives the ops fake (shape-only) kernels and
autograd, refuses the rest.

``torch.ops.hf_flash_backend.forward`` and ``.backward`` are defined in ``csrc/bindings.cpp``; their
semantics are those of :func:`hf_flash_backend.reference.attention_fp64`. Importing this module
loads the library if it is there and never initialises CUDA; without it the first call raises
:class:`RuntimeError` with the command that builds it.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

logger = logging.getLogger("hf_flash_backend")

NAMESPACE = "hf_flash_backend"
DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_PACKAGE = Path(__file__).resolve().parent
_load_error: str | None = None


def library_path() -> Path:
    """Where the compiled library is expected."""
    return _PACKAGE / "libhf_flash_backend.so"


def build_info() -> dict[str, Any]:
    """What the library was built with: torch and CUDA version, GPU architectures; empty if it is
    not built.
    """
    path = _PACKAGE / "build_info.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _missing_library_text(problem: str) -> str:
    built = build_info() or "nothing"
    return (
        f"hf_flash_backend: the compiled library cannot be used: {problem}. "
        f"torch {torch.__version__}, CUDA of torch {torch.version.cuda}, built: {built}. "
        "Build it with: pip install --no-build-isolation ."
    )


def load_library() -> None:
    """Loads the library once. Raises RuntimeError naming what was found, what is missing and the
    build command.
    """
    global _load_error
    if is_loaded():
        return
    path = library_path()
    if not path.is_file():
        _load_error = f"{path.name} is not beside the package"
    else:
        try:
            torch.ops.load_library(str(path))
            _register()
            _load_error = None
            return
        except OSError as error:
            _load_error = f"{path.name} does not load ({error})"
    raise RuntimeError(_missing_library_text(_load_error))


def is_loaded() -> bool:
    return hasattr(torch.ops.hf_flash_backend, "forward")


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    row_start: torch.Tensor | None = None,
    row_end: torch.Tensor | None = None,
    query_offsets: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    tile_map: torch.Tensor | None = None,
    dropout_seed: torch.Tensor | None = None,
    softcap: float = 0.0,
    window_left: int | None = None,
    window_right: int | None = None,
    query_offset: int | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    num_splits: int = 0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call of the op, after refusing what is valid but not implemented.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D]; v: [B, Hkv, Lk, Dv]. fp16, bf16, fp32 or fp64 (not on
            CUDA), one dtype and device, D and Dv multiples of 8, Hq a multiple of Hkv, any
            strides.
        scale: multiplies q k^T.
        mask: bool [1|B, 1|Hq, 1|Lq, Lk], true = visible.
        bias: [1|B, 1|Hq, 1|Lq, Lk], dtype of q or fp32, added to the scores; -inf = not visible.
        row_start, row_end: int32 [1|B, 1|Lq]; row i sees keys row_start <= j < row_end.
        query_offsets: int32 [1|B, 1|Lq], in place of query_offset.
        sinks: [1|B, 1|Hq, 1|Lq], fp32 (fp64 for fp64): the score of one more key of value 0.
        alibi_slopes: [1|B, 1|Hq], fp32 (fp64 for fp64): adds -slope * |position - key|.
        dropout_p, dropout_seed: rate, and one int64 number on the device of q.
        softcap: 0 = off; else scores become softcap * tanh(scores / softcap), before bias and mask.
        window_left, window_right: row i, standing at key i + query_offset, sees that many keys to
            either side.
        query_offset: default Lk - Lq (bottom-right alignment).

    Returns:
        out [B, Hq, Lq, Dv] in the dtype of q, memory order (B, Lq, Hq, Dv), and lse [B, Hq, Lq],
        natural log, fp32 (fp64 for fp64 inputs). A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: wrong shape, dtype or device. NotImplementedError: valid but not implemented,
        named. RuntimeError: no library, or a CUDA error.
    """
    load_library()
    refuse_unimplemented(
        cu_seqlens=cu_seqlens_q is not None or cu_seqlens_k is not None,
        block_table=block_table is not None,
        tile_map=tile_map is not None,
        num_splits=num_splits > 1,
    )
    if k.device != q.device or v.device != q.device:
        raise ValueError(
            f"hf_flash_backend: q, k, v: got devices {q.device}, {k.device} and {v.device}, "
            "expected one device."
        )
    optional = (mask, bias, row_start, row_end, query_offsets, sinks, alibi_slopes, dropout_seed)
    for name, tensor in zip((*_OPTIONAL[:7], _OPTIONAL[-1]), optional, strict=True):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(
                f"hf_flash_backend: {name}: got device {tensor.device}, expected the device of q, "
                f"{q.device}."
            )
    if not torch.compiler.is_compiling():
        _refuse_forward_mode(q, k, v, bias, sinks, alibi_slopes)
        _refuse_device(q.device.type, q.device.index, q.dtype, max(q.shape[-1], v.shape[-1]))
    try:
        return torch.ops.hf_flash_backend.forward(
            q, k, v, mask, bias, row_start, row_end, query_offsets, sinks, alibi_slopes,
            cu_seqlens_q, cu_seqlens_k, block_table, tile_map, dropout_seed,
            scale=scale, softcap=softcap,
            window_left=window_left, window_right=window_right, query_offset=query_offset,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, dropout_p=dropout_p,
            num_splits=num_splits, deterministic=deterministic,
        )  # fmt: skip
    except RuntimeError as error:
        if "functorch transforms" not in str(error):
            raise
        raise NotImplementedError(
            "hf_flash_backend: torch.func.grad and its relatives are not implemented. Use "
            'torch.autograd.grad, or attn_implementation="eager".'
        ) from error


def _refuse_forward_mode(*tensors: torch.Tensor | None) -> None:
    """Raises under forward-mode differentiation, where torch would take the tangent to be 0."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "hf_flash_backend: forward-mode differentiation (torch.func.jvp) is not "
                'implemented. Use torch.autograd.grad, or attn_implementation="eager".'
            )


def refuse_unimplemented(**arguments: bool) -> None:
    """Raises NotImplementedError for the first argument that is in use."""
    for name, is_used in arguments.items():
        if is_used:
            raise NotImplementedError(
                f"hf_flash_backend: {name} is not implemented yet. "
                'Leave it out, or use attn_implementation="eager" for this model.'
            )


@functools.lru_cache(maxsize=256)
def _refuse_device(device_type: str, index: int | None, dtype: torch.dtype, head_dim: int) -> None:
    """Raises for a device, dtype or head dim that no kernel covers; logs once when a slower kernel
    than possible runs.
    """
    if device_type == "meta" or dtype not in DTYPE_NAMES or head_dim % 8 != 0:
        return  # shape-only, or a wrong argument that the op itself names
    if device_type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"hf_flash_backend: device {device_type} is not supported: expected cpu or cuda. "
            'Use attn_implementation="sdpa".'
        )
    if device_type == "cpu":
        return
    from . import support

    shape = (1, 1, 1, 1, 1, head_dim, head_dim)
    call = support.explain(shape=shape, dtype=dtype, device=torch.device(device_type, index))
    if call["kernel"] == "none":
        raise NotImplementedError(f"hf_flash_backend: {call['reason']}")
    _log_once(call["reason"])


@functools.lru_cache
def _log_once(reason: str) -> None:
    """Says why a slower kernel runs than the GPU could use, once a process and reason."""
    if reason:
        logger.warning("hf_flash_backend: %s.", reason)


def _empty_blhd(like: torch.Tensor, heads: int, length: int, dim: int) -> torch.Tensor:
    """[B, H, L, D] in the memory order of the op's outputs, (B, L, H, D)."""
    return like.new_empty_strided(
        (like.shape[0], heads, length, dim), (length * heads * dim, dim, heads * dim, 1)
    )


def _forward_fake(q, k, v, *args, **kwargs):
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = _empty_blhd(q, q.shape[1], q.shape[2], v.shape[3])
    return out, q.new_empty(q.shape[:3], dtype=lse_dtype)


def _backward_fake(dout, dlse, q, k, v, out, lse, mask=None, bias=None, *args, **kwargs):
    bias_shape = bias.shape if kwargs.get("bias_grad") else (0,)
    alibi_shape = lse.shape if kwargs.get("alibi_grad") else (0,)
    return (
        *(_empty_blhd(t, t.shape[1], t.shape[2], t.shape[3]) for t in (q, k, v)),
        lse.new_empty(bias_shape),
        lse.new_empty(alibi_shape),
    )


# Optional tensors of forward in schema order, and those that have a gradient.
_OPTIONAL = (
    "mask", "bias", "row_start", "row_end", "query_offsets", "sinks", "alibi_slopes",
    "cu_seqlens_q", "cu_seqlens_k", "block_table", "tile_map", "dropout_seed",
)  # fmt: skip


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    q, k, v, *optional = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *optional)
    ctx.scalars = keyword_only_inputs


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, *optional = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (3 + len(optional))
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = dict(zip(_OPTIONAL, optional, strict=True))
    needs = dict.fromkeys(_OPTIONAL, False)  # torch leaves out arguments that kept their default
    needs |= zip(_OPTIONAL, ctx.needs_input_grad[3:], strict=False)
    scalars = dict(ctx.scalars)
    scalars["deterministic"] = (
        scalars["deterministic"] or torch.are_deterministic_algorithms_enabled()
    )
    dq, dk, dv, dbias, dalibi_rows = torch.ops.hf_flash_backend.backward(
        dout, dlse, q, k, v, out, lse, *optional,
        **scalars, bias_grad=needs["bias"], alibi_grad=needs["alibi_slopes"],
    )  # fmt: skip
    grads = dict.fromkeys(_OPTIONAL)
    if needs["bias"]:
        grads["bias"] = dbias.to(tensors["bias"].dtype)
    if needs["alibi_slopes"]:
        grads["alibi_slopes"] = dalibi_rows.sum(dim=-1).sum_to_size(tensors["alibi_slopes"].shape)
    if needs["sinks"]:
        grads["sinks"] = _sinks_grad(tensors["sinks"], dout, dlse, out, lse)
    return (dq, dk, dv, *grads.values())


def _sinks_grad(sinks, dout, dlse, out, lse):
    """-P_sink (rowsum(dout * out) - dlse): the sink is a key of value 0, so its dP is 0."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
    if dlse is not None:
        delta = delta - dlse
    weight = torch.where(lse == -math.inf, 0.0, torch.exp(sinks - lse))
    return -(weight * delta).sum_to_size(sinks.shape)


def _refuse_double_backward(ctx, *grads):
    raise NotImplementedError(
        "hf_flash_backend: double backward (create_graph=True) is not implemented. "
        'Use attn_implementation="eager", which torch differentiates twice.'
    )


def _register() -> None:
    torch.library.register_fake(f"{NAMESPACE}::forward", _forward_fake)
    torch.library.register_fake(f"{NAMESPACE}::backward", _backward_fake)
    torch.library.register_autograd(
        f"{NAMESPACE}::forward", _backward, setup_context=_setup_context
    )
    torch.library.register_autograd(f"{NAMESPACE}::backward", _refuse_double_backward)


if library_path().is_file():
    try:
        load_library()
    except RuntimeError as error:  # reported again, with the same text, by the first call
        logger.warning("%s", error)
