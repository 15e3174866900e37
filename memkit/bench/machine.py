"""Who measured: the hardware, the versions and the commit that every results file names."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import memkit

_PACKAGES = ("numpy", "tokenizers", "scikit-learn", "triton")


def hardware(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": device,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": _host_memory(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = gpu.name
        found["gpu_memory_bytes"] = gpu.total_memory
        found["gpu_capability"] = f"{gpu.major}.{gpu.minor}"
    return found


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    found["memkit"] = memkit.__version__  # what runs, which an editable install's metadata may lag behind
    found["cuda"] = torch.version.cuda
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def stamp(device: str) -> dict[str, Any]:
    """The head of a results file."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(device),
        "versions": versions(),
    }


def commit() -> str | None:
    """The checkout's commit, `-dirty` when tracked files differ; None for an installed package.

    MEMKIT_COMMIT in the environment says it of a copy that has no history.
    """
    if given := os.environ.get("MEMKIT_COMMIT"):
        return given
    here = Path(__file__).resolve().parent
    # An installed memkit may lie inside somebody else's repository: ask whether git tracks this very file.
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    head = _git(here, "rev-parse", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if head and changed else head


def _git(folder: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
