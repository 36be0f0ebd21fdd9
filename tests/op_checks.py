"""What every device must satisfy: cases, and the check that runs one forward and backward."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

import torch
from compare import assert_accurate, assert_lse_accurate

from hf_flash_backend import attention
from hf_flash_backend.reference import attention_eager, attention_fp64

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class Case:
    dtype: str = "bf16"
    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    Lq: int = 129
    Lk: int = 129
    D: int = 64
    Dv: int = 64
    kind: str = "full"  # see arguments_of
    layout: str = "blhd"  # bhld | blhd | fused (slices of one q, k, v tensor) | odd (copied once)
    scale_up: float = 1.0  # multiplies q: 8 gives logits around +-30

    @property
    def id(self) -> str:
        dims = f"B{self.B}-Hq{self.Hq}-Hkv{self.Hkv}-Lq{self.Lq}-Lk{self.Lk}-D{self.D}"
        dims += f"-Dv{self.Dv}" if self.Dv != self.D else ""
        large = "-large" if self.scale_up != 1.0 else ""
        return f"{self.dtype}-{dims}-{self.kind}-{self.layout}{large}"


def poisoned(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str, g
) -> torch.Tensor:
    """[B, H, L, D] random, the interior of a larger NaN tensor, in the wanted memory layout."""
    b, h, length, d = shape
    order = {"bhld": (b, h, length + 2, d + 8), "odd": (b, h, length + 2, d + 3)}
    whole = torch.full(order.get(layout, (b, length + 2, h, d + 8)), math.nan, dtype=dtype)
    view = whole[:, :, 1:-1] if layout in order else whole[:, 1:-1].transpose(1, 2)
    view = view[..., 1:-2] if layout == "odd" else view[..., :-8]
    view.copy_(torch.randn(shape, generator=g).to(dtype))
    if layout == "fused":
        fused = torch.full((b, length, 3 * h * d), math.nan, dtype=dtype)
        fused[..., : h * d] = view.transpose(1, 2).reshape(b, length, h * d)
        whole, view = fused, None
        on_device = whole.to(device)
        return on_device[..., : h * d].view(b, length, h, d).transpose(1, 2)
    on_device = whole.to(device)
    return on_device.as_strided(view.shape, view.stride(), view.storage_offset())


def arguments_of(case: Case, device: str, g: torch.Generator) -> dict:
    """The keywords of attention() for the case's kind; one row of "mask" sees nothing."""
    B, Hq, Lq, Lk = case.B, case.Hq, case.Lq, case.Lk

    def random_bools(*shape):
        return torch.rand(shape, generator=g) > 0.3

    kinds = {
        "full": lambda: {},
        "causal": lambda: dict(is_causal=True),
        "window": lambda: dict(is_causal=True, window=(37, None)),
        "band": lambda: dict(window=(5, 9)),
        "offset": lambda: dict(is_causal=True, query_offset=3),
        "padding": lambda: dict(mask=random_bools(B, Lk), is_causal=True),
        "mask": lambda: dict(mask=random_bools(B, 1, Lq, Lk)),
        "bias": lambda: dict(bias=torch.randn(1, Hq, Lq, Lk, generator=g).to(DTYPES[case.dtype])),
        "bias32": lambda: dict(bias=torch.randn(B, 1, 1, Lk, generator=g), is_causal=True),
        "softcap": lambda: dict(softcap=15.0, is_causal=True),
        "negative": lambda: dict(scale=-0.2, is_causal=True),
        "rows": lambda: dict(
            row_start=(starts := torch.randint(0, Lk, (B, Lq), generator=g, dtype=torch.int32)),
            row_end=starts + torch.randint(0, Lk, (B, Lq), generator=g, dtype=torch.int32),
        ),
    }
    arguments = kinds[case.kind]()
    if case.kind == "mask":
        arguments["mask"][0, :, Lq // 2] = False
    return {k: t.to(device) if isinstance(t, torch.Tensor) else t for k, t in arguments.items()}


def seeded(case: Case) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(case.id.encode()).digest()[:6], "little")
    return torch.Generator().manual_seed(seed)


