"""`memkit doctor`: versions, build, hardware, and small trials of what should run here."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator

import torch

from .bench import machine
from .bench.report import size


def run(say: Callable[[str], None]) -> bool:
    """Says everything, line by line; whether every trial that applies to this machine passed."""
    for line in _facts():
        say(line)
    passed = True
    for name, trial in TRIALS.items():
        try:
            outcome = trial()
        except Exception as error:
            outcome = f"FAILED: {type(error).__name__}: {error}"
            passed = False
        say(f"{name:<8} {outcome}")
    return passed


def _facts() -> Iterator[str]:
    versions = machine.versions()
    commit = machine.commit()
    at_commit = f", commit {commit}" if commit else ""
    yield f"memkit   {versions['memkit']}{at_commit}"
    yield f"python   {versions['python']}"
    yield f"torch    {versions['torch']}"
    yield f"built    {_build()}"
    hardware = machine.hardware("cpu")
    memory = f", {size(hardware['memory_bytes'])}" if hardware["memory_bytes"] else ""
    code = {"v4": "AVX-512", "v3": "AVX2", "base": "any x86-64"}[
        importlib.import_module("memkit._C").cpu_isa()
    ]
    yield f"cpu      {hardware['cpu']}, {hardware['threads']} threads{memory}; memkit's code for {code}"
    yield f"gpu      {_gpus()}"


def _build() -> str:
    info = importlib.import_module("memkit._build_info")
    cuda = f"CUDA {info.CUDA} for {info.CUDA_ARCHS}" if info.CUDA else f"no CUDA: {info.WITHOUT_CUDA}"
    return f"for torch {info.TORCH} by {info.COMPILER}; {cuda}"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none found" if torch.version.cuda else "none: torch is a CPU build"
    found = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        found.append(f"{gpu.name} (capability {gpu.major}.{gpu.minor}, {size(gpu.total_memory)})")
    return "; ".join(found)


def _fused_on(device: str) -> str:
    from . import functional

    x = torch.linspace(-3, 3, 64, device=device, requires_grad=True)
    expected = torch.autograd.grad(torch.nn.functional.gelu(x * 1).sum(), x)[0]
    got = torch.autograd.grad(functional.gelu(x * 1, inplace=True).sum(), x)[0]
    worst = (got - expected).abs().max().item()
    if not worst < 1e-3:
        raise RuntimeError(f"gelu in place: expected the stock gradient, got one {worst:.1e} away")
    return f"ok: gelu in place, gradient within {worst:.0e} of stock"


def _fused_on_cuda() -> str:
    if not torch.cuda.is_available():
        return "no GPU to run on"
    return _fused_on("cuda")


def _dropout() -> str:
    from . import functional

    x = torch.ones(1 << 12, requires_grad=True)
    y = functional.dropout(x, 0.5)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    if not gradient.equal(y.detach()) or set(gradient.tolist()) != {0.0, 2.0}:
        raise RuntimeError("dropout: expected a gradient of 0 and 2 where the forward gave them, got another")
    return "ok: backward draws again what the forward dropped"


def _pool() -> str:
    from .pool import Pool

    pool = Pool("1MiB", grow=False)
    block = pool.empty(256)
    address = block.data_ptr()
    del block
    reused = pool.empty(256).data_ptr() == address
    with pool.use():
        torch.ones(256)
    pool.check()
    stats = pool.stats()
    if not reused or stats.allocated or stats.allocated_peak < 1024:
        raise RuntimeError(f"pool: expected its memory back and used again, got {pool}")
    pool.close()
    return "ok: gives memory out, takes it back, serves torch's own allocations"


def _measure() -> str:
    from . import memory

    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for device in devices:
        work = functools.partial(torch.ones, 1 << 20, dtype=torch.uint8, device=device)
        measured = memory.measure(work, device=device)
        if measured.peak < 1 << 20:
            expected = f"a peak of at least {size(1 << 20)} on {device}"
            raise RuntimeError(f"measure: expected {expected}, got {size(measured.peak)}")
    return f"ok: measure sees every allocation, {' and '.join(devices)}"


def _compiler() -> str:
    if shutil.which("g++") or shutil.which("c++") or shutil.which("clang++"):
        return "ok: a C++ compiler, so torch.compile runs on the CPU"
    return "no C++ compiler: torch.compile does not run on the CPU"


def _bench_packages() -> str:
    packages = {
        "tokenizers": "tokenizers",
        "sklearn": "scikit-learn",
        "matplotlib": "matplotlib",
        "tqdm": "tqdm",
    }
    missing = [pip for module, pip in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"memkit bench needs: pip install {' '.join(missing)}"
    return "ok: memkit bench has what it needs"


TRIALS: dict[str, Callable[[], str]] = {
    "kernels": lambda: _fused_on("cpu"),
    "dropout": _dropout,
    "pool": _pool,
    "cuda": _fused_on_cuda,
    "memory": _measure,
    "compile": _compiler,
    "bench": _bench_packages,
}
