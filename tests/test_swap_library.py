"""Modules written as model libraries write them: found by their names, verified by their values, safe in every call."""

import copy
import inspect
import pickle

import pytest
import torch
from swap_cases import D, assert_as_stock, batch, only, step
from torch import nn

from memkit import lean, swap, unswap
from memkit.memory import measure
from memkit.swap import types

pytestmark = pytest.mark.usefixtures("repeatable")


class TinyRMSNorm(nn.Module):
    def __init__(self, offset=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)
        self.eps = 1e-6
        self.offset = offset

    def forward(self, x):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight + self.offset) * normed


class OwnLayerNorm(nn.Module):
    """As in Cohere's models."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)
        self.variance_epsilon = 1e-5

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class KinLayerNorm(TinyRMSNorm):
    """T5's kin calls it so."""


class PlainRMSNorm(nn.Module):
    """As in nanochat, for rows of any width."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class PlainLayerNorm(nn.Module):
    """As in OLMo."""

    def __init__(self):
        super().__init__()
        self.normalized_shape = (D,)

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape)


class OffsetLayerNorm(nn.LayerNorm):
    """As in Nemotron."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class FirstLayerNorm(nn.LayerNorm):
    """As in transformers' ConvNeXt."""

    data_format = "channels_first"

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class BloomGelu(nn.Module):
    """With a constant of eight digits."""

    def forward(self, x):
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class MLP(nn.Module):
    def __init__(self, act=None, width=3 * D):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, width), act or nn.GELU(), nn.Linear(width, D)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class ConvMLP(MLP):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(2, D, 1), nn.Conv2d(D, 2, 1)


class GatedMLP(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)
        self.down_proj, self.act_fn = nn.Linear(3 * D, D), act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class T5MLP(nn.Module):
    def __init__(self, p=0.25):
        super().__init__()
        self.wi, self.wo, self.act, self.dropout = nn.Linear(D, D), nn.Linear(D, D), nn.ReLU(), nn.Dropout(p)

    def forward(self, x):
        return self.wo(self.dropout(self.act(self.wi(x))))


