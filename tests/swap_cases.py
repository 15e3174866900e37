"""What the tests of swap share: models, a step, and the comparison with stock."""

import functools

import pytest
import torch
from torch import nn

from memkit.swap import change, types

D = 16
DOUBLE = {"dtype": torch.float64}

# Every type that swap knows, built as users build it.
STOCK = {
    "relu": nn.ReLU,
    "leaky_relu": functools.partial(nn.LeakyReLU, 0.2),
    "elu": functools.partial(nn.ELU, 1.5),
    "selu": nn.SELU,
    "celu": functools.partial(nn.CELU, 2.0),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softplus": functools.partial(nn.Softplus, 2.0),
    "relu6": nn.ReLU6,
    "hardtanh": functools.partial(nn.Hardtanh, -0.5, 0.75),
    "hardsigmoid": nn.Hardsigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
}
acts = pytest.mark.parametrize("act", STOCK)
some_acts = pytest.mark.parametrize("act", ["relu", "elu", "gelu"])


def batch(*shape, **kwargs):
    return torch.randn(*(shape or (4, D)), **{**DOUBLE, **kwargs})


def mlp(act, **kwargs):
    return nn.Sequential(nn.Linear(D, D), act, nn.Linear(D, D)).to(**{**DOUBLE, **kwargs})


def step(model, *args, **kwargs):
    """Outputs and gradients of a training step, from one random state, without dropout: memkit drops other elements."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.training = False
    leaves = [p for p in model.parameters() if p.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    out = model(*args, **kwargs)
    out = torch.cat(out) if isinstance(out, tuple) else out
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_as_stock(model, *args, rtol=1e-7, atol=1e-8, **kwargs):
    """The swapped model computes what it computes unswapped; leaves it swapped."""
    got = step(model, *args, **kwargs)
    done = change.undo(model)
    assert not any(isinstance(module, types.Changed) for module in model.modules())
    stock = step(model, *args, **kwargs)
    change.redo(done)
    for ours, theirs in zip(got, stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def only(report):
    assert len(report) == 1
    return report.rows[0]


class Block(nn.Module):
    """Linear, activation, Linear, put together by a function of (self, x)."""

    def __init__(self, run, act=None):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.act = act or nn.GELU()
        self.run = run
        self.to(torch.float64)

    def forward(self, x):
        return self.run(self, x)


def plain(self, x):
    h = self.first(x)
    h = self.act(h)
    return self.second(h)
