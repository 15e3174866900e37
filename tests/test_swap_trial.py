"""The runs on a sample: what they compare, and what they refuse."""

import abc
import copy
import dataclasses
import math
import random
from collections import UserDict

import pytest
import torch
from swap_cases import (
    DOUBLE,
    MLP,
    Block,
    D,
    assert_as_stock,
    batch,
    mlp,
    only,
    plain,
)
from torch import nn

from memkit import swap
from memkit.memory import measure
from memkit.swap import NO_HOOKS, trial, types

pytestmark = pytest.mark.usefixtures("repeatable")


class Forces(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), *layers, nn.Linear(32, 1)).double()

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.net(x).sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("layers", [[nn.LayerNorm(32)], [nn.RMSNorm(32)], [nn.SiLU(), nn.LayerNorm(32)]])
def test_a_forward_that_differentiates(layers, lean):
    model = Forces(*copy.deepcopy(layers))
    ours, x = copy.deepcopy(model), torch.randn(6, 3, **DOUBLE)
    swap(ours, sample=x, lean=lean)
    for m in (model, ours):
        energy, forces = m(x)
        (energy + forces.square().sum()).backward()
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("lean", [False, True, "call"])
def test_a_forward_that_calls_what_has_to_be_compiled(lean):
    """As that of transformers' flex_attention does."""

    @torch.compile(fullgraph=True, backend="eager")
    def gate(x):
        return x * torch.sigmoid(x)

    model = Block(lambda self, x: gate(plain(self, x)))
    ours, x = copy.deepcopy(model), batch()
    report = swap(ours, sample=x, lean=lean)
    assert report.changed
    assert not report.note
    for m in (model, ours):
        m(x).sum().backward()
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.slow
def test_flex_attention(recwarn):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation("flex_attention")
    ids = torch.randint(3, 90, (2, 32))
    with torch.no_grad():
        stock = model(input_ids=ids).logits
        assert swap(model, sample={"input_ids": ids}).changed
        torch.testing.assert_close(model(input_ids=ids).logits, stock)
    assert not [each for each in recwarn if "without torch.compile" in str(each.message)]


def test_a_swapped_model_that_raises_is_refused(monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("broken")

    model = mlp(nn.GELU())
    monkeypatch.setattr(types.GELU, "forward", broken)
    report = swap(model, sample=batch())
    assert [row.reason for row in report] == ["the swapped model raises on the sample: KeyError: 'broken'"]
    assert type(model[1]) is nn.GELU


class TrainingAndEvaluation(nn.Module):
    """That go on in different ways."""

    def __init__(self, act):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(D, D, bias=False), act, nn.Linear(D, D)

    def forward(self, x):
        h = self.first(x)
        y = self.last(self.act(h))
        return y if self.training else y + h.sum(-1, keepdim=True)


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("act", [nn.GELU, nn.SiLU, nn.ReLU])
def test_what_the_mode_that_the_sample_is_not_in_reads(act, lean):
    model = TrainingAndEvaluation(act()).double()
    ours, x = copy.deepcopy(model), batch()
    report = swap(ours, sample=x, lean=lean)
    kept = "in lean()" if lean else "unchanged" if isinstance(ours.act, nn.ReLU) else "output"
    assert report.rows[0].after == kept, report
    for train in (True, False, True):
        model.train(train), ours.train(train)
        with torch.set_grad_enabled(train):
            torch.testing.assert_close(ours(x), model(x))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("act", [nn.GELU, nn.SiLU, nn.Mish])
def test_lean_is_exact(act, given):
    """For as many bytes as from the output."""

    def gradients(m, x):
        x = x.clone().requires_grad_()
        return [x.double() for x in torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()])]

    torch.manual_seed(0)
    x = torch.randn(64, D)
    model = nn.Sequential(nn.Linear(D, 64), act(), nn.Linear(64, 64), act(), nn.Linear(64, D))
    lean, outside = copy.deepcopy(model), copy.deepcopy(model)
    report = swap(lean, sample=x if given else None, lean="call")
    assert [row.after for row in report] == ["in lean()"] * 2
    swap(outside, sample=x if given else None)
    exact = gradients(copy.deepcopy(model).double(), x.double())
    apart = [
        sum((a - b).square().sum() for a, b in zip(gradients(m, x), exact, strict=True)).sqrt()
        for m in (model, lean)
    ]
    assert apart[1] <= 1.3 * apart[0]
    kept = [measure(lambda m=m: m(x)).saved for m in (lean, outside)]
    assert kept[0] <= kept[1] + 64


