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
from torch import nn

from memkit import lean, swap, unswap
from memkit.memory import measure
from memkit.swap import library, trial, types
from memkit.swap.library.twin import computes_in

pytestmark = pytest.mark.usefixtures("repeatable")


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


class GatedLlama4(GatedMLP):
    def __init__(self):
        super().__init__()
        self.activation_fn = self.act_fn
        del self.act_fn

    def forward(self, x):
        return self.down_proj(self.activation_fn(self.gate_proj(x)) * self.up_proj(x))


class BatchedExperts(nn.Module):
    """As in Llama 4."""

    def __init__(self, act=None, experts=2):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, D, 6 * D))
        self.down_proj = nn.Parameter(torch.randn(experts, 3 * D, D))
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        gate_up = torch.bmm(x.view(len(self.down_proj), -1, D), self.gate_up_proj)
        gate, up = gate_up.chunk(2, -1)
        return torch.bmm(up * self.act_fn(gate), self.down_proj).view(-1, D)


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


class BertPart(nn.Module):
    """Of BERT's two, the first has an activation, the second a residual."""

    def __init__(self, width, out, act=None):
        super().__init__()
        self.dense = nn.Linear(width, out)
        if act:
            self.intermediate_act_fn = act
        else:
            self.dropout, self.LayerNorm = nn.Dropout(0.0), nn.LayerNorm(out)

    def forward(self, x, residual=None):
        x = self.dense(x)
        return self.intermediate_act_fn(x) if residual is None else self.LayerNorm(self.dropout(x) + residual)


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate, self.output = BertPart(D, 3 * D, nn.GELU()), BertPart(3 * D, D)

    def feed_forward_chunk(self, x):
        return self.output(self.intermediate(x), x)

    def forward(self, x):
        assert len(inspect.signature(self.feed_forward_chunk).parameters) == 1  # as transformers does
        return self.feed_forward_chunk(x)


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
    swap(model, lean=True)
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
        "Doubled computes something else than memkit's act_linear"
    ]


class Dropping(Doubled):
    """As DETR's network: a dropout that is no module."""

    def forward(self, x):
        h = self.fc2(self.act(self.fc1(x)))
        return nn.functional.dropout(h, 0.1, self.training)


def test_a_proposal_that_draws_random_numbers_is_refused_for_that():
    report = swap(nn.Sequential(Dropping(), nn.Linear(8, 8)), sample=torch.randn(3, 8))
    assert [row.reason for row in report.left if row.path == "0"] == [
        "Dropping draws random numbers, as dropout does, which memkit's act_linear does not"
    ]


class DropsTwice(nn.Module):
    """ViTDet's: one dropout, called twice, where others of these names call it once."""

    def __init__(self, p=0.5):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
        self.drop = nn.Dropout(p)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class DropsOnce(DropsTwice):
    def forward(self, x):
        return self.drop(self.fc2(self.act(self.fc1(x))))


