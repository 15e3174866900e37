"""Builds memkit._C with torch.utils.cpp_extension and ninja. Metadata that does not depend on torch: pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Container
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))  # PEP 517 builds do not put the source folder there
# A virtual environment need not be activated to hold the ninja that builds.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])

import setuptools  # noqa: E402
from setuptools import Extension, setup  # noqa: E402
from setuptools.errors import BaseError  # noqa: E402

import setup_checks as checks  # noqa: E402

# -fno-math-errno and -fno-trapping-math: without them g++ cannot vectorise the branch-free formulas.
# -falign-loops: a loop of four instructions that crosses a line of the code's cache took 1.4 times as long (Zen 5).
# No -march=native: the loops are compiled for three instruction sets and choose at run time, so wheels run everywhere.
# -Wno-...uninitialized: g++ 12 warns of its own AVX-512 headers (GCC bug 105593).
# -fopenmp: at::parallel_for is serial without it. -g0 undoes the -g of some distributions' Python.
CXX_FLAGS = ["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS += [
    "-falign-loops=64",
    "-fvisibility=hidden",
    "-fopenmp",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
# For g++ alone: or it makes of two clamps, with AVX-512, a net of masks that takes half as long again as the formula.
GCC_FLAGS = ["-fno-thread-jumps"]
# -O1 is for the host's half, launches alone, which compile in half the time; kernels are optimised in full unless told not
# to be. -compress-all: object code an eighth the size. Line numbers: NVCC_APPEND_FLAGS=-lineinfo.
NVCC_FLAGS = ["-Xcompiler=-O1", "-Xcompiler=-fvisibility=hidden", "-Xfatbin=-compress-all"]

# Files of csrc compiled as one: the headers, torch above all, take longer than most of these files themselves. The files
# of a unit may not give one name to two things. Units are begun in this order, and then each file that fits no pattern, by
# its path: what takes longest comes first, or one core waits for the other at the end.
UNITS = {
    "torch.cpp": "torch/* bindings",
    "activation.cpp": "cpu/activation",
    "cuda_norm.cu": "cuda/pooling cuda/row_norm* cuda/rotary cuda/softmax",
    "cuda_channel.cu": "cuda/channel_*",
    "cuda_activation.cu": "cuda/activation_*",
    "cuda_loss.cu": "cuda/glu cuda/loss cuda/optimizer",
    "row_norm.cpp": "cpu/row_norm",
    "row_norm_apart.cpp": "cpu/row_norm_apart",
    "softmax.cpp": "cpu/softmax",
    "arena.cpp": "arena/*",
}
# Ahead of a kernel compiled for the CPU; CUDA's own header then finds its guard.
PLAYED = '#include "../../tests/simt/cuda_runtime.h"\n#define __CUDA_RUNTIME_H__\n'


def say(text: str) -> None:
    print(text if text.startswith("memkit") else f"memkit: {text}", file=sys.stderr, flush=True)


def use_ccache(toolkit: checks.Toolkit | None) -> None:
    """For a torch that does not call ccache by itself: CXX becomes a link by which ccache poses as c++."""
    ccache = shutil.which("ccache")
    if ccache is None:
        return
    if "CXX" not in os.environ:
        link = ROOT / "build" / "ccache" / "c++"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(ccache)
        os.environ["CXX"] = str(link)
    if toolkit:
        os.environ.setdefault("PYTORCH_NVCC", f"{ccache} {toolkit.root / 'bin' / 'nvcc'}")


def sources(suffixes: Container[str], played: bool) -> list[str]:
    """The files to compile: each unit, written into build/units where it changed, for ninja's sake, and what is in none.

    played: kernels are compiled for the CPU, over tests/simt/cuda_runtime.h in the place of CUDA's.
    """
    csrc, folder = ROOT / "csrc", ROOT / "build" / "units"
    folder.mkdir(parents=True, exist_ok=True)
    alone = {path for path in csrc.rglob("*") if path.suffix in suffixes}
    units = []
    for place, (name, patterns) in enumerate(UNITS.items()):
        suffix = Path(name).suffix
        if suffix not in suffixes:
            continue
        files = {path for pattern in patterns.split() for path in csrc.glob(pattern + suffix)}
        alone -= files
        text = "".join(f'#include "{path.relative_to(csrc)}"\n' for path in sorted(files))
        unit = folder / f"{place:02}_{name}"  # sources are sorted, by setuptools
        if played and suffix == ".cu":
            unit, text = unit.with_suffix(".cpp"), PLAYED + text
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        units.append(unit)
    return [str(path.relative_to(ROOT)) for path in [*units, *sorted(alone)]]


def build_arguments() -> dict[str, Any]:
    checks.check_platform(sys.platform)
    checks.check_setuptools(setuptools.__version__)
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a CUDA library that torch loads is missing
        raise checks.BuildError(checks.TORCH_MISSING.format(python=sys.executable, error=error)) from None
    warning = checks.check_torch(torch.__version__)
    if warning:
        say(warning)

    def find(torch_cuda: str) -> tuple[checks.Toolkit | None, list[str]]:
        return checks.find_toolkit(torch_cuda, checks.nvcc_candidates(os.environ, checks.site_folders()))

    archs, nvcc_flags = None, NVCC_FLAGS
    toolkit, reason = checks.choose_cuda(os.environ, torch.__version__, torch.version.cuda, find)
    if toolkit:
        os.environ["CUDA_HOME"] = str(toolkit.root)  # cpp_extension reads it on import, below
        archs = os.environ.get("TORCH_CUDA_ARCH_LIST")
        if not archs and not torch.cuda.is_available():
            archs, nvcc_flags = checks.DEFAULT_ARCHS, [*NVCC_FLAGS, *checks.DEFAULT_ARCH_FLAGS]
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "_wrap_compiler"):
        use_ccache(toolkit)
    simt, emulated = (os.environ.get("MEMKIT_CUDA") == wish for wish in ("simt", "emulated"))
    macros = [("MEMKIT_TORCH_VERSION", f'"{torch.__version__}"'), ("MEMKIT_CUDA_VERSION", '""')]
    include_dirs, libraries, link = [str(ROOT / "csrc")], [], ["-fopenmp"]
    cxx = os.environ.get("CXX", "c++")
    link += checks.standard_library(cxx, Path("/proc/self/maps").read_text())
    if toolkit:
        macros[-1] = ("MEMKIT_CUDA_VERSION", f'"{toolkit.version}"')
        macros.append(("MEMKIT_WITH_CUDA", "1"))
        include_dirs.append(str(toolkit.include))
        libraries += ["c10_cuda", "torch_cuda"]
        link.append(str(toolkit.cudart))
    if simt:
        macros.append(("MEMKIT_SIMT", "1"))
        include_dirs.append(str(ROOT / "tests" / "simt"))
    files = sources([".cpp", ".cu"] if toolkit or simt else [".cpp"], simt or emulated)
    extensions = [
        cpp_extension.CppExtension(
            "memkit._C",
            [*files, "tests/simt/operators.cpp"] if emulated else files,
            define_macros=macros,
            extra_compile_args={"cxx": CXX_FLAGS, "nvcc": nvcc_flags},
            include_dirs=include_dirs,
            libraries=libraries,
            extra_link_args=link,
        )
    ]
    if toolkit and emulated:  # to be preloaded, under the name by which the driver is looked for
        name = ["-Wl,-soname,libcuda.so.1"]
        include = [str(toolkit.include)]
        extensions.append(
            Extension("memkit._cuda", ["tests/simt/runtime.cpp"], include_dirs=include, extra_link_args=name)
        )
    version = torch.__version__ + ("-cuda" + toolkit.version if toolkit else "-simt" if simt else "")
    version += "-emulated" if emulated else ""

    class Build(cpp_extension.BuildExtension):  # type: ignore[misc]
        """Checks first, keeps objects a torch version apart, and writes down what the binary was built for."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # One folder for pip's editable builds (which would use a throw-away one) and for `build_ext --inplace`.
            self.build_temp = str(ROOT / "build" / f"{sys.implementation.cache_tag}-torch{version}")

        def run(self) -> None:
            try:
                compiler = checks.check_compiler(os.environ.get("CXX", "c++"))
                checks.check_python_headers(sysconfig.get_path("include"))
                checks.check_ninja(os.environ["PATH"])
                checks.check_disk(Path(self.build_temp))
                gcc = compiler.startswith("g++")
                keeps = checks.collector_flags(os.cpu_count() or 1, checks.memory("Total")) if gcc else []
                cores, available = len(os.sched_getaffinity(0)), checks.memory("Available")
                jobs = checks.max_jobs(os.environ, cores, available, each=3 if keeps else 2)
            except checks.BuildError as error:
                raise BaseError(str(error)) from None
            os.environ["MAX_JOBS"] = str(jobs)
            if gcc:
                extensions[0].extra_compile_args["cxx"] += GCC_FLAGS + keeps
            cuda = f"yes, {reason}" if toolkit else f"no, {reason}"
            say(f"torch {torch.__version__}, {compiler}, {jobs} jobs; CUDA: {cuda}")
            try:
                super().run()
            except RuntimeError as error:  # torch's: a compiler failed, or is one that this nvcc refuses
                raise BaseError(f"memkit: {error}") from None
            self.write_info(Path(self.get_ext_fullpath("memkit._C")))

        def write_info(self, binary: Path) -> None:
            lines = {
                "TORCH": torch.__version__,
                "TORCH_CUDA": torch.version.cuda,
                "CUDA": toolkit.version if toolkit else None,
                "CUDA_ARCHS": (archs or "visible GPUs") if toolkit else None,
                "WITHOUT_CUDA": None if toolkit else reason,
                "COMPILER": checks.check_compiler(os.environ.get("CXX", "c++")),
                "BINARY": binary.name,
            }
            text = '"""Written by setup.py: what memkit._C was built for."""\n\n'
            text += "".join(f"{name}: str | None = {value!r}\n" for name, value in lines.items())
            (binary.parent / "_build_info.py").write_text(text)

    local = checks.local_version(torch.__version__, torch.version.cuda, toolkit is not None)
    return {
        "version": f"{base_version()}+{local}",
        "install_requires": [checks.torch_requirement(torch.__version__)],
        "ext_modules": extensions,
        "cmdclass": {"build_ext": Build},
    }


def base_version() -> str:
    match = re.search(r'^__version__ = "(.+)"$', (ROOT / "memkit" / "__init__.py").read_text(), re.MULTILINE)
    assert match is not None, "memkit/__init__.py has no __version__"
    return match[1]


# A source distribution fits every torch and must not ask for one.
if {"sdist", "clean"} & set(sys.argv[1:]):
    setup(version=base_version(), install_requires=[f"torch>={checks.dotted(checks.TORCH_OLDEST)}"])
else:
    try:
        arguments = build_arguments()
    except checks.BuildError as error:
        sys.exit(str(error))
    setup(**arguments)
