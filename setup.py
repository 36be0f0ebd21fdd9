"""Builds hf_flash_backend/libhf_flash_backend.so: C++ for the CPU, CUDA kernels when nvcc is found.

The library uses the libtorch stable ABI and holds no Python, so one file serves every Python and
every torch from 2.10 on, and it is built here by a ninja file rather than torch's CUDAExtension,
which refuses a CPU-only torch. Each kernel source is compiled once for each head dim of
csrc/tiles.h: small parallel units, no generated sources.

Environment: HFB_BUILD=auto|cpu|cuda (default auto: CUDA if nvcc is found), HFB_CUDA_ARCHS="80;90"
(compute capabilities; the lowest also as PTX for newer GPUs), MAX_JOBS (default from cores and
memory).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
LIBRARY = "libhf_flash_backend.so"
TORCH_TARGET = "0x020a000000000000ULL"  # stable ABI of torch 2.10
DEFAULT_ARCHS = "80;90"
GIB_PER_JOB = 2.0  # one nvcc unit peaks near 1 GiB


def default_jobs() -> int:
    """MAX_JOBS, else as many as cores and memory carry."""
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gib / GIB_PER_JOB)))


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [str(Path(home) / "bin" / "nvcc")] if home else []
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if path and Path(path).is_file()), None)


def choose_nvcc() -> str | None:
    """The nvcc to use, or None for a CPU-only build, explained in one line."""
    mode = os.environ.get("HFB_BUILD", "auto")
    if mode not in ("auto", "cpu", "cuda"):
        sys.exit(f"hf_flash_backend: HFB_BUILD: got {mode!r}, expected auto, cpu or cuda.")
    nvcc = None if mode == "cpu" else find_nvcc()
    if mode == "cuda" and nvcc is None:
        sys.exit(
            "hf_flash_backend: HFB_BUILD=cuda but nvcc was not found. "
            "Install the CUDA toolkit or set CUDA_HOME."
        )
    if nvcc is None:
        why = (
            "HFB_BUILD=cpu"
            if mode == "cpu"
            else "nvcc was not found (PATH, CUDA_HOME, /usr/local/cuda)"
        )
        print(f"hf_flash_backend: building the CPU kernels only: {why}.")
    return nvcc


def cuda_archs() -> list[int]:
    text = os.environ.get("HFB_CUDA_ARCHS", DEFAULT_ARCHS).replace(",", ";")
    archs = sorted({int(a.strip().replace(".", "")) for a in text.split(";") if a.strip()})
    if not archs or archs[0] < 80:
        sys.exit(
            f"hf_flash_backend: HFB_CUDA_ARCHS: got {text!r}, "
            "expected compute capabilities from 80 on, like '80;90'."
        )
    return archs


# Of csrc/tiles.h, for kernels that are not compiled at every head dim.
HEAD_DIM_LISTS = {
    "fwd_sm90": "HFB_SM90_HEAD_DIMS",
    "bwd_sm90": "HFB_BWD_SM90_HEAD_DIMS",
    "bwd_dq_sm80": "HFB_COARSE_HEAD_DIMS",
    "bwd_dbias_sm80": "HFB_COARSE_HEAD_DIMS",
}


def head_dims(macro: str = "HFB_HEAD_DIMS") -> list[int]:
    """The compiled head dims, read from their one list in csrc/tiles.h."""
    line = re.search(rf"#define {macro}\(X\)(.*)", (CSRC / "tiles.h").read_text())
    return [int(d) for d in re.findall(r"X\((\d+)\)", line.group(1))]


class BuildLibrary(build_ext):
    user_options = [
        *build_ext.user_options,
        ("kernel=", None, "rebuild only this kernel source, e.g. fwd_sm80, and relink"),
        ("head-dim=", None, "with --kernel: only this head dim"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.kernel = None
        self.head_dim = None

    def run(self) -> None:
        try:
            import torch
        except ImportError:
            sys.exit(
                "hf_flash_backend: torch is not importable in the build environment. "
                "Install torch >= 2.10 first, then: pip install --no-build-isolation ."
            )
        torch_dir = Path(torch.__file__).resolve().parent
        nvcc = choose_nvcc()
        archs = cuda_archs() if nvcc else []
        build_dir = ROOT / "build" / ("cuda" if nvcc else "cpu")
        build_dir.mkdir(parents=True, exist_ok=True)
        objects, link = write_ninja(build_dir, torch_dir, nvcc, archs)
        ninja = ninja_command() + ["-C", str(build_dir), f"-j{default_jobs()}"]
        if self.kernel:
            wanted = [o for o in objects if o.startswith(f"{self.kernel}_d{self.head_dim or ''}")]
            if not wanted:
                sys.exit(
                    f"hf_flash_backend: no object of kernel {self.kernel!r} "
                    f"at head dim {self.head_dim}: {objects}"
                )
            subprocess.run([*ninja, *wanted], check=True)
            subprocess.run(link, shell=True, check=True, cwd=build_dir)
            for name in wanted:
                print((build_dir / name).with_suffix(".ptxas").read_text())
        else:
            print(
                f"hf_flash_backend: {len(objects)} units, architectures {archs or 'CPU only'}, "
                f"{default_jobs()} jobs"
            )
            subprocess.run(ninja, check=True)
        target = (
            ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        ) / "hf_flash_backend"
        target.mkdir(parents=True, exist_ok=True)
        staged = (
            target / f"{LIBRARY}.new"
        )  # replaced at once: a running process keeps the file it mapped
        shutil.copy2(build_dir / LIBRARY, staged)
        staged.replace(target / LIBRARY)
        info = {
            "torch": torch.__version__,
            "cuda": cuda_version(nvcc),
            "archs": archs,
            "head_dims": head_dims(),
        }
        (target / "build_info.json").write_text(json.dumps(info) + "\n")

    def get_outputs(self) -> list[str]:
        return [
            str(Path(self.build_lib) / "hf_flash_backend" / name)
            for name in (LIBRARY, "build_info.json")
        ]


def ninja_command() -> list[str]:
    try:
        import ninja

        return [str(Path(ninja.BIN_DIR) / "ninja")]
    except ImportError:
        found = shutil.which("ninja")
        return (
            [found]
            if found
            else sys.exit("hf_flash_backend: ninja was not found. Run: pip install ninja")
        )


def cuda_version(nvcc: str | None) -> str | None:
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", text).group(1)


def write_ninja(
    build_dir: Path, torch_dir: Path, nvcc: str | None, archs: list[int]
) -> tuple[list[str], str]:
    """Writes build.ninja; returns the object names and the link command."""
    cxx = os.environ.get("CXX", "g++")
    with_sm90 = " -DHFB_WITH_SM90" if 90 in archs else ""
    defines = f"-DTORCH_TARGET_VERSION={TORCH_TARGET}" + (" -DHFB_WITH_CUDA" if nvcc else "")
    defines += with_sm90
    host = "-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-unknown-pragmas"
    track = "-MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc"
    includes = f"-isystem {torch_dir}/include"
    compile_cxx = f"{cxx} -std=c++17 -O3 {host.replace(',', ' ')} {defines} {includes} {track}"
    lines = ["ninja_required_version = 1.5"]
    lines += [f"rule cxx\n  command = {compile_cxx}\n  description = C++ $in"]
    units = [
        (source.stem, "cxx", source, "")
        for source in [*CSRC.glob("*.cpp"), *CSRC.glob("cpu/*.cpp")]
    ]
    if nvcc:
        lowest = f"compute_{archs[0]}"
        codes = ",".join([f"sm_{a}" for a in archs] + [lowest])
        # One PTX for all architectures saves a sixth of the build; bwd_sm80 has its own for each,
        # because its 16-byte reductions exist from sm_90 on.
        shared_ptx = f"-gencode=arch={lowest},code=[{codes}]"
        own_ptx = " ".join(f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs)
        own_ptx += f" -gencode=arch={lowest},code={lowest}"
        checked = f"{sys.executable} {CSRC / 'cuda' / 'checked_nvcc.py'} $out"
        checked += f" {nvcc} -std=c++17 -O3 -Xcompiler {host}{with_sm90}"
        lines += [f"rule nvcc_host\n  command = {checked} {track}\n  description = C++ $in"]
        kernel = (
            f"{checked} $gencode --compress-mode=speed -Xptxas -v -DHFB_HEAD_DIM=$head_dim {track}"
        )
        lines += [f"rule nvcc\n  command = {kernel}\n  description = CUDA $in, head dim $head_dim"]
        units += [
            (source.stem, "nvcc_host", source, "") for source in (CSRC / "cuda").glob("*.cpp")
        ]
        # wgmma and setmaxnreg exist for exactly compute capability 9.0: no PTX for newer GPUs.
        sm90 = "-gencode=arch=compute_90a,code=sm_90a"
        for source in (CSRC / "cuda").glob("*.cu"):
            is_sm90 = source.stem.endswith("_sm90")
            if is_sm90 and not with_sm90:
                continue
            generic = own_ptx if source.stem == "bwd_sm80" else shared_ptx
            flags = f"\n  gencode = {sm90 if is_sm90 else generic}\n  head_dim = "
            dims = head_dims(HEAD_DIM_LISTS.get(source.stem, "HFB_HEAD_DIMS"))
            units += [(f"{source.stem}_d{d}", "nvcc", source, f"{flags}{d}") for d in dims]
    lines += [
        f"build {name}.o: {rule} {source}{variables}"
        for name, rule, source, variables in sorted(units)
    ]
    objects = sorted(f"{name}.o" for name, *_ in units)
    # A NEEDED entry for libtorch_cpu and libc10 is required: torch loads its libraries locally, so
    # the stable C functions are found only through it. libtorch_cuda is not linked, so that the
    # file also loads beside a CPU-only torch.
    linker, to_ld = (f"{nvcc} -cudart static", "-Xlinker ") if nvcc else (cxx, "-Wl,")
    libraries = f"-L{torch_dir}/lib {to_ld}--no-as-needed -ltorch_cpu -lc10 -ldl -lpthread"
    link = f"{linker} {to_ld}-s -shared -o {LIBRARY} {' '.join(objects)} {libraries}"
    lines += [f"rule link\n  command = {link}\n  description = link {LIBRARY}"]
    lines += [f"build {LIBRARY}: link {' '.join(objects)}", f"default {LIBRARY}", ""]
    (build_dir / "build.ninja").write_text("\n".join(lines))
    return objects, link


class AnyPythonWheel(bdist_wheel):
    """py3-none-<platform>: the library holds no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("hf_flash_backend._library", sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel},
)
