"""The runs on a sample leave a model, its inputs and the process as they were."""

import abc
import copy
import dataclasses
import gc
import math
import random
from collections import UserDict

import pytest
import torch
from swap_cases import (
    DOUBLE,
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
from memkit.swap import trial, types

pytestmark = pytest.mark.usefixtures("repeatable")


# -- the sample leaves no trace ----------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Everything that a run can change."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(D, D), nn.BatchNorm1d(D), nn.GELU(), nn.Dropout(0.5), nn.Linear(D, D)
        )
        self.act = nn.SiLU()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))
        self.plain = torch.zeros(1)
        self.calls = 0
        self.history = []
        self.seen = {}

    def forward(self, x):
        self.count += 1
        self.last = x.detach().sum()
        self.plain.add_(1)
        self.calls += 1
        self.history.append(self.calls)
        self.seen[self.calls] = x.shape
        self.extra = random.random() + torch.rand(1).item()
        x = x + random.random()
        self.training_was = self.training
        self.net[1].eval()
        x = self.act(self.net(x))
        x.mul_(2)
        return {"y": [x], "text": "not a tensor"}


def fingerprint(model):
    return {
        "flags": [m.training for m in model.modules()],
        "tensors": [(t, t.clone()) for t in [*model.parameters(), *model.buffers(), model.plain]],
        "grads": [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "attributes": [copy.copy(vars(m)) for m in model.modules()],
        "history": (list(model.history), dict(model.seen), model.calls),
        "random": (torch.get_rng_state(), random.getstate()),
    }


def assert_untouched(before, model):
    after = fingerprint(model)
    for key in ("flags", "requires_grad", "history"):
        assert after[key] == before[key]
    for key in ("tensors", "grads"):
        for (a, a_value), (b, b_value) in zip(after[key], before[key], strict=True):
            assert a is b
            assert a is None or a_value.equal(b_value)
    for ours, theirs in zip(after["attributes"], before["attributes"], strict=True):
        assert ours.keys() - {"_swap"} == theirs.keys() - {"_swap"}
        assert "forward" not in ours
    assert after["random"][0].equal(before["random"][0])
    assert after["random"][1] == before["random"][1]


@pytest.mark.parametrize("train", [True, False])
def test_the_sample_run_leaves_no_trace(train):
    model = Stateful().train(train)
    model.net[0].bias.requires_grad_(False)
    model.net[0].weight.grad = torch.ones(D, D)
    stepped = []
    model.net[4].weight.register_post_accumulate_grad_hook(stepped.append)
    x = torch.randn(4, D, requires_grad=True)
    before, x_before = fingerprint(model), x.detach().clone()
    report = swap(model, sample=(x,))
    assert len(report) == 3
    assert_untouched(before, model)
    assert not stepped
    assert model.net[4].weight._post_accumulate_grad_hooks
    assert x.grad is None
    assert x.equal(x_before)


def test_inputs_that_the_model_overwrites():
    model = Block(lambda self, x: plain(self, x.mul_(2)))
    x = batch()
    kept = x.clone()
    swap(model, sample=x)
    assert x.equal(kept)


def test_an_error_on_the_sample():
    model = nn.Sequential(mlp(nn.GELU()), Stateful().double())
    swap(model)
    classes = [type(m) for m in model.modules()]
    wrong = batch(4, D + 1)
    before = fingerprint(model[1])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        swap(model, sample=wrong)
    told = "swap: the model raised this on the sample (stock, watched); it is as it was before"
    assert getattr(caught.value, "__notes__", [told]) == [told]
    assert [type(m) for m in model.modules()] == classes
    assert_untouched(before, model[1])


def test_an_error_in_backward():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("mine")

    model = Block(lambda self, x: Fails.apply(plain(self, x)))
    with pytest.raises(KeyError, match="mine"):
        swap(model, sample=batch())
    assert type(model.act) is nn.GELU
    assert "forward" not in vars(model.act)


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
def test_in_place_in_the_mode_of_the_sample_alone(act, lean):
    model = TrainingAndEvaluation(act()).double()
    ours, x = copy.deepcopy(model), batch()
    report = swap(ours, sample=x, lean=lean)
    kept = lean and not isinstance(ours.act, nn.ReLU)  # by the input a slope is exact
    assert report.rows[0].after == ("in lean()" if kept else "in place"), report
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


def test_what_a_run_leaves_on_parameters_and_buffers_is_put_back():
    class Observed(MLP):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(0))

        def forward(self, x):
            self.scale.resize_(3).fill_(2.0)
            self.fc1.weight.seen = [1]
            return super().forward(x)

    model = Observed().double()
    model.fc2.weight.kept = 5
    swap(model, sample=batch())
    assert model.scale.shape == (0,)
    assert not hasattr(model.fc1.weight, "seen")
    assert model.fc2.weight.kept == 5


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


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


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


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("lean", [False, "call"])
def test_buffers_of_a_parametrization_stay(given, lean):
    def normed(layer):
        return nn.utils.parametrizations.spectral_norm(layer)

    model = nn.Sequential(
        normed(nn.Linear(D, D)), nn.GELU(), nn.LayerNorm(D), normed(nn.Linear(D, D)), MLP()
    ).double()
    normed(model[4].fc1)
    before = copy.deepcopy(model.state_dict())
    swap(model, sample=batch() if given else None, lean=lean)
    for name, held in model.state_dict().items():
        assert torch.equal(held, before[name]), name


