"""The CUDA kernels: the cases of the CPU, and streams, graphs, sizes past one tile."""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import op_checks
import pytest
import torch
from cases import Case, edge, grid, smoke
from op_checks import HIDDEN_NAN_KINDS, check_case, check_hidden_nan, check_unseen_rows
from torch.utils.checkpoint import checkpoint

from hf_flash_backend import attention, support, trace
from hf_flash_backend.reference import attention_eager, attention_fp64

pytestmark = pytest.mark.gpu

DTYPES = ("bf16", "fp16")
CASES = list(dict.fromkeys(smoke(DTYPES) + grid(DTYPES, 168) + edge(DTYPES)))
CASES += list(dict.fromkeys(smoke(("fp32",)) + grid(("fp32",), 84) + edge(("fp32",))))
LONG = [
    Case(dtype=dtype, B=1, Hq=4, Hkv=2, Lq=Lq, Lk=Lk, D=D, Dv=D, kind=kind)
    for dtype, D in (("bf16", 64), ("fp16", 128), ("bf16", 256))
    for Lq, Lk in ((1024, 1023), (799, 1500))
    for kind in ("full", "causal", "window", "padding", "rows")
]


@pytest.mark.parametrize("case", CASES + LONG, ids=lambda c: c.id)
def test_accuracy(case):
    check_case(case, "cuda")


def test_fp32_is_not_tf32(monkeypatch):
    """The same check fails for torch's own formula once its products are rounded to TF32."""
    case = Case(dtype="fp32", Lq=130, Lk=257, D=128, Dv=128)
    check_case(case, "cuda")

    def rounded(q, k, v, return_lse, deterministic, **arguments):
        torch.backends.cuda.matmul.allow_tf32 = q.dtype == torch.float32
        out, lse = attention_eager(q, k, v, **arguments)
        torch.backends.cuda.matmul.allow_tf32 = False
        return out, lse

    monkeypatch.setattr(op_checks, "attention", rounded)
    monkeypatch.setattr(op_checks, "is_dense", lambda out: True)
    with pytest.raises(AssertionError, match="out: m.* error .*, allowed"):
        check_case(case, "cuda")


