"""Modules written as model libraries write them: found by their names, verified by their values, safe in every call."""

import copy
import inspect
import pickle

import pytest
import torch
from swap_cases import (
    D,
    TinyRMSNorm,
    assert_as_stock,
    assert_compiled,
    assert_copied,
    assert_known,
    batch,
    images,
    step,
)
from swap_library_layers import (
    MLP,
    T5MLP,
    BasicConv2d,
    BatchedExperts,
    BertLayer,
    BloomGelu,
    Bottleneck,
    ConvMLP,
    DenseLayer,
    GatedLlama4,
    GatedMLP,
    QuickGELU,
)
from torch import nn

from memkit import lean, swap, unswap
from memkit.memory import measure
from memkit.swap import types

pytestmark = pytest.mark.usefixtures("repeatable")


KNOWN = {
    "mlp": (MLP, batch),
    "mlp of convolutions": (ConvMLP, images),
    "mlp with a library's activation": (lambda: MLP(QuickGELU()), batch),
    "mlp with Bloom's activation": (lambda: MLP(BloomGelu()), batch),
    "mlp with parameters": (lambda: MLP(nn.LeakyReLU(0.3)), batch),
    "gated": (GatedMLP, batch),
    "gated gelu": (lambda: GatedMLP(nn.GELU("tanh")), batch),
    "gated by another name": (GatedLlama4, batch),
    "experts of one product": (BatchedExperts, batch),
    "dropout inside": (T5MLP, batch),
    "bert layer": (BertLayer, batch),
    "conv": (BasicConv2d, images),
    "block": (Bottleneck, images),
    "dense layer": (DenseLayer, images),
}
known = pytest.mark.parametrize("name", KNOWN)


@known
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_known(name, by_sample, lean):
    assert_known(*KNOWN[name], by_sample, lean)


@known
def test_copies_and_pickles(name):
    assert_copied(*KNOWN[name])


@known
@pytest.mark.parametrize("lean", [False, "call"])
def test_compiled(name, lean):
    assert_compiled(*KNOWN[name], lean)


def test_saved_bytes():
    for module, tensors in ((MLP(), 1), (GatedMLP(), 2)):
        model, x = nn.Sequential(module), torch.randn(64, D)
        swap(model)
        assert measure(lambda: model(x)).saved == tensors * 64 * 3 * D * 4  # noqa: B023


def test_a_function_behind_a_norm_that_is_called_by_itself_keeps_its_result_alone():
    stock = nn.Sequential(BasicConv2d(), nn.Conv2d(D, 2, 3)).train()
    model = copy.deepcopy(stock)
    assert swap(model).changed
    for each in (stock, model):
        each[0].bn.register_forward_hook(lambda *args: None)
    x = images().float()
    assert measure(lambda: model(x)).saved == measure(lambda: stock(x)).saved


class SiLUActivation(nn.Module):
    """With an option."""

    def forward(self, x, factor=1.0):
        return factor * nn.functional.silu(x)


class CalledByName(MLP):
    def forward(self, x):
        return self.fc2(self.act(x=self.fc1(x)))


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("sampled", [False, True])
def test_an_activation_called_by_the_name_of_its_argument(sampled, lean):
    model, x = CalledByName(QuickGELU()).double(), batch()
    stock = copy.deepcopy(model)
    report = swap(model, sample=x if sampled else None, ops=["quick_gelu"], lean=lean)
    assert bool(report.changed) == (sampled or lean == "call")
    torch.testing.assert_close(step(model, x), step(stock, x))


def test_an_activation_with_options_is_left():
    model, x = MLP(SiLUActivation()), torch.randn(2, D)
    swap(model, sample=x, ops=["silu"])
    assert type(model.act) is SiLUActivation
    model.act(x, factor=2.0)


