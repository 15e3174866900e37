"""`lean()` makes padded results again: what was padded is, and is padded as before."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

SHAPES = {1: (2, 3, 20), 2: (2, 3, 7, 9), 3: (2, 3, 5, 6, 7)}
PADS = {1: (3, 2), 2: (3, 1, 0, 2), 3: (1, 2, 0, 1, 2, 0)}
MODES = ["constant", "reflect", "replicate"]


def padded(x: Tensor, mode: str, value: float = 0.0, pad=None) -> Tensor:
    pad = PADS[x.dim() - 2] if pad is None else pad
    return F.pad(M.gelu(x, save="input"), pad, mode=mode, value=value if mode == "constant" else None)


def gradients(function, x: Tensor, *, lean: bool) -> list[Tensor]:
    with memkit.lean() if lean else torch.enable_grad():
        y = function(x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).requires_grad_()
    with memkit.lean() if lean else torch.enable_grad():
        out = (y * weight).sum()
    return [y.detach(), *torch.autograd.grad(out, [x, weight])]


def assert_as_stock(function, x: Tensor) -> None:
    for ours, theirs in zip(
        gradients(function, x, lean=True), gradients(function, x, lean=False), strict=True
    ):
        assert torch.equal(ours, theirs)


def given(dims: int, **options) -> Tensor:
    return torch.randn(*SHAPES[dims], **options).requires_grad_()


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_as_it_was(mode, dims, dtype):
    assert_as_stock(lambda x: padded(x, mode, 0.5), given(dims, dtype=dtype))


@pytest.mark.parametrize("value", [0.0, -0.0, 2.5, -torch.inf, torch.nan])
@pytest.mark.parametrize("pad", [(0, 0), (2, 0), (0, 2), (0, 0, 1, 0), (0, 0, 0, 0, 0, 1), (-1, 2), (-1, -1)])
def test_constants(pad, value):
    x = given(1)
    weight = torch.ones_like(padded(x, "constant", value, pad)).requires_grad_()
    for lean in (False, True):
        with memkit.lean() if lean else torch.enable_grad():
            y = padded(x, "constant", value, pad) * weight
        (grad,) = torch.autograd.grad(y.sum(), weight)
        expected = F.pad(F.gelu(x), pad, value=value)
        torch.testing.assert_close(grad, expected, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept(mode):
    conv, x = nn.Conv1d(64, 64, 5), torch.randn(4, 64, 500, requires_grad=True)

    def step():
        with memkit.lean():
            return conv(padded(x * 1.0, mode, pad=(2, 2)))

    # The product is; before, what the convolution is given as well.
    assert measure(step).saved <= x.nbytes + 1000


@pytest.mark.parametrize("mode", MODES)
def test_views_and_layouts(mode):
    x = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last).requires_grad_()
    assert_as_stock(lambda x: padded(x, mode, 1.0)[:, 1:, ::2].mT, x)


def test_a_change_in_place_afterwards():
    def function(x):
        y = padded(x, "constant")
        return y.mul_(2.0)

    assert_as_stock(function, given(2))


def test_rows_of_a_norm():
    norm = memkit.nn.LayerNorm(9)
    assert_as_stock(lambda x: F.pad(norm(x), (1, 1, 2, 0), value=3.0), given(2))


@pytest.mark.parametrize("mode", MODES)
def test_hooks_around(mode):
    x, conv = given(1), nn.Conv1d(3, 4, 3)
    found = []
    for around in (None, "cpu", "checkpoint"):

        def run(x):
            with memkit.lean():
                return conv(padded(x, mode, 0.5)).square().sum()

        with torch.autograd.graph.save_on_cpu() if around == "cpu" else torch.enable_grad():
            loss = checkpoint(run, x, use_reentrant=False) if around == "checkpoint" else run(x)
        found.append(torch.autograd.grad(loss, [x, conv.weight]))
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


def test_differentiated_twice():
    x, conv = given(1, dtype=torch.float64), nn.Conv1d(3, 4, 3).double()
    found = []
    for lean in (False, True):
        with memkit.lean() if lean else torch.enable_grad():
            loss = conv(F.pad(M.tanh(x) + M.tanh(2 * x), (1, 1), value=0.5)).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append([grad, *torch.autograd.grad(grad.square().sum(), [x, conv.weight])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
