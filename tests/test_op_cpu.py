"""The ops on the CPU, and what does not depend on a device: schema, fakes, autograd, compile."""

import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint
from cases import edge, grid, smoke
from op_checks import HIDDEN_NAN_KINDS, check_case, check_hidden_nan, check_unseen_rows

from hf_flash_backend import attention, ops, trace
from hf_flash_backend.reference import attention_fp64

DTYPES = ("fp32", "bf16", "fp64", "fp16")
CASES = list(dict.fromkeys(smoke(DTYPES) + grid(DTYPES, 84) + edge(DTYPES)))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_accuracy(case):
    check_case(case, "cpu")


@pytest.mark.parametrize("kind", HIDDEN_NAN_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_in_hidden_keys(dtype, kind):
    check_hidden_nan("cpu", dtype, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_see_no_key(dtype):
    check_unseen_rows("cpu", dtype)


def test_visible_nan_and_inf_reach_exactly_the_rows_that_see_them():
    q, k, v = (torch.randn(1, 1, 70, 8) for _ in range(3))
    v[0, 0, 40, 3], v[0, 0, 50, 5] = float("nan"), float("inf")
    out = attention(q, k, v, is_causal=True)
    truth, _ = attention_fp64(q, k, v, is_causal=True)
    assert torch.equal(torch.isnan(out), torch.isnan(truth))
    assert torch.equal(torch.isinf(out), torch.isinf(truth))


def test_threads_do_not_change_a_bit():
    def run(threads):
        torch.set_num_threads(threads)
        inputs = [torch.randn(2, h, 300, 40, generator=g).requires_grad_() for h in (6, 2, 2)]
        out = attention(*inputs, is_causal=True)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    before = torch.get_num_threads()
    try:
        g = torch.Generator().manual_seed(0)
        one = run(1)
        g = torch.Generator().manual_seed(0)
        two = run(2)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def sample(dtype=torch.float32, requires_grad=True):
    g = torch.Generator().manual_seed(4)
    return [
        torch.randn(2, h, n, 8, generator=g, dtype=dtype).requires_grad_(requires_grad)
        for h, n in ((4, 5), (2, 7), (2, 7))
    ]


OPCHECK = {
    "full": {},
    "causal": {"window_right": 0},
    "softcap": {"softcap": 5.0},
    "mask": {"mask": torch.ones(2, 1, 5, 7, dtype=torch.bool)},
    "rows": {"row_start": torch.ones(2, 5, dtype=torch.int32)},
    "offsets": {"query_offsets": torch.ones(2, 1, dtype=torch.int32), "window_right": 0},
    "bias": {"bias": torch.zeros(1, 4, 5, 7, requires_grad=True)},
    "sinks": {"sinks": torch.zeros(1, 4, 1, requires_grad=True)},
    "alibi": {"alibi_slopes": torch.ones(1, 4, requires_grad=True)},
    "dropout": {"dropout_seed": torch.tensor([7]), "dropout_p": 0.2},
}


@pytest.mark.parametrize("name", OPCHECK)
def test_opcheck(name):
    q, k, v = sample()
    arguments = dict(scale=0.3, **OPCHECK[name])
    torch.library.opcheck(torch.ops.hf_flash_backend.forward.default, (q, k, v), arguments)
    out, lse = ops.forward(q, k, v, **arguments)
    arguments = {n: t.detach() if torch.is_tensor(t) else t for n, t in arguments.items()}
    arguments |= dict(bias_grad=name == "bias", alibi_grad=name == "alibi")
    detached = tuple(t.detach() for t in (torch.randn_like(out), lse, q, k, v, out, lse))
    torch.library.opcheck(torch.ops.hf_flash_backend.backward.default, detached, arguments)


GRADCHECK = {
    "full": {},
    "causal": dict(is_causal=True),
    "window": dict(window=(2, 1)),
    "learned": dict(
        bias=torch.randn(1, 1, 3, 4, dtype=torch.float64),
        sinks=torch.randn(2, dtype=torch.float64),
        alibi_slopes=torch.rand(1, 2, dtype=torch.float64),
        softcap=3.0,
    ),
    "dropout": dict(dropout_p=0.4, dropout_seed=torch.tensor([3])),
}


@pytest.mark.parametrize("name", GRADCHECK)
def test_gradcheck(name):
    g = torch.Generator().manual_seed(4)
    shapes = ((1, 2, 3, 8), (1, 1, 4, 8), (1, 1, 4, 8))
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    arguments = dict(GRADCHECK[name])
    learned = [n for n, t in arguments.items() if torch.is_tensor(t) and t.is_floating_point()]
    inputs += [arguments.pop(n) for n in learned]

    def function(q, k, v, *rest):
        named = dict(zip(learned, rest, strict=True))
        return attention(q, k, v, return_lse=True, **arguments, **named)

    inputs = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(function, inputs, atol=1e-7)


def test_compile_fullgraph_forward_and_backward():
    def loss(q, k, v, mask):
        return attention(q, k, v, mask=mask, is_causal=True).square().sum()

    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :2] = False
    with trace() as calls:
        eager = torch.autograd.grad(loss(*(inputs := sample()), mask), inputs)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        ours = torch.autograd.grad(compiled(*(inputs := sample()), mask), inputs)
    for a, b in zip(eager, ours, strict=True):
        torch.testing.assert_close(a, b)
    assert [c["op"] for c in calls] == ["forward", "backward"] * 2


def test_compile_does_not_recompile_for_every_length():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q: attention(q, q, q, is_causal=True), backend=counter)
    for length in range(5, 15):
        compiled(torch.randn(1, 2, length, 8))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_draws_the_same_dropout_again(use_reentrant):
    inputs = sample()

    def function(q, k, v):
        return attention(q, k, v, dropout_p=0.5).square()

    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(11)
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=use_reentrant)
        else:
            out = function(*inputs)
        gradients.append(torch.autograd.grad(out.sum(), inputs) if not use_reentrant else None)
        if use_reentrant:
            for t in inputs:
                t.grad = None
            out.sum().backward()
            gradients[-1] = [t.grad.clone() for t in inputs]
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_dropout_follows_the_generator_of_torch():
    q = torch.randn(1, 2, 64, 8)
    torch.manual_seed(1)
    first, second = attention(q, q, q, dropout_p=0.5), attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(attention(q, q, q, dropout_p=0.5), first)
    assert not torch.equal(first, second)