@pytest.mark.parametrize("replace", ["hook", "subclass", "frozen", "half"])
def test_layers_are_looked_at_anew(replace):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, x = MLP().double(), batch()
    swap(model)
    if replace == "hook":
        model.fc2.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    elif replace == "subclass":
        model.fc2.__class__ = Doubled
    elif replace == "frozen":
        model.fc2.requires_grad_(False)
    else:
        model.bfloat16()
        x = x.bfloat16()
    assert_as_stock(model, x, **({"rtol": 0.1, "atol": 0.05} if replace == "half" else {}))


def test_dropout_inside_drops_as_many():
    model = T5MLP(0.5).double()
    nn.init.eye_(model.wo.weight)
    nn.init.zeros_(model.wo.bias)
    swap(model)
    x = batch(4096, D)
    kept = model(x) != 0
    expected = torch.relu(model.wi(x))
    assert abs((kept.sum() / (expected != 0).sum()).item() - 0.5) < 0.02
    torch.testing.assert_close(model(x)[:0], expected[:0])
    model.eval()
    torch.testing.assert_close(model(x), expected)


def test_lean_call():
    """Each call runs inside lean, whoever makes it; the forward's signature stays."""
    model, x = nn.Sequential(Bottleneck(), Bottleneck()).double(), images()
    signature = inspect.signature(model.forward)
    stock = measure(lambda: model(x)).saved
    swap(model, lean="call")
    assert inspect.signature(model.forward) == signature
    inside = measure(lambda: model(x)).saved
    assert inside < 0.75 * stock
    copied = pickle.loads(pickle.dumps(model))
    assert measure(lambda: copied(x)).saved == inside
    assert_as_stock(model, x)
    swap(model, lean=True)
    assert measure(lambda: model(x)).saved > inside

    def in_lean():
        with lean():
            return model(x)

    assert measure(in_lean).saved == inside
    with pytest.raises(ValueError, match="expected lean True, False or 'call', got 'always'"):
        swap(model, lean="always")
    unswap(model)
    assert not any(isinstance(module, types.Changed) for module in model.modules())


def test_names_choose():
    model = nn.Sequential(MLP(), GatedMLP(), TinyRMSNorm())
    rows = {row.path for row in swap(model, ops=["gated"]) if row.changed}
    assert rows == {"1"}
    assert not swap(model, ops=["relu"]).changed


def test_report():
    model, x = nn.Sequential(nn.Sequential(MLP(), MLP()), TinyRMSNorm()).double(), batch(64, D)
    report = swap(model, sample=x)
    modules = report.to_dict()["modules"]
    assert modules["0"] == [a + b for a, b in zip(modules["0.0"], modules["0.1"], strict=True)]
    assert modules[""] == [report.bytes_before, report.bytes_after]
    told, measured = report.bytes_before - report.bytes_after, report.saved_before - report.saved_after
    assert told == pytest.approx(measured, rel=0.02)
    assert "nothing to change" in str(swap(nn.Linear(2, 2)))


@pytest.mark.parametrize("lean", [False, "call"])
def test_report_of_residual_blocks(lean):
    """What their rows say: outside of lean() their convolutions keep the activations' results as before."""
    model = nn.Sequential(Bottleneck(), nn.Conv2d(2, 2, 1))
    report = swap(model, sample=torch.randn(16, 2, 16, 16), lean=lean)
    told, measured = report.bytes_before - report.bytes_after, report.saved_before - report.saved_after
    assert report.rows[0].changed
    assert told == pytest.approx(measured, abs=0.02 * report.saved_before)
    assert (measured > 0.2 * report.saved_before) is bool(lean)


def test_a_root_that_is_a_twin_falls_back_to_stock():
    mlp, x = GatedMLP().double(), batch()
    expected = mlp(x)
    swap(mlp, lean="call")
    mlp.act_fn.register_forward_hook(lambda module, args, out: None)
    torch.testing.assert_close(mlp(x), expected)
    unswap(mlp)
    assert type(mlp) is GatedMLP


