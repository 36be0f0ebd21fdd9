"""The support matrix: every row runs, or is refused with that row's reason; the page is fresh."""

from pathlib import Path

import pytest
import torch

from hf_flash_backend import attention, support, support_table, trace

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"


def arguments_of(feature: str, device: str, dtype: torch.dtype) -> dict:
    """A call of attention() that has the feature, for B 2, Hq 4, L 64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ints = torch.zeros(2, 1, dtype=torch.int32, device=device)
    return {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"window": (4, 4)},
        "row_limits": {"row_start": ints},
        "query_offsets": {"query_offset": ints, "is_causal": True},
        "sinks": {"sinks": torch.zeros(4, device=device, dtype=wide)},
        "mask": {"mask": torch.ones(2, 64, dtype=torch.bool, device=device)},
        "bias": {"bias": torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)},
        "alibi": {"alibi_slopes": torch.ones(4, device=device)},
        "softcap": {"softcap": 10.0},
        "dropout": {"dropout_p": 0.1},
        "deterministic": {"deterministic": True},
    }[feature]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", support.HEAD_DIMS)
def test_every_row_runs_or_gives_its_reason(head_dim, device):
    rows = [row for row in support.matrix(device) if row["head_dim"] == head_dim]
    assert len(rows) == 4 * 2 * len(support.FEATURES)
    for row in rows:
        dtype, is_forward = row["dtype"], row["direction"] == "forward"
        q, k, v = (torch.randn(2, h, 64, head_dim, device=device, dtype=dtype) for h in (4, 2, 2))
        q.requires_grad_(not is_forward)
        arguments = arguments_of(row["feature"], device, dtype)
        if row["kernel"] == "none":
            with pytest.raises(NotImplementedError) as error:
                attention(q, k, v, **arguments)
            assert row["reason"] in str(error.value)
            continue
        with trace() as calls:
            out = attention(q, k, v, **arguments)
            if not is_forward:
                out.sum().backward()
        assert (calls[-1]["kernel"], calls[-1]["reason"]) == (row["kernel"], row["reason"])


def test_the_page_is_what_the_library_says():
    hopper = support_table.DEVICES["NVIDIA sm_90 (H100, H200)"]
    if support.explain(shape=(1, 1, 1, 1, 1, 64, 64), device=hopper)["kernel"] != "fwd_sm90":
        pytest.skip("this build has no sm_90 kernels, so its plan of a Hopper GPU differs")
    assert PAGE.read_text() == support_table.render(), "run: make report"
