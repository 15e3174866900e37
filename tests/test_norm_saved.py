"""What LayerNorm and RMSNorm keep for backward, and what decides it."""

from __future__ import annotations

import math

import pytest
import torch
from norm_cases import assert_as_good_as_stock, normal, ops, weights
from torch import Tensor

import memkit.functional as M
import memkit.nn
from memkit.memory import measure


def saved_per_element(module: torch.nn.Module, x: Tensor) -> float:
    return measure(lambda: module(x)).saved / x.numel()


@ops
def test_bytes_kept_before_a_linear(op: str) -> None:
    """One tensor of bf16, the Linear's own, and four bytes a row."""
    columns = 1024
    norm = memkit.nn.LayerNorm if op == "layer_norm" else memkit.nn.RMSNorm
    net = torch.nn.Sequential(norm(columns), torch.nn.Linear(columns, 8)).bfloat16()
    x = normal((64, columns), torch.bfloat16, 0).requires_grad_()
    assert saved_per_element(net, x) == 2 + 4 / columns
    net[
        0
    ].save = (
        "input"  # kept beside the Linear's: here the input is from before, so that only the statistics count
    )
    assert saved_per_element(net, x) == 2 + (8 if op == "layer_norm" else 4) / columns
    hidden = torch.nn.Sequential(torch.nn.Linear(columns, columns).bfloat16(), net)
    assert saved_per_element(hidden, x) == 4 + (8 if op == "layer_norm" else 4) / columns
    net[0].save = "auto"
    assert saved_per_element(hidden, x) == 2 + 4 / columns


@ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_kept_under_autocast(op: str, dtype: torch.dtype) -> None:
    columns = 1024
    norm = memkit.nn.LayerNorm if op == "layer_norm" else memkit.nn.RMSNorm
    net = torch.nn.Sequential(norm(columns), torch.nn.Linear(columns, 8))
    x = normal((64, columns), dtype, 0).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert net[0](x).dtype == torch.bfloat16
        assert M.norm_saves(net[0](x)) == "output"
        net(x)
        casts = 8 * columns * 2 + 8 * 2  # of the Linear's parameters
        assert measure(lambda: net(x)).saved <= x.numel() * 2 + 4 * 64 + casts


@ops
def test_autocast_is_as_exact_as_stock_with_its_linear(op: str) -> None:
    """The output blurs the norm's weight gradient no more than the Linear's rounded gradient does."""
    columns = 512
    norm = {"layer_norm": memkit.nn.LayerNorm, "rms_norm": memkit.nn.RMSNorm}[op]
    twin = {"layer_norm": torch.nn.LayerNorm, "rms_norm": torch.nn.RMSNorm}[op]

    def build(cls: type) -> torch.nn.Module:
        torch.manual_seed(0)
        net = torch.nn.Sequential(cls(columns), torch.nn.Linear(columns, columns))
        with torch.no_grad():
            for parameter, values in zip(
                net[0].parameters(), weights(op, columns, torch.float32), strict=True
            ):
                parameter.copy_(values)
        return net

    x = normal((256, columns), torch.float32, 0)
    upstream = normal((256, columns), torch.float32, 1)

    def gradients(net: torch.nn.Module, autocast: bool) -> list[Tensor]:
        dtype = next(net.parameters()).dtype
        leaf = x.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = net(leaf)
        found = torch.autograd.grad(out, [leaf, *net[0].parameters()], upstream.to(out.dtype))
        return [found[0], *found[1:]]

    want = gradients(build(twin).double(), False)
    theirs, mine = gradients(build(twin), True), gradients(build(norm), True)
    names = "input weight bias" if op == "layer_norm" else "input weight"
    assert_as_good_as_stock(names, mine, theirs, want)


def test_the_choice_follows_the_weights() -> None:
    x = normal((4, 64), torch.float32, 0)
    norm = memkit.nn.LayerNorm(64)
    assert M.norm_saves(norm(x)) == "output"
    with torch.no_grad():
        norm.weight[3] = 0.01
        norm.bias[3] = 0.02
    assert M.norm_saves(norm(x)) == "input"
    with torch.no_grad():
        norm.bias[3] = 0.005
    assert M.norm_saves(norm(x)) == "output"
    with torch.no_grad():
        norm.weight[0] = 0
    assert M.norm_saves(norm(x)) == "input"
    with pytest.raises(
        ValueError, match=r"^layer_norm: expected, with save='output', finite weights other than 0"
    ):
        M.layer_norm(x, (64,), norm.weight, norm.bias, save="output")
    with torch.no_grad():
        norm.weight[0] = math.nan
    assert M.norm_saves(norm(x)) == "input"
    assert M.norm_saves(x) is None
    half = memkit.nn.RMSNorm(64, dtype=torch.float16)
    with torch.no_grad():
        half.weight[1] = 1e-5  # outputs would be subnormal
    assert M.norm_saves(half(x.half())) == "input"


def test_weights_written_past_their_version() -> None:
    """As engines with flat or sharded parameters do. A weight of 0 rebuilds nothing, its own gradient included."""
    leaves = [normal((4, 8), torch.float32, 0), torch.ones(8), torch.zeros(8)]
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    assert M.norm_saves(M.layer_norm(x, (8,), weight, bias)) == "output"
    version = weight._version
    weight.data.zero_()
    assert weight._version == version
    out = M.layer_norm(x, (8,), weight, bias)
    assert M.norm_saves(out) == "input"
    found = torch.autograd.grad(out.sum(), weight)
    expected = torch.autograd.grad(torch.nn.functional.layer_norm(x, (8,), weight, bias).sum(), weight)
    torch.testing.assert_close(found, expected)
    bias.data.fill_(2.0)
    weight.data.fill_(2.0)
    assert M.norm_saves(M.layer_norm(x, (8,), weight, bias)) == "output"
    bias.data.fill_(2.1)
    assert M.norm_saves(M.layer_norm(x, (8,), weight, bias)) == "input"


def test_weights_that_die_leave_no_verdict_behind() -> None:
    x = normal((2, 8), torch.float32, 0).requires_grad_()
    for i in range(600):
        weight = torch.ones(8) if i % 2 else torch.zeros(8)
        assert M.norm_saves(M.rms_norm(x, (8,), weight)) == ("output" if i % 2 else "input")
