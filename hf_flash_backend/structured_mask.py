""":class:`StructuredMask`: a mask of Lq x Lk pairs that takes memory linear in the lengths.

The mask function makes one per forward, Transformers and the model carry it around as the 4-D bool
tensor that it stands for, and the adapter turns it into arguments of
:func:`hf_flash_backend.functional.attention` without ever forming the pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
_TENSOR_FIELDS = ("anchor", "key_padding", "row_start", "row_end", "given")
_HOST_FIELDS = ("shift", "window_left", "window_right", "is_packed")
_READ_ONLY = (
    "hf_flash_backend: the attention mask was changed in place: got a write to a mask that is kept "
    "as a rule, expected a copy. Write to mask & True, or make a new mask with torch.where."
)


class StructuredMask(torch.Tensor):
    """bool [B, 1, Lq, Lk], true = visible, kept as a rule instead of pairs.

    Pair (b, i, j) is visible if all of these hold; a field that is None hides nothing:

    * ``-window_left <= j - (i + Lk - Lq + shift) <= window_right``: ints or None, all on the host.
      ``shift`` is 0 where the last row stands at the last key, so a growing cache changes none of
      them and a compiled layer is not compiled again;
    * ``row_start[b, i] <= j < row_end[b, i]``, int32 [1|B, Lq]: packed sequences, chunks, and rows
      whose position is known on the device only (static caches);
    * ``key_padding[b, j]``, bool [B, Lk];
    * ``given[b, 0, i, j]``, bool [B, 1, Lq, Lk]: what no rule describes.

    ``is_packed`` says that packed sequences are told apart already. ``anchor`` is empty: it stands
    for the device, also where no other tensor does, and it is fake where the mask is.

    detach, alias, clone and copies to another device keep the rule. Every other op sees the pairs:
    it gets the exact dense mask and returns plain tensors. Nothing can be written in place: a dense
    mask made for one op would take the write and be thrown away.

    torch.compile, autograd and checkpointing take it apart into its tensor fields
    (``__tensor_flatten__``).
    """

    anchor: torch.Tensor
    key_padding: torch.Tensor | None
    row_start: torch.Tensor | None
    row_end: torch.Tensor | None
    given: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        anchor: torch.Tensor,
        *,
        shift: int = 0,
        window_left: int | None = None,
        window_right: int | None = None,
        is_packed: bool = False,
        key_padding: torch.Tensor | None = None,
        row_start: torch.Tensor | None = None,
        row_end: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
    ) -> StructuredMask:
        mask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=anchor.device
        )
        mask.anchor = anchor
        mask.shift = shift
        mask.window_left, mask.window_right = window_left, window_right
        mask.is_packed = is_packed
        mask.key_padding = key_padding
        mask.row_start, mask.row_end = row_start, row_end
        mask.given = given
        return mask

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = [name for name in _TENSOR_FIELDS if getattr(self, name) is not None]
        return names, {name: getattr(self, name) for name in _HOST_FIELDS}

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, torch.Tensor],
        settings: dict[str, Any],
        size: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> StructuredMask:
        return StructuredMask(size, **settings, **tensors)

    def materialise(self) -> torch.Tensor:
        """The pairs: bool [B, 1, Lq, Lk], contiguous."""
        if self.given is not None:
            return self.given.contiguous()
        batch, _, len_q, len_kv = self.shape
        # Made from a field, not by arange: where the fields are fake, so must be what comes of them.
        key = self.anchor.new_ones(len_kv, dtype=torch.int64).cumsum(0) - 1
        row = self.anchor.new_ones(len_q, dtype=torch.int64).cumsum(0) - 1
        stands_at = row[:, None] + (len_kv - len_q + self.shift)
        visible = self.anchor.new_ones(1, len_q, len_kv, dtype=torch.bool)
        if self.window_left is not None:
            visible = visible & (key >= stands_at - self.window_left)
        if self.window_right is not None:
            visible = visible & (key <= stands_at + self.window_right)
        if self.row_start is not None:
            visible = visible & (key >= self.row_start[:, :, None])
        if self.row_end is not None:
            visible = visible & (key < self.row_end[:, :, None])
        if self.key_padding is not None:
            visible = visible & self.key_padding[:, None, :]
        return visible[:, None].expand(batch, 1, len_q, len_kv).contiguous()

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> StructuredMask:
        """The same rule with every tensor field replaced."""
        names, settings = self.__tensor_flatten__()
        tensors = {name: function(getattr(self, name)) for name in names}
        return StructuredMask(self.shape, **settings, **tensors)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
            return args[0]._map(func)
        if func is _aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            target = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
            return args[0]._map(lambda t: t.to(copy=True, **target))
        for position, argument in enumerate(func._schema.arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if is_written and isinstance(value, StructuredMask):
                raise RuntimeError(_READ_ONLY)
        args, kwargs = torch.utils._pytree.tree_map_only(
            StructuredMask, StructuredMask.materialise, (args, kwargs)
        )
        return func(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise RuntimeError(_READ_ONLY)

    def data_ptr(self) -> int:
        raise RuntimeError(
            "hf_flash_backend: data_ptr: got an attention mask that is kept as a rule and has no "
            "memory, expected a dense tensor. Pass mask & True."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StructuredMask:
        return self.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        names, settings = self.__tensor_flatten__()
        rule = ", ".join(f"{name}={value}" for name, value in settings.items())
        return f"StructuredMask(shape={list(self.shape)}, {rule}, fields={names})"


def arguments(mask: StructuredMask, len_q: int, len_kv: int) -> dict[str, Any]:
    """A mask of len_q rows and len_kv keys as arguments of ``functional.attention``.

    A model that cut its rows or keys since the mask was made gets the dense one: the op then says
    whether it fits. Not a method, because dynamo takes methods of tensors for ops.
    """
    if not torch.compiler.is_compiling() and not mask.is_inference() and mask._version > 0:
        raise RuntimeError(_READ_ONLY)
    if mask.given is not None:
        return {"mask": mask.given}
    if mask.shape[2] != len_q or mask.shape[3] != len_kv:
        return {"mask": mask & True}
    return {
        "mask": mask.key_padding,
        "row_start": mask.row_start,
        "row_end": mask.row_end,
        "window": (mask.window_left, mask.window_right),
        "query_offset": None if mask.shift == 0 else len_kv - len_q + mask.shift,
    }
