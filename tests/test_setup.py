"""The build: what it checks first, which nvcc it takes, its command line, and what its sources may include."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import memkit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import setup_checks as checks  # noqa: E402

# Checks before the compiler starts


def test_other_platforms_are_refused():
    checks.check_platform("linux")
    with pytest.raises(checks.BuildError, match=r"^memkit: builds on Linux only, got darwin$"):
        checks.check_platform("darwin")


def test_torch_versions():
    assert checks.check_torch("2.11.0+cu130") is None
    assert checks.check_torch("2.14.1") is None
    with pytest.raises(checks.BuildError, match=r"^memkit: needs torch 2\.11 or newer, got 2\.10\.0\+cpu$"):
        checks.check_torch("2.10.0+cpu")
    with pytest.raises(checks.BuildError, match="expected a version like"):
        checks.check_torch("main")
    assert checks.check_torch("2.99.0") == (
        f"memkit: tested with torch up to {checks.dotted(checks.TORCH_NEWEST_TESTED)}, got 2.99.0; building all the same"
    )


def test_setuptools():
    checks.check_setuptools("77.0.3")
    checks.check_setuptools("80.9")
    with pytest.raises(
        checks.BuildError, match=r"^memkit: needs setuptools 77\.0\.3 or newer, got 65\.5\.0; "
    ):
        checks.check_setuptools("65.5.0")
    wanted = f"setuptools>={checks.SETUPTOOLS_OLDEST}"
    for file in ("pyproject.toml", "Makefile", "README.md"):
        assert wanted in (ROOT / file).read_text(encoding="utf-8")


def test_requirement_and_version_name_torch():
    assert checks.torch_requirement("2.14.0+cu130") == "torch==2.14.*"
    assert checks.local_version("2.14.0+cu130", "13.0", with_cuda=True) == "torch2.14.cu130"
    assert checks.local_version("2.14.0+cu130", "13.0", with_cuda=False) == "torch2.14.cpu"
    assert checks.local_version("2.13.0+cpu", None, with_cuda=False) == "torch2.13.cpu"


GCC = "g++ (Debian {0}-14) {0}\nCopyright (C) 2022 Free Software Foundation, Inc.\n"
CLANG = "Ubuntu clang version {0} (++2024)\nTarget: x86_64-pc-linux-gnu\n"


def test_compilers():
    assert checks.check_compiler("c++", lambda _: GCC.format("12.2.0")) == "g++ 12.2.0"
    assert checks.check_compiler("clang++", lambda _: CLANG.format("18.1.3")) == "clang++ 18.1.3"
    asked: list[list[str]] = []
    checks.check_compiler(
        "ccache g++-13", lambda command: asked.append(list(command)) or GCC.format("13.1.0")
    )
    assert asked == [["ccache", "g++-13", "--version"]]


@pytest.mark.parametrize(
    "banner",
    [
        "icpc (ICC) 2021.10.0 20230609\nCopyright (C) 1985-2023 Intel Corporation.  All rights reserved.\n",
        "nvc++ 9.1-0 64-bit target on x86-64 Linux\nCopyright (c) 2024, NVIDIA CORPORATION\n",
        "ccache version 4.7.5\nCopyright (C) 2022 Free Software Foundation, Inc. (part) 4.0\n",
        "",
    ],
)
def test_compilers_of_others_may_try(banner):
    assert checks.check_compiler("c++", lambda _: banner) == (banner.splitlines() or ["c++"])[0]


@pytest.mark.parametrize(
    ("cxx", "banner", "message"),
    [
        ("c++", GCC.format("9.4.0"), r"^memkit: needs g\+\+ 11 or newer, got 9\.4\.0 \(c\+\+\)"),
        (
            "clang++",
            CLANG.format("10.0.1"),
            r"^memkit: needs clang\+\+ 14 or newer, got 10\.0\.1 \(clang\+\+\)",
        ),
    ],
)
def test_old_compilers_are_named(cxx, banner, message):
    with pytest.raises(checks.BuildError, match=message):
        checks.check_compiler(cxx, lambda _: banner)


def test_a_missing_compiler_is_named():
    with pytest.raises(checks.BuildError, match=r"needs a C\+\+ compiler, and '/no/such/g\+\+' does not run"):
        checks.check_compiler("/no/such/g++")


MAPS = "7f00-7f01 r-xp 00000000 00:2f 4203   /lib/x86_64-linux-gnu/libstdc++.so.6.0.33\n7f02-7f03 rw-p 00 0:0 0 [heap]\n"


def test_a_compiler_without_a_shared_standard_library_links_torchs():
    def without(command):
        assert command == ["ccache", "g++", "-print-file-name=libstdc++.so"]
        return "libstdc++.so\n"

    linked = checks.standard_library("ccache g++", MAPS, without)
    assert linked == ["/lib/x86_64-linux-gnu/libstdc++.so.6.0.33", "-Wl,--exclude-libs,libstdc++.a"]
    assert checks.standard_library("ccache g++", "", without) == []
    assert checks.standard_library("g++", MAPS, lambda _: "/usr/lib/gcc/12/libstdc++.so\n") == []
    assert checks.standard_library("/no/such/g++", MAPS) == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_binary_brings_no_standard_library_of_its_own():
    """With one of its own an error message that holds a number ends the process."""
    names = subprocess.run(
        ["nm", "-D", "--defined-only", memkit._C.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert " PyInit__C" in names
    assert not re.search(r" [TuW] _ZNSo9_M_insert", names)


def test_missing_python_headers(tmp_path):
    with pytest.raises(checks.BuildError, match=r"needs Python's headers, and .*/Python\.h is not there"):
        checks.check_python_headers(str(tmp_path))
    (tmp_path / "Python.h").touch()
    checks.check_python_headers(str(tmp_path))


def test_missing_ninja(tmp_path):
    with pytest.raises(checks.BuildError, match=r"needs ninja .*pip install ninja"):
        checks.check_ninja(str(tmp_path))
    (tmp_path / "ninja").touch(mode=0o755)
    checks.check_ninja(str(tmp_path))


def test_too_little_disk(tmp_path):
    with pytest.raises(checks.BuildError, match=r"needs 2\.1 GB of free disk to build, got 0\.5 GB at "):
        checks.check_disk(tmp_path / "not" / "yet", free=5 * 10**8)
    checks.check_disk(tmp_path / "not" / "yet", free=3 * 10**9)


def test_jobs():
    giga = 1024**3
    assert checks.max_jobs({"MAX_JOBS": "7"}, cores=2, memory=giga) == 7
    assert checks.max_jobs({}, cores=8, memory=64 * giga) == 8
    assert checks.max_jobs({}, cores=8, memory=5 * giga) == 2
    assert checks.max_jobs({}, cores=8, memory=giga) == 1
    assert checks.max_jobs({"MAX_JOBS": ""}, cores=3, memory=None) == 3
    with pytest.raises(checks.BuildError, match="expected MAX_JOBS to be a number from 1, got 'all'"):
        checks.max_jobs({"MAX_JOBS": "all"}, cores=2, memory=None)


# Which nvcc


def toolkit(root: Path, version: str = "13.0", here: bool = True) -> Path:
    """A toolkit whose nvcc is a shell script; with `here` it tells its root, as nvcc does."""
    major = version.split(".")[0]
    for file in ("bin/nvcc", "include/cuda_runtime.h", f"lib/libcudart.so.{major}"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    nvcc = root / "bin" / "nvcc"
    told = f"echo '#$ _HERE_={nvcc.parent}' >&2" if here else ":"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n{told}\n")
    nvcc.chmod(0o755)
    return nvcc


def test_a_toolkit_with_the_layout_of_the_wheels(tmp_path):
    found = checks.read_toolkit(toolkit(tmp_path / "nvidia" / "cu13"))
    root = tmp_path / "nvidia" / "cu13"
    assert found == checks.Toolkit(root, "13.0", root / "include", root / "lib" / "libcudart.so.13")


def test_nvcc_behind_a_wrapper_tells_its_root(tmp_path):
    real = toolkit(tmp_path / "cuda")
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    found = checks.read_toolkit(wrapper)
    assert isinstance(found, checks.Toolkit)
    assert found.root == tmp_path / "cuda"


def test_a_conda_toolkit_keeps_its_headers_under_targets(tmp_path):
    nvcc = toolkit(tmp_path)
    (tmp_path / "include").rename(tmp_path / "headers")
    (tmp_path / "targets" / "x86_64-linux").mkdir(parents=True)
    (tmp_path / "headers").rename(tmp_path / "targets" / "x86_64-linux" / "include")
    found = checks.read_toolkit(nvcc)
    assert isinstance(found, checks.Toolkit)
    assert found.include == tmp_path / "targets" / "x86_64-linux" / "include"


def test_toolkits_that_cannot_compile_are_turned_down(tmp_path):
    bare, broken = toolkit(tmp_path / "bare"), tmp_path / "broken" / "nvcc"
    (tmp_path / "bare" / "include" / "cuda_runtime.h").unlink()
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    old, good = toolkit(tmp_path / "old", "12.8"), toolkit(tmp_path / "good", "13.2")
    found, turned_down = checks.find_toolkit("13.0", [bare, broken, old, good])
    assert isinstance(found, checks.Toolkit)
    assert found.version == "13.2"
    assert turned_down == [
        f"{tmp_path / 'bare'} (CUDA 13.0) lacks cuda_runtime.h",
        f"{broken} does not run",
        f"{old} is CUDA 12.8",
    ]


def test_the_most_deliberate_nvcc_comes_first(tmp_path):
    chosen, on_path, system = (toolkit(tmp_path / name) for name in ("chosen", "path", "system"))
    wheels = toolkit(tmp_path / "site-packages" / "nvidia" / "cu13")
    env = {"CUDA_HOME": str(tmp_path / "chosen"), "PATH": str(tmp_path / "path" / "bin")}
    site = [str(tmp_path / "site-packages")]
    assert checks.nvcc_candidates(env, site, str(tmp_path / "system")) == [chosen, on_path, system, wheels]
    assert checks.nvcc_candidates({"PATH": ""}, [], str(tmp_path / "nowhere")) == []


def nothing(torch_cuda: str) -> tuple[None, list[str]]:
    return None, []


def test_a_cpu_torch_gets_no_cuda():
    assert checks.choose_cuda({}, "2.13.0+cpu", None, nothing) == (
        None,
        "torch 2.13.0+cpu is not a CUDA build",
    )
    with pytest.raises(
        checks.BuildError,
        match=r"^memkit: MEMKIT_CUDA=1 needs a CUDA build of torch, got torch 2\.13\.0\+cpu$",
    ):
        checks.choose_cuda({"MEMKIT_CUDA": "1"}, "2.13.0+cpu", None, nothing)


def test_memkit_cuda_0_asks_no_nvcc():
    def find(torch_cuda: str) -> tuple[None, list[str]]:
        raise AssertionError("nvcc was looked for")

    for wish in ("0", "simt"):
        assert checks.choose_cuda({"MEMKIT_CUDA": wish}, "2.14.0+cu130", "13.0", find) == (
            None,
            f"MEMKIT_CUDA={wish}",
        )
    with pytest.raises(
        checks.BuildError, match="expected MEMKIT_CUDA to be 0, 1, simt, emulated or unset, got 'yes'"
    ):
        checks.choose_cuda({"MEMKIT_CUDA": "yes"}, "2.14.0+cu130", "13.0", find)


def test_nvcc_of_another_major_is_named_with_the_cure():
    def find(torch_cuda: str) -> tuple[None, list[str]]:
        return None, ["/usr/bin/nvcc is CUDA 12.8"]

    message = (
        r"MEMKIT_CUDA=1, but torch 2\.14\.0\+cu130 needs nvcc 13\.x; /usr/bin/nvcc is CUDA 12\.8\.\n"
        r"pip install nvidia-cuda-nvcc==13\.0\.\* "
    )
    with pytest.raises(checks.BuildError, match=message):
        checks.choose_cuda({"MEMKIT_CUDA": "1"}, "2.14.0+cu130", "13.0", find)
    chosen, reason = checks.choose_cuda({}, "2.14.0+cu130", "13.0", find)
    assert chosen is None
    assert "The CUDA half is left out; to have it: pip install nvidia-cuda-nvcc==13.0.* " in reason


def test_compilers_keep_their_garbage_on_machines_of_6_gb_a_core(tmp_path):
    giga = 1024**3
    assert checks.collector_flags(2, 11_700_000 * 1024) == [
        "--param=ggc-min-heapsize=4194304"
    ]  # sold as 12 GB
    assert not checks.collector_flags(2, 8 * giga)
    assert not checks.collector_flags(2, None)
    assert checks.max_jobs({}, cores=8, memory=8 * giga, each=3) == 2

    assert checks.memory("Total", tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  16000000 kB\nMemAvailable:  9000000 kB\n")
    assert checks.memory("Total", tmp_path) == 16_000_000 * 1024
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    assert checks.memory("Available", tmp_path) == 9_000_000 * 1024
    (folder / "memory.max").write_text(f"{4 * giga}\n")
    assert checks.memory("Total", tmp_path) == checks.memory("Available", tmp_path) == 4 * giga


def test_cuda_12_has_no_wheels_to_offer():
    _, reason = checks.choose_cuda({}, "2.13.0+cu126", "12.6", nothing)
    assert "needs nvcc 12.x; none was found" in reason
    assert "install NVIDIA's CUDA 12 toolkit and set CUDA_HOME" in reason


def test_wheels_follow_torchs_cuda_line():
    assert checks.cuda_wheels("13.2") == [
        f"nvidia-{name}==13.2.*" for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
    ]
    assert checks.missing_wheels({}, None) == []
    assert checks.missing_wheels({"MEMKIT_CUDA": "0", "PATH": ""}, "13.0") == []


# The command line of setup.py


def build_command(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"CXX": "/no/such/g++"}, "error: memkit: needs a C++ compiler, and '/no/such/g++' does not run"),
        (
            {"MEMKIT_CUDA": "maybe"},
            "memkit: expected MEMKIT_CUDA to be 0, 1, simt, emulated or unset, got 'maybe'",
        ),
        ({"MAX_JOBS": "0"}, "error: memkit: expected MAX_JOBS to be a number from 1, got '0'"),
    ],
)
def test_a_build_that_cannot_work_ends_without_a_traceback(env, message):
    done = build_command(env, "build_ext", "--inplace")
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_torch_the_build_says_what_to_install(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')\n")
    done = build_command({"PYTHONPATH": str(tmp_path)}, "build_ext", "--inplace")
    assert done.returncode != 0
    assert "cannot import torch (No module named torch)" in done.stderr
    assert "pip install --no-build-isolation ." in done.stderr
    assert "Traceback" not in done.stderr


# The rim: what may include torch

TORCH_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10)/', re.MULTILINE)


def test_only_the_rim_includes_torch():
    code = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    assert len(code) > 3
    inside = [path for path in code if path.parent.name in {"formulas", "cpu", "cuda", "arena"}]
    assert [path.name for path in inside if TORCH_INCLUDE.search(path.read_text())] == []
    assert any(TORCH_INCLUDE.search(path.read_text()) for path in code if path.parent.name == "torch")


@pytest.mark.parametrize("header", sorted((ROOT / "csrc" / "cuda").glob("*.h")), ids=lambda path: path.name)
def test_what_names_cudas_kernels_needs_no_cuda(header):
    """A build without CUDA includes these, on machines that have none of its headers."""
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-H", "-x", "c++", str(header)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cuda_runtime" not in done.stderr  # which names each file that was included


@pytest.mark.slow
def test_all_that_includes_torch_compiles_without_cuda(tmp_path):
    """As a build for a CPU-only PyTorch compiles it: without MEMKIT_WITH_CUDA and without CUDA's headers."""
    from torch.utils.cpp_extension import include_paths

    units = re.search(r"^UNITS = (\{.*?^\})", (ROOT / "setup.py").read_text(), re.DOTALL | re.MULTILINE)
    assert units is not None
    layers = [patterns for patterns in ast.literal_eval(units[1]).values() if "torch/" in patterns]
    assert layers
    folders = [str(ROOT / "csrc"), *include_paths("cpu"), sysconfig.get_path("include")]
    macros = ['-DMEMKIT_TORCH_VERSION=""', '-DMEMKIT_CUDA_VERSION=""', "-DTORCH_EXTENSION_NAME=_C"]
    unit = tmp_path / "unit.cpp"
    for layer in layers:
        files = sorted({path for name in layer.split() for path in (ROOT / "csrc").glob(name + ".cpp")})
        unit.write_text("".join(f'#include "{path}"\n' for path in files))
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", "-H", *macros]
        command += [f"-I{folder}" for folder in folders]
        done = subprocess.run([*command, str(unit)], check=False, capture_output=True, text=True)
        assert done.returncode == 0, [line for line in done.stderr.splitlines() if " error: " in line]
        assert "cuda_runtime" not in done.stderr  # which names each file that was included


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_make_test_runs_pytest_though_a_cpp_test_fails(target, tmp_path):
    calls = tmp_path / "calls"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    python.chmod(0o755)
    command = [
        "make",
        "-s",
        *(
            word
            for name in (
                "build",
                "test-simt",
                "test-emulated",
                f"{tmp_path}/.memkit/models",
                f"{tmp_path}/.memkit/engines",
            )
            for word in ("-o", name)
        ),
        target,
        f"VENV={tmp_path}",
        f"BUILD={tmp_path / 'cpp'}",
        "CXX=false",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"MAKEFLAGS": ""}
    )
    assert done.returncode != 0
    assert "C++ tests failed" in done.stderr
    assert calls.read_text().startswith("-m pytest")
