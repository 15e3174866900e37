"""Activations of two slopes keep a bit an element where nothing else keeps their output, and only there."""

import pytest
import torch
import torch.nn.functional as F
from swap_cases import STOCK, assert_as_stock, batch, images, mlp, only
from torch import nn

import memkit
from memkit import swap, unswap

pytestmark = pytest.mark.usefixtures("repeatable")

TWO_SLOPES = ["relu", "leaky_relu", "relu6", "hardtanh", "hardsigmoid"]
IN_PLACE = [nn.ReLU(), nn.ReLU(True), nn.LeakyReLU(0.2, True), nn.ReLU6(True), nn.Hardsigmoid(True)]
in_place = pytest.mark.parametrize("act", IN_PLACE, ids=repr)


class Fire(nn.Module):
    """What follows the activation is a function of (self, result)."""

    def __init__(self, then, act=None):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.act = act or nn.ReLU(inplace=True)
        self.then = then
        self.to(torch.float64)

    def forward(self, x):
        return self.then(self, self.act(self.first(x)))


def joined(self, h):
    return self.second(
        torch.cat([h, self.first.bias.expand(h.shape[0], 8, 8, 4).permute(0, 3, 1, 2)], 1)[:, 2:6]
    )


def added(self, h):
    return self.second(h + self.first.bias.view(1, -1, 1, 1))


def averaged(self, h):
    return h.mean((2, 3))


def enlarged(self, h):
    return self.second(F.interpolate(h, scale_factor=2))


def pooled_apart(self, h):
    return self.second(F.adaptive_avg_pool2d(h, 2))


NOT_KEPT = [joined, added, averaged, enlarged]


def of_one_bit(report):
    row = only(report)
    elements = 3 * 4 * 8 * 8
    assert row.saved == "1 bit", report
    assert row.bytes_before == elements * 8
    assert row.bytes_after == elements // 8


@pytest.mark.parametrize("then", NOT_KEPT)
def test_taken(then):
    model, x = Fire(then), images()
    report = swap(model, sample=x)
    of_one_bit(report)
    assert_as_stock(model, x)
    measured = memkit.memory.measure(lambda: model(x).sum().backward())
    unswap(model)
    stock = memkit.memory.measure(lambda: model(x).sum().backward())
    assert stock.saved - measured.saved == report.saved_before - report.saved_after
    assert measured.saved < stock.saved


@pytest.mark.parametrize("act", TWO_SLOPES)
def test_every_function_of_two_slopes(act):
    model = Fire(joined, STOCK[act]())
    assert only(swap(model, sample=images())).saved == "1 bit"
    assert_as_stock(model, images())


@in_place
def test_stock_in_place(act):
    model = Fire(added, act)
    swap(model, sample=images())
    assert_as_stock(model, images())
    assert model.act._swap.save == "bit"


def into_linear(self, h):
    return self.second(h)


def multiplied(self, h):
    return h * self.first.bias.view(1, -1, 1, 1)


def into_average(self, h):
    return F.avg_pool2d(h, 2)


@pytest.mark.parametrize("then", [into_linear, multiplied, into_average])
@in_place
def test_not_taken_where_the_output_is_kept(then, act):
    model = Fire(then, act)
    row = only(swap(model, sample=images()))
    assert "1 bit" not in row.saved
    assert row.bytes_after <= row.bytes_before
    assert_as_stock(model, images())


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 4)], ids=repr)
def test_not_taken_before_a_norm_that_keeps_it(norm):
    model = Fire(lambda self, h: self.norm(h))
    model.norm = norm.double()
    report = swap(model, sample=images())
    assert [row.saved for row in report if row.path == "act"] == ["output"]
    assert_as_stock(model, images())


@pytest.mark.parametrize(("last", "bit"), [(averaged, True), (enlarged, True), (into_linear, False)])
def test_one_module_called_several_times(last, bit):
    """Three bits are less than one output that nobody else keeps."""

    def then(self, h):
        return last(self, self.act(self.second(self.act(self.second(h)))))

    model = Fire(then, nn.LeakyReLU(0.2))
    assert (only(swap(model, sample=images())).saved == "1 bit") == bit
    assert_as_stock(model, images())