class BasicConv2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, D, 3), nn.BatchNorm2d(D)

    def forward(self, x):
        return torch.relu_(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, D, 1), nn.BatchNorm2d(D)
        self.conv2, self.bn2 = nn.Conv2d(D, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.relu, self.downsample = nn.ReLU(inplace=True), None

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class DenseLayer(nn.Module):
    """As in torchvision's DenseNet: given one tensor or several."""

    memory_efficient = False
    drop_rate = 0.0

    def __init__(self):
        super().__init__()
        self.norm1, self.relu1, self.conv1 = nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Conv2d(2, D, 1)
        self.norm2, self.relu2 = nn.BatchNorm2d(D), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(D, 2, 3, padding=1)

    def bn_function(self, given):
        return self.conv1(self.relu1(self.norm1(torch.cat(given, 1))))

    def forward(self, given):
        x = self.bn_function([given] if isinstance(given, torch.Tensor) else given)
        return self.conv2(self.relu2(self.norm2(x)))


def images():
    return torch.randn(3, 2, 8, 8, dtype=torch.float64)


KNOWN = {
    "rms_norm": (TinyRMSNorm, batch),
    "rms_norm+1": (lambda: TinyRMSNorm(1.0), batch),
    "rms_norm by the other's name": (KinLayerNorm, batch),
    "rms_norm without a weight": (PlainRMSNorm, batch),
    "layer_norm": (OwnLayerNorm, batch),
    "layer_norm without a weight": (PlainLayerNorm, batch),
    "layer_norm+1": (lambda: OffsetLayerNorm(D), batch),
    "layer_norm, channels first": (lambda: FirstLayerNorm(2), images),
    "the same without a weight": (lambda: FirstLayerNorm(2, elementwise_affine=False), images),
    "mlp": (MLP, batch),
    "mlp of convolutions": (ConvMLP, images),
    "mlp with a library's activation": (lambda: MLP(QuickGELU()), batch),
    "mlp with Bloom's activation": (lambda: MLP(BloomGelu()), batch),
    "mlp with parameters": (lambda: MLP(nn.LeakyReLU(0.3)), batch),
    "gated": (GatedMLP, batch),
    "gated gelu": (lambda: GatedMLP(nn.GELU("tanh")), batch),
    "dropout inside": (T5MLP, batch),
    "conv": (BasicConv2d, images),
    "block": (Bottleneck, images),
    "dense layer": (DenseLayer, images),
}
known = pytest.mark.parametrize("name", KNOWN)


def make(name):
    module, inputs = KNOWN[name]
    return nn.Sequential(module()).double(), inputs().requires_grad_()


@known
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_known(name, by_sample, lean):
    model, x = make(name)
    report = swap(model, sample=x if by_sample else None, lean=lean)
    assert type(model[0]).__mro__[1].__module__.startswith("memkit.swap.library"), report
    assert_as_stock(model, x)
    model.eval()
    assert_as_stock(model, x)


@known
def test_copies_and_pickles(name):
    model, x = make(name)
    swap(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[0]) is type(model[0])
        torch.testing.assert_close(step(copied, x), step(model, x))
    classes = [type(m) for m in KNOWN[name][0]().modules()]
    unswap(model)
    assert [type(m) for m in model[0].modules()] == classes
    assert not any("_swap" in vars(m) for m in model.modules())


@known
@pytest.mark.parametrize("lean", [False, "call"])
def test_compiled(name, lean):
    """In one graph, and what stock computes."""
    model, x = make(name)
    model.eval()
    stock = copy.deepcopy(model)
    swap(model, lean=lean)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for each, expected in zip(step(compiled, x), step(stock, x), strict=True):
        torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("norm", [PlainRMSNorm, PlainLayerNorm])
def test_norms_without_a_weight_keep_their_output(norm):
    x = torch.randn(64, D, requires_grad=True)
    model = nn.Sequential(nn.Tanh(), norm(), nn.Linear(D, 1))
    report = swap(model, sample=x, ops={"rms_norm", "layer_norm"})
    assert report.saved_after == report.saved_before - report.bytes_before + report.bytes_after
    assert measure(lambda: model(x)).saved == (2 * D + 1) * 64 * 4
    if norm is PlainRMSNorm:
        torch.testing.assert_close(model[1](torch.tensor(3.0)), norm()(torch.tensor(3.0)))


def test_saved_bytes():
    for module, tensors in ((MLP(), 1), (GatedMLP(), 2)):
        model, x = nn.Sequential(module), torch.randn(64, D)
        swap(model)
        assert measure(lambda: model(x)).saved == tensors * 64 * 3 * D * 4  # noqa: B023


def test_what_only_looks_alike_is_left():
    class OtherMLP(MLP):
        def forward(self, x):
            return 1.001 * super().forward(x)

    class GELU(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    class Two(MLP):
        def forward(self, x, scale):
            return super().forward(x) * scale

    for module in (OtherMLP(), Two()):
        report = swap(module)
        assert type(module) in (OtherMLP, Two)
        row = next(row for row in report if row.path == "")
        assert "computes something else" in row.reason or "other arguments" in row.reason
    model = MLP(GELU()).double()
    assert not any(row.before == "GELU" for row in swap(model))
    assert_as_stock(model, batch())


def rms(x, dims=-1, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + eps)


NOT_QUITE = {
    "another eps": lambda self, x: nn.functional.layer_norm(x, (D,), None, None, 1e-6),
    "always float32": lambda self, x: rms(x.float()),
    "the third dimension": lambda self, x: rms(x, 2 if x.dim() > 2 else -1),
    "the first numbers": lambda self, x: x * torch.rsqrt(x[..., :D].pow(2).mean(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("forward", NOT_QUITE.values(), ids=NOT_QUITE)
def test_norms_without_a_weight_that_compute_something_else(forward):
    """There is nothing but numbers to tell them by."""

    layer = "layer_norm" in forward.__code__.co_names
    cls = type("OwnLayerNorm" if layer else "OwnRMSNorm", (nn.Module,), {"forward": forward})
    norm = cls()
    if layer:
        norm.normalized_shape = (D,)
    else:
        norm.eps = 1e-6
    assert not swap(nn.Sequential(norm, nn.Linear(D, D))).changed


@pytest.mark.parametrize("attribute", [("normalized_shape", D), ("weight", 1.0), ("weight", [1.0] * D)])
def test_norms_that_hold_other_things_are_left(attribute):
    norm = PlainRMSNorm()
    setattr(norm, *attribute)
    assert not swap(nn.Sequential(nn.Linear(D, D), norm)).changed


@pytest.mark.parametrize("values", [((-1,), (-2, -1)), ({"eps": 1e-6}, {"eps": 0.1})])
def test_a_verdict_is_of_one_kind_of_module(values):
    class OwnRMSNorm(PlainRMSNorm):
        def __init__(self, held):
            super().__init__()
            self.held = held

        def forward(self, x):
            return rms(x, eps=self.held["eps"]) if isinstance(self.held, dict) else rms(x, self.held)

    model = nn.Sequential(OwnRMSNorm(values[0]), nn.Linear(D, D), OwnRMSNorm(values[1])).double()
    assert [row.path for row in swap(model).changed] == ["0"]
    assert_as_stock(model, batch(2, 3, D))


class Frozen(nn.GELU):
    training = property(lambda self: True)


def test_a_part_whose_mode_cannot_be_set():
    model = MLP(nn.GELU()).double()
    del model.act.training
    model.act.__class__ = Frozen
    reasons = [row.reason for row in swap(model).left if row.path == ""]
    assert reasons == ["MLP has a part whose mode cannot be set"]
    assert_as_stock(model, batch())


def test_a_scripted_part_is_left():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)))
    model = nn.Sequential(MLP(), scripted).double()
    assert {row.path.split(".")[0] for row in swap(model).changed} == {"0"}
    assert_as_stock(model, batch())


class Doubled(nn.Module):
    """The names of timm's gated network, the shapes of its plain one, the forward of neither."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(16, 8), nn.Dropout(0.0)

    def forward(self, x):
        return 2 * self.fc2(self.act(self.fc1(x)))


def test_a_proposal_whose_shapes_do_not_fit_is_refused():
    report = swap(nn.Sequential(Doubled(), nn.Linear(8, 8)), sample=torch.randn(3, 8))
    assert [row.reason for row in report.left if row.path == "0"] == [
        "this version of Doubled computes something else"
    ]


@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_that_a_forward_writes_out_is_not_lost(training):
    """Nothing shows it in evaluation."""

    class DroppedMLP(GatedMLP):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    model = DroppedMLP().train(training)
    assert not swap(model).changed
    assert (model.train()(batch().float()) == 0).any()


def test_verifying_leaves_no_trace():
    model = nn.Sequential(BasicConv2d(), nn.Flatten(), nn.Dropout(0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    swap(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model[2].training


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


def test_rounding_that_a_model_enlarges_is_not_an_error():
    """A batch norm over two values gives signs: gradients are as good as noise, stock's too."""
    model = nn.Sequential(
        nn.Conv2d(2, 64, 8), nn.BatchNorm2d(64), nn.SiLU(), nn.Conv2d(64, 4, 1), nn.BatchNorm2d(4)
    )
    report = swap(model, sample=torch.randn(2, 2, 8, 8))
    assert any(row.changed for row in report), report


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


def test_an_activation_behind_a_batch_norm_is_rebuilt():
    """In a forward of its own: with the norm's input kept, neither the norm's result nor the activation's is."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.conv = nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, D, 3)

        def forward(self, x):
            return self.conv(self.act(self.norm(1.5 * x)))

    model, x = Block().double(), images()
    before = measure(lambda: model(x)).saved
    report = swap(model, sample=x, lean="call")
    assert measure(lambda: model(x)).saved <= before - 0.9 * 8 * x.numel(), report
    assert_as_stock(model, x)


def test_what_would_keep_more_is_undone():
    """A batch norm's statistics are kept in double precision, which is more where nothing else is spared."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU(), nn.AvgPool2d(2))
    x = torch.randn(2, 2, 2, 2, requires_grad=True)
    report = swap(model, sample=x)
    assert not report.changed, report
    assert report.saved_after == report.saved_before
    assert not any(isinstance(module, types.Changed) for module in model.modules())


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


def test_a_norm_whose_parameters_are_elsewhere():
    """On no elements everything agrees with everything."""
    norm = TinyRMSNorm(D)
    norm.weight = nn.Parameter(torch.empty(0))
    row = only(swap(nn.Sequential(norm)))
    assert not row.changed
    assert row.reason == "its parameters have no values yet"
