"""Instance and group norms inside `memkit.lean`: they and activations behind them are made again from their inputs."""

import copy
import pickle

import pytest
import torch
from swap_cases import assert_as_stock, step
from torch import nn

from memkit import lean, swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

C = 8
NORMS = {
    "instance": lambda: nn.InstanceNorm2d(C),
    "instance, weights": lambda: nn.InstanceNorm2d(C, eps=1e-3, affine=True),
    "group": lambda: nn.GroupNorm(2, C),
}
norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
ACTS = {
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(0.1, inplace=True),
    "silu": nn.SiLU,
}
acts = pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)


def make(norm, act):
    first, last = nn.Conv2d(3, C, 3, padding=1), nn.Conv2d(C, 3, 3, padding=1)
    return nn.Sequential(first, norm, act, last).double(), torch.randn(2, 3, 6, 4, dtype=torch.float64)


@norms
@acts
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(norm, act, by_sample):
    model, x = make(norm(), act())
    stock = [type(m) for m in model.modules()]
    swap(model, sample=x if by_sample else None, lean=True)
    for context in (lean(), torch.enable_grad()):
        with context:
            assert_as_stock(model, x)
            copied = pickle.loads(pickle.dumps(model))
            torch.testing.assert_close(step(copied, x), step(model, x))
    unswap(model)
    assert [type(m) for m in model.modules()] == stock


@norms
@acts
def test_saved_bytes(norm, act):
    """The norm's input, and two numbers a channel."""
    model, x = make(norm(), act())
    report = swap(model, sample=x, lean="call")
    tensor = 2 * C * 6 * 4 * 8
    assert report.saved_after <= tensor + 2 * 2 * C * 8
    assert report.saved_before >= 2 * tensor


OTHERS = {
    "running statistics": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 4, 4)),
    "one image": (lambda: nn.InstanceNorm2d(3), (3, 4, 4)),
    "rows": (lambda: nn.InstanceNorm1d(3), (2, 3, 5)),
    "one row": (lambda: nn.InstanceNorm1d(3), (3, 5)),
    "volumes": (lambda: nn.InstanceNorm3d(3, affine=True), (2, 3, 2, 3, 4)),
    "half precision": (lambda: nn.InstanceNorm2d(3), (2, 3, 4, 4)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_instance_norms(name):
    norm, shape = OTHERS[name]
    dtype = torch.bfloat16 if name == "half precision" else torch.float64
    model, x = norm().to(dtype), torch.randn(*shape, dtype=dtype, requires_grad=True)
    swap(model, lean=True)
    assert type(model) is not type(norm())
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for training in (True, False):
        model.train(training)
        found = []
        for stock in (False, True):
            if stock:
                unswap(model)
            if model.track_running_stats:
                model.reset_running_stats()
            with lean():
                out = model(x)
            weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
            found.append([out.detach(), *torch.autograd.grad(out, x, weights)])
        swap(model, lean=True)
        torch.testing.assert_close(*found, **close)


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (2, 4, 5, 5), (2, 3, 5)])
def test_stock_refuses_what_it_refuses(shape):
    errors = []
    norm = nn.InstanceNorm2d(3, affine=True)
    for stock in (True, False):
        if not stock:
            swap(norm, lean=True)
        with lean():
            try:
                norm(torch.randn(shape))
            except (ValueError, RuntimeError) as error:
                errors.append(str(error))
    assert shape == (2, 3, 5) or len(errors) == 2
    assert len(set(errors)) <= 1


@norms
def test_autocast(norm):
    """No further from float64 than twice stock, of what is not 0: the bias before an instance norm has no gradient."""
    model, x = make(norm(), nn.ReLU(inplace=True))
    exact = step(copy.deepcopy(model), x)
    model, x = model.float(), x.float()
    results = []
    for stock in (True, False):
        if not stock:
            swap(model, lean=True, ops=["group_norm"])
        with torch.autocast("cpu", torch.bfloat16), lean():
            results.append(step(model, x))
    for theirs, ours, value in zip(*results, exact, strict=True):
        assert ours.dtype == theirs.dtype
        if value.norm() > 1e-6:
            assert (ours - value).norm() <= 2 * (theirs - value).norm()


PARTS = {
    "split": lambda x: x.split(C // 2, 1),
    "chunk": lambda x: x.chunk(2, 1),
    "slices": lambda x: (x[:, : C // 2], x[:, C // 2 :]),
    "unbind": lambda x: x.unflatten(1, (2, C // 2)).unbind(1),
}


class InParts(nn.Module):
    """What a norm gives, and an activation that follows it, goes to two layers, half each."""

    def __init__(self, norm, act, parts):
        super().__init__()
        self.first, self.norm, self.act, self.parts = nn.Conv2d(3, C, 3, padding=1), norm, act, parts
        self.last = nn.ModuleList(nn.Conv2d(C // 2, 3, 3, padding=1) for _ in range(2))

    def forward(self, x):
        a, b = self.parts(self.act(self.norm(self.first(x))))
        return self.last[0](a) + self.last[1](b)


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(C), *NORMS.values()], ids=["batch", *NORMS])
@pytest.mark.parametrize("act", [nn.Identity, lambda: nn.SiLU(inplace=True)], ids=["none", "silu"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_sample_sees_through_views(norm, act, parts):
    """The norm's input alone is kept: what its views are kept for is made again."""
    model = InParts(norm(), act(), parts).double()
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    swapped = copy.deepcopy(model)
    swap(swapped, sample=x, lean="call")
    torch.testing.assert_close(step(swapped, x), step(model, x))
    kept = measure(lambda: swapped(x).sum().backward(), device="cpu").saved
    assert kept <= 2 * C * 6 * 4 * 8 + 2 * 2 * C * 8