def test_the_output_may_be_changed_in_place_afterwards():
    """Stock's LeakyReLU keeps its input; its output is anybody's."""

    def then(self, h):
        h.mul_(2)
        return h.mean((2, 3))

    model = Fire(then, nn.LeakyReLU(0.2))
    of_one_bit(swap(model, sample=images()))
    assert_as_stock(model, images())


VGG = {
    "conv, pool": lambda act: nn.Sequential(nn.Conv2d(2, 4, 3), act, nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)),
    "linear, dropout": lambda act: nn.Sequential(
        nn.Flatten(), nn.Linear(128, 64), act, nn.Dropout(0.5), nn.Linear(64, 2)
    ),
}


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("name", VGG)
@in_place
def test_in_a_sequential(act, name, by_sample):
    model = VGG[name](act).double()
    report = swap(model, sample=images() if by_sample else None)
    row = next(row for row in report if row.before == type(act).__name__)
    assert row.saved == "1 bit", report
    assert_as_stock(model, images())


def test_a_pool_that_stays_stocks_keeps_the_output():
    for act in (nn.ReLU(), nn.ReLU(True)):
        for by_sample in (False, True):
            model = VGG["conv, pool"](act).double()
            row = only(swap(model, ops=["relu"], sample=images() if by_sample else None))
            assert row.saved == "output"
    model = VGG["conv, pool"](nn.ReLU()).double()
    model[2].return_indices = True
    assert [row.saved for row in swap(model) if row.path == "1"] == ["output"]


@pytest.mark.parametrize("later", [False, True])
def test_bounds_of_a_relu6_that_were_set(later):
    """It is a Hardtanh in stock."""
    model, x = VGG["conv, pool"](nn.ReLU6(True)).double(), images()
    if later:
        swap(model)
    model[1].min_val, model[1].max_val = -0.1, 0.1
    if not later:
        swap(model)
    assert model[1]._swap.save == "bit"
    want = model[3](F.max_pool2d(F.hardtanh(model[0](x), -0.1, 0.1), 2))
    torch.testing.assert_close(model(x), want)
    grads = [torch.autograd.grad(y.square().sum(), model[0].weight) for y in (model(x), want)]
    torch.testing.assert_close(*grads)


def test_before_a_layer_that_keeps_its_input_nothing_changes():
    assert only(swap(mlp(nn.ReLU(True)))).reason == "already in place"
    assert only(swap(mlp(nn.ReLU(True)), sample=batch())).reason == "already in place"
    assert only(swap(mlp(nn.ReLU()), sample=batch())).saved == "output"
    frozen = mlp(nn.ReLU())
    frozen[2].requires_grad_(False)
    assert only(swap(frozen, sample=batch())).saved == "1 bit"


def test_a_hook_added_later_sees_the_input_and_may_change_the_output():
    """Past autograd's version counter too."""

    def hook(module, args, out):
        seen.append(args[0].clone())
        out.data.neg_()

    model, x, seen = Fire(added, nn.LeakyReLU(0.2)), images(), []
    swap(model, sample=x)
    model.act.register_forward_hook(hook)
    assert_as_stock(model, x)
    for input in seen:
        torch.testing.assert_close(input, model.first(x))


def test_compiled():
    model, x = Fire(joined), images()
    want = torch.autograd.grad(model(x).square().sum(), model.parameters())
    swap(model, sample=x)
    got = torch.autograd.grad(torch.compile(model, backend="aot_eager")(x).square().sum(), model.parameters())
    torch.testing.assert_close(got, want)


def test_autocast():
    model, x = Fire(joined).float(), images().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert only(swap(model, sample=x)).saved == "1 bit"
        got = torch.autograd.grad(model(x).float().square().sum(), model.first.weight)
        unswap(model)
        want = torch.autograd.grad(model(x).float().square().sum(), model.first.weight)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_lean():
    model, x = Fire(joined), images()
    assert only(swap(model, sample=x, lean="call")).saved == "1 bit"
    assert_as_stock(model, x)


@pytest.mark.parametrize("lean", [False, "call"])
def test_of_a_sum_of_layers(lean):
    """As an adapter beside a layer makes it: neither summand can be made again, so there is nothing to gain in lean."""

    class Adapted(Fire):
        def forward(self, x):
            return self.then(self, self.act(self.first(x) + self.first(x.flip(0))))

    model, x = Adapted(averaged, nn.ReLU()), images()
    of_one_bit(swap(model, sample=x, lean=lean))
    assert_as_stock(model, x)
