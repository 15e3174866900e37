"""What a few numbers in one place do not show of a layer: that it skips itself at random, what it does elsewhere, what it
reads past autograd. Each of these is left to stock."""

import random

import numpy as np
import pytest
import torch
from swap_cases import D
from swap_library_layers import MLP, BasicConv2d, GatedMLP, QuickGELU
from torch import nn
from torch.nn import functional as F

from memkit import swap
from memkit.swap.library.activations import library_activation
from memkit.swap.library.elsewhere import asks_of

pytestmark = pytest.mark.usefixtures("repeatable")


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self.norm(x) * self.weight


class Block(nn.Module):
    """torchvision's."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(D, D, 3, padding=1), nn.BatchNorm2d(D)
        self.conv2, self.bn2 = nn.Conv2d(D, D, 3, padding=1), nn.BatchNorm2d(D)
        self.relu, self.downsample = nn.ReLU(inplace=True), None

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


def why_left(module):
    """The reason in its row, or none if it got a twin."""
    (row,) = (row for row in swap(module).rows if row.path == "")
    return "" if row.changed else row.reason


BASES = [MLP, GatedMLP, BasicConv2d, RMSNorm, Block]
DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "random": random.random,
    "numpy": np.random.rand,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", BASES)
def test_the_layers_themselves_are_known(base, dtype):
    assert not why_left(base().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drawn", DRAWS)
@pytest.mark.parametrize("base", BASES)
def test_a_layer_that_skips_itself_at_random(base, drawn, dtype):
    """Which it need not do in the runs that are compared."""

    class Skips(base):
        def forward(self, x):
            out = super().forward(x)
            return out * 0 if self.training and DRAWS[drawn]() < 1e-6 else out

    Skips.__name__ = base.__name__
    for training in (True, False):
        assert "draws random numbers" in why_left(Skips().to(dtype).train(training))


def test_a_layer_whose_rate_goes_by_the_name_of_layer_drop():
    class Skips(MLP):
        layerdrop = 0.0

        def __init__(self):
            super().__init__()
            self.layerdrop = 1e-6

        def forward(self, x):
            if self.layerdrop > 0 and torch.rand(1) < self.layerdrop:
                return x
            return super().forward(x)

    assert "draws random numbers" in why_left(Skips())


def test_a_rate_that_is_raised_later():
    class Skips(MLP):
        def __init__(self):
            super().__init__()
            self.p = 0.0

        def forward(self, x):
            return x if self.p > 0 and torch.rand(1) < self.p else super().forward(x)

    model, x = Skips(), torch.randn(2, D)
    assert not why_left(model)
    assert not torch.equal(model(x), x)
    model.p = 1.0
    assert torch.equal(model(x), x)


def test_a_child_that_draws_for_both_is_no_reason():
    """As timm's blocks call their stochastic depth."""
    blocks = pytest.importorskip("timm.models.resnet")
    layers = pytest.importorskip("timm.layers")
    assert not why_left(blocks.BasicBlock(D, D, drop_path=layers.DropPath(0.5)))


def test_an_activation_that_skips_itself_at_random():
    class Skips(QuickGELU):
        def forward(self, x):
            return x if self.training and torch.rand(1).item() < 1e-6 else super().forward(x)

    Skips.__name__ = "QuickGELU"
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert library_activation(Skips()) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert library_activation(QuickGELU()) == "quick_gelu"


def test_verifying_draws_nothing_for_others():
    model, drawn = nn.Sequential(MLP(), Block()), []
    for swaps in (False, True):
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        if swaps:
            swap(model)
        drawn.append([draw() for draw in DRAWS.values()])
    assert drawn[0] == drawn[1]


CONDITIONS = {
    "four dimensions": lambda module, x: x.dim() == 4,
    "one dimension": lambda module, x: x.ndim == 1,
    "a row": lambda module, x: x.shape[-2:-1] == (1,),
    "a batch of one": lambda module, x: x.size(0) == 1,
    "many rows": lambda module, x: x.dim() > 2 and x.shape[1] > 16,
    "a large batch": lambda module, x: len(x) >= 100,
    "as many as it says": lambda module, x: x.dim() > 2 and x.shape[1] == module.longest,
    "more than its features": lambda module, x: x.dim() > 2 and x.shape[1] > module.width,
    "no gradients": lambda module, x: not torch.is_grad_enabled(),
    "in evaluation without gradients": lambda module, x: not (module.training or torch.is_grad_enabled()),
    "data": lambda module, x: not x.requires_grad,
    "frozen": lambda module, x: not next(iter(module.parameters())).requires_grad,
    "half precision": lambda module, x: x.dtype == torch.float16,
    "float64": lambda module, x: x.dtype == torch.float64,
}
OF_FEED_FORWARD = {
    "autocast": lambda module, x: torch.is_autocast_enabled("cpu"),
    "half precision inside autocast": lambda module, x: x.dtype == torch.bfloat16 != module.fc1.weight.dtype,
}


def _branching(base, decides):
    class Branches(base):
        longest, width = 77, D

        def forward(self, x):
            out = super().forward(x)
            return out * 1.5 if self.decides(x) else out

    Branches.decides, Branches.__name__ = decides, base.__name__
    return Branches


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("base", [MLP, GatedMLP, RMSNorm])
def test_a_branch_on_what_it_is_given(base, name):
    """`decides` is of this file, as a method is: of both the code is read."""
    assert "computes something else" in why_left(_branching(base, CONDITIONS[name])())


