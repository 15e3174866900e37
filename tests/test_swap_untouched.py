"""The runs on a sample leave a model, its inputs and the process as they were."""

import collections
import contextlib
import copy
import dataclasses
import gc
import operator
import random
from contextlib import nullcontext

import numpy
import pytest
import torch
from swap_cases import (
    DOUBLE,
    MLP,
    Block,
    D,
    batch,
    mlp,
    only,
    plain,
)
from torch import nn

from memkit import swap
from memkit.swap import untouched, watch

pytestmark = pytest.mark.usefixtures("repeatable")


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


class Tally:
    def __init__(self):
        self.calls = 0
        self.log = []


class Remembers(nn.Module):
    """In containers and objects, in each other."""

    def __init__(self, refuses=False):
        super().__init__()
        self.net, self.refuses = mlp(nn.GELU(), dtype=torch.float32), refuses
        self.queue = collections.deque(maxlen=4)
        self.nested = {"steps": [0], "kept": ({"ema": torch.zeros(D)},)}
        self.tally = Tally()
        self.bank = [torch.zeros(6, D)]
        self.aside = [nn.BatchNorm1d(D)]  # not registered
        self.around = {"me": self, "tally": self.tally}  # a circle

    def forward(self, x):
        y = self.net(x)
        mean = y.detach().mean(0)
        self.queue.append(mean)
        self.nested["steps"][0] += 1
        self.nested["kept"][0]["ema"].mul_(0.9).add_(mean)
        self.nested["last"] = mean
        self.tally.calls += 1
        self.tally.log.append(mean)
        self.bank[0][self.tally.calls % 6].copy_(mean)  # a part of it
        self.aside[0](y)
        if self.refuses:
            raise ValueError("not this one")
        return y

    def state(self):
        norm, kept = self.aside[0], self.nested["kept"][0]["ema"]
        values = [kept, self.bank[0], norm.running_mean, norm.running_var, norm.num_batches_tracked]
        names = [*self.nested, *map(len, (self.queue, self.tally.log))]
        return [x.tolist() for x in values], [*names, self.nested["steps"][0], self.tally.calls]


@pytest.mark.parametrize("refuses", [False, True])
def test_containers_and_objects_are_as_they_were(refuses):
    model, x = Remembers(refuses), torch.randn(4, D)
    with contextlib.suppress(ValueError):
        for _ in range(2):
            model(x)
    with pytest.raises(ValueError, match="not this one") if refuses else nullcontext():
        model(x)
    before, held = model.state(), (model.queue, model.bank[0], model.tally)
    with pytest.raises(ValueError, match="not this one") if refuses else nullcontext():
        assert len(swap(model, sample=x)) == 1
    assert model.state() == before
    assert all(map(operator.is_, held, (model.queue, model.bank[0], model.tally)))
    assert model.queue.maxlen == 4


class Guarded(dict):
    """That lets its items be changed, but not taken away."""

    def clear(self):
        raise RuntimeError("not to be cleared")


class HoldsAside(nn.Module):
    """What no module has registered."""

    def __init__(self):
        super().__init__()
        self.net = mlp(nn.GELU(), dtype=torch.float32)
        self.lazy = [nn.LazyLinear(D)]
        self.prompts = [nn.Parameter(torch.ones(D))]
        self.guarded = [Guarded(kept=1)]
        self.long = {"items": list(range(5000))}
        self.teacher = [nn.BatchNorm1d(D).eval()]

    def forward(self, x):
        self.guarded[0]["kept"] += 1
        self.long["items"].append(0)
        with torch.no_grad():
            seen = self.teacher[0](x)
        return self.net(self.lazy[0](x) + seen + self.prompts[0])


def test_what_is_held_aside_stays_usable():
    with torch.inference_mode():
        frozen = nn.BatchNorm1d(D).eval()
    model = HoldsAside()
    model.teacher = [frozen.requires_grad_(False)]
    x = torch.randn(4, D)
    assert len(swap(model, sample=x)) == 1
    assert model.prompts[0].grad is None
    assert model.guarded[0]["kept"] > 1  # of no built-in type: left alone
    assert len(model.long["items"]) > 5000
    assert model(x).isfinite().all()


