"""Stage 2, online softmax, alone: the tiled algorithm and the merge of partial results."""

import math

import pytest
import torch
from compare import assert_lse_accurate

from hf_flash_backend.reference import attention_fp64, attention_tiled, merge_partials

BLOCK = 16


def problem(kind: str, dtype: torch.dtype):
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, 70, 8, generator=g, dtype=dtype) for _ in range(3))
    arguments = {}
    if kind == "first tile hidden":
        arguments["row_start"] = torch.full((1, 70), BLOCK, dtype=torch.int32)
    elif kind == "later tiles larger":
        k = k * torch.arange(1, 71).reshape(1, 1, 70, 1).to(dtype) / 10
    elif kind == "nothing visible":
        mask = torch.ones(1, 1, 70, 70, dtype=torch.bool)
        mask[:, :, 30] = False
        arguments["mask"] = mask
    elif kind == "logits of 3e5":
        q, arguments["scale"] = q * 1e5, 1.0
    elif kind == "lse below -100":
        q[..., 0], k[..., 0], arguments["scale"] = 1.0, -300.0, 1.0
    elif kind == "first tile hidden, rest negative":
        arguments["row_start"] = torch.full((1, 70), BLOCK, dtype=torch.int32)
        q[..., 0], k[..., 0], arguments["scale"] = 1.0, -300.0, 1.0
    return q, k, v, arguments


KINDS = (
    "plain", "first tile hidden", "later tiles larger", "nothing visible", "logits of 3e5",
    "lse below -100", "first tile hidden, rest negative",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_n", [1, BLOCK, 70, 128])
def test_tiles_equal_the_whole(kind, block_n):
    q, k, v, arguments = problem(kind, torch.float64)
    out, lse = attention_tiled(q, k, v, block_n=block_n, **arguments)
    truth, truth_lse = attention_fp64(q, k, v, **arguments)
    torch.testing.assert_close(out, truth, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(lse, truth_lse, atol=1e-9, rtol=1e-9)


def test_fp32_lse_is_within_eight_ulp():
    q, k, v, _ = problem("plain", torch.float32)
    _, lse = attention_tiled(q, k, v, block_n=BLOCK)
    assert_lse_accurate(lse, attention_fp64(q, k, v)[1])


def test_nan_behind_a_hidden_key_stays_there():
    q, k, v, _ = problem("plain", torch.float64)
    clean = attention_tiled(q[:, :, :40], k[:, :, :40], v[:, :, :40], is_causal=True)[0]
    k[:, :, 40:], v[:, :, 40:] = math.nan, math.nan
    out = attention_tiled(q, k, v, is_causal=True, block_n=BLOCK)[0]
    torch.testing.assert_close(out[:, :, :40], clean)


def partial(q, k, v, first, last):
    return attention_fp64(q, k[:, :, first:last], v[:, :, first:last])


def test_merge_is_commutative_associative_and_exact():
    q, k, v, _ = problem("later tiles larger", torch.float64)
    a, b, c = (partial(q, k, v, *ends) for ends in ((0, 10), (10, 45), (45, 70)))
    left = merge_partials(*merge_partials(*a, *b), *c)
    right = merge_partials(*a, *merge_partials(*b, *c))
    swapped = merge_partials(*b, *a)
    for got, want in (
        (left, right),
        (swapped, merge_partials(*a, *b)),
        (left, attention_fp64(q, k, v)),
    ):
        torch.testing.assert_close(got, want)


def test_merge_with_a_side_that_saw_nothing():
    q, k, v, _ = problem("plain", torch.float64)
    a = partial(q, k, v, 0, 70)
    nothing = torch.zeros_like(a[0]), torch.full_like(a[1], -math.inf)
    torch.testing.assert_close(merge_partials(*a, *nothing), a)
    assert torch.isneginf(merge_partials(*nothing, *nothing)[1]).all()


def test_without_the_rescale_the_check_fails():
    """The negative control: sums of two tiles added as they are."""
    q, k, v, _ = problem("later tiles larger", torch.float64)
    (out_a, _), (out_b, _) = partial(q, k, v, 0, 35), partial(q, k, v, 35, 70)
    with pytest.raises(AssertionError):
        torch.testing.assert_close((out_a + out_b) / 2, attention_fp64(q, k, v)[0])