def check_case(case: Case, device: str) -> None:
    """Forward, lse and every gradient (through out and lse) against fp64 by the accuracy rule."""
    g, dtype = seeded(case), DTYPES[case.dtype]
    q = poisoned((case.B, case.Hq, case.Lq, case.D), case.layout, dtype, device, g)
    k = poisoned((case.B, case.Hkv, case.Lk, case.D), case.layout, dtype, device, g)
    v = poisoned((case.B, case.Hkv, case.Lk, case.Dv), case.layout, dtype, device, g)
    q.mul_(case.scale_up)
    v.add_(0.5)
    arguments = arguments_of(case, device, g)
    dout = torch.randn((case.B, case.Lq, case.Hq, case.Dv), generator=g).to(device, dtype)
    dout = dout.transpose(1, 2)
    dlse = torch.randn((case.B, case.Hq, case.Lq), generator=g).to(device)

    def run(function, *inputs):
        inputs = [t.detach().requires_grad_() for t in inputs]
        out, lse = function(*inputs, **arguments)
        seen = torch.where(lse == -math.inf, 0.0, lse)
        loss = (out * dout.to(out.dtype)).sum() + (seen * dlse.to(lse.dtype)).sum()
        return out.detach(), lse.detach(), torch.autograd.grad(loss, inputs)

    ours, lse, grads = run(lambda *t, **a: attention(*t, return_lse=True, **a), q, k, v)
    truth, truth_lse, truth_grads = run(attention_fp64, q.double(), k.double(), v.double())
    eager, _, eager_grads = run(attention_eager, q, k, v)
    assert ours.transpose(1, 2).is_contiguous()
    assert_accurate(ours, truth, eager, "out")
    scale = abs(arguments.get("scale") or case.D**-0.5)
    absolute_k = k.double().abs().repeat_interleave(case.Hq // case.Hkv, dim=1)
    magnitude = scale * (q.double().abs() @ absolute_k.transpose(-1, -2)).amax(dim=-1)
    assert_lse_accurate(lse, truth_lse, magnitude)
    for name, got, want, normal in zip(
        ("dq", "dk", "dv"), grads, truth_grads, eager_grads, strict=True
    ):
        assert_accurate(got, want, normal, name)


def check_hidden_nan(device: str, dtype: torch.dtype, kind: str) -> None:
    """NaN in keys that no scored row sees changes not one bit of their output and gradients."""
    g = torch.Generator().manual_seed(3)
    B, H, L, D = 2, 4, 200, 64
    q, k, v = (torch.randn(B, H, L, D, generator=g).to(device, dtype) for _ in range(3))
    hidden = torch.zeros(B, L, dtype=torch.bool, device=device)
    scored = slice(0, L)
    if kind == "causal":
        arguments, scored = dict(is_causal=True), slice(0, 130)
        hidden[:, 130:] = True
    elif kind == "padding":
        hidden[0, :77] = hidden[1, 150:] = True
        arguments = dict(mask=~hidden)
    elif kind == "mask":
        hidden[:, 100:150] = True
        mask = torch.rand(B, 1, L, L, generator=g).to(device) > 0.5
        arguments = dict(mask=mask & ~hidden[:, None, None, :])
    elif kind == "bias":
        hidden[:, 100:150] = True
        arguments = dict(bias=torch.where(hidden[:, None, None, :], -math.inf, 0.0).to(dtype))
    else:
        hidden[0, 150:] = hidden[1, 199:] = True
        ends = torch.tensor([[150], [199]], dtype=torch.int32, device=device)
        arguments = dict(row_end=ends)

    def run(k, v):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = attention(*inputs, return_lse=True, **arguments)
        if kind == "causal":
            return out[:, :, scored], lse[:, :, scored], ()
        return out, lse, torch.autograd.grad(out.float().square().sum(), inputs)

    poison = hidden[:, None, :, None]
    clean = run(k, v)
    nans = run(torch.where(poison, math.nan, k), torch.where(poison, math.nan, v))
    assert torch.equal(clean[0], nans[0]) and torch.equal(clean[1], nans[1])
    for name, a, b in zip(("dq", "dk", "dv"), clean[2], nans[2], strict=False):
        assert torch.isfinite(b).all(), name
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


KINDS = "full causal window band offset padding mask bias bias32 softcap negative rows".split()
LENGTHS = ((1, 1), (17, 64), (129, 129), (113, 203), (203, 113), (239, 1), (1, 333))
HEAD_DIMS = (8, 16, 24, 40, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)


def grid(dtypes: tuple[str, ...], count: int) -> list[Case]:
    """Every kind, head dim, length pair and layout at least once, rest drawn by a fixed seed."""
    draw = random.Random(2)
    cases = []
    for i in range(count):
        D = HEAD_DIMS[i % len(HEAD_DIMS)]
        Lq, Lk = LENGTHS[i % len(LENGTHS)]
        Hq, Hkv = draw.choice(((4, 4), (6, 2), (3, 1)))
        case = Case(
            dtype=dtypes[i % len(dtypes)], Hq=Hq, Hkv=Hkv, Lq=Lq, Lk=Lk, D=D,
            Dv=draw.choice((D, D, max(8, D // 16 * 8))), kind=KINDS[i % len(KINDS)],
            layout=draw.choice(("bhld", "blhd", "fused", "odd")),
            scale_up=draw.choice((1.0, 1.0, 8.0)),
        )  # fmt: skip
        cases.append(case)
    return list(dict.fromkeys(cases))
