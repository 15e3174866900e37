"""Tangents of incoming gradients (forward over reverse, where no tangent reaches what the operators are given)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import memkit.functional as M

f64 = torch.float64
LABELS = torch.tensor([0, 3, 5, 1])
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": M.relu,
    "relu in place": lambda x: M.relu(x * 1, inplace=True),
    "softplus": M.softplus,
    "silu": lambda x: M.silu(x, save="input"),
    "act_dropout": lambda x: M.act_dropout(x, "relu", 0.3),
    "swiglu": lambda x: M.swiglu(x, x.sin()),
    "softmax": lambda x: M.softmax(x, -1),
    "layer_norm": lambda x: M.layer_norm(x, (8,)),
    "rms_norm": lambda x: M.rms_norm(x, (8,)),
    "normalize": lambda x: M.normalize(x, dim=-1),
    "group_norm": lambda x: M.group_norm(x, 2),
    "batch_norm_act": lambda x: M.batch_norm_act(x, None, None, None, None, True, act="relu"),
    "act_linear": lambda x: M.act_linear(x, torch.eye(8, dtype=f64) + 1, None, "gelu"),
    "cross_entropy": lambda x: M.cross_entropy(x, LABELS),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_tangent_of_the_incoming_gradient(name: str, create_graph: bool) -> None:
    x = torch.randn(4, 8, dtype=f64, requires_grad=True)
    out = CASES[name](x)
    grad, tangent = torch.randn_like(out), torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, x, tangent, retain_graph=True)  # which is linear in it
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad, tangent)
        (found,) = torch.autograd.grad(out, x, dual, create_graph=create_graph)
        assert found.requires_grad == create_graph
        torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, expected, rtol=1e-7, atol=1e-9)


def test_an_error_where_there_is_no_derivative() -> None:
    x = torch.randn(4, 8, dtype=f64, requires_grad=True)
    out = M.gelu(x * 1, save="output")
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=r"^gelu: expected save='input' for a deriv"),
    ):
        torch.autograd.grad(out, x, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))
