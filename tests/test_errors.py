"""Every error names the argument, what it got, what was expected and what to do."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_flash_backend import attention, explain, ops, support, why_not
from hf_flash_backend.reference import visible_keys

H200 = {
    "is_cuda": 1,
    "sm": 90,
    "num_sms": 132,
    "smem_optin_bytes": 232448,
    "driver_version": 13000,
    "runtime_version": 13000,
}
Q = torch.zeros(1, 4, 3, 8)
KV = torch.zeros(1, 2, 3, 8)

WRONG_TENSORS = {
    "3-D": (Q[0], KV, KV, "q, k, v: got 3-D, 4-D and 4-D tensors, expected 4-D"),
    "dtype": (
        Q.int(), KV.int(), KV.int(),
        "q dtype: got Int, expected Half, BFloat16, Float or Double. Cast q, k and v",
    ),
    "mixed dtypes": (Q, KV.double(), KV, "k: got dtype Double, expected the dtype of q, Float."),
    "head_dim 7": (
        Q[..., :7], KV[..., :7], KV[..., :7],
        "head_dim: got 7, expected a positive multiple of 8; pad q, k and v with zeros.",
    ),
    "head_dim of k": (Q, KV.repeat(1, 1, 1, 2), KV, "k head_dim: got 16, expected the head_dim of q, 8."),
    "heads": (Q[:, :3], KV, KV, "k heads: got 2, expected a divisor of the 3 heads of q."),
    "batch": (Q, KV.repeat(2, 1, 1, 1), KV, "k, v batch: got 2 and 1, expected the batch of q, 1."),
    "length of v": (Q, KV, KV[:, :, :2], "v: got shape [1, 2, 2, 8], expected the heads and length"),
    "devices": (Q, KV.to("meta"), KV, "q, k, v: got devices cpu, meta and cpu, expected one device."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors(name):
    q, k, v, text = WRONG_TENSORS[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        attention(q, k, v)


WRONG_ARGUMENTS = {
    "mask shape": (
        dict(mask=torch.ones(1, 1, 3, 4) > 0),
        "mask: got shape [1, 1, 3, 4], expected [1",
    ),
    "mask rank": (
        dict(mask=torch.ones(3, 3, 3) > 0),
        "mask: got 3-D shape [3, 3, 3], expected 4-D",
    ),
    "mask dtype": (dict(mask=torch.ones(1, 3, dtype=torch.int64)), "mask: got dtype torch.int64"),
    "window": (
        dict(window=(-2, 0)),
        "window_left: got -2, expected None (unlimited) or at least 0.",
    ),
    "one window": (
        dict(window=4),
        "window: got 4, expected (left, right) or None. A window of w keys that ends",
    ),
    "softcap": (dict(softcap=-1.0), "softcap: got -1.0"),
    "row_start dtype": (
        dict(row_start=torch.zeros(1, 3)),
        "row_start: got dtype Float, expected Int.",
    ),
    "row_end shape": (
        dict(row_end=torch.zeros(1, 4, dtype=torch.int32)),
        "row_end: got shape [1, 4], expected [1 or 1, 1 or 3].",
    ),
    "query_offset shape": (
        dict(query_offset=torch.zeros(2, dtype=torch.int32)),
        "query_offsets: got shape [2, 1], expected [1 or 1, 1 or 3].",
    ),
    "query_offset dtype": (
        dict(query_offset=torch.zeros(1, dtype=torch.int64)),
        "query_offsets: got dtype Long, expected Int.",
    ),
    "sinks shape": (dict(sinks=torch.zeros(3)), "sinks: got shape [1, 3, 1], expected [1 or 1, "),
    "sinks dims": (
        dict(sinks=torch.zeros(1, 4, 3)),
        "sinks: got shape [1, 4, 3], expected [4] or [1 or 1, 1 or 4, 1 or 3, 1].",
    ),
    "alibi_slopes shape": (
        dict(alibi_slopes=torch.zeros(3)),
        "alibi_slopes: got shape [1, 3], expected [1 or 1, 1 or 4].",
    ),
    "dropout_p": (dict(dropout_p=1.5), "dropout_p: got 1.500000, expected 0 to 1."),
    "dropout_p below 0": (dict(dropout_p=-0.1), "dropout_p: got -0.100000, expected 0 to 1."),
    "dropout_seed": (
        dict(dropout_p=0.1, dropout_seed=torch.zeros(2, dtype=torch.int64)),
        "dropout_seed: got shape [2] Long, expected one number of dtype Long.",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments(name):
    arguments, text = WRONG_ARGUMENTS[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        attention(Q, KV, KV, **arguments)


UNIMPLEMENTED = {
    "cu_seqlens_q": torch.zeros(2, dtype=torch.int32),
    "block_table": torch.zeros(1, 1, dtype=torch.int32),
    "tile_map": torch.zeros(1, dtype=torch.uint8),
    "num_splits": 3,
}


@pytest.mark.parametrize("name", UNIMPLEMENTED)
def test_unimplemented_arguments_are_refused_by_name(name):
    shown = name.removesuffix("_q")
    with pytest.raises(NotImplementedError, match=f"{shown} is not implemented yet. Leave it out"):
        ops.forward(Q, KV, KV, scale=1.0, **{name: UNIMPLEMENTED[name]})
    with pytest.raises(RuntimeError, match=f"{shown}.* is not implemented"):
        torch.ops.hf_flash_backend.forward(Q, KV, KV, scale=1.0, **{name: UNIMPLEMENTED[name]})


def test_an_optional_tensor_on_another_device_is_refused():
    with pytest.raises(ValueError, match="sinks: got device meta, expected the device of q, cpu"):
        attention(Q, KV, KV, sinks=torch.ones(4, device="meta"))


def test_explain_refuses_impossible_shapes():
    with pytest.raises(ValueError, match="shape: got .*, expected .B, Hq, Hkv"):
        explain(shape=(1, 4, 0, 8, 8, 64, 64), device=H200, is_causal=True)


def test_dropout_without_a_seed_is_refused_by_the_op():
    with pytest.raises(ValueError, match="dropout_seed: got none, expected an int64 tensor"):
        ops.forward(Q, KV, KV, scale=1.0, dropout_p=0.1)


def test_transforms_of_torch_func_are_refused_by_name():
    def loss(q):
        return attention(q, KV, KV).sum()

    with pytest.raises(NotImplementedError, match="torch.func.grad and its relatives are not"):
        torch.func.grad(loss)(Q)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jvp(loss, (Q,), (Q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q, Q)
        with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
            loss(dual)


UNUSABLE = {
    "old GPU": (
        dict(device=dict(H200, sm=75)),
        "the GPU has compute capability 7.5, expected 8.0 or newer. Use attn_implementation=",
    ),
    "old driver": (
        dict(device=dict(H200, driver_version=12080)),
        "the NVIDIA driver is older than the CUDA runtime: got a driver for CUDA 12.8, built with "
        "runtime 13.0, which needs a driver r580 or newer. Update the driver",
    ),
    "no driver": (
        dict(device=dict(H200, driver_version=0)),
        "no usable NVIDIA driver: the library",
    ),
    "CPU-only build": (
        dict(device=dict(H200, runtime_version=0)),
        "this build has no CUDA kernels",
    ),
    "fp64": (
        dict(device=H200, dtype=torch.float64),
        "dtype fp64 is not supported on CUDA: expected fp16, bf16 or fp32.",
    ),
    "head_dim 512": (dict(device=H200, head_dim=512), "head_dim 512 is not supported on CUDA"),
    "head_dim 7": (dict(head_dim=7), "head_dim: got 7, expected a positive multiple of 8"),
    "int8": (dict(dtype=torch.int8), "dtype: got torch.int8, expected one of"),
    "mps": (dict(device="mps"), "device mps is not supported: expected cpu or cuda."),
    "xpu": (dict(device="xpu"), "device xpu is not supported: expected cpu or cuda."),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_why_not(name):
    arguments, text = UNUSABLE[name]
    assert text in why_not(**{"head_dim": 64, **arguments})


def test_what_runs_has_no_reason_against_it():
    assert why_not(head_dim=64) is None
    assert why_not(head_dim=256, device=H200) is None
    assert why_not(head_dim=8, device=dict(H200, sm=80), direction="backward") is None


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_tensors_of_other_devices(device):
    with FakeTensorMode():
        q = torch.empty(1, 1, 4, 8, device=device)
        with pytest.raises(NotImplementedError, match=f"device {device} is not supported"):
            attention(q, q, q)


def test_missing_library(monkeypatch, tmp_path):
    monkeypatch.setattr(ops, "is_loaded", lambda: False)
    monkeypatch.setattr(ops, "library_path", lambda: tmp_path / "libhf_flash_backend.so")
    with pytest.raises(RuntimeError) as raised:
        attention(Q, KV, KV)
    for fact in (
        "is not beside the package",
        f"torch {torch.__version__}",
        "built: ",
        "Build it with: pip install",
    ):
        assert fact in str(raised.value)


def test_broken_library(monkeypatch, tmp_path):
    broken = tmp_path / "libhf_flash_backend.so"
    broken.write_text("no library")
    monkeypatch.setattr(ops, "is_loaded", lambda: False)
    monkeypatch.setattr(ops, "library_path", lambda: broken)
    with pytest.raises(RuntimeError, match="libhf_flash_backend.so does not load"):
        attention(Q, KV, KV)


def test_explain_on_a_gpu_that_is_not_here():
    shape = (2, 16, 4, 4096, 4096, 80, 80)
    plan = explain(shape=shape, device=dict(H200, sm=80), is_causal=True)
    assert (plan["kernel"], plan["compiled_head_dim"], plan["features"], plan["reason"]) == (
        "fwd_sm80",
        96,
        "causal,gqa",
        "",
    )
    assert plan["flops"] == 4 * 2 * 16 * (4096 * 4097 // 2) * 80
    small = explain(
        shape=(1, 1, 1, 64, 64, 128, 128),
        device=dict(H200, sm=86, smem_optin_bytes=101376),
        direction="backward",
    )
    assert small["smem_bytes"] <= 101376


def test_explain_counts_the_pairs_of_the_band():
    sizes = itertools.product((1, 2, 5, 7), (1, 3, 5, 9), (None, 0, 1, 20), (None, 0, 2, 30))
    for lq, lk, left, right in sizes:
        plan = explain(shape=(1, 1, 1, lq, lk, 8, 8), window=(left, right))
        pairs = visible_keys(lq, lk, window=(left, right)).sum().item()
        assert plan["flops"] == 4 * 8 * pairs, (lq, lk, left, right)


def test_explain_does_not_use_the_modes_of_the_caller():
    with torch.device("meta"), FakeTensorMode():
        assert explain(shape=(1, 1, 1, 4, 4, 8, 8))["flops"] == 4 * 8 * 16


def has_sm90() -> bool:
    """Whether this library holds the sm_90 kernels: nvcc, and 90 among HFB_CUDA_ARCHS."""
    return explain(shape=(1, 1, 1, 1, 1, 64, 64), device=H200)["kernel"] == "fwd_sm90"


HOPPER_CALLS = {
    "plain": (dict(), "fwd_sm90", ""),
    "causal": (dict(is_causal=True), "fwd_sm90", ""),
    "row limits": (dict(features=("row_limits",)), "fwd_sm90", ""),
    "mask": (dict(features=("mask",)), "fwd_sm80", "mask, bias, softcap, ALiBi, dropout and"),
    "softcap": (dict(softcap=30.0), "fwd_sm80", "mask, bias, softcap, ALiBi, dropout and"),
    "alibi": (dict(features=("alibi",)), "fwd_sm80", "mask, bias, softcap, ALiBi, dropout and"),
    "sinks": (dict(features=("sinks",)), "fwd_sm90", ""),
    "negative scale": (dict(scale=-1.0), "fwd_sm80", "mask, bias, softcap, ALiBi, dropout and"),
    "backward": (dict(direction="backward"), "bwd_sm90", ""),
    "deterministic backward": (
        dict(direction="backward", features=("deterministic",)),
        "bwd_sm90",
        "",
    ),
    "backward above head dim 128": (
        dict(direction="backward", shape=(2, 16, 4, 64, 64, 192, 128)),
        "bwd_sm80",
        "head dims above 128 have no sm_90 backward kernel yet",
    ),
    "no keys": (dict(shape=(2, 16, 4, 8, 0, 80, 80)), "fwd_sm80", "there are no keys"),
}


@pytest.mark.parametrize("name", HOPPER_CALLS)
def test_which_kernel_runs_on_hopper_and_why(name):
    arguments, kernel, reason = HOPPER_CALLS[name]
    plan = explain(**{"shape": (2, 16, 4, 4096, 4096, 80, 80), "device": H200, **arguments})
    if not has_sm90():
        assert plan["kernel"].endswith("sm80")
        assert "no sm_90 kernels (90 was not in HFB_CUDA_ARCHS)" in plan["reason"]
        return
    assert plan["kernel"] == kernel and plan["reason"].startswith(reason)
    assert (plan["reason"] == "") == kernel.endswith("sm90")


@pytest.mark.parametrize(
    "shape, arguments, num_blocks",
    [
        ((4, 16, 16, 4096, 4096, 128, 128), dict(), 132),  # persistent
        ((1, 1, 1, 1000, 1000, 128, 128), dict(), 8),  # fewer tiles than multiprocessors
        ((4, 16, 16, 4096, 4096, 128, 128), dict(is_causal=True), 132),  # 1024 equal pairs
        ((1, 9, 9, 4096, 4096, 128, 128), dict(is_causal=True), 288),  # 144 pairs: uneven
        ((4, 16, 16, 4096, 4096, 128, 128), dict(features=("row_limits",)), 2048),  # any length
    ],
    ids=["full", "few tiles", "folded", "uneven pairs", "row limits"],
)
def test_blocks_of_the_hopper_kernel(shape, arguments, num_blocks):
    if not has_sm90():
        pytest.skip("this build has no sm_90 kernels")
    assert explain(shape=shape, device=H200, **arguments)["num_blocks"] == num_blocks


@pytest.mark.parametrize(
    "setting, kernel, reason",
    [
        ("sm80", "fwd_sm80", "HFB_KERNEL=sm80 asks for the generic sm_80 kernels"),
        ("sm70", "none", "HFB_KERNEL: got 'sm70', expected sm80 or unset."),
    ],
)
def test_kernel_setting(setting, kernel, reason):
    script = (
        "from hf_flash_backend import explain\n"
        f"plan = explain(shape=(1, 1, 1, 64, 64, 64, 64), device={H200})\n"
        "print(plan['kernel'], plan['reason'])"
    )
    environment = {**os.environ, "HFB_KERNEL": setting}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == f"{kernel} {reason}", run.stderr


def test_trace_can_be_nested_and_read_early():
    with support.trace() as outer:
        attention(Q, KV, KV)
        with support.trace() as inner:
            attention(Q, KV, KV)
            assert len(inner.refresh()) == 1 and len(outer.refresh()) == 2
    assert (len(outer), len(inner)) == (2, 1) and outer[0]["kernel"] == "cpu"