@pytest.mark.parametrize("kind", HIDDEN_NAN_KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_nan_in_hidden_keys(dtype, kind):
    check_hidden_nan("cuda", dtype, kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rows_that_see_no_key(dtype):
    check_unseen_rows("cuda", dtype)


def tensors(length=300, dtype=torch.bfloat16, heads=(4, 2), dim=64):
    hq, hkv = heads
    return [torch.randn(2, h, length, dim, device="cuda", dtype=dtype) for h in (hq, hkv, hkv)]


def test_forward_is_bitwise_reproducible():
    q, k, v = tensors()
    first = attention(q, k, v, is_causal=True)
    assert all(torch.equal(first, attention(q, k, v, is_causal=True)) for _ in range(10))


def test_side_stream():
    q, k, v = tensors(1000)
    expected = attention(q, k, v, is_causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = q * 1.0  # the kernel must wait for this on the same stream
        ours = attention(late, k, v, is_causal=True)
    stream.synchronize()
    assert torch.equal(ours, expected)


def test_a_thread_that_never_used_the_gpu():
    """Such threads run the backward pass, and the forward pass again under checkpointing."""
    q, k, v = tensors(200)
    expected = attention(q, k, v)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(attention, q, k, v).result(), expected)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    plain = torch.autograd.grad(attention(*leaves).sum(), leaves)
    out = checkpoint(attention, *leaves, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sum(), leaves), plain, strict=True):
        torch.testing.assert_close(a, b)


def test_two_shapes_back_to_back_do_not_share_state():
    a, b = tensors(333), tensors(65, heads=(8, 1), dim=128)
    alone = [attention(*t, is_causal=True) for t in (a, b)]
    for _ in range(3):
        assert torch.equal(attention(*a, is_causal=True), alone[0])
        assert torch.equal(attention(*b, is_causal=True), alone[1])


def test_cuda_graph_replays_forward_and_backward_on_new_inputs():
    inputs = [t.requires_grad_() for t in tensors(200)]

    def step():
        out = attention(*inputs, is_causal=True)
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in inputs:
            t.copy_(torch.randn_like(t))
    graph.replay()
    fresh = step()
    assert torch.equal(captured[0], fresh[0])
    for a, b in zip(captured[1:], fresh[1:], strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_compile_inductor_forward_and_backward():
    def loss(q, k, v):
        return attention(q, k, v, is_causal=True).float().square().sum()

    inputs = [t.requires_grad_() for t in tensors(128)]
    eager = torch.autograd.grad(loss(*inputs), inputs)
    ours = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs), inputs)
    for a, b in zip(eager, ours, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_opcheck():
    q, k, v = (t.requires_grad_() for t in tensors(20))
    torch.library.opcheck(
        torch.ops.hf_flash_backend.forward.default, (q, k, v), dict(scale=0.1, window_right=0)
    )


def test_trace_names_the_kernels_and_tiles():
    inputs = [t.requires_grad_() for t in tensors(70, dim=80)]
    on_hopper = support.device_facts("cuda")["sm"] == 90
    with trace() as calls:
        attention(*inputs).sum().backward()
        attention(*inputs, softcap=5.0)
    forward = "fwd_sm90" if on_hopper else "fwd_sm80"
    backward = "bwd_sm90" if on_hopper else "bwd_sm80"
    assert [c["kernel"] for c in calls] == [forward, backward, "fwd_sm80"]
    assert calls[0]["compiled_head_dim"] == (128 if on_hopper else 96)
    assert calls[0]["block_m"] == 128 and calls[0]["reason"] == ""
    assert ("sm_90" in calls[2]["reason"]) == on_hopper


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_hopper_and_generic_kernel_agree_beyond_one_tile_a_multiprocessor(D, is_causal):
    """More query tiles than multiprocessors: blocks take several, or pairs, or run in waves."""
    if support.device_facts("cuda")["sm"] != 90:
        pytest.skip("not a Hopper GPU")
    q, k, v = (torch.randn(3, 24, 1100, D, device="cuda", dtype=torch.float16) for _ in range(3))
    with trace() as calls:
        out, lse = attention(q, k, v, is_causal=is_causal, return_lse=True)
        mask = torch.ones(1, 1, 1, 1100, dtype=torch.bool, device="cuda")
        other, other_lse = attention(q, k, v, is_causal=is_causal, mask=mask, return_lse=True)
    assert [c["kernel"] for c in calls] == ["fwd_sm90", "fwd_sm80"]
    tiles = 72 * -(-1100 // calls[0]["block_m"])
    assert tiles > support.device_facts("cuda")["num_sms"]
    torch.testing.assert_close(out, other, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, other_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_values_that_are_not_finite_reach_the_rows_that_see_them_and_no_other(D):
    q, k, v = (torch.randn(2, 4, 500, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    clean = attention(q, k, v, is_causal=True)
    v[:, :, 200, 3], v[:, :, 201, 5], v[:, :, 340, 7] = math.nan, math.inf, -math.inf
    ours = attention(q, k, v, is_causal=True)
    truth, _ = attention_fp64(q.double(), k.double(), v.double(), is_causal=True)
    assert torch.equal(ours[:, :, :200], clean[:, :, :200])
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(ours), kind(truth))


def test_generic_kernels_can_be_forced():
    script = (
        "import torch; from hf_flash_backend import attention, trace\n"
        "q = torch.ones(1, 1, 64, 64, device='cuda', dtype=torch.bfloat16)\n"
        "with trace() as calls: attention(q, q, q)\n"
        "print(calls[0]['kernel'])"
    )
    environment = {**os.environ, "HFB_KERNEL": "sm80"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "fwd_sm80", run.stderr


def test_what_the_device_cannot_do_is_refused_by_name():
    q = torch.randn(1, 1, 8, 64, device="cuda", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="dtype fp64 is not supported on CUDA"):
        attention(q, q, q)
    q = torch.randn(1, 1, 8, 264, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="head_dim 264 is not supported on CUDA"):
        attention(q, q, q)
    q = torch.randn(1, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expected one device"):
        attention(q, q.cpu(), q)
    assert support.why_not(head_dim=64, device="cuda") is None


@pytest.mark.parametrize("D", [96, 128, 192, 256])
def test_small_shared_memory_backward_tiles_are_planned(D):
    facts = dict(support.device_facts("cuda"), sm=86, smem_optin_bytes=101376)
    plan = support.explain(shape=(1, 1, 1, 128, 128, D, D), device=facts, direction="backward")
    assert plan["smem_bytes"] <= 101376