@pytest.mark.parametrize("writes", [False, True])
def test_tensors_that_a_run_only_reads_or_makes_are_not_copied(writes, monkeypatch):
    array = numpy.ones(4, dtype=numpy.float32)

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.bank = mlp(nn.GELU(), dtype=torch.float32), {"of": [torch.ones(7)]}

        def forward(self, x):
            torch.from_numpy(array.copy()).add_(1)
            torch.tensor([1.0, 2.0]).add_(1)
            if writes:
                self.bank["of"][0].add_(1)
            return self.net(x) + self.bank["of"][0].sum()

    copied = set()
    keep = untouched.keep_memory
    for module in (untouched, watch):
        monkeypatch.setattr(
            module, "keep_memory", lambda stack, storage: (copied.add(storage.nbytes()), keep(stack, storage))
        )
    model = Reads()
    swap(model, sample=torch.randn(4, D))
    assert copied == ({7 * 4} if writes else set())
    assert model.bank["of"][0].eq(1).all()


def _average_in_place(key, query):
    with torch.no_grad():
        key.mul_(0.9).add_(query, alpha=0.1)


def _average_of_data(key, query):
    key.data.mul_(0.9).add_(query.data, alpha=0.1)


def _average_as_other_data(key, query):
    key.data = key.data * 0.9 + query.data * 0.1


def _view_of_data(key, query):
    key.data = key.data.view(key.shape[::-1]).t()


@pytest.mark.parametrize("lean", [False, True, "call"])
@pytest.mark.parametrize(
    "average", [_average_in_place, _average_of_data, _average_as_other_data, _view_of_data]
)
def test_parameters_that_the_forward_writes(average, lean):
    """A key encoder follows by a moving average (He et al. 2020)."""

    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = mlp(nn.GELU()), mlp(nn.GELU()).requires_grad_(False)

        def forward(self, x):
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                average(key, query)
            return self.query(x) * self.key(x)

    model = Momentum()
    before = [(p, p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    swap(model, sample=batch(), lean=lean)
    for parameter, (same, address, values) in zip(model.parameters(), before, strict=True):
        assert parameter is same
        assert (parameter.data_ptr(), parameter.stride()) == (address, values.stride())
        assert parameter.equal(values)


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


def test_nothing_is_held_afterwards():
    model = Block(plain)
    gc.collect()
    before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    swap(model, sample=batch())
    gc.collect()
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) == before


@pytest.mark.parametrize("raises", [False, True])
def test_garbage_is_collected_once_and_the_heap_is_left_as_it_was(raises):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

        def forward(self, x):
            frozen.append(gc.get_freeze_count())
            if raises:
                raise ArithmeticError
            return self.body(x)

    frozen = []
    gc.unfreeze()
    with pytest.raises(ArithmeticError) if raises else nullcontext():
        swap(Model(), sample=torch.randn(2, 4))
    assert min(frozen) > 0
    assert gc.get_freeze_count() == 0

    gc.freeze()  # the program's own
    before = gc.get_freeze_count()
    with pytest.raises(ArithmeticError) if raises else nullcontext():
        swap(Model(), sample=torch.randn(2, 4))
    assert gc.get_freeze_count() > before / 2


class Settings:
    def __init__(self, layerdrop):
        self.layerdrop = layerdrop


@dataclasses.dataclass(frozen=True)
class Frozen:
    layerdrop: float


class Skipping(nn.Module):
    """LayerDrop, by an attribute or by settings that the model shares with others."""

    def __init__(self, config=None, encoder_layerdrop=0.0):
        super().__init__()
        self.layers = nn.ModuleList(mlp(nn.GELU()) for _ in range(8))
        self.encoder_layerdrop = encoder_layerdrop
        if config is not None:
            self.config = config

    def forward(self, x):
        drop = max(self.encoder_layerdrop, getattr(getattr(self, "config", None), "layerdrop", 0.0))
        for layer in self.layers:
            if not (self.training and float(torch.rand([])) < drop):
                x = x + layer(x)
        return x


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize(
    "given",
    [{"config": Settings(0.9)}, {"config": Frozen(0.9)}, {"encoder_layerdrop": 0.9}],
    ids=["config", "frozen", "module"],
)
def test_no_layer_is_skipped_on_the_sample(given, lean):
    model = Skipping(**given)
    report = swap(model, sample=batch(), lean=lean)
    assert not report.left
    assert len(report.changed) >= 8
    assert report.saved_after < report.saved_before
    assert [model.encoder_layerdrop, getattr(given.get("config"), "layerdrop", 0.9)] == [
        given.get("encoder_layerdrop", 0.0),
        0.9,
    ]


def test_layers_may_be_skipped_again_after_an_error_on_the_sample():
    config = Settings(0.5)
    with pytest.raises(Exception, match="mat1 and mat2"):
        swap(Skipping(config), sample=torch.randn(3, D + 1))
    assert config.layerdrop == 0.5
