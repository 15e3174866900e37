"""Gated units of two tensors."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

import memkit.functional as M

from .op import Op, Size


def gate_and_up(size: Size) -> list[Tensor]:
    return [size.normal(-1), size.normal(-1, part=1)]


OPS = {
    "swiglu": Op(lambda g, u: F.silu(g) * u, lambda g, u: M.swiglu(g, u), None, gate_and_up, passes=3),
    "geglu": Op(lambda g, u: F.gelu(g) * u, lambda g, u: M.geglu(g, u), None, gate_and_up, passes=3),
}
