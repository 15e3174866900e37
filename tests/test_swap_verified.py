"""What names propose is verified: by values, in every mode and in half precision, and it leaves no trace."""

import copy

import pytest
import torch
from swap_cases import D, assert_as_stock, batch
from swap_library_layers import MLP, BasicConv2d, GatedMLP
from torch import nn

from memkit import swap
from memkit.swap import library, trial
from memkit.swap.library import verifier
from memkit.swap.library.twin import computes_in

pytestmark = pytest.mark.usefixtures("repeatable")


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
    real, strict = verifier._rounds_alike, verifier._why_not

    def rounds_alike(*given):
        asked.append(real(*given))
        return asked[-1]

    monkeypatch.setattr(verifier, "_rounds_alike", rounds_alike)
    monkeypatch.setattr(
        verifier, "_why_not", lambda *a: "differs" if torch.is_autocast_enabled("cpu") else strict(*a)
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

    assert all(row.changed for row in swap(resnet.BasicBlock(16, 16), lean=True).rows)
    for block, where in ((Other(16, 16).bfloat16(), ""), (Other(16, 16), "under autocast ")):
        (row,) = (row for row in swap(block, lean=True).rows if row.before == "Other")
        assert row.reason == f"Other computes something else {where}than memkit's batch_norm_act"


@pytest.mark.parametrize("factor", [1.05, 1.02])
def test_a_norm_that_is_larger_in_half_precision(factor):
    class LlamaRMSNorm(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(64)), 1e-6
            self.factor = factor

        def forward(self, x):
            kind, wide = x.dtype, x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            out = self.weight * wide.to(kind)
            return out * self.factor if kind == torch.bfloat16 else out

    assert swap(LlamaRMSNorm(1.0)).changed
    (row,) = swap(LlamaRMSNorm(factor)).rows
    assert row.reason == "LlamaRMSNorm computes something else in torch.bfloat16 than memkit's rms_norm"
    assert not verifier._rounds_alike(*_its_match(LlamaRMSNorm(factor).bfloat16()), True)


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
    assert verifier._is_as_near(torch.tensor([1.0, -0.19]), stock, exact, slack)
    assert not verifier._is_as_near(torch.tensor([1.0, -0.21]), stock, exact, slack)
    assert not verifier._is_as_near(torch.tensor([1.0, torch.nan]), stock, exact, slack)
    assert not verifier._is_as_near(stock.double(), stock, exact, slack)
    assert not verifier._is_as_near(None, stock, exact, slack)
    assert verifier._is_as_near(None, None, None, slack)
