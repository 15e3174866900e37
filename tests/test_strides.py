"""Results have the strides that PyTorch's have, along dimensions of one element too: what comes next goes by them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit
from memkit import functional as M
from memkit._reference import ACTIVATIONS

# Contiguous and channels last in one.
SHAPES = [(3, 8, 1, 1), (3, 1, 4, 2), (1, 1, 4, 4)]
PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "batch_norm": (
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: M.batch_norm_act(x, None, None, training=True, act="identity"),
    ),
    "batch_norm_act": (
        lambda x: F.relu(F.batch_norm(x, None, None, training=True)),
        lambda x: M.batch_norm_act(x, None, None, training=True, act="relu"),
    ),
    "group_norm": (lambda x: F.group_norm(x, 1), lambda x: M.group_norm(x, 1)),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[1:]), lambda x: M.layer_norm(x, x.shape[1:])),
    "softmax": (lambda x: F.softmax(x, 1), lambda x: M.softmax(x, 1)),
    "dropout": (lambda x: F.dropout(x, 0.5), lambda x: M.dropout(x, 0.5)),
    "act_conv2d": (
        lambda x: F.conv2d(F.gelu(x), torch.ones(4, x.size(1), 1, 1)),
        lambda x: M.act_conv2d(x, torch.ones(4, x.size(1), 1, 1), act="gelu"),
    ),
} | {name: (each.stock, getattr(M, name)) for name, each in ACTIVATIONS.items()}


def row_first(shape: tuple[int, ...]) -> Tensor:
    """An image as files have it, alone: channels last but for the stride of its only number."""
    _, channels, height, width = shape
    return torch.randn(height, width, channels).permute(2, 0, 1).unsqueeze(0)


def ambiguous(shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape).to(memory_format=torch.channels_last)
    assert x.is_contiguous()
    assert x.stride() != torch.empty(shape).stride()
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_as_stock(name, shape):
    stock, ours = PAIRS[name]
    x = ambiguous(shape)
    assert ours(x).stride() == stock(x).stride()
    grad_x = x.requires_grad_() * 1
    assert ours(grad_x).stride() == stock(grad_x).stride()
    if (
        name != "act_conv2d"
    ):  # PyTorch's own results on the meta device have other strides than those on the CPU
        assert ours(torch.empty_strided(shape, x.stride(), device="meta")).stride() == stock(x).stride()


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in ("softmax", "layer_norm")])
def test_an_image_alone(name):
    stock, ours = PAIRS[name]
    x = row_first((1, 3, 6, 5))
    assert not x.is_contiguous()
    assert ours(x).stride() == stock(x).stride()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["relu6", "gelu"])
def test_with_a_bias(name, bias):
    x = ambiguous((3, 8, 1, 1))
    b = torch.randn(8)
    stock = ACTIVATIONS[name].stock(x + b.view(-1, 1, 1) if bias else x)
    ours = M.bias_act(x, b, name, dim=1) if bias else getattr(M, name)(x)
    assert ours.stride() == stock.stride()


@pytest.mark.parametrize("shape", [(3, 8, 1, 1), (3, 1, 4, 2)], ids=str)
def test_norms_over_channels_compiled_as_in_eager_mode(shape):
    x = torch.randn(shape)
    for norm in (lambda x: M.normalize(x, dim=1), lambda x: M.rms_norm(x, x.shape[1:2], dim=1)):
        torch._dynamo.reset()
        compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)(x)
        assert norm(x).stride() == compiled.stride() == F.normalize(x).stride() == x.stride()
        torch.testing.assert_close(compiled, norm(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_not_in_place_where_the_strides_would_stay(shape):
    x = ambiguous(shape)
    y = M.gelu(x, inplace="auto")
    assert y.data_ptr() != x.data_ptr()
    assert y.stride() == F.gelu(x).stride()
    usual = torch.randn(shape)
    assert M.gelu(usual, inplace="auto").data_ptr() == usual.data_ptr()


def test_gradients_in_either_strides():
    x = ambiguous((3, 1, 4, 2)).double().requires_grad_()
    pairs = [
        (M.gelu, F.gelu),
        (M.relu, F.relu),
        (lambda x: M.swiglu(x, 2 * x), lambda x: F.silu(x) * (2 * x)),
        (lambda x: M.softmax(x, -1), lambda x: F.softmax(x, -1)),
    ]
    for ours, stock in pairs:
        for grad in (torch.randn(3, 1, 4, 2).double(), ambiguous((3, 1, 4, 2)).double()):
            got, expected = (torch.autograd.grad(each(x * 1), x, grad)[0] for each in (ours, stock))
            torch.testing.assert_close(got, expected)


class Pooled(nn.Module):
    """As pyramid pooling: a branch of 1x1 that meets the image again."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(64, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.out = nn.Sequential(nn.Conv2d(96, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],)).permute(0, 3, 1, 2)
        small = F.interpolate(self.branch(x), size=x.shape[2:], mode="bilinear")
        return self.out(torch.cat([x, small], 1))


@pytest.mark.parametrize("lean", [False, "call"])
def test_a_pooled_branch_stays_as_it_is_laid_out(lean):
    stock = Pooled()
    model, x = copy.deepcopy(stock), torch.randn(2, 64, 4, 4)
    report = memkit.swap(model, sample=x, lean=lean)
    assert report.changed
    assert model(x).stride() == stock(x).stride()


def test_a_parameter_turned_between_two_steps():
    """A 1x1 convolution's, whose memory stays as it is."""
    layers = [nn.Conv2d(4, 8, 1) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [memkit.optim.AdamW(layer.parameters()) for layer in layers]
    for turned in (False, True):
        if turned:
            layers[1].to(memory_format=torch.channels_last)
            assert layers[1].weight.stride() != layers[0].weight.stride()
        for layer, optimizer in zip(layers, optimizers, strict=True):
            for parameter in layer.parameters():
                parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            optimizer.step()
        torch.testing.assert_close(*(layer.weight for layer in layers), check_stride=False)