def test_a_parameter_that_the_forward_changes():
    embedding = nn.Embedding(10, D, max_norm=0.1, **DOUBLE)
    model = nn.Sequential(embedding, *mlp(nn.GELU()))
    weight = embedding.weight.detach().clone()
    row = only(swap(model, sample=torch.arange(5)))
    assert "changes a parameter" in row.reason
    assert embedding.weight.equal(weight)


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


def test_nothing_is_held_afterwards():
    model = Block(plain)
    gc.collect()
    before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    swap(model, sample=batch())
    gc.collect()
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) == before


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


@pytest.mark.parametrize("embedded", [False, True])
def test_a_kink_that_rounding_crosses_is_not_an_error(monkeypatch, embedded):
    """Stock computes exactly 0 before the ReLU, and has no gradient; any rounding moves half of it to the other side."""
    x = torch.arange(4) if embedded else batch()
    model = Block(lambda self, x: torch.relu(plain(self, self.embed(x)) - self.zero))
    model.embed = nn.Embedding(4, D, **DOUBLE) if embedded else nn.Identity()
    model.zero = plain(model, model.embed(x)).detach()
    real = types._C.activation

    class Rounding:
        @staticmethod
        def activation(op, input, *rest):
            return real(op, input * (1 + 1e-12), *rest)

    monkeypatch.setattr(types, "_C", Rounding)
    assert only(swap(model, sample=x)).changed
    model.embed = nn.Identity()
    assert_as_stock(model, batch())


class WithPosition(nn.Embedding):
    """Its result is not a tensor alone."""

    def forward(self, x):
        return {"position": torch.arange(x.shape[0]), "embedded": super().forward(x)}


@pytest.mark.parametrize("embedding", [WithPosition, nn.EmbeddingBag])
def test_embeddings_of_other_forms_are_disturbed_too(embedding):
    embed = embedding(4, D, **DOUBLE)
    model = trial.Trial(embed, torch.arange(4)[:, None])
    exact, again, noisy = (model.run("", noise=noise).outputs[0][0] for noise in (0.0, 0.0, 1e-3))
    assert exact == again
    assert exact * (1 - 1e-3) <= noisy <= exact * (1 + 1e-3)
    assert noisy != exact
    assert not embed._forward_hooks


