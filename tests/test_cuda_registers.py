"""CUDA kernels keep what they work on in registers: ptxas says where it does not. Needs nvcc, no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))

# Around calls of double precision's quotient, root, logarithm and exponential, which are functions: at most 16 bytes.
ALLOWED = {
    "channel_whole.cu": r"whole_backward_kernelILb0ELb1E",
    "softmax.cu": r"forward_besideIdLb1E",
    "loss.cu": r"_kernelIdLb1E",
}


@pytest.fixture(scope="module")
def nvcc() -> Path:
    if torch.version.cuda is None:
        pytest.skip("a torch without CUDA")
    sys.path.insert(0, str(ROOT))
    try:
        import setup_checks as checks
    finally:
        sys.path.remove(str(ROOT))
    toolkit, reasons = checks.find_toolkit(
        torch.version.cuda, checks.nvcc_candidates(os.environ, checks.site_folders())
    )
    if toolkit is None:
        pytest.skip("; ".join(reasons) or "no nvcc")
    return Path(toolkit.root) / "bin" / "nvcc"


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_no_spills(nvcc: Path, source: Path, tmp_path: Path) -> None:
    command = [str(nvcc), "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-arch=sm_90", "-cubin"]
    command += ["-Xptxas=--warn-on-spills", "-o", str(tmp_path / "out.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    spilled = re.findall(r"spilled to local memory in function '(\w+)'", done.stderr)
    allowed = ALLOWED.get(source.name, "^$")
    assert [name for name in spilled if not re.search(allowed, name)] == []
    assert bool(spilled) == (source.name in ALLOWED), "what is allowed is needed"
