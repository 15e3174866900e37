"""Norms and dropouts that swap changed, and batch norms that run with the activation behind them."""

import copy
import importlib
import pickle
import re

import pytest
import torch
from swap_cases import D, assert_as_stock, batch, images, step
from torch import nn

from memkit import memory, swap, unswap
from memkit.functional import norm_saves
from memkit.swap import layers, types

pytestmark = pytest.mark.usefixtures("repeatable")


class Residual(nn.Module):
    """A pre-norm block, as transformers have it."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.act, self.down = norm, nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


def blocks(norm=nn.LayerNorm, **kwargs):
    return nn.Sequential(nn.Linear(D, D), *(Residual(norm(D)) for _ in range(2))).to(
        **{"dtype": torch.float64, **kwargs}
    )


def convolutions(act=nn.SiLU):
    def stage(inputs):
        return nn.Sequential(nn.Conv2d(inputs, D, 3, bias=False), nn.BatchNorm2d(D), act())

    return nn.Sequential(stage(2), stage(D), nn.Flatten(), nn.Linear(D * 16, 3)).double()


def residual_body(act=nn.SiLU, **kwargs):
    """conv, norm, act, conv, norm, act, conv: two triples that run as one each."""
    convolutions = [nn.Conv2d(D, D, 3, padding=1, **kwargs) for _ in range(3)]
    between = [(nn.BatchNorm2d(D), act()) for _ in range(2)]
    first, second, last = convolutions
    return nn.Sequential(first, *between[0], second, *between[1], last).double()


def by_path(report):
    return {row.path: row for row in report}


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("by_sample", [True, False])
def test_blocks(norm, by_sample):
    model, x = blocks(norm), batch(8, D)
    report = swap(model, sample=x if by_sample else None)
    rows = by_path(report)
    assert all(row.changed for row in report if row.before != "GELU"), report
    assert rows["1.norm"].saved == ("output" if by_sample else "input")
    assert rows["1.drop"].saved == "seed"
    assert_as_stock(model, x)


def test_the_report_counts_what_is_saved():
    """Row by row it comes to what was measured."""
    for model, x in (
        (blocks(), batch(64, D)),
        (blocks(nn.RMSNorm), batch(64, D)),
        (convolutions(), images()),
    ):
        report = swap(model, sample=x)
        told = report.bytes_before - report.bytes_after
        assert told == pytest.approx(report.saved_before - report.saved_after, abs=16 * 8 * len(report)), (
            report
        )
        assert report.saved_after < 0.85 * report.saved_before
        assert memory.measure(lambda: model(x).sum()).saved == report.saved_after  # noqa: B023


def test_dropout_keeps_a_seed():
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5)).double()
    x = batch(4096, D)
    stock = memory.measure(lambda: model(x)).saved
    swap(model)
    assert stock - memory.measure(lambda: model(x)).saved >= x.numel() - 8
    y = model(x)
    kept = (y != 0).double().mean().item()
    assert abs(kept - 0.5) < 0.01
    torch.testing.assert_close(y[y != 0], (2 * model[0](x))[y != 0])
    model.eval()
    assert model(x).equal(model[0](x))


def test_an_output_that_is_changed_later_is_not_kept():
    class Scaled(Residual):
        def forward(self, x):
            return x + self.drop(self.down(self.act(self.up(self.norm(x).mul_(2)))))

    model, x = Scaled(nn.LayerNorm(D)).double(), batch()
    row = by_path(swap(model, sample=x))["norm"]
    assert row.changed
    assert row.saved == "input"
    assert "changed in place" in row.reason
    assert_as_stock(model, x)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_an_input_that_is_kept_anyway_is_kept(norm):
    """The output would come on top, as what follows keeps its own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.out = norm(D), nn.ReLU(), nn.Linear(D, D)

        def forward(self, x):
            return self.out(self.act(self.norm(torch.tanh(x))))

    model, x = Model().double(), batch().requires_grad_()
    before = memory.measure(lambda: model(x)).saved
    report = swap(model, sample=x)
    assert by_path(report)["norm"].saved == "input"
    assert by_path(report)["norm"].bytes_after < x.nbytes
    assert memory.measure(lambda: model(x)).saved <= before
    assert_as_stock(model, x)