def test_whole_numbers_are_left_as_they_are():
    """They may be indices, which have no neighbours."""
    index, x, ones = torch.arange(4.0), batch(), torch.ones(3)
    model = MLP().double()
    for sample, moved in (((x, index), [True, False]), ((ones, index), [True, True])):
        tried = trial.Trial(model, sample)
        inputs = tried.fresh()
        with tried.disturbed(inputs, 0.01):
            assert [not torch.equal(a, b) for a, b in zip(inputs, sample, strict=True)] == moved


def test_a_model_that_takes_no_other_numbers_is_compared_on_its_sample_alone():
    given = batch()

    class Strict(MLP):
        def forward(self, x):
            if not torch.equal(x, given):
                raise ValueError("other numbers")
            return super().forward(x) + (0.0 if type(self.act) is nn.GELU else 0.5)

    model = Strict().double()
    report = swap(model, sample=given, ops=["gelu"])
    assert "differ on the sample" in report.rows[0].reason
    assert type(model.act) is nn.GELU


def test_masked_logits_are_compared():
    class Masked(MLP):
        def forward(self, x):
            y = super().forward(x).float()
            return y.masked_fill(torch.arange(y.shape[-1]) == 0, torch.finfo(y.dtype).min)

    assert not swap(Masked(), sample=batch().float()).note


def test_a_parametrization_is_computed_once():
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 3, padding=1))
    x, calls = torch.randn(2, 3, 64, 64), []
    swap(conv, sample=x, lean="call")

    class Noted(nn.Module):
        def forward(self, weight):
            calls.append(1)
            return weight

    nn.utils.parametrize.register_parametrization(conv[2], "weight", Noted())
    calls.clear()
    conv(x.requires_grad_())
    assert len(calls) == 1


class AbstractFirst(abc.ABC, MLP):
    pass


def test_classes_with_a_base_before_the_modules():
    model = AbstractFirst().double()
    with pytest.raises(TypeError, match=r"AbstractFirst's first base to be a Module, got ABC; put that last"):
        swap(model, sample=batch(), lean="call")
    for lean in (False, True):
        report = swap(model, sample=batch(), lean=lean)
        assert "first base's, ABC" in next(row.reason for row in report if row.path == "")
        assert type(model) is AbstractFirst


def test_what_cannot_be_compared_is_said():
    model = MLP().double().requires_grad_(False)
    assert "no gradients" in swap(model, sample=batch()).note
    assert not swap(MLP().double(), sample=batch()).note


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "mapping"])
def test_kinds_of_sample(kind):
    class Two(Block):
        def forward(self, x, scale=1.0):
            return plain(self, x * scale)

    x = batch()
    sample = {"tensor": x, "tuple": (x, 2.0), "dict": {"x": x, "scale": 3.0}, "mapping": UserDict(x=x)}[kind]
    assert only(swap(Two(None), sample=sample)).changed


def test_without_gradients():
    model = Block(plain)
    with torch.no_grad():
        report = swap(model, sample=batch())
    row = only(report)
    assert row.changed
    assert "gradients were not compared" in str(report)
    assert (row.bytes_before, row.bytes_after) == (0, 0)
    assert_as_stock(model, batch())


def test_outputs_in_a_dataclass():
    @dataclasses.dataclass
    class Output:
        y: torch.Tensor
        hidden: list

    def run(self, x):
        h = self.first(x)
        return Output(self.second(self.act(h)), [UserDict(h=h)])

    row = only(swap(Block(run), sample=batch()))
    assert "the model returns its input" in row.reason
    assert row.bytes_before > row.bytes_after


def test_random_values_repeat():
    class Noisy(Block):
        def forward(self, x):
            return plain(self, x * random.random() + torch.randn_like(x))

    report = swap(Noisy(None), sample=batch())
    assert only(report).changed
    assert report.note == ""


def test_a_model_that_never_repeats_itself():
    ticks = iter(range(1, 100))
    report = swap(Block(lambda self, x: plain(self, x * next(ticks))), sample=batch())
    assert only(report).changed
    assert "not compared" in report.note


