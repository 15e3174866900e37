"""`lean()` and sums: `a + b` of two results that can be rebuilt is rebuilt too; and `swap(lean=True)`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit.bench.models import CNN
from memkit.memory import measure

WIDTH, ROWS = 32, 64
SIZE = 4 * WIDTH * ROWS


class Sum(nn.Module):
    """act(act(first(x)) + act(second(x))), then a layer that keeps it. `change` comes between the summands and their sum."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        a, b = M.gelu(self.first(x), save="input"), M.silu(self.second(x), save="input")
        return self.last(M.mish(self.change(a, b), save="input"))


def gradients(model: nn.Module, x: Tensor, lean: bool) -> tuple[list[Tensor], int]:
    def run() -> Tensor:
        if not lean:
            return model(x)
        with memkit.lean():
            return model(x)

    measured = measure(run)
    out = measured.result
    slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [
        out,
        *torch.autograd.grad(out, list(model.parameters()), slope, materialize_grads=True),
    ], measured.saved


def assert_same(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """To the bit. Returns what was saved, without and with lean()."""
    plain, before = gradients(model, x, lean=False)
    rebuilt, after = gradients(model, x, lean=True)
    for ours, theirs in zip(rebuilt, plain, strict=True):
        assert torch.equal(ours, theirs)
    return before, after


def test_a_sum_is_rebuilt() -> None:
    before, after = assert_same(Sum(), torch.randn(ROWS, WIDTH))
    assert before - after == 2 * SIZE  # the sum and what mish makes of it
    assert after == 2 * SIZE  # what the summands were made from


def changed_meanwhile(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        a.mul_(2)
    return a + b


def changed_afterwards(a: Tensor, b: Tensor) -> Tensor:
    total = a + b
    with torch.no_grad():
        a.mul_(2)
    return total


@pytest.mark.parametrize(
    "change",
    [
        changed_meanwhile,
        changed_afterwards,
        lambda a, b: torch.add(a, b, alpha=2),
        lambda a, b: a + b[:1],
        lambda a, b: a + b.detach(),
        lambda a, b: (a + b).mul_(0.5),
        lambda a, b: a + 1.5,
        lambda a, b: a.add_(b),
        lambda a, b: a.double().float() + b,
        lambda a, b: a + a,
        lambda a, b: (a + b) + a,
        lambda a, b: (a.t() + b.t()).t(),
    ],
)
def test_other_sums_are_right(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_same(Sum(change), torch.randn(ROWS, WIDTH))


class Chain(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(length + 1))

    def forward(self, x: Tensor) -> Tensor:
        x = M.silu(self.layers[0](x), save="input")
        for layer in self.layers[1:]:
            x = M.silu(x + M.gelu(layer(x), save="input"), save="input")
        return x


@pytest.mark.parametrize("act", ["hardswish", "hardsigmoid", "hardtanh", "relu6", "silu"])
def test_an_activation_with_dropout_is_rebuilt(act: str) -> None:
    """From an input that is rebuilt itself, so that its memory could be taken. Beside dropout all but silu need it."""

    class Dropping(Sum):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(1)
            return self.last(M.act_dropout(M.gelu(self.first(x), save="input"), act, 0.3, save="input"))

    before, after = assert_same(Dropping(), torch.randn(ROWS, WIDTH))
    assert after <= before - SIZE


def test_a_chain_keeps_some() -> None:
    """Each result needs the one before it: what would take more than three operators to rebuild is kept."""
    for length in (1, 2, 3, 8):
        before, after = assert_same(Chain(length), torch.randn(ROWS, WIDTH))
        assert before == (3 * length + 1) * SIZE
        assert after <= (1.6 * length + 1) * SIZE


def test_graphs_that_are_kept_and_other_hooks() -> None:
    model, x = Sum(), torch.randn(ROWS, WIDTH)
    want, _ = gradients(model, x, lean=False)
    with memkit.lean():
        loss = model(x)
    slope = torch.linspace(-1, 1, loss.numel()).view_as(loss)
    for _ in range(2):
        got = torch.autograd.grad(loss, list(model.parameters()), slope, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want[1:], strict=True))
    with save_on_cpu(), memkit.lean():
        loss = model(x)
    got = torch.autograd.grad(loss, list(model.parameters()), slope)
    assert all(torch.equal(a, b) for a, b in zip(got, want[1:], strict=True))
    for reentrant in (False, True):
        with memkit.lean():
            loss = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
        got = torch.autograd.grad(loss, list(model.parameters()), slope) if not reentrant else None
        assert got is None or all(torch.equal(a, b) for a, b in zip(got, want[1:], strict=True))

    def inside(x: Tensor) -> Tensor:
        with memkit.lean():
            return model(x)

    loss = checkpoint(inside, x.clone().requires_grad_(), use_reentrant=False)
    got = torch.autograd.grad(loss, list(model.parameters()), slope)
    assert all(torch.equal(a, b) for a, b in zip(got, want[1:], strict=True))


def test_second_derivatives() -> None:
    model, x = Sum().double(), torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for lean in (False, True):
        if lean:
            with memkit.lean():
                out = model(x)
        else:
            out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), list(model.parameters())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


# -- swap(lean=True)


def test_swap_for_lean_on_a_residual_network() -> None:
    model, x = CNN(10, width=8).double(), torch.randn(16, 1, 8, 8, dtype=torch.float64)
    want, stock = gradients(model, x, lean=False)
    for sample in (x, None):
        memkit.swap(model, sample=sample, lean=True)
        got, saved = gradients(model, x, lean=True)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
        assert saved < 0.45 * stock
        outside, saved = gradients(model, x, lean=False)
        assert saved <= stock
        for ours, theirs in zip(outside, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    memkit.unswap(model)
    for ours, theirs in zip(gradients(model, x, lean=False)[0], want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_swap_for_lean_in_half_precision() -> None:
    """There the slope from the output is not exact; inside lean() it comes from the input."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    want, stock = gradients(model, x, lean=False)
    (row,) = memkit.swap(model, sample=x, lean=True)
    assert (row.after, row.saved) == ("in lean()", "input")
    got, saved = gradients(model, x, lean=True)
    assert stock - saved == SIZE // 2
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert gradients(model, x, lean=False)[1] == stock
