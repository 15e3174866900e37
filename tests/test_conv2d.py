"""The convolution whose backward needs less memory: values, and where it is used. The rest: test_consumer.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit
import memkit.functional as M

# Batch, channels in and out, height, kernel, stride, groups. Divided by batch, by channel, not at all.
SHAPES = {
    "batch": (9, 32, 48, 48, 3, 2, 1),
    "groups": (6, 64, 64, 48, 3, 1, 64),
    "pointwise": (7, 48, 16, 56, 1, 1, 1),
    "steps": (5, 64, 64, 56, 1, 2, 1),
    "channels": (16, 256, 250, 6, 3, 1, 1),
    "whole": (2, 8, 8, 5, 3, 1, 1),
}


def leaves(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], tuple[int, int, int, int]]:
    batch, inputs, outputs, size, kernel, stride, groups = SHAPES[name]
    torch.manual_seed(0)
    x = torch.randn(batch, inputs, size, size - 1, dtype=dtype, requires_grad=True)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, dtype=dtype, requires_grad=True)
    bias = torch.randn(outputs, dtype=dtype, requires_grad=True)
    return [x, weight, bias], (stride, kernel // 2, 1, groups)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_made_in_parts_are_stock_s(name: str, format: torch.memory_format) -> None:
    (x, weight, bias), numbers = leaves(name)
    x = x.detach().to(memory_format=format).requires_grad_()
    results = []
    for conv in (M.conv2d, F.conv2d):
        out = conv(x, weight, bias, *numbers)
        grad = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append((out, *torch.autograd.grad(out, (x, weight, bias), grad)))
    (out, *ours), (stock, *theirs) = results
    assert torch.equal(out, stock)
    for mine, other in zip(ours, theirs, strict=True):
        # Sums of products, ordered otherwise where the library takes another way for another batch.
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-6 * float(other.detach().abs().max()))
    assert ours[0].is_contiguous(memory_format=format)


@pytest.mark.parametrize("name", ["batch", "groups", "steps", "channels"])
def test_backward_peaks_lower(name: str) -> None:
    (x, weight, _), numbers = leaves(name)

    def peak(conv: Callable[..., Tensor]) -> int:
        out = conv(x, weight, None, *numbers)
        grad = torch.ones_like(out)
        return memkit.memory.measure(torch.autograd.grad, out, (x, weight), grad).peak

    peak(F.conv2d), peak(M.conv2d)  # buffers that the library keeps
    assert peak(M.conv2d) < 0.97 * peak(F.conv2d)


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (1, 3, 8, 8)])
def test_small_batches(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    M.conv2d(x, weight).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


def test_module() -> None:
    ours, stock = memkit.nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 4, 9, 9)
    assert torch.equal(ours(x), stock(x))
    assert torch.equal(ours(x[0]), stock(x[0]))  # without a batch: as stock
    for options in ({"padding": "same"}, {"padding": 1, "padding_mode": "circular"}):
        assert memkit.nn.Conv2d(4, 6, 3, **options)(x).shape == (*x.shape[:1], 6, 9, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize("two", [2, (2,), (2, 2), [2], np.int64(2), (np.int64(2), 2), torch.tensor(2)])
def test_numbers_as_stock_takes_them(two: Any) -> None:
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    for options in ({"stride": two}, {"padding": two}, {"dilation": two}):
        assert torch.equal(M.conv2d(x, weight, **options), F.conv2d(x, weight, **options))


def test_bad_input() -> None:
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    for call, error, text in (
        (lambda: M.conv2d(x[0, 0], weight), ValueError, "conv2d: expected an input .N, C, H, W."),
        (lambda: M.conv2d("x", weight), TypeError, "conv2d: expected input to be a Tensor, got str"),  # type: ignore[arg-type]
        (lambda: M.conv2d(x.int(), weight), TypeError, "conv2d: expected float32"),
        (lambda: M.conv2d(x, weight.double()), TypeError, "conv2d: expected a weight of the input's dtype"),
        (lambda: M.conv2d(x[:, :2], weight), ValueError, "conv2d: expected 3 channels"),
        (lambda: M.conv2d(x, weight, stride=0), ValueError, "conv2d: expected stride"),
        (lambda: M.conv2d(x, weight, padding="same"), ValueError, "conv2d: expected padding"),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=text):
            call()


class Twice(nn.Module):
    """Two convolutions of one activation: the convolution's input is what lean() drops."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.first, self.act = nn.Conv2d(channels, 32, 3, padding=1), nn.SiLU()
        self.a, self.b = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        return self.a(x) + self.b(x)


def test_swap_in_lean() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Twice(), *(Twice(32) for _ in range(5)))
    x = torch.randn(8, 3, 24, 24)

    def step() -> list[Tensor]:
        out = model(x)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), tuple(model.parameters()))]

    step()
    stock = memkit.memory.measure(step)
    memkit.swap(model, sample=x, lean="call")
    assert isinstance(model[0].a, memkit.nn.Conv2d)
    step()
    ours = memkit.memory.measure(step)
    for mine, other in zip(ours.result, stock.result, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    assert ours.saved < 0.7 * stock.saved
    assert ours.peak < 0.8 * stock.peak
    memkit.swap(model, sample=x, ops=[], lean="call")
    assert type(model[0].a) is nn.Conv2d
    memkit.unswap(model)
    assert type(model) is nn.Sequential
    assert type(model[0]) is Twice