def test_a_sample_whose_results_are_not_finite():
    """Uninitialised memory, or a model that overflows: the report says that it proves less."""
    x = batch()
    x[0, 0] = math.nan
    note = swap(mlp(nn.GELU()), sample=x).note
    assert note == "each output on the sample holds NaN or infinity, so outputs were not compared"


def test_values_that_differ_are_refused(monkeypatch):
    """What no watch sees, the comparison does: here, memkit's formula itself is wrong."""
    model = Block(plain)
    real = types._C.activation

    class Wrong:
        @staticmethod
        def activation(op, input, *rest):
            return real("silu", input, *rest)

    monkeypatch.setattr(types, "_C", Wrong)
    report = swap(model, sample=batch())
    assert "differ on the sample" in only(report).reason
    assert type(model.act) is nn.GELU
    assert report.saved_before == report.saved_after


class Parented(dict):
    """A dictionary that needs an argument more, as DeepSpeed's for parameters does."""

    def __init__(self, parent, *args):
        super().__init__(*args)
        self.parent = parent


def test_dictionaries_of_other_classes():
    model, x = mlp(nn.GELU()), batch()
    for module in model.modules():
        module._parameters = Parented(module, module._parameters)
    assert only(swap(model, sample=x)).changed
    assert all(type(module._parameters) is Parented for module in model.modules())
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert_as_stock(model, x)


def test_parameters_that_deepspeed_has_sharded():
    model, x = mlp(nn.GELU()), batch()
    model[0].weight.ds_id = 0
    with pytest.raises(
        ValueError, match=r"^swap: expected parameters that are whole, got .* ZeRO 3 has sharded"
    ):
        swap(model, sample=x)
    assert type(model[1]) is nn.GELU
    assert only(swap(model)).changed


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
def test_parameters_that_fsdp_has_sharded(version):
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part, x = mlp(nn.GELU()), batch()
        if version == 2:
            model = nn.Sequential(fully_shard(part))
        else:
            model = nn.Sequential(FullyShardedDataParallel(part, device_id=torch.device("cpu")))
        with pytest.raises(ValueError, match=r"^swap: expected parameters that are whole, got .* FSDP has"):
            swap(model, sample=x)
        assert only(swap(model)).changed
    finally:
        dist.destroy_process_group()


# -- forwards that use function transforms -------------------------------------------------------------------------------


class Ensemble(nn.Module):
    """Of three networks by vmap."""

    def __init__(self):
        super().__init__()
        nets = [mlp(nn.GELU()) for _ in range(3)]
        weights, _ = torch.func.stack_module_state(nets)
        self.weights = nn.ParameterDict({name.replace(".", "_"): each for name, each in weights.items()})
        self.net = mlp(nn.GELU())
        self.head = mlp(nn.GELU())

    def forward(self, x):
        weights = {name.replace("_", "."): each for name, each in self.weights.items()}
        return self.head(torch.vmap(lambda w: torch.func.functional_call(self.net, w, (x,)))(weights))


class InnerStep(nn.Module):
    """Takes a gradient on the way."""

    def __init__(self):
        super().__init__()
        self.net = mlp(nn.GELU())
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        x = self.net(x)
        gradient = torch.func.grad(lambda w: (x @ w - x).square().mean())(self.weight)
        return x @ (self.weight - gradient)


@pytest.mark.parametrize("lean", [False, True, "call"])
def test_an_ensemble_by_vmap(lean):
    model = Ensemble().double()
    assert [row.path for row in swap(model, sample=batch(), lean=lean).changed][-1] == "head.1"
    assert_as_stock(model, batch())


def test_gradients_on_the_way_allow_no_hooks():
    model = InnerStep().double()
    report = swap(model, sample=batch())
    assert [row.path for row in report.changed] == ["net.1"]
    assert str(report).endswith("1 of 1 sites changed; as without a sample: " + NO_HOOKS)
    assert_as_stock(model, batch())
    for lean in (True, "call"):
        with pytest.raises(RuntimeError, match="swap: expected lean=False, as the forward takes gradients"):
            swap(model, sample=batch(), lean=lean)
        assert isinstance(model.net[1], types.Swapped)  # as before
