"""How a kernel is called, where others went wrong: strides, repeats, devices, streams, compilation,
double backward, head dims, import.
"""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch._dynamo.testing
from cases import DTYPES, HEAD_DIMS, poisoned, seeded
from regressions import assert_finite, check, close, draw, ours, regression, run, truth
from test_errors import H200
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_flash_backend import ops, support, why_not
from hf_flash_backend.reference import attention_fp64


def fused_qkv(device, dtype):
    """Slices of one projection, as GPT-2 makes them: strides (768, 8, 96, 1)."""
    (qkv,) = draw((1, 8, 96), device=device, dtype=dtype)
    q, k, v = (t.view(1, 8, 4, 8).transpose(1, 2) for t in qkv.split(32, dim=2))
    assert q.stride() == (768, 8, 96, 1)
    return q, k, v, q.contiguous()


def transposed(device, dtype):
    """[B, L, H, D] seen as [B, H, L, D]."""
    q, k, v, dout = draw(
        (2, 17, 4, 16), (2, 33, 2, 16), (2, 33, 2, 16), (2, 17, 4, 16), device=device, dtype=dtype
    )
    return [t.transpose(1, 2) for t in (q, k, v, dout)]


def inner_stride(device, dtype):
    """Innermost stride not 1: every other column, and columns for rows."""
    q, k = draw((1, 2, 17, 32), (1, 2, 33, 32), device=device, dtype=dtype)
    v, dout = draw((1, 2, 16, 33), (1, 2, 16, 17), device=device, dtype=dtype, seed=1)
    return q[..., ::2], k[..., ::2], v.transpose(2, 3), dout.transpose(2, 3)


def expanded_kv(device, dtype):
    """k = v, one head and batch row with stride 0 for all, 33 keys, the largest head_dim."""
    dim = next(d for d in (512, 256) if why_not(head_dim=d, device=device) is None)
    q, kv, dout = draw(
        (2, 4, 33, dim), (1, 1, 33, dim), (2, 4, 33, dim), device=device, dtype=dtype
    )
    return q, kv.expand(2, 4, 33, dim), kv.expand(2, 4, 33, dim), dout


def column_slice_of_dout(device, dtype):
    """The gradient is a column slice of a wider tensor."""
    q, k, v, dout = draw(
        (1, 2, 17, 16), (1, 2, 33, 16), (1, 2, 33, 16), (1, 2, 17, 48), device=device, dtype=dtype
    )
    return q, k, v, dout[..., 16:32]


def dout_of_sum(device, dtype):
    """The gradient of out.sum(): all strides 0."""
    q, k, v, _ = column_slice_of_dout(device, dtype)
    return q, k, v, torch.ones((), device=device, dtype=q.dtype).expand(1, 2, 17, 16)


LAYOUTS = {
    f.__name__: f
    for f in (fused_qkv, transposed, inner_stride, expanded_kv, column_slice_of_dout, dout_of_sum)
}