ANOTHER = {
    "an activation of the same": (nn.GELU, lambda self, h: self.first(h) + self.norm(h)),
    "the activation before": (nn.Tanh, lambda self, h: 2 + self.norm(self.first(h))),
    "a norm of the same": (lambda: nn.LayerNorm(D), lambda self, h: self.first(h) + self.norm(h)),
}


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("another", ANOTHER)
def test_an_input_that_another_site_keeps_is_kept(another, norm):
    """The output would come on top, and the model would keep more than stock."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.first, self.norm = nn.Linear(D, D), ANOTHER[another][0](), norm(D)

        def forward(self, x):
            return ANOTHER[another][1](self, self.lin(x))

    model, x = Model().double(), batch(64, D)
    report = swap(model, sample=x)
    assert by_path(report)["norm"].changed, report
    assert by_path(report)["norm"].saved == "input"
    assert report.saved_after <= 1.25 * x.nbytes
    told = report.bytes_before - report.bytes_after
    assert told == pytest.approx(report.saved_before - report.saved_after, abs=2 * D * 8 * len(report)), (
        report
    )
    assert_as_stock(model, x)


def test_weights_that_do_not_allow_the_output():
    norm = nn.LayerNorm(D).double()
    nn.init.constant_(norm.bias, 5.0)
    model, x = Residual(norm), batch()
    model = model.double()
    before = swap(model, sample=x)
    assert by_path(before)["norm"].bytes_after >= x.nbytes
    assert_as_stock(model, x)


def test_hooks_added_later_are_served():
    """A hook may change the output in place: then the norm keeps its input."""
    model, x = blocks(), batch()
    swap(model, sample=x)
    assert norm_saves(model[1].norm(model[0](x))) == "output"
    model[1].norm.register_forward_hook(lambda module, args, out: out.mul_(2))
    assert_as_stock(model, x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "act",
    [
        nn.ReLU,
        nn.SiLU,
        nn.GELU,
        lambda: nn.LeakyReLU(0.2),
        lambda: nn.Hardtanh(-0.5, 0.5),
        lambda: nn.ReLU(True),
    ],
)
@pytest.mark.parametrize("by_sample", [True, False])
def test_batch_norm_with_its_activation(act, training, by_sample):
    model, x = convolutions(act).train(training), images()
    twin = copy.deepcopy(model)
    state = list(model.state_dict())
    report = swap(model, sample=x if by_sample else None)
    assert [row.after for row in report] == ["with the norm"] * 2
    for ours, theirs in zip(step(model, x), step(twin, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert list(model.state_dict()) == state
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert repr(model) == repr(twin)
    unswap(model)
    assert not any(isinstance(module, types.Changed) for module in model.modules())
    assert type(model[0]) is nn.Sequential


@pytest.mark.parametrize("act", [nn.SiLU, nn.ReLU, lambda: nn.ReLU(True)])
@pytest.mark.parametrize(
    "kwargs", [{}, {"groups": 2}, {"stride": 2}, {"padding_mode": "reflect"}, {"bias": False}]
)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_activation_and_convolution(act, kwargs, training):
    model, x = residual_body(act, **kwargs).train(training), torch.randn(3, D, 6, 6, dtype=torch.float64)
    twin, fused = copy.deepcopy(model), "padding_mode" not in kwargs
    report = swap(model, sample=x)
    out = model(x)
    assert ("_conv2d_backward" in out.grad_fn.name()) == fused
    model.zero_grad()
    unswap(model)
    model.load_state_dict(twin.state_dict())
    swap(model)
    for ours, theirs in zip(step(model, x), step(twin, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    if fused:
        kept = memory.measure(lambda: model(x).sum()).saved
        assert kept == report.saved_after
        told = report.bytes_before - report.bytes_after
        statistics = 2 * D * 8 * len(report)
        assert report.saved_before - kept == pytest.approx(told, abs=statistics)
        norms = [x.numel() * 8, x.numel() * 8] if "stride" not in kwargs else [3 * D * 9 * 8, 3 * D * 4 * 8]
        assert kept == pytest.approx(sum(norms), abs=statistics)  # their inputs


def test_a_convolution_with_hooks_is_called():
    model, x = residual_body(), torch.randn(3, D, 6, 6, dtype=torch.float64)
    swap(model)
    seen = []
    model[3].register_forward_hook(lambda module, args, out: seen.append(args[0]))
    twin = copy.deepcopy(model)
    unswap(twin)
    torch.testing.assert_close(model(x), twin(x))
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1])


def test_parts_of_a_sequence_are_themselves():
    """The norm alone, the activation alone, slices and edits."""
    model, x = convolutions().eval(), images()
    twin = copy.deepcopy(model)
    swap(model)
    for part in (slice(0, 1), slice(0, 2), slice(1, 2), slice(1, 3)):
        data = x if part.start == 0 else torch.randn(3, D, 6, 6, dtype=torch.float64)
        torch.testing.assert_close(model[0][part](data), twin[0][part](data))
    h = torch.randn(3, D, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(model[0][1](h), twin[0][1](h))
    torch.testing.assert_close(model[0][2](h), twin[0][2](h))
    for each in (model, twin):
        each[0][2] = nn.Tanh()
    torch.testing.assert_close(model(x), twin(x))
    seen = []
    model[1][1].register_forward_hook(lambda module, args, out: seen.append(out))
    torch.testing.assert_close(model(x), twin(x))
    assert len(seen) == 1


def test_copies_pickles_compilers():
    model, x = convolutions(), images()
    swap(model, sample=x)
    want = step(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for ours, theirs in zip(step(other, x), want, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert type(other[0]) is layers.Sequential
        unswap(other)
        assert type(other[0]) is nn.Sequential
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(step(compiled, x), want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_autocast():
    """Norms that give float32 there stay, unless exact=False; batch norms compute in what they get."""
    model, x = blocks(dtype=torch.float32), batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        row = by_path(swap(model, sample=x))["1.norm"]
        assert not row.changed
        assert "exact=False" in row.reason
        assert model[1].norm(x).dtype == torch.float32
        swap(model)
        assert model[1].norm(x).dtype == torch.float32
        swap(model, sample=x, exact=False)
        assert model[1].norm(x).dtype == torch.bfloat16
    net, image = convolutions().float(), images().float()
    with torch.autocast("cpu", torch.bfloat16):
        stock = net.eval()(image)
        report = swap(net, sample=image)
        assert {row.after for row in report} == {"with the norm"}
        torch.testing.assert_close(net(image), stock, rtol=5e-2, atol=5e-2)


def test_what_memkit_has_no_kernel_for():
    model = nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(4))
    swap(model)
    assert model[0].eval()(torch.ones(2, 4, dtype=torch.int64)).dtype == torch.int64
    with pytest.raises(RuntimeError, match="normalized_shape"):  # stock's own error
        model[1](torch.ones(2, 5))
    x = torch.ones(64, dtype=torch.complex64)

    def drop(layer):
        torch.manual_seed(0)
        return layer.train()(x)

    try:
        expected = drop(nn.Dropout(0.5))
    except NotImplementedError as error:  # up to PyTorch 2.14
        with pytest.raises(NotImplementedError, match=re.escape(str(error).splitlines()[0])):
            drop(model[0])
    else:
        assert torch.equal(drop(model[0]), expected)


def test_ops_chooses():
    model = nn.Sequential(*convolutions(), nn.Dropout(0.1), nn.LayerNorm(3)).double()
    assert [row.before for row in swap(model, ops=["layer_norm"])] == ["LayerNorm"]
    assert type(model[0]) is nn.Sequential
    assert "with the norm" not in {row.after for row in swap(model, ops=["silu"])}
    assert {row.after for row in swap(model, ops=["silu", "batch_norm_act"])} == {"with the norm"}
    with pytest.raises(ValueError, match="batch_norm_act"):
        swap(model, ops=["norm"])


def test_an_activation_behind_a_batch_norm_is_rebuilt():
    """In a forward of its own: with the norm's input kept, neither the norm's result nor the activation's is."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.conv = nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, D, 3)

        def forward(self, x):
            return self.conv(self.act(self.norm(1.5 * x)))

    model, x = Block().double(), images()
    before = memory.measure(lambda: model(x)).saved
    report = swap(model, sample=x, lean="call")
    assert memory.measure(lambda: model(x)).saved <= before - 0.9 * 8 * x.numel(), report
    assert_as_stock(model, x)


