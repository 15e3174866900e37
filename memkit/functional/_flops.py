"""What torch.utils.flop_counter counts for memkit's matrix products.

That module brings Triton with it, so that it is told once somebody else has loaded it.
"""

# Parts of torch are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def _logits(input: Sequence[int], linear_weight: Sequence[int]) -> int:
    """Of input [..., in_features] and linear_weight [C, in_features]; each gradient takes as many."""
    return 2 * math.prod(input) * linear_weight[0]


def _no_gradient(input: Sequence[int], linear_weight: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return _logits(input, linear_weight)


def _forward(input: Sequence[int], linear_weight: Sequence[int], *args: Any, **kwargs: Any) -> int:
    wanted = args[-1]  # of input, linear_weight and linear_bias, which takes a sum
    return _logits(input, linear_weight) * (1 + int(wanted[0]) + int(wanted[1]))


def _backward(
    grad: Sequence[int], input: Sequence[int], linear_weight: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return _forward(input, linear_weight, *args)  # the logits again


def tell() -> None:
    """Before an operator runs: also the counters that were made before this one was told. Formulas of a user's own stay."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    ops, known = torch.ops.memkit, module.flop_registry
    formulas = {
        ops._linear_cross_entropy: _no_gradient,
        ops._linear_cross_entropy_forward: _forward,
        ops._linear_cross_entropy_backward: _backward,
    }
    for op, formula in formulas.items():
        if op not in known:
            module.register_flop_formula(op)(formula)
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):
            for op in formulas:
                counter.flop_registry.setdefault(op, known[op])