def test_a_default_device_that_the_model_is_not_on():
    model, x = mlp(nn.GELU()), batch()
    with torch.device("meta"):
        report = swap(model, sample=x)
    assert any(row.changed for row in report)


def test_rounding_that_a_model_enlarges_is_not_an_error():
    """A batch norm over two values gives signs: gradients are as good as noise, stock's too."""
    model = nn.Sequential(
        nn.Conv2d(2, 64, 8), nn.BatchNorm2d(64), nn.SiLU(), nn.Conv2d(64, 4, 1), nn.BatchNorm2d(4)
    )
    report = swap(model, sample=torch.randn(2, 2, 8, 8))
    assert any(row.changed for row in report), report


def test_what_rounding_leaves_of_a_sum_over_many_rows_is_no_difference():
    # Stock sums a norm's bias gradient up in float32: of gradients that cancel, nothing but its rounding is left.
    model = nn.Sequential(nn.Linear(D, 512), nn.LayerNorm(512))
    assert only(swap(model, sample=torch.randn(4096, D))).changed


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_function_is_changed_again_after_a_first_disagreement(monkeypatch, activation):
    layer = nn.TransformerEncoderLayer(D, 2, D, 0.0, activation=activation, batch_first=True, **DOUBLE)
    answers = [False]
    agrees = trial.Outcome.agrees_with
    monkeypatch.setattr(
        trial.Outcome, "agrees_with", lambda *args: answers.pop() if answers else agrees(*args)
    )
    report = swap(layer, sample=batch(2, 3, D))
    assert not answers
    assert any(row.path == "activation" and row.changed for row in report.rows)
    assert_as_stock(layer, batch(2, 3, D))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_of_whose_gradients_autocast_leaves_nothing(monkeypatch, wrong):
    """Deep, with batch norms over few values: compared in float32, where an error of a hundredth shows."""
    torch.manual_seed(0)
    layers = (nn.Linear(D, D), nn.GELU(), nn.BatchNorm1d(D))
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(20) for layer in layers))
    for linear in model[::3]:
        nn.init.normal_(linear.weight, std=2 / D**0.5)
    x = torch.randn(16, D)
    real = types._C.activation

    class Planted:
        @staticmethod
        def activation(op, input, *rest):
            rounding = 4e-3 * torch.rand_like(input) if input.dtype == torch.bfloat16 else 0.0
            return real(op, input * (1 + rounding + 0.05 * wrong), *rest)

    with torch.autocast("cpu", torch.bfloat16):
        stock, rounded = (trial.Trial(model, x).run("", noise=noise) for noise in (0.0, 2e-3))
        assert not rounded.agrees_with(stock, 0.25)
        monkeypatch.setattr(types, "_C", Planted)
        report = swap(model, sample=x, exact=False)
    changed = [row.changed for row in report.rows if row.before == "GELU"]
    assert len(changed) == 20
    assert not any(changed) if wrong else all(changed)


@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_a_model_of_whose_gradients_float32_leaves_nothing(monkeypatch, wrong):
    """Compared in float64, where an error of a thousandth shows; here float32's outcomes never agree."""
    model, x = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)), torch.randn(8, D)
    real, run, agrees = types._C.activation, trial.Trial.run, trial.Outcome.agrees_with
    in_float64 = []

    def noted(self, phase, *args, **kwargs):
        outcome = run(self, phase, *args, **kwargs)
        if next(self.model.parameters()).dtype == torch.float64:
            in_float64.append(id(outcome))
        return outcome

    class Planted:
        @staticmethod
        def activation(op, input, *rest):
            return real(op, input * (1 + wrong), *rest)

    parameters = [p.clone() for p in model.parameters()]
    monkeypatch.setattr(types, "_C", Planted)
    monkeypatch.setattr(trial.Trial, "run", noted)
    # Stock, run again, agrees: it repeats itself on the sample.
    monkeypatch.setattr("memkit.swap._disturbed", lambda *args: None)
    repeats = iter([False, False, True])
    monkeypatch.setattr(
        trial.Outcome,
        "agrees_with",
        lambda self, *args: agrees(self, *args) if id(self) in in_float64 else next(repeats),
    )
    report = only(swap(model, sample=x))
    assert report.changed == (not wrong)
    assert in_float64
    assert all(p.equal(q) for p, q in zip(model.parameters(), parameters, strict=True))


