"""What a build of memkit needs, found and checked before the compiler starts.

Everything here is plain standard-library Python that takes its surroundings as arguments, so that the tests can
describe a machine instead of owning one. `setup.py` calls it; `python setup_checks.py` prints requirements for the Makefile.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH_OLDEST = (2, 11)
TORCH_NEWEST_TESTED = (2, 15)
GCC_OLDEST = 11
CLANG_OLDEST = 14
SETUPTOOLS_OLDEST = "77.0.3"  # as in pyproject.toml: the first that reads its licence
DISK_NEEDED = 2 * 1024**3
# 8.0 runs on every Ampere and Ada card, 9.0 on Hopper; newer cards compile the PTX. All from one translation, for 8.0, of
# which csrc/cuda needs no more: torch's own flags for a list of architectures would translate once for each.
DEFAULT_ARCHS = "8.0+PTX;9.0"
DEFAULT_ARCH_FLAGS = [f"-gencode=arch=compute_80,code={code}" for code in ("compute_80", "sm_80", "sm_90")]

Run = Callable[[Sequence[str]], str]  # command -> what it printed; raises OSError or CalledProcessError


class BuildError(Exception):
    """The build cannot work; the text says why and what to do."""


def run(command: Sequence[str]) -> str:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


def minor(version: str) -> tuple[int, int]:
    """(2, 14) from "2.14.0+cu130"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise BuildError(f"memkit: expected a version like 2.14.0, got {version!r}")
    return int(match[1]), int(match[2])


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# torch


TORCH_MISSING = (
    "memkit: {python} cannot import torch ({error}).\n"
    "memkit is compiled against the torch that you already have; pip's build isolation hides it. Install torch "
    f"({dotted(TORCH_OLDEST)} to {dotted(TORCH_NEWEST_TESTED)}), then:\n"
    f"  pip install 'setuptools>={SETUPTOOLS_OLDEST}' ninja && pip install --no-build-isolation ."
)


def check_platform(platform: str) -> None:
    if platform != "linux":
        raise BuildError(f"memkit: builds on Linux only, got {platform}")


def check_setuptools(version: str) -> None:
    if _release(version) < _release(SETUPTOOLS_OLDEST):
        raise BuildError(
            f"memkit: needs setuptools {SETUPTOOLS_OLDEST} or newer, got {version}; "
            f"pip install 'setuptools>={SETUPTOOLS_OLDEST}'"
        )


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def check_torch(version: str) -> str | None:
    """Raises below the oldest torch that works; returns a warning above the newest that was tested."""
    got = minor(version)
    if got < TORCH_OLDEST:
        raise BuildError(f"memkit: needs torch {dotted(TORCH_OLDEST)} or newer, got {version}")
    if got > TORCH_NEWEST_TESTED:
        return f"memkit: tested with torch up to {dotted(TORCH_NEWEST_TESTED)}, got {version}; building all the same"
    return None


def torch_requirement(version: str) -> str:
    """The only torch line that a binary built with this torch can load into."""
    return f"torch=={dotted(minor(version))}.*"


def local_version(torch_version: str, torch_cuda: str | None, with_cuda: bool) -> str:
    """torch2.14.cu130, torch2.13.cpu: what tells two wheels of one memkit version apart."""
    variant = "cu" + torch_cuda.replace(".", "") if with_cuda and torch_cuda else "cpu"
    return f"torch{dotted(minor(torch_version))}.{variant}"


# Compiler, headers, disk


def check_compiler(cxx: str, run: Run = run) -> str:
    """Returns a line like "g++ 12.2.0"."""
    try:
        banner = run([*cxx.split(), "--version"])
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"memkit: needs a C++ compiler, and {cxx!r} does not run ({error}).\n"
            f"Install g++ {GCC_OLDEST} or newer (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++) "
            "or name one: CXX=/path/to/g++"
        ) from None
    first = banner.partition("\n")[0]
    clang = "clang" in first
    name, oldest = ("clang++", CLANG_OLDEST) if clang else ("g++", GCC_OLDEST)
    if clang:
        match = re.search(r"version (\d+)[.\d]*", first)
    else:  # Intel's and NVIDIA's look like g++'s, too, but for who signs
        match = re.match(r"\S+ \(.*\) (\d+)[.\d]*", first) if "Free Software Foundation" in banner else None
    if match is None:  # a vendor's compiler with a banner of its own: let it try
        return first or cxx
    if int(match[1]) < oldest:
        raise BuildError(
            f"memkit: needs {name} {oldest} or newer, got {match[0].split()[-1]} ({cxx}); "
            "name another: CXX=/path/to/g++"
        )
    return f"{name} {match[0].split()[-1]}"


