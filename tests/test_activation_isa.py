"""The loops for older processors give what those for this one give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from activation_cases import all_cases, inputs, ours
from torch import Tensor

from memkit import _C
from memkit._reference import value_and_gradient


def outcomes() -> dict[str, tuple[Tensor, Tensor]]:
    """1,037 elements: whole vectors of any width, and a rest."""
    return {
        f"{case} {mode} {dtype}": value_and_gradient(
            ours(case, mode), inputs("normal", dtype, 1037).to(dtype)
        )
        for case, mode, dtype in all_cases()
    }


OLDER = {"v4": ("v3", "base"), "v3": ("base",), "base": ()}


@pytest.mark.parametrize("other", OLDER[_C.cpu_isa()])
def test_an_older_instruction_set(other: str, tmp_path: Path) -> None:
    file = tmp_path / "outcomes.pt"
    code = f"import torch, memkit._C as c, test_activation_isa as t; assert c.cpu_isa() == {other!r}; "
    code += f"torch.save(t.outcomes(), {str(file)!r})"
    environment = {**os.environ, "MEMKIT_CPU_ISA": other, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    here, there = outcomes(), torch.load(file)
    assert here.keys() == there.keys()
    for name, pair in here.items():
        for got, want in zip(there[name], pair, strict=True):
            # An ulp of the function, and for the slope from an output what an ulp of that costs near a minimum.
            slope = want is pair[1] and "input" not in name
            eps = torch.finfo(want.dtype).eps
            torch.testing.assert_close(
                got, want, rtol=4 * eps, atol=2 * eps**0.5 if slope else 4 * eps, equal_nan=True
            )