@pytest.mark.parametrize(
    "norm", ["function", "functional group norm", "under autocast", "wrapped", "memkit's"]
)
def test_an_activation_behind_a_norm_that_stays(norm):
    """Whose result is not made again, so that there is nothing to gain from the activation's input."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.act, self.conv = nn.Conv2d(2, D, 3), nn.ReLU(), nn.Conv2d(D, 2, 3)
            self.norm = nn.GroupNorm(4, D)

        def forward(self, x):
            x = self.before(x)
            if norm == "function":
                x = nn.functional.batch_norm(x, None, None, training=True)
            elif norm == "functional group norm":
                x = nn.functional.group_norm(x, 4)
            else:
                x = self.norm(x)
            return self.conv(self.act(x))

    model, x = Block(), images().float()
    if norm == "wrapped":
        model.norm.forward = model.norm.forward
    with torch.autocast("cpu", torch.bfloat16, enabled=norm == "under autocast"):
        stock = memory.measure(lambda: model(x).sum().backward())
        report = swap(model, sample=x, lean="call")
        (row,) = (row for row in report if row.path == "act")
        assert (row.after == "in lean()") == (norm == "memkit's"), report
        assert memory.measure(lambda: model(x).sum().backward()).saved <= stock.saved


def test_without_autograd_stock_computes_what_brings_something_to_autograd_alone(monkeypatch):
    stock = nn.Sequential(
        nn.Conv2d(3, D, 3), nn.BatchNorm2d(D), nn.Conv2d(D, D, 3), nn.InstanceNorm2d(D)
    ).eval()
    model, x = copy.deepcopy(stock), torch.randn(2, 3, 8, 8)
    swap(model, sample=x, lean="call")
    assert isinstance(model[1], layers.BatchNorm2d)

    def refuse(*args):
        raise AssertionError("memkit's")

    with monkeypatch.context() as patch:
        for layer in (layers.BatchNorm2d, layers.InstanceNorm2d, layers.Conv2d):
            patch.setattr(layer, "_memkit", refuse)
        with torch.no_grad():
            assert torch.equal(model(x), stock(x))
        with torch.inference_mode():
            assert torch.equal(model(x), stock(x))
        with pytest.raises(AssertionError, match="memkit's"):
            model(x)
    model(x)


def test_idle_dropout_of_a_nested_tensor_is_stocks_copy():
    model = nn.Sequential(nn.Dropout())
    swap(model)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    model.eval()(nested).unbind()[0].add_(1)
    assert torch.equal(nested.unbind()[0], torch.ones(2))
    x = torch.ones(2)
    assert model(x) is x


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropout_in_place_by_a_number(kind):
    """As torch.nn takes it, and memkit does not: it runs as stock."""
    model, x = nn.Sequential(nn.LayerNorm(4), kind(0.5, 1), nn.LayerNorm(4)), torch.randn(2, 8, 4)
    stock = copy.deepcopy(model)
    swap(model)
    torch.manual_seed(0)
    got = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(got, stock(x))


@pytest.mark.parametrize("p", [1.5, -1.0, float("nan")])
def test_idle_dropout_of_a_wrong_probability(p):
    model = nn.Sequential(nn.Dropout())
    swap(model)
    model[0].p = p
    with pytest.raises((ValueError, RuntimeError), match="dropout probability has to be between 0 and 1"):
        model.eval()(torch.ones(2))


STATIC = list(types._OWN.values())


@pytest.mark.parametrize("twin", STATIC, ids=lambda cls: cls._own[1])
def test_twins_go_by_the_names_of_what_they_stand_for(twin):
    """Which libraries write into files, to make the modules again."""
    stock = types.stock_of(twin)
    assert (twin.__module__, twin.__qualname__) == (stock.__module__, stock.__qualname__)
    module = twin.__new__(twin)
    nn.Module.__init__(module)
    for copied in (copy.deepcopy(module), *(pickle.loads(pickle.dumps(module, n)) for n in (0, 2, 5))):
        assert type(copied) is twin


@pytest.mark.parametrize("lean", [False, True, "call"])
def test_a_swapped_model_prints_as_before(lean):
    model = nn.Sequential(
        nn.LayerNorm(D), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.RMSNorm(D), nn.Dropout()
    )
    before = repr(model)
    assert swap(model, sample=batch(dtype=torch.float32), lean=lean).changed
    assert repr(model) == before


def test_a_twin_that_is_the_whole_model():
    model = nn.LayerNorm(D)
    assert swap(model, sample=batch(dtype=torch.float32), lean="call").changed
    assert isinstance(model, layers.LayerNorm)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is type(model)
        unswap(copied)
        assert type(copied) is nn.LayerNorm


def test_what_torch_fx_writes_can_be_imported(tmp_path, monkeypatch):
    """A pair of norm and activation, whose Sequential is changed too."""
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU(), nn.Linear(D, D))
    assert swap(model).changed
    assert isinstance(model, types.Changed)
    torch.fx.symbolic_trace(model).to_folder(tmp_path / "written_by_fx", "Written")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("written_by_fx").Written()(batch(dtype=torch.float32)).shape == (4, D)
