"""StructuredMask as a tensor: what keeps the rule, what sees the pairs, what is refused."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from adapter import call, dense, make_qkv
from models import (
    DECODERS,
    assert_close,
    expect_calls,
    left_padding,
    make_pair,
    packed,
    plain,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from hf_flash_backend import functional, structured_mask
from hf_flash_backend.structured_mask import StructuredMask

ANCHOR = torch.empty(0)
pair = functools.cache(make_pair)


def make(**changes):
    """A mask of 2 x 4 rows and 6 keys that has every field but given."""
    rule = {
        "shift": -1,
        "window_left": 3,
        "window_right": 1,
        "key_padding": torch.tensor([[False] + [True] * 5, [True] * 6]),
        "row_start": torch.tensor([[0, 0, 2, 2], [0, 1, 1, 1]], dtype=torch.int32),
        "row_end": torch.tensor([[3, 4, 5, 6]], dtype=torch.int32),
    }
    return StructuredMask((2, 1, 4, 6), ANCHOR, **(rule | changes))


def brute_force(mask):
    visible = torch.zeros(mask.shape, dtype=torch.bool)
    start, end = (t.expand(2, -1) for t in (mask.row_start, mask.row_end))
    for b, i, j in ((b, i, j) for b in range(2) for i in range(4) for j in range(6)):
        distance = j - (i + 6 - 4 + mask.shift)
        in_band = -mask.window_left <= distance <= mask.window_right
        in_row = start[b, i] <= j < end[b, i]
        visible[b, 0, i, j] = in_band and in_row and mask.key_padding[b, j]
    return visible


def test_it_is_a_bool_tensor_without_storage():
    mask = make()
    assert isinstance(mask, torch.Tensor)
    assert (mask.shape, mask.dtype, mask.device) == ((2, 1, 4, 6), torch.bool, ANCHOR.device)
    assert mask.dim() == mask.ndim == 4 and len(mask) == 2 and not mask.requires_grad
    assert "StructuredMask(shape=[2, 1, 4, 6], shift=-1" in repr(mask)
    with pytest.raises(RuntimeError, match="has no memory, expected a dense tensor"):
        mask.data_ptr()


@pytest.mark.parametrize(
    "copied",
    [
        torch.Tensor.detach,
        torch.Tensor.clone,
        torch.Tensor.contiguous,
        torch.ops.aten.alias,
        copy.deepcopy,
        lambda mask: mask.to("cpu"),
        lambda mask: mask.to(torch.bool),
        lambda mask: mask.to("cpu", copy=True),
        lambda mask: mask.to("cpu", non_blocking=True, copy=True),
        lambda mask: mask[:, :, :, : mask.shape[-1]],
        lambda mask: mask[:, :, :, :100],
        lambda mask: mask.requires_grad_(False),
    ],
)
@pytest.mark.parametrize("fields", [True, False], ids=["fields", "band_only"])
def test_copies_keep_the_rule(monkeypatch, copied, fields):
    without = {} if fields else dict.fromkeys(("key_padding", "row_start", "row_end"))
    mask = make(**without)
    monkeypatch.setattr(StructuredMask, "materialise", lambda _: pytest.fail("a dense mask"))
    result = copied(mask)
    assert isinstance(result, StructuredMask) and result.shape == mask.shape
    for name, value in structured_mask.arguments(mask, 4, 6).items():
        other = structured_mask.arguments(result, 4, 6)[name]
        assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
    moved = mask.to("meta")
    assert isinstance(moved, StructuredMask) and moved.device.type == "meta"
    assert {getattr(moved, name).device.type for name in moved.__tensor_flatten__()[0]} <= {"meta"}


OTHER = torch.rand(2, 1, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.5


@pytest.mark.parametrize(
    "op",
    [
        lambda m: m.to(torch.float32),
        lambda m: m.float(),
        lambda m: m.to(torch.int64, copy=True),
        lambda m: ~m,
        lambda m: m & OTHER,
        lambda m: OTHER & m,
        lambda m: m | OTHER,
        lambda m: m == OTHER,
        lambda m: m[:, :, -2:, :],
        lambda m: m[:, 0],
        lambda m: m[..., :3],
        lambda m: m[1],
        lambda m: m[torch.tensor([1, 0])],
        lambda m: m[m],
        lambda m: m.index_select(0, torch.tensor([1, 1, 0])),
        lambda m: m.repeat_interleave(2, dim=0),
        lambda m: m.expand(2, 3, 4, 6),
        lambda m: m.transpose(2, 3),
        lambda m: m.view(2, 24),
        lambda m: m.reshape(-1),
        lambda m: torch.cat([m, OTHER], dim=-1),
        lambda m: torch.where(m, 0.0, float("-inf")),
        lambda m: torch.where(OTHER, m, False),
        lambda m: torch.zeros(2, 1, 4, 6).masked_fill(m, 1.0),
        lambda m: torch.zeros(2, 1, 4, 6).masked_fill_(m, 1.0),
        lambda m: torch.zeros(2, 1, 4, 6, dtype=torch.bool).copy_(m),
        lambda m: torch.zeros(2, 1, 4, 6) + m,
        lambda m: m.all(),
        lambda m: m.any(-1),
        lambda m: m.sum(),
        lambda m: m.nonzero(),
        lambda m: torch.nn.functional.pad(m, (0, 2)),
        lambda m: m.chunk(2)[1],
    ],
)
def test_other_ops_see_the_pairs(op):
    mask = make()
    result, expected = op(mask), op(brute_force(mask))
    assert type(result) is torch.Tensor and result.dtype == expected.dtype
    assert torch.equal(result, expected)


def write_item(mask):
    mask[:, :, 0] = False


def write_and(mask):
    mask &= OTHER


@pytest.mark.parametrize(
    "write",
    [
        write_item,
        write_and,
        lambda m: m.fill_(True),
        lambda m: m.masked_fill_(OTHER, False),
        lambda m: m.copy_(OTHER),
        lambda m: torch.logical_not(m, out=m),
    ],
)
def test_writes_are_refused(write):
    with pytest.raises(RuntimeError, match="the attention mask was changed in place"):
        write(make())


def test_a_write_through_a_view_is_refused_by_the_adapter():
    q, k, v = make_qkv(4, 6)
    mask = make()
    mask[0].fill_(True)
    with pytest.raises(RuntimeError, match="changed in place: got a write to a mask that is kept"):
        call(q, k, v, mask)


@pytest.mark.parametrize("is_causal", [False, True])
def test_adapter_forms_no_pairs(monkeypatch, is_causal):
    q, k, v = make_qkv(4, 6)
    mask = make()
    expected = dense(q, k, v, brute_force(mask))
    monkeypatch.setattr(StructuredMask, "materialise", lambda _: pytest.fail("a dense mask"))
    arguments = {"is_causal": is_causal, "sliding_window": 2}  # both are in the mask
    assert_close(call(q, k, v, mask, **arguments), expected)


def test_the_op_itself_takes_the_pairs():
    q, k, v = (t.requires_grad_() for t in make_qkv(4, 6))
    mask = make()
    results = [functional.attention(q, k, v, mask=m) for m in (mask, mask & True)]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in results]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_mask_of_other_rows_or_keys_is_dense():
    """The op then says whether it fits: one row is broadcast, anything else is an error."""
    q, k, v = make_qkv(4, 6)
    one_row = StructuredMask((2, 1, 1, 6), ANCHOR, window_right=-3)
    assert_close(call(q, k, v, one_row), dense(q, k, v, one_row & True))
    with pytest.raises(ValueError, match="mask"):
        call(q, k, v, StructuredMask((2, 1, 3, 6), ANCHOR, window_right=0))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_gradient_checkpointing(monkeypatch, name, use_reentrant):
    eager, ours = make_pair(name)
    monkeypatch.setattr(StructuredMask, "materialise", lambda _: pytest.fail("a dense mask"))
    arguments, real = left_padding()
    for model in (eager, ours):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.zero_grad()
    eager(**arguments).logits[real].square().mean().backward()
    with expect_calls(2 * ours.config.num_hidden_layers):  # once more in the backward pass
        ours(**arguments).logits[real].square().mean().backward()
    for (name, theirs), mine in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, f"gradient of {name}")


def test_checkpoint_takes_a_mask_as_an_argument():
    q, k, v = (t.requires_grad_() for t in make_qkv(4, 6))
    mask = make()
    expected = torch.autograd.grad(call(q, k, v, mask).square().sum(), (q, k, v))
    for use_reentrant in (False, True):
        output = checkpoint(call, q, k, v, mask, use_reentrant=use_reentrant)
        output.square().sum().backward()
        for leaf, grad in zip((q, k, v), expected, strict=True):
            assert torch.equal(leaf.grad, grad)
            leaf.grad = None


def test_device_map_hooks_keep_the_rule():
    accelerate = pytest.importorskip("accelerate")
    moved = accelerate.utils.send_to_device({"mask": make()}, torch.device("meta"))["mask"]
    assert isinstance(moved, StructuredMask) and moved.device.type == "meta"


class NoDense:
    """The usual paths of a model form no pairs at all, and pass a StructuredMask at least once."""

    def __init__(self, monkeypatch):
        self.seen = 0
        monkeypatch.setattr(StructuredMask, "materialise", lambda _: pytest.fail("a dense mask"))
        arguments = structured_mask.arguments

        def counted(mask, *lengths):
            self.seen += 1
            assert mask.given is None
            return arguments(mask, *lengths)

        monkeypatch.setattr(structured_mask, "arguments", counted)


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_models_form_no_pairs(monkeypatch, name, cache):
    _, ours = pair(name)
    watched = NoDense(monkeypatch)
    arguments, _ = left_padding()
    if cache is None:
        ours(**arguments)
        ours(**packed()[0])
    else:
        settings = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
        ours.generate(
            arguments["input_ids"], attention_mask=arguments["attention_mask"], **settings
        )
    assert watched.seen >= ours.config.num_hidden_layers


@pytest.mark.parametrize(("name", "dynamic"), [("llama", True), ("mistral", False)])
@torch.no_grad()
def test_compiled_models(monkeypatch, name, dynamic):
    """Dynamo reads the rule of a causal mask; that of a window it cannot, which is kept dense."""
    if name == "llama":
        monkeypatch.setattr(StructuredMask, "materialise", lambda _: pytest.fail("a dense mask"))
    eager, ours = pair(name)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    arguments, real = left_padding()
    assert_close(compiled(**arguments).logits[real], eager(**arguments).logits[real], "logits")
    arguments, _ = plain()
    assert_close(compiled(**arguments).logits, eager(**arguments).logits, "logits")
    arguments, _ = packed(use_cache=False)
    expected = eager(**arguments).logits
    arguments, _ = packed(use_cache=True)
    assert_close(compiled(**arguments).logits, expected, "logits")


@torch.no_grad()
def test_masks_from_outside_enter_a_compiled_function():
    """generate() makes the mask of a static cache itself and hands it to the compiled model."""
    q, k, v = make_qkv(4, 6)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for _ in range(3):
        mask = make(row_end=torch.randint(1, 6, (1, 4), dtype=torch.int32))
        assert_close(compiled(q, k, v, mask), dense(q, k, v, mask & True))
        assert_close(compiled(q, k, v, mask[:, :, :1]), dense(q, k, v, mask[:, :, :1]))
    assert counter.frame_count == 2