def standard_library(cxx: str, maps: str, run: Run = run) -> list[str]:
    """What to link so that the process has one C++ standard library: nothing, if the compiler has a shared one.

    One that only has the archive would link a copy into memkit beside the library that torch has loaded, and the
    two would share some of their objects: a stream that prints a number then crashes. maps: /proc/self/maps, after
    torch's import. A copy of what the loaded library does not have is kept to itself.
    """
    name = "libstdc++.so"
    try:
        shared = run([*cxx.split(), f"-print-file-name={name}"]).strip() != name
    except (OSError, subprocess.CalledProcessError):
        shared = True  # a compiler that does not say
    loaded = re.search(rf"/\S*{re.escape(name)}\S*$", maps, re.MULTILINE)
    return [] if shared or not loaded else [loaded[0], "-Wl,--exclude-libs,libstdc++.a"]


def check_python_headers(include: str) -> None:
    if not (Path(include) / "Python.h").exists():
        raise BuildError(
            f"memkit: needs Python's headers, and {include}/Python.h is not there "
            "(Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"
        )


def check_ninja(path: str) -> None:
    if shutil.which("ninja", path=path) is None:
        raise BuildError("memkit: needs ninja to build, and it is not on PATH: pip install ninja")


def check_disk(folder: Path, free: int | None = None) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free if free is None else free
    if free < DISK_NEEDED:
        raise BuildError(
            f"memkit: needs {DISK_NEEDED / 1e9:.1f} GB of free disk to build, "
            f"got {free / 1e9:.1f} GB at {folder}"
        )