class DropsFirst(DropsTwice):
    def forward(self, x):
        return self.fc2(self.act(self.drop(self.fc1(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("cls", [DropsTwice, DropsOnce, DropsFirst])
def test_every_dropout_is_called_where_it_was(cls, sampled, dtype):
    model = nn.Sequential(cls(), nn.LayerNorm(8)).to(dtype)
    stock = copy.deepcopy(model)
    report = swap(model, sample=torch.randn(4, 8, dtype=dtype) if sampled else None)
    (row,) = (row for row in report if row.path == "0")
    assert row.changed == (cls is not DropsFirst)
    if cls is DropsFirst:
        assert row.reason == "DropsFirst calls its dropouts elsewhere than memkit's act_linear"
    x = torch.randn(1, 8, dtype=dtype).expand(20000, 8)
    ours, theirs = (made[0](x).float().var(0) for made in (model, stock))
    torch.testing.assert_close(ours, theirs, rtol=0.2, atol=0.0)


@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_that_a_forward_writes_out_is_not_lost(training):
    """Nothing shows it in evaluation."""

    class DroppedMLP(GatedMLP):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    model = DroppedMLP().train(training)
    assert [row.path for row in swap(model).changed] == ["dropout"]
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


def test_half_precision_that_cannot_be_copied_stays():
    class Alone(MLP):
        def __deepcopy__(self, memo):
            raise TypeError("there is one of it")

    for dtype, changed in ((torch.float32, True), (torch.bfloat16, False)):
        report = swap(nn.Sequential(Alone().to(dtype)))
        (row,) = (row for row in report.rows if row.path == "0")
        assert row.changed == changed
        assert changed or row.reason == "Alone cannot be copied to be verified in float32"


def test_a_weight_that_a_wrapper_passes_on_counts():
    """As an adapter's may be that keeps its layer out of the children's reach."""

    class Wrapper(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layers = (layer,)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.layers[0], name)

    x = torch.zeros(2, 4)
    assert computes_in(x, Wrapper(nn.Linear(4, 4)))
    assert not computes_in(x, Wrapper(nn.Linear(4, 4, dtype=torch.bfloat16)))


def test_a_block_whose_rounding_autocast_shows(monkeypatch):
    """The twin rounds elsewhere than stock, to which digit is the processor's: here they differ in any case."""
    resnet = pytest.importorskip("torchvision.models.resnet")
    torch.manual_seed(0)
    model, x = nn.Sequential(resnet.resnet50().layer4), torch.randn(2, 1024, 6, 6)
    asked = []
    real, strict = library._rounds_alike, library._why_not

    def rounds_alike(*given):
        asked.append(real(*given))
        return asked[-1]

    monkeypatch.setattr(library, "_rounds_alike", rounds_alike)
    monkeypatch.setattr(
        library, "_why_not", lambda *a: "differs" if torch.is_autocast_enabled("cpu") else strict(*a)
    )
    with torch.autocast("cpu", torch.bfloat16):
        report = swap(model, sample=x, lean=True)
    assert asked
    assert all(asked)
    assert all(row.changed for row in report.rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_in_half_precision(dtype):
    """Whose twins round elsewhere than stock: alike in float32, and as near to that in half precision."""
    resnet = pytest.importorskip("torchvision.models.resnet")
    torch.manual_seed(0)
    for model in (resnet.resnet50().layer3, resnet.resnet18().layer2):
        report = swap(model.to(dtype), lean=True)
        assert all(row.changed for row in report.rows), str(report)


def test_a_block_that_is_another_in_half_precision():
    resnet = pytest.importorskip("torchvision.models.resnet")

    class Other(resnet.BasicBlock):
        def forward(self, x):
            return super().forward(x) * (1.5 if x.dtype == torch.bfloat16 else 1)

    assert all(row.changed for row in swap(Other(16, 16), lean=True).rows)
    (row,) = (row for row in swap(Other(16, 16).bfloat16(), lean=True).rows if row.before == "Other")
    assert row.reason == "Other computes something else than memkit's batch_norm_act"


@pytest.mark.parametrize("factor", [1.05, 1.02])
def test_a_norm_that_is_larger_in_half_precision(factor):
    class LlamaRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(64)), 1e-6

        def forward(self, x):
            kind, wide = x.dtype, x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            out = self.weight * wide.to(kind)
            return out * factor if kind == torch.bfloat16 else out

    assert swap(LlamaRMSNorm()).changed
    assert not library._rounds_alike(*_its_match(LlamaRMSNorm().bfloat16()), True)


def _its_match(module):
    return module, library.candidates(module, frozenset(["rms_norm"]), True)[0]


def test_a_copy_that_is_the_module_itself():
    """Is not made float32 for a comparison."""

    class Frozen(nn.Linear):
        def __deepcopy__(self, memo):
            return self

    resnet = pytest.importorskip("torchvision.models.resnet")
    block = resnet.BasicBlock(16, 16, downsample=Frozen(1, 1)).bfloat16()
    model = nn.Sequential(Frozen(8, 8), nn.SiLU(), nn.BatchNorm1d(8), nn.Linear(8, 8)).bfloat16()
    for each in (block, model):
        assert trial.own_copy(each) is None
    swap(block, lean=True)
    swap(model, sample=torch.randn(4, 8).bfloat16(), lean=True)
    assert {p.dtype for each in (block, model) for p in each.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("layers", [4, 16])
def test_dropouts_are_in_training_after_a_comparison_in_float32(layers):
    torch.manual_seed(0)
    parts = [(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.SiLU()) for _ in range(layers)]
    model = nn.Sequential(*(layer for part in parts for layer in part), nn.Dropout(0.3)).bfloat16()
    swap(model, sample=torch.randn(64, 32).bfloat16(), lean=True)
    assert all(module.training for module in model.modules())


def test_nearness_of_a_twin():
    exact, stock, slack = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.1]), 0.0
    assert library._is_as_near(torch.tensor([1.0, -0.19]), stock, exact, slack)
    assert not library._is_as_near(torch.tensor([1.0, -0.21]), stock, exact, slack)
    assert not library._is_as_near(torch.tensor([1.0, torch.nan]), stock, exact, slack)
    assert not library._is_as_near(stock.double(), stock, exact, slack)
    assert not library._is_as_near(None, stock, exact, slack)
    assert library._is_as_near(None, None, None, slack)


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