@pytest.mark.parametrize("name", OF_FEED_FORWARD)
def test_a_branch_on_autocast(name):
    assert "computes something else under autocast" in why_left(_branching(MLP, OF_FEED_FORWARD[name])())


OF_IMAGES = {
    "a low image": lambda module, x: x.shape[2] <= 3,
    "a large image": lambda module, x: x.shape[3] > 50,
    "a batch of one": lambda module, x: x.shape[0] == 1,
}


@pytest.mark.parametrize("name", OF_IMAGES)
@pytest.mark.parametrize("base", [Block, BasicConv2d])
def test_a_branch_of_an_image_layer(base, name):
    assert "computes something else" in why_left(_branching(base, OF_IMAGES[name])())


class OnlyAutocast(MLP):
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


class Rounds(MLP):
    """To what it is given, which under autocast the last layer's result is not."""

    def forward(self, x):
        return super().forward(x).type_as(x)


@pytest.mark.parametrize("cls", [OnlyAutocast, Rounds])
def test_a_layer_of_another_dtype_under_autocast(cls):
    assert "computes something else under autocast" in why_left(cls())


class Columns(RMSNorm):
    """Whose rows are an image's channels: it takes another input where the sizes are the same."""

    def forward(self, x):
        if x.dim() == 4:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


def test_a_norm_of_rows_that_is_one_of_channels_too():
    Columns.__name__ = "RMSNorm"
    for sample in (None, torch.randn(2, 3, D), torch.randn(2, D, 3, D)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), Columns(), nn.Linear(D, D))
        nn.init.normal_(model[1].weight)
        images, rows = torch.randn(2, D, 3, D), torch.randn(2, 3, D)
        before = [model(x) for x in (images, rows)]
        swap(model, sample=sample)
        for x, expected in zip((images, rows), before, strict=True):
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*(name for name in CONDITIONS if name != "frozen"), "autocast"])
def test_an_activation_with_a_branch(name):
    cls = _branching(QuickGELU, (CONDITIONS | OF_FEED_FORWARD)[name])
    assert asks_of(cls).goes_by_them
    assert library_activation(cls()) is None


LIMITS = {
    "input": lambda self, x: self.norm(x.clamp(-50, 50)) * self.weight,
    "far input": lambda self, x: self.norm(x.clamp(-5e3, 5e3)) * self.weight,
    "variance": lambda self, x: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(max=100.0) + self.eps) * self.weight
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIMITS)
def test_a_norm_with_a_limit(name, dtype):
    cls = type("RMSNorm", (RMSNorm,), {"forward": LIMITS[name]})
    assert "of large inputs" in why_left(cls().to(dtype))


class LimitedLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.clamp(-50, 50))


class LimitedBlock(Block):
    def forward(self, x):
        return super().forward(x.clamp(-50, 50))


@pytest.mark.parametrize("make", [lambda: LimitedLayerNorm(D), LimitedBlock])
def test_other_layers_with_a_limit(make):
    assert "of large inputs" in why_left(make())


class Scaled(MLP):
    """By a parameter that autograd does not see."""

    def __init__(self, gain=1.0, trained=False):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain), requires_grad=trained)


class ByDetached(Scaled):
    def forward(self, x):
        return super().forward(x) * self.gain.detach()


class ByNumber(Scaled):
    def forward(self, x):
        return super().forward(x) * self.gain.item()


class ByClone(Scaled):
    def forward(self, x):
        with torch.no_grad():
            gain = self.gain.clone()
        return super().forward(x) * gain


class Ordered(MLP):
    def __init__(self, order=None):
        super().__init__()
        self.register_buffer("order", torch.arange(3 * D) if order is None else order)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x))[..., self.order])


class Flagged(MLP):
    def __init__(self, flag=0):
        super().__init__()
        self.flag = torch.tensor(flag)

    def forward(self, x):
        return super().forward(x) * (2 if self.flag else 1)


BESIDE = [
    (Scaled, 1.0, 3.0),
    (ByDetached, 1.0, 3.0),
    (ByNumber, 1.0, 3.0),
    (ByClone, 1.0, 3.0),
    (Ordered, torch.arange(3 * D), torch.arange(3 * D).flip(0)),
    (Flagged, 0, 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize(("cls", "first", "second"), BESIDE)
def test_layers_that_differ_in_what_autograd_does_not_see(cls, first, second, by_sample, dtype):
    """Alike else: one verdict is of both."""
    model, x = nn.Sequential(cls(first), cls(second)).to(dtype), torch.randn(3, D).to(dtype)
    parameters = [p.clone() for p in model.parameters()]
    expected = model(x)
    report = swap(model, sample=x if by_sample else None)
    rows = [row for row in report.rows if row.path in ("0", "1")]
    assert [row.changed for row in rows] == [cls is Scaled] * 2, report
    assert cls is Scaled or "computes with" in rows[0].reason
    torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
    assert all(p.equal(q) for p, q in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_down_in_half_precision_too(dtype):
    """Where a twin may round otherwise than stock."""

    class Counts(RMSNorm):
        def __init__(self):
            super().__init__()
            self.calls = {"all": 0}

        def forward(self, x):
            self.calls["all"] += 1
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)

    Counts.__name__ = "RMSNorm"
    assert why_left(Counts().to(dtype)) == "RMSNorm changes calls in each call"