def test_dropout_keeps_the_share_and_the_mean():
    """Ones as values: an output is the sum of what was kept. 2 million draws, 5 standard errors."""
    q, v = torch.zeros(1, 2, 1024, 8), torch.ones(1, 2, 1024, 8)
    for rate in (0.1, 0.5, 0.9):
        out = attention(q, q, v, dropout_p=rate, dropout_seed=torch.tensor([5]))[..., 0]
        error = (rate / (1 - rate) / out.numel() / 1024) ** 0.5
        assert abs(out.mean().item() - 1) < 5 * error
    assert torch.equal(attention(q, q, v, dropout_p=1.0), torch.zeros_like(v))
    assert torch.equal(attention(q, q, v, dropout_p=0.0), attention(q, q, v))


def test_vmap_equals_a_loop():
    inputs = [torch.stack([t.detach(), 2 * t.detach()]) for t in sample()]
    ours = torch.vmap(lambda q, k, v: attention(q, k, v, is_causal=True))(*inputs)
    loop = [attention(*t, is_causal=True) for t in zip(*inputs, strict=True)]
    assert torch.equal(ours, torch.stack(loop))


def test_expanded_dout_and_lse_gradient_alone():
    inputs = sample()
    out, lse = attention(*inputs, return_lse=True)
    truth, truth_lse = attention_fp64(*inputs)
    for ours, want in ((out.sum(), truth.sum()), (lse.sum(), truth_lse.sum())):
        got = torch.autograd.grad(ours, inputs[:2], retain_graph=True)
        ref = torch.autograd.grad(want, inputs[:2], retain_graph=True)
        for a, b in zip(got, ref, strict=True):
            torch.testing.assert_close(a, b.float(), atol=1e-5, rtol=1e-5)


def test_double_backward_is_refused_by_name():
    inputs = sample()
    grads = torch.autograd.grad(attention(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(grads[0].sum(), inputs)


def test_empty_problems():
    q = torch.randn(0, 2, 5, 8)
    assert attention(q, q, q).shape == (0, 2, 5, 8)
    q, k = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 2, 0, 8)
    out, lse = attention(q, k, k, return_lse=True)
    assert (out == 0).all() and (lse == float("-inf")).all()
    assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()


def test_extra_memory_is_linear_in_the_length():
    """8,192 keys: eager needs 256 MiB of scores a head; a fresh process grows by a few."""
    script = (
        "import resource, torch; from hf_flash_backend import attention;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024;"
        "q = torch.randn(1, 1, 8192, 64); attention(q[:, :, :64], q[:, :, :64], q[:, :, :64]);"
        "before = peak(); attention(q, q, q, is_causal=True); print(peak() - before)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 32  # MiB