def test_a_dense_layer_that_is_given_several():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 1, 1), DenseLayer()

        def forward(self, x):
            return self.second([self.first(x), x[:, :1]])

    model, x = Block().double(), images()
    before = measure(lambda: model(x)).saved
    report = swap(model, sample=x, lean="call")
    assert [row.path for row in report.changed] == ["second"], report
    assert measure(lambda: model(x)).saved < 0.75 * before
    assert_as_stock(model, x)


def test_function_transforms_of_a_lean_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x, parameters = torch.randn(3, 4), dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    stock = torch.func.grad(loss)(parameters)
    swap(model, sample=x, lean="call")
    for name, grad in torch.func.grad(loss)(parameters).items():
        torch.testing.assert_close(grad, stock[name])


@pytest.mark.parametrize("lean", [False, "call"])
def test_experts_of_one_product_keep_gate_and_up(lean):
    x = torch.randn(16, D, requires_grad=True)
    model = nn.Sequential(BatchedExperts())
    stock = measure(lambda: model(x)).saved
    report = swap(model, sample=x, lean=lean)
    kept = measure(lambda: model(x)).saved
    # The activation's result, and in lean() the product.
    assert stock - kept == 16 * 3 * D * 4 * (2 if lean else 1)
    assert report.saved_after == kept


def test_experts_of_one_product_that_compute_something_else():
    class Capped(BatchedExperts):
        def forward(self, x):
            return super().forward(x).clamp(-1, 1)

    model = nn.Sequential(Capped()).double()
    assert "0" not in [row.path for row in swap(model).changed]
    assert_as_stock(model, batch())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_limit_that_small_numbers_do_not_reach(dtype):
    class LimitedMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
            self.act_fn = nn.SiLU()

        def forward(self, x):
            gate = self.gate_proj(x).clamp(max=10.0)
            return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    class LimitedSteps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)

        def forward(self, x):
            return self.fc2(self.act(self.fc1(x)).clamp(-20, 20))

    model = nn.Sequential(LimitedMLP(), LimitedSteps()).to(dtype)
    report = swap(model)
    assert not report.changed, report
    for row in (row for row in report.rows if row.path in "01"):
        assert "computes something else" in row.reason


class Adapted(nn.Module):
    """A layer with an adapter, as peft puts in its place."""

    def __init__(self, layer):
        super().__init__()
        self.base, self.down, self.up = (
            layer,
            nn.Linear(layer.in_features, 2),
            nn.Linear(2, layer.out_features),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("lean", [False, "call"])
def test_adapters_put_in_afterwards(lean):
    """The activation is still memkit's, though nothing is fused with it."""
    model, x = MLP(QuickGELU()).double(), batch(64, D)
    swap(model, sample=x, lean=lean)
    model.fc2 = Adapted(model.fc2).double()
    stock = copy.deepcopy(model)
    unswap(stock)
    assert measure(lambda: model(x)).saved < 0.7 * measure(lambda: stock(x)).saved
    assert_as_stock(model, x)


NORM_LAYERS = {
    "group": lambda: nn.GroupNorm(2, D),
    "none": nn.Identity,
    "response": lambda: nn.LocalResponseNorm(2),
    "frozen": lambda: pytest.importorskip("torchvision.ops").FrozenBatchNorm2d(D),
}


@pytest.mark.parametrize("norm", NORM_LAYERS.values(), ids=NORM_LAYERS)
@pytest.mark.parametrize("how", [False, True, "call"])
def test_residual_blocks_with_other_norms(norm, how):
    """ResNets of detectors have norms that are no modules with num_features."""
    model = Bottleneck().double()
    model.bn1, x = norm().double(), torch.randn(2, 2, 6, 6, dtype=torch.float64)
    report = swap(model, sample=x, lean=how)
    assert report.saved_after <= report.saved_before
    assert all(row.bytes_after <= row.bytes_before for row in report.rows)
    with lean() if how is True else torch.enable_grad():
        assert_as_stock(model, x)
