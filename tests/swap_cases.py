"""What the tests of swap share: models, a step, and the comparison with stock."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from memkit import swap, unswap
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


def images():
    return torch.randn(3, 2, 8, 8, dtype=torch.float64)


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


def tangent_and_gradients(model, x):
    """Of the result, x having a tangent, and of the parameters in a backward after that."""
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, torch.linspace(-1, 1, x.numel()).view(x.shape)))
        tangent = forward_ad.unpack_dual(out).tangent.detach()
    out.sum().backward()
    return [tangent, *(p.grad for p in model.parameters() if p.grad is not None)]


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


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


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


def normed(by_sample):
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)).double()
    return model, model[1]


def in_sequence(by_sample):
    model = mlp(nn.GELU())
    return model, model[1]


def in_block(by_sample):
    model = Block(plain)
    return model, model.act


MODELS = [(normed, True), (in_sequence, False), (in_sequence, True), (in_block, True)]
models = pytest.mark.parametrize(("build", "by_sample"), MODELS)


class Kept:
    """What hooks kept, and what it was at the time."""

    def __init__(self):
        self.tensors, self.values = [], []

    def add(self, tensor):
        self.tensors.append(tensor)
        self.values.append(tensor.detach().clone())

    def assert_unchanged(self):
        assert self.tensors
        for tensor, value in zip(self.tensors, self.values, strict=True):
            assert tensor.detach().equal(value)


class TinyRMSNorm(nn.Module):
    def __init__(self, offset=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)
        self.eps = 1e-6
        self.offset = offset

    def forward(self, x):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight + self.offset) * normed


def of_a_library(module, inputs):
    return nn.Sequential(module()).double(), inputs().requires_grad_()


def assert_known(module, inputs, by_sample, lean):
    """A recipe takes it, and it computes what stock does."""
    model, x = of_a_library(module, inputs)
    report = swap(model, sample=x if by_sample else None, lean=lean)
    assert type(model[0]).__mro__[1].__module__.startswith("memkit.swap.library"), report
    assert_as_stock(model, x)
    model.eval()
    assert_as_stock(model, x)


def assert_copied(module, inputs):
    """Copies and pickles of what a recipe took compute the same; `unswap` leaves nothing of it."""
    model, x = of_a_library(module, inputs)
    classes = [type(m) for m in model.modules()]
    swap(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[0]) is type(model[0])
        torch.testing.assert_close(step(copied, x), step(model, x))
    unswap(model)
    assert [type(m) for m in model.modules()] == classes
    assert not any("_swap" in vars(m) for m in model.modules())


def assert_compiled(module, inputs, lean):
    """In one graph, and what stock computes."""
    model, x = of_a_library(module, inputs)
    model.eval()
    stock = copy.deepcopy(model)
    swap(model, lean=lean)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for each, expected in zip(step(compiled, x), step(stock, x), strict=True):
        torch.testing.assert_close(each, expected)