def max_jobs(env: Mapping[str, str], cores: int, memory: int | None, each: int = 2) -> int:
    """MAX_JOBS if it is set, else one compiler a core, and no more of them than memory holds (`each`: GB)."""
    wish = env.get("MAX_JOBS")
    if wish:
        if not wish.isdecimal() or int(wish) < 1:
            raise BuildError(f"memkit: expected MAX_JOBS to be a number from 1, got {wish!r}")
        return int(wish)
    return max(1, cores if memory is None else min(cores, memory // (each * 1024**3)))


def memory(kind: str, root: Path = Path("/")) -> int | None:
    """Bytes: the machine's "Available", or its "Total" or what a container may have of it."""
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(rf"Mem{kind}:\s+(\d+) kB", text)
    found = [int(match[1]) * 1024] if match else []
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            found.append(int((root / "sys/fs/cgroup" / limit).read_text()))
        except (OSError, ValueError):  # not this version of cgroups, or "max"
            continue
    return min(found, default=None)


def collector_flags(cores: int, total: int | None) -> list[str]:
    """g++ without its garbage collector on machines of 6 GB a core: a twentieth of the time, up to 1 GB more a job."""
    return ["--param=ggc-min-heapsize=4194304"] if total and total >= cores * 5.5 * 1024**3 else []


# CUDA


@dataclass(frozen=True)
class Toolkit:
    root: Path  # holds bin/nvcc
    version: str  # "13.0"
    include: Path
    cudart: Path  # by its versioned name: the wheels carry no unversioned libcudart.so


def read_toolkit(nvcc: Path, run: Run = run) -> Toolkit | str:
    """The toolkit around `nvcc`, or what is wrong with it. On PATH nvcc is often a wrapper or a link: it knows its root."""
    try:
        release = re.search(r"release (\d+\.\d+)", run([str(nvcc), "--version"]))
        here = re.search(r"_HERE_=(.*)", run([str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull]))
    except (OSError, subprocess.CalledProcessError):
        return f"{nvcc} does not run"
    if release is None:
        return f"{nvcc} does not say its version"
    root = (Path(here[1].strip()) if here else nvcc.resolve().parent).parent
    runtime = f"libcudart.so.{release[1].split('.')[0]}"
    include = _first(root, ("include", "targets/*/include"), "cuda_runtime.h")
    cudart = _first(root, ("lib64", "lib", "targets/*/lib"), runtime)
    if include is None or cudart is None:
        return f"{root} (CUDA {release[1]}) lacks {runtime if include else 'cuda_runtime.h'}"
    return Toolkit(root, release[1], include.parent, cudart)


def _first(root: Path, folders: Sequence[str], file: str) -> Path | None:
    return next((path for folder in folders for path in sorted(root.glob(f"{folder}/{file}"))), None)


def nvcc_candidates(env: Mapping[str, str], site: Sequence[str], cuda: str = "/usr/local/cuda") -> list[Path]:
    """Every nvcc of this machine, the most deliberate choice first."""
    found = [Path(env[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    on_path = shutil.which("nvcc", path=env.get("PATH", ""))
    found += [Path(on_path)] if on_path else []
    found.append(Path(cuda) / "bin" / "nvcc")
    for folder in site:  # the PyPI wheels: nvidia/cu13
        found += sorted(Path(folder).glob("nvidia/cu*/bin/nvcc"), reverse=True)
    return [nvcc for nvcc in dict.fromkeys(found) if nvcc.exists()]


def find_toolkit(
    torch_cuda: str, candidates: Sequence[Path], read: Callable[[Path], Toolkit | str] = read_toolkit
) -> tuple[Toolkit | None, list[str]]:
    """The first toolkit of torch's CUDA major, and what was turned down."""
    turned_down = []
    for nvcc in candidates:
        toolkit = read(nvcc)
        if isinstance(toolkit, str):
            turned_down.append(toolkit)
        elif toolkit.version.split(".")[0] == torch_cuda.split(".")[0]:
            return toolkit, turned_down
        else:
            turned_down.append(f"{nvcc} is CUDA {toolkit.version}")
    return None, turned_down


def choose_cuda(
    env: Mapping[str, str],
    torch_version: str,
    torch_cuda: str | None,
    find: Callable[[str], tuple[Toolkit | None, list[str]]],
) -> tuple[Toolkit | None, str]:
    """The toolkit to build the CUDA half with, or None and the reason. MEMKIT_CUDA=1 turns a reason into an error."""
    wish = env.get("MEMKIT_CUDA", "")
    if wish not in ("", "0", "1", "simt", "emulated"):
        raise BuildError(f"memkit: expected MEMKIT_CUDA to be 0, 1, simt, emulated or unset, got {wish!r}")
    if wish in ("0", "simt"):
        return None, f"MEMKIT_CUDA={wish}"
    if torch_cuda is None:
        if wish:
            raise BuildError(
                f"memkit: MEMKIT_CUDA={wish} needs a CUDA build of torch, got torch {torch_version}"
            )
        return None, f"torch {torch_version} is not a CUDA build"
    toolkit, turned_down = find(torch_cuda)
    if toolkit is not None:
        return toolkit, f"nvcc {toolkit.version} at {toolkit.root}"
    major = torch_cuda.split(".")[0]
    reason = "; ".join([f"torch {torch_version} needs nvcc {major}.x", *(turned_down or ["none was found"])])
    wheels = cuda_wheels(torch_cuda)
    cure = (
        "pip install " + " ".join(wheels)
        if wheels
        else f"install NVIDIA's CUDA {major} toolkit and set CUDA_HOME (PyPI has no whole nvcc of CUDA {major})"
    )
    if wish:
        raise BuildError(f"memkit: MEMKIT_CUDA={wish}, but {reason}.\n{cure}")
    return None, f"{reason}. The CUDA half is left out; to have it: {cure}"


def cuda_wheels(torch_cuda: str) -> list[str]:
    """The PyPI wheels that make up an nvcc of torch's own CUDA line. Before CUDA 13 the wheels held no nvcc driver."""
    if minor(torch_cuda) < (13, 0):
        return []
    names = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
    return [f"{name}=={dotted(minor(torch_cuda))}.*" for name in names]


def site_folders() -> list[str]:
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def missing_wheels(env: Mapping[str, str], torch_cuda: str | None) -> list[str]:
    """The wheels this machine needs to compile the CUDA half; none where it has an nvcc or wants no CUDA."""
    if torch_cuda is None or env.get("MEMKIT_CUDA") in ("0", "simt"):
        return []
    toolkit, _ = find_toolkit(torch_cuda, nvcc_candidates(env, site_folders()))
    return [] if toolkit else cuda_wheels(torch_cuda)


def extra(name: str, pyproject: Path) -> list[str]:
    """One extra's requirements, without building memkit to learn them."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    return list(tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"][name])


def main(arguments: Sequence[str]) -> int:
    """Prints requirements for the Makefile to hand to pip."""
    match list(arguments):
        case ["cuda-wheels"]:
            import torch

            print(*missing_wheels(os.environ, torch.version.cuda))
        case ["extra", *names] if names:
            pyproject = Path(__file__).with_name("pyproject.toml")
            print(*(requirement for name in names for requirement in extra(name, pyproject)))
        case _:
            print("usage: setup_checks.py cuda-wheels | extra NAME...", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