def read_as_dense(t):
    """What a kernel sees that ignores strides."""
    storage = t.untyped_storage().size() // t.element_size() - t.storage_offset()
    flat = torch.as_strided(t, (storage,), (1,)).repeat(1 + t.numel() // storage)
    return flat[: t.numel()].view(t.shape)


def strides_ignored(q, k, v, **arguments):
    out, lse = truth(*(read_as_dense(t) for t in (q, k, v)), **arguments)
    out.register_hook(lambda gradient: read_as_dense(gradient) * 1.0)
    return out, lse


def constant_dout_doubled(q, k, v, **arguments):
    """A gradient with stride 0 is added up along that dimension."""
    out, lse = truth(q, k, v, **arguments)
    out.register_hook(lambda gradient: gradient * (2.0 if 0 in gradient.stride() else 1.0))
    return out, lse


@pytest.mark.parametrize("layout", LAYOUTS)
@regression({})
def test_strides(attend, device, dtype, layout):
    """R23: views, transposes, broadcasts and gradients with stride 0 were read as dense tensors."""
    check_strides(attend, device, dtype, layout)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dout_of_sum"])
@regression({"ignored": strides_ignored})
def test_ignored_strides_fail(attend, device, dtype, layout):
    """R23: the check refuses a kernel that ignores strides."""
    check_strides(attend, device, dtype, layout)


@regression({"doubled": constant_dout_doubled})
def test_misread_constant_gradient_fails(attend, device, dtype):
    """R23: the check refuses a kernel that misreads the gradient of a sum."""
    check_strides(attend, device, dtype, "dout_of_sum")


def check_strides(attend, device, dtype, layout):
    q, k, v, dout = LAYOUTS[layout](device, dtype)
    arguments = {}
    if layout == "expanded_kv":
        mask = torch.rand(2, 1, 33, 33, generator=torch.Generator().manual_seed(1)) > 0.3
        arguments["mask"] = mask.to(device)
    result = run(attend, q, k, v, dout, **arguments)
    check(result, q, k, v, dout, **arguments)
    dense = [t.contiguous() for t in (q, k, v, dout)]
    same = run(attend, *dense, **arguments)
    for name, a in vars(result).items():
        b = getattr(same, name)
        assert a.shape == b.shape
        if attend is ours and (device == "cpu" or name in ("out", "lse")):  # not torch's matmul
            assert torch.equal(a, b), f"{name} differs from that of contiguous tensors"
    for name, t in (("dq", q), ("dk", k), ("dv", v)):
        assert getattr(result, name).shape == t.shape


def noisy(q, k, v, **arguments):
    """Sums in another order each time: one rounding step here and there."""
    out, lse = truth(q, k, v, **arguments)
    out.register_hook(lambda gradient: gradient * (1 + 1e-2 * torch.rand(())))
    return out, lse


@pytest.fixture(params=["argument", "switch"])
def deterministic(request):
    """The two ways to ask for reproducible gradients: the argument, and torch's switch."""
    if request.param == "argument":
        yield dict(deterministic=True)
        return
    torch.use_deterministic_algorithms(True)
    yield {}
    torch.use_deterministic_algorithms(False)


@regression({"noisy": noisy}, dtypes=("bf16",))
def test_gradients_are_reproducible(attend, device, dtype, deterministic):
    """R25: gradients differed from run to run, with the flag for reproducible ones set."""
    q, k, v, dout = draw(
        (2, 8, 333, 64), (2, 2, 333, 64), (2, 2, 333, 64), (2, 8, 333, 64),
        device=device, dtype=dtype,
    )  # fmt: skip
    arguments = dict(is_causal=True, **deterministic)
    try:
        first = run(attend, q, k, v, dout, **arguments)
    except RuntimeError as error:
        assert "deterministic" in str(error) and device == "cuda"
        pytest.skip(str(error))
    check(first, q, k, v, dout, is_causal=True)
    for _ in range(29 if attend is ours else 1):
        again = run(attend, q, k, v, dout, **arguments)
        for name, a in vars(first).items():
            assert torch.equal(a, getattr(again, name)), name


def depends_on_batch(q, k, v, **arguments):
    """Splits the keys in two, and merges, only where the batch is small."""
    if q.shape[0] > 1:
        return truth(q, k, v, **arguments)
    half = k.shape[2] // 2
    (a, lse_a), (b, lse_b) = (
        truth(q, t[:, :, part], u[:, :, part])
        for part in (slice(0, half), slice(half, None))
        for t, u in ((k, v),)
    )
    weight = torch.sigmoid(lse_a - lse_b)[..., None].to(q.dtype)
    return weight * a + (1 - weight) * b, torch.logaddexp(lse_a, lse_b)


@pytest.mark.parametrize("len_q", [1, 64])
@regression({"split": depends_on_batch}, dtypes=("bf16",))
def test_a_row_alone_equals_the_row_in_a_batch(attend, device, dtype, len_q):
    """R25: the same sequence gave other bits in a batch, as keys were split by the batch size."""
    shapes = ((8, 8, len_q, 64), (8, 2, 2048, 64), (8, 2, 2048, 64))
    q, k, v = draw(*shapes, device=device, dtype=dtype)
    out, lse = attend(q, k, v)
    for row in range(8):
        alone, lse_alone = attend(*(t[row : row + 1] for t in (q, k, v)))
        assert torch.equal(alone[0], out[row]) and torch.equal(lse_alone[0], lse[row])
    for t, want in zip((out, lse), attention_fp64(q, k, v), strict=True):
        close(t, want, 1e-2, "batch of 8")


def on_current_device(q, k, v, **arguments):
    device = f"cuda:{torch.cuda.current_device()}"
    return ours(*(t.to(device) for t in (q, k, v)), **arguments)


@pytest.mark.parametrize("attend", [ours, on_current_device], ids=["ours", "wrong-current_device"])
def test_device_of_the_tensors_counts(attend, monkeypatch):
    """E2: kernels ran on the current device instead of the one that holds the tensors."""
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(support, "device_facts", lambda d: asked.append(str(d)) or H200)
    ops._refuse_device.cache_clear()
    try:
        with FakeTensorMode():
            q = torch.empty(1, 2, 4, 8, device="cuda:1", dtype=torch.bfloat16)
            out, lse = attend(q, q, q)
    finally:
        ops._refuse_device.cache_clear()
    answers = [str(out.device), str(lse.device), *asked]
    assert (answers == ["cuda:1"] * 3) == (attend is ours), answers


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_from_two_threads():
    """E2: likewise with two real devices, from two threads at once."""
    failures = []

    def work(index):
        try:
            q, k, v, dout = draw(*[(1, 2, 65, 64)] * 4, device=f"cuda:{index}", dtype="bf16")
            for _ in range(10):
                result = run(ours, q, k, v, dout, is_causal=True)
                check(result, q, k, v, dout, is_causal=True)
                assert result.dq.device == q.device and torch.cuda.current_device() == 0
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.gpu
def test_side_stream_and_graph():
    """E3: a kernel on the default stream raced with side streams and was missing from graphs."""
    old, new = (
        draw(*[(2, 4, 200, 64)] * 4, device="cuda", dtype="bf16", seed=seed) for seed in (0, 1)
    )
    static = [t.clone() for t in old]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [t * 1.0 for t in static]  # must be waited for, on this stream
        aside = run(ours, *late, is_causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    check(aside, *old, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(ours, *static, is_causal=True)
    for t, other in zip(static, new, strict=True):
        t.copy_(other)
    graph.replay()
    check(captured, *new, is_causal=True)
    with pytest.raises(AssertionError):  # the inputs of the capture are not those of the replay
        check(captured, *old, is_causal=True)


def python_list_of_length(q, k, v, **arguments):
    """A number of the shape as a Python constant: compiled again for every length."""
    return ours(q, k, v, scale=1 / 8 + len([0.0] * q.shape[2]) * 1e-30, **arguments)


def value_on_the_host(q, k, v, **arguments):
    """A decision by the content of a tensor: a graph break."""
    return ours(q, k, v, is_causal=bool(q.sum() > 0))


@regression(
    {"recompiles": python_list_of_length, "breaks": value_on_the_host},
    dtypes=("bf16",),
    raises=(
        AssertionError,
        torch._dynamo.exc.TorchDynamoException,
        torch._dynamo.exc.FailOnRecompileLimitHit,
    ),
    with_truth=False,
)
def test_compile(attend, device, dtype):
    """E4: calls broke the graph for want of a shape function, or compiled anew for every length."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for length in range(5, 15):
        q, k, v, dout = draw(*[(1, 2, length, 64)] * 4, device=device, dtype=dtype)
        result = run(compiled, q, k, v, dout, is_causal=True)
        check(result, q, k, v, dout, is_causal=True)
    assert counter.frame_count <= 2


class OnceOnly(torch.autograd.Function):
    """Gradients that torch takes for constants: the second derivative is silently missing."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return attention_fp64(q, k, v)

    @staticmethod
    def backward(ctx, dout, dlse):
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            grads = torch.autograd.grad(attention_fp64(*inputs)[0], inputs, dout.detach())
        return tuple(g + 0.0 * t for g, t in zip(grads, ctx.saved_tensors, strict=True))


@regression({"silent": lambda q, k, v: OnceOnly.apply(q, k, v)})
def test_double_backward(attend, device, dtype):
    """E5: a second derivative was silently zero, or failed without naming the operation."""
    inputs = draw(*[(1, 2, 5, 8)] * 3, device=device, dtype=dtype)

    def second(function, inputs):
        inputs = [t.detach().requires_grad_() for t in inputs]
        out, _ = function(*inputs)
        grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    try:
        got = second(attend, inputs)
    except RuntimeError as error:
        for part in ("hf_flash_backend", "double backward", "eager"):
            assert part in str(error)
        return
    want = second(attention_fp64, [t.double() for t in inputs])
    for name, a, b in zip("qkv", got, want, strict=True):
        close(a, b, 1e-4, f"second derivative by {name}")


def neighbours_read(q, k, v, **arguments):
    """Reads 8 lanes past the head_dim of q, as a kernel that rounds it up and masks nothing."""
    wider = torch.as_strided(q, (*q.shape[:3], q.shape[3] + 8), q.stride(), q.storage_offset())
    out, lse = truth(q, k, v, **arguments)
    return out + 0.0 * wider[..., -1:], lse


WIDTHS = [*((d, d) for d in HEAD_DIMS), (192, 128), (320, 320), (512, 512)]


@pytest.mark.parametrize("dim, dim_v", WIDTHS, ids=str)
@regression({"neighbours_read": neighbours_read}, dtypes=("bf16", "fp16"))
def test_head_dims(attend, device, dtype, dim, dim_v):
    """E7: unusual head dims were refused, or what lies behind a row leaked into it; some limits
    were not told.
    """
    g = seeded(f"{dtype}-{dim}-{dim_v}")
    shapes = ((1, 2, 33, dim), (1, 2, 33, dim), (1, 2, 33, dim_v), (1, 2, 33, dim_v))
    q, k, v, dout = (poisoned(shape, "bhld", DTYPES[dtype], device, g) for shape in shapes)
    try:
        result = run(attend, q, k, v, dout, is_causal=True)
    except NotImplementedError as error:
        assert device == "cuda" and dim > 256
        assert f"head_dim {dim} is not supported" in str(error) and "256" in str(error)
        return
    assert_finite(result)
    check(result, q, k, v, dout, is_causal=True)


ASKS = "from hf_flash_backend import why_not; print(why_not(head_dim=64, device='cuda'))"
# As a package would leave it that had touched a GPU; a host without one cannot really do it.
TOUCHES_CUDA = "import torch; torch.cuda._initialized = True"


@pytest.mark.parametrize(
    "script, hides_gpu",
    [("import hf_flash_backend", False), (ASKS, True), (TOUCHES_CUDA, False)],
    ids=["import", "why_not", "wrong-touches_cuda"],
)
def test_import_leaves_cuda_alone(script, hides_gpu):
    """E9: importing a package initialised CUDA, which breaks forked workers, or failed without a
    GPU, where the question why nothing can run had no answer.
    """
    script += "; import torch; print(torch.cuda.is_initialized())"
    environment = dict(os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if hides_gpu else {}))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    *reason, is_initialized = done.stdout.splitlines()
    assert is_initialized == str(TOUCHES_CUDA in script)
    if script.startswith(ASKS):
        causes = ("driver", "no CUDA kernels", "cannot read GPU 0")
        assert any(cause in reason[0] for cause in causes), reason
