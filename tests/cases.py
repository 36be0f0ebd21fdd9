"""The calls that every kernel must get right: one dataclass, one input maker, three lists.

A case is its id: ``bf16-B2-Hq6-Hkv2-Lq113-Lk203-D64-causal-fused-large`` reads as dtype, sizes,
kind of mask or score, memory layout, and ``-large`` for logits around +-30. The id seeds the
inputs, so a failure is reproduced by its name alone.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
KINDS = (
    "full causal window band offset offsets padding mask bias bias32 softcap negative rows "
    "sinks sink_rows alibi alibi_batch dropout dropout_mask"
).split()
LAYOUTS = "bhld blhd fused expanded odd".split()
# Lengths on both sides of every tile edge, one row, one key, more rows than keys and the reverse.
LENGTHS = ((1, 1), (17, 64), (129, 129), (113, 203), (203, 113), (239, 1), (1, 333))
HEAD_DIMS = (8, 16, 24, 40, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class Case:
    """One call. Sizes as in ``attention``; kind: see ``arguments_of``; layout: see ``poisoned``."""

    dtype: str = "bf16"
    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    Lq: int = 129
    Lk: int = 129
    D: int = 64
    Dv: int = 64
    kind: str = "full"
    layout: str = "blhd"
    scale_up: float = 1.0  # multiplies q: 8 gives logits around +-30
    deterministic: bool = False

    @property
    def id(self) -> str:
        dims = f"B{self.B}-Hq{self.Hq}-Hkv{self.Hkv}-Lq{self.Lq}-Lk{self.Lk}-D{self.D}"
        dims += f"-Dv{self.Dv}" if self.Dv != self.D else ""
        large = "-large" if self.scale_up != 1.0 else ""
        fixed = "-deterministic" if self.deterministic else ""
        return f"{self.dtype}-{dims}-{self.kind}-{self.layout}{large}{fixed}"


@dataclass(frozen=True)
class Inputs:
    """q, k, v, dout, dlse of a case on a device, and the keywords of ``attention``."""

    q: torch.Tensor  # [B, Hq, Lq, D]
    k: torch.Tensor  # [B, Hkv, Lk, D]
    v: torch.Tensor  # [B, Hkv, Lk, Dv], mean 0.5: outputs are not around 0
    dout: torch.Tensor  # [B, Hq, Lq, Dv], in the memory order (B, Lq, Hq, Dv)
    dlse: torch.Tensor  # [B, Hq, Lq] fp32
    arguments: dict


def seeded(name: str) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
    return torch.Generator().manual_seed(seed)


def poisoned(
    shape: tuple[int, int, int, int],
    layout: str,
    dtype: torch.dtype,
    device: str,
    g: torch.Generator,
) -> torch.Tensor:
    """[B, H, L, D] random, the interior of a larger tensor of NaN.

    layout: bhld; blhd, the transpose models pass; fused, one of three slices of a qkv projection;
    expanded, one batch row with stride 0; odd, rows whose address is no multiple of 16 bytes.
    """
    b, h, length, d = shape
    if layout == "expanded":
        return poisoned((1, h, length, d), "bhld", dtype, device, g).expand(shape)
    pads = {"bhld": (1, 8), "odd": (1, 3), "blhd": (1, 8), "fused": (0, 2 * h * d)}
    rows, cols = pads[layout]
    if layout == "fused":
        whole = torch.full((b, length, h * d + cols), math.nan, dtype=dtype, device=device)
        view = whole[..., h * d : 2 * h * d].view(b, length, h, d).transpose(1, 2)
    elif layout == "blhd":
        whole = torch.full((b, length + 2 * rows, h, d + cols), math.nan, dtype=dtype)
        view = whole.to(device)[:, rows:-rows, :, :-cols].transpose(1, 2)
    else:
        whole = torch.full((b, h, length + 2 * rows, d + cols), math.nan, dtype=dtype)
        first = 1 if layout == "odd" else 0
        view = whole.to(device)[:, :, rows:-rows, first : first + d]
    view.copy_(torch.randn(shape, generator=g).to(device, dtype))
    return view


def arguments_of(case: Case, device: str, g: torch.Generator) -> dict:
    """The keywords of ``attention`` for the case's kind; one row of "mask" sees nothing."""
    B, Hq, Lq, Lk = case.B, case.Hq, case.Lq, case.Lk

    def random_bools(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g) > 0.3

    def seed() -> torch.Tensor:
        return torch.randint(-(2**62), 2**62, (1,), generator=g)

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
        "offsets": lambda: dict(
            query_offset=torch.randint(-9, Lk, (B,), generator=g, dtype=torch.int32),
            window=(50, 0),
        ),
        "softcap": lambda: dict(softcap=15.0, is_causal=True),
        "sinks": lambda: dict(sinks=torch.randn(Hq, generator=g), is_causal=True),
        "sink_rows": lambda: dict(
            sinks=torch.randn(B, Hq, Lq, 1, generator=g), mask=random_bools(B, 1, 1, Lk)
        ),
        "alibi": lambda: dict(alibi_slopes=torch.rand(Hq, generator=g) / 8, is_causal=True),
        "alibi_batch": lambda: dict(
            alibi_slopes=torch.rand(B, Hq, generator=g) / 8,
            query_offset=torch.randint(0, Lk, (B, Lq), generator=g, dtype=torch.int32),
            softcap=25.0,
        ),
        "dropout": lambda: dict(dropout_p=0.3, dropout_seed=seed(), is_causal=True),
        "dropout_mask": lambda: dict(
            dropout_p=0.1, dropout_seed=seed(), mask=random_bools(1, 1, Lq, Lk)
        ),
        "negative": lambda: dict(scale=-0.2, is_causal=True),
        "rows": lambda: dict(
            row_start=(starts := torch.randint(0, Lk, (B, Lq), generator=g, dtype=torch.int32)),
            row_end=starts + torch.randint(0, Lk, (B, Lq), generator=g, dtype=torch.int32),
        ),
        "diagonal": lambda: dict(window=(0, 0)),
        "everything": lambda: dict(  # all forms of mask and score at once
            mask=random_bools(B, Lk),
            bias=torch.randn(1, 1, Lq, Lk, generator=g),
            sinks=torch.randn(Hq, generator=g),
            alibi_slopes=torch.rand(Hq, generator=g) / 16,
            dropout_p=0.2,
            dropout_seed=seed(),
            row_start=torch.randint(0, 1 + Lk // 2, (1, Lq), generator=g, dtype=torch.int32),
            window=(40, 3),
            softcap=20.0,
            scale=0.3,
        ),
    }
    arguments = kinds[case.kind]()
    if case.kind == "mask":
        arguments["mask"][0, :, Lq // 2] = False
    return {k: t.to(device) if isinstance(t, torch.Tensor) else t for k, t in arguments.items()}


def make_inputs(case: Case, device: str) -> Inputs:
    g, dtype = seeded(case.id), DTYPES[case.dtype]
    q = poisoned((case.B, case.Hq, case.Lq, case.D), case.layout, dtype, device, g)
    k = poisoned((case.B, case.Hkv, case.Lk, case.D), case.layout, dtype, device, g)
    v = poisoned((case.B, case.Hkv, case.Lk, case.Dv), case.layout, dtype, device, g)
    for tensor, change in ((q, lambda t: t.mul_(case.scale_up)), (v, lambda t: t.add_(0.5))):
        change(tensor[:1] if case.layout == "expanded" else tensor)
    arguments = arguments_of(case, device, g)
    dout = torch.randn((case.B, case.Lq, case.Hq, case.Dv), generator=g).to(device, dtype)
    dlse = torch.randn((case.B, case.Hq, case.Lq), generator=g).to(device)
    return Inputs(q, k, v, dout.transpose(1, 2), dlse, arguments)


def smoke(dtypes: tuple[str, ...]) -> list[Case]:
    """Every kind once: what runs on every push and under compute-sanitizer."""
    return [
        Case(dtype=dtypes[i % len(dtypes)], Lq=77, Lk=133, kind=kind, layout="fused")
        for i, kind in enumerate(KINDS)
    ]


def grid(dtypes: tuple[str, ...], count: int) -> list[Case]:
    """Kinds, head dims, lengths and dtypes in turn, the rest drawn by a fixed seed."""
    draw = random.Random(2)
    cases = []
    for i in range(count):
        D = HEAD_DIMS[i % len(HEAD_DIMS)]
        Lq, Lk = LENGTHS[i % len(LENGTHS)]
        Hq, Hkv = draw.choice(((4, 4), (6, 2), (3, 1)))
        case = Case(
            dtype=dtypes[i % len(dtypes)], Hq=Hq, Hkv=Hkv, Lq=Lq, Lk=Lk, D=D,
            Dv=draw.choice((D, D, max(8, D // 16 * 8))), kind=KINDS[i % len(KINDS)],
            layout=draw.choice(LAYOUTS), scale_up=draw.choice((1.0, 1.0, 8.0)),
        )  # fmt: skip
        cases.append(case)
    return list(dict.fromkeys(cases))


def edge(dtypes: tuple[str, ...]) -> list[Case]:
    """Where kernels break: rows without keys, one-key windows, lengths one off a tile, MQA, decode,
    every head dim, all features together, a value wider than the key.
    """
    shapes = [
        dict(Lq=799, Lk=3, kind="causal"),
        dict(Lq=239, Lk=1, kind="causal"),
        dict(Lq=65, Lk=64, kind="diagonal"),
        dict(Lq=64, Lk=65, kind="causal"),
        dict(Lq=108, Lk=256, kind="window", Hq=6, Hkv=1),
        dict(Lq=15, Lk=16, kind="causal", B=1),
        dict(Lq=16, Lk=15, kind="band", B=1),
        dict(Lq=1, Lk=1000, kind="padding", Hq=8, Hkv=1),
        dict(Lq=1, Lk=17, kind="causal", Hq=8, Hkv=8),
        dict(Lq=127, Lk=130, kind="everything"),
        dict(Lq=130, Lk=127, kind="everything", layout="odd", scale_up=8.0),
        dict(Lq=70, Lk=70, D=64, Dv=128, kind="causal"),
        dict(Lq=70, Lk=70, D=192, Dv=128, kind="causal"),
    ]
    shapes += [dict(D=D, Dv=D, Lq=131, Lk=131, B=1, kind="causal") for D in HEAD_DIMS]
    shapes += [
        dict(D=D, Dv=D, Lq=150, Lk=141, kind=kind, deterministic=True)
        for D in (64, 96, 128, 192, 256)
        for kind in ("causal", "everything")
    ]
    shapes += [dict(D=D, Dv=D, Lq=77, Lk=140, kind="bias32") for D in (64, 128, 192, 256)]
    return [Case(dtype=dtypes[i % len(dtypes)], **shape) for i, shape in enumerate(shapes)]
