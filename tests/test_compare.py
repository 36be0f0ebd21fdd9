"""The checker must reject known-wrong attention."""

import math

import pytest
import torch
from compare import assert_accurate, assert_lse_accurate

from hf_flash_backend.reference import attention_eager, attention_fp64


def problem(dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 4, 65, 64, generator=generator).to(dtype) for _ in range(3))
    return q, k, v


def swap_heads(out):
    return out[:, [1, 0, 2, 3]]


def one_element(out):
    out = out.clone()
    out[1, 2, 33, 7] += 0.1
    return out


def one_nan(out):
    out = out.clone()
    out[0, 0, 0, 0] = math.nan
    return out


WRONG_OUTPUTS = {
    "swapped heads": swap_heads,
    "one wrong element": one_element,
    "one NaN": one_nan,
    "two percent": lambda out: out * 1.02,
    "shifted rows": lambda out: out.roll(1, dims=2),
}
WRONG_CALLS = {
    "top-left causal": dict(is_causal=True, query_offset=-1),
    "no mask": dict(),
    "no scale": dict(is_causal=True, scale=1.0),
    "window off by one": dict(is_causal=True, window=(60, None)),
}


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_wrong_outputs_fail(name):
    q, k, v = problem()
    truth, _ = attention_fp64(q, k, v, is_causal=True)
    eager, _ = attention_eager(q, k, v, is_causal=True)
    assert_accurate(truth.bfloat16(), truth, eager, "right")
    with pytest.raises(AssertionError):
        assert_accurate(WRONG_OUTPUTS[name](truth.bfloat16()), truth, eager, name)


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_fail(name):
    q, k, v = problem()
    truth, truth_lse = attention_fp64(q, k, v, is_causal=True)
    eager, _ = attention_eager(q, k, v, is_causal=True)
    wrong, wrong_lse = attention_fp64(q, k, v, **WRONG_CALLS[name])
    with pytest.raises(AssertionError):
        assert_accurate(wrong.bfloat16(), truth, eager, name)
    with pytest.raises(AssertionError):
        assert_lse_accurate(wrong_lse.float(), truth_lse)


def test_lse_off_by_nine_ulp_fails():
    truth = torch.full((1, 1, 3), 5.0, dtype=torch.float64)
    step = torch.finfo(torch.float32).eps * 5.0
    assert_lse_accurate((truth + 7 * step).float(), truth)
    with pytest.raises(AssertionError):
        assert_lse_accurate((truth + 9 * step).float(), truth)