class LargeInside(nn.Module):
    """In half precision there is nothing left of what memkit's norm hands on, or no number; then `ends` looks at it."""

    def __init__(self, weight=1.0, bias=0.0, scale=1.0, ends=None, deep=0):
        super().__init__()
        self.norm, self.out, self.ends = nn.LayerNorm(D), nn.Linear(D, 8), ends
        self.scale, self.bias = scale, bias
        nn.init.constant_(self.norm.weight, weight)
        nn.init.constant_(self.norm.bias, bias)
        layers = (nn.Linear(D, D, bias=False), nn.BatchNorm1d(D), nn.ReLU())
        self.deep = nn.Sequential(*(copy.deepcopy(layer) for _ in range(deep) for layer in layers))

    def forward(self, x):
        y = self.out((self.norm(x) - self.bias) * self.scale)
        return self.deep(x), self.ends(y) if self.ends else y


def bfloat16_alone(y):
    assert y.dtype == torch.bfloat16
    return y


def as_many_as_digits(y):
    return y[: 4 if y.dtype == torch.bfloat16 else 5]


@pytest.mark.parametrize("deep", [0, 40])
@pytest.mark.parametrize(
    ("dtype", "kwargs"),
    [
        (torch.float16, {"weight": 1e6, "scale": 1e-6}),  # infinity
        (torch.bfloat16, {"bias": 3000.0}),
        (torch.bfloat16, {"bias": 3000.0, "ends": bfloat16_alone}),
        (torch.bfloat16, {"bias": 3000.0, "ends": as_many_as_digits}),
    ],
)
def test_what_autocast_makes_wrong_is_refused(dtype, kwargs, deep):
    """Also beside a network of whose gradients half precision leaves nothing, and of a model that needs autocast."""
    torch.manual_seed(0)
    model, x = LargeInside(deep=deep, **kwargs), torch.randn(32, D)
    with torch.autocast("cpu", dtype):
        report = swap(model, sample=x, exact=False)
        assert torch.get_autocast_dtype("cpu") is dtype
        assert torch.is_autocast_enabled("cpu")
    assert not any(row.changed for row in report.rows)
    assert type(model.norm) is nn.LayerNorm


def test_nearness_to_what_is_exact():
    def outcome(*values):
        probes = torch.tensor(values, dtype=torch.float64)
        return trial.Outcome([(probes.norm().item(), probes)], [])

    truth = outcome(1.0, 0.0)
    assert outcome(1.0, 0.19).is_as_near([outcome(0.9, 0.0)], truth, 1e-6)
    assert not outcome(1.0, 0.21).is_as_near([outcome(0.9, 0.0)], truth, 1e-6)
    assert not outcome(math.nan, math.nan).is_as_near([outcome(-9.0, 9.0)], truth, 1.0)
    assert not outcome(1.0).is_as_near([outcome(-9.0, 9.0)], truth, 1.0)
    assert not trial.Outcome([], []).is_as_near([truth], truth, 1.0)
    # An error of stock's in one gradient excuses none in another.
    both = trial.Outcome(truth.outputs, [*outcome(5.0, 0.0).outputs, *outcome(1.0, 0.0).outputs])
    other = trial.Outcome(truth.outputs, [*outcome(1.0, 0.0).outputs, *outcome(-1.0, 0.0).outputs])
    exact = trial.Outcome(truth.outputs, [*outcome(1.0, 0.0).outputs] * 2)
    assert not other.is_as_near([both], exact, 0.05)
