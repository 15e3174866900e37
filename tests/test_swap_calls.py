"""Swapped modules in all the ways a module is called: dtypes, devices, transformer layers, compilers, checkpoints."""

import copy
import functools
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from swap_cases import (
    DOUBLE,
    STOCK,
    Block,
    D,
    acts,
    assert_as_stock,
    batch,
    mlp,
    only,
    some_acts,
    step,
)
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memkit import swap, unswap
from memkit.swap import change, recipes, sites, types

pytestmark = pytest.mark.usefixtures("repeatable")


# -- torch.nn's transformer layers


@pytest.mark.parametrize("train", [True, False])
def test_functions_that_transformer_layers_hold(train):
    for function, name in recipes.FUNCTIONS.items():
        layer = nn.TransformerEncoderLayer(D, 2, D, 0.0, activation=function, batch_first=True, **DOUBLE)
        layer.train(train)
        row = only(swap(layer, ops=STOCK))
        assert (row.path, row.changed) == ("activation", True), (name, row.reason)
        assert_as_stock(layer, batch(2, 3, D))
        unswap(layer)
        assert layer.activation is function


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.ReLU(), nn.GELU(), F.silu, lambda x: x * 2])
@pytest.mark.parametrize("layer_type", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers(layer_type, activation, by_sample, calls):
    layer = layer_type(D, 2, D, 0.0, activation=activation, batch_first=True, **DOUBLE)
    args = (batch(2, 3, D),) if layer_type is nn.TransformerEncoderLayer else (batch(2, 3, D), batch(2, 5, D))
    before = dict(vars(layer)), repr(layer), list(layer.state_dict())
    row = only(swap(layer, sample=args if by_sample else None, ops=STOCK))
    known = getattr(activation, "__name__", "") != "<lambda>"
    assert row.changed == known, row.reason
    calls.clear()
    assert_as_stock(layer, *args)
    # In place but for a view that autograd recorded, which Linear makes of more than two dimensions up to PyTorch 2.14.
    recorded = layer.linear1(batch(2, 3, D))._is_view()
    assert [overwritten for _, overwritten in calls] == [not recorded] * known
    calls.clear()
    with torch.no_grad():
        layer.train()(*args)
    assert [overwritten for _, overwritten in calls] == [True] * known
    assert (repr(layer), list(layer.state_dict())) == before[1:]
    unswap(layer)
    assert vars(layer) == before[0]


def test_dropout_keeps_nothing():
    layer = nn.TransformerEncoderLayer(D, 2, D, 0.1, activation="gelu", batch_first=True, **DOUBLE)
    for sample in (None, batch(2, 3, D)):
        row = only(swap(layer, sample=sample, ops=STOCK))
        assert not row.changed
        assert "nothing to save" in row.reason


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU()])
def test_fast_path_of_transformers_is_taken(activation, monkeypatch, calls):
    layer = nn.TransformerEncoderLayer(D, 2, D, 0.0, activation=activation, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 3, D)
    with torch.no_grad():
        stock = model(x)
    swap(model)
    taken = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: taken.append(1) or fused(*a))
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock)
    assert len(taken) == 2
    assert calls == []
    torch.testing.assert_close(model(x), stock, rtol=1e-5, atol=1e-6)  # with grad: the layer's own forward
    assert len(calls) == 2


def test_hook_in_a_transformer_layer_keeps_its_tensor(calls):
    layer = nn.TransformerEncoderLayer(D, 2, D, 0.0, batch_first=True, **DOUBLE)
    swap(layer)
    kept = []
    layer.linear1.register_forward_hook(lambda m, i, o: kept.append(o))
    assert_as_stock(layer, batch(2, 3, D))
    assert calls == [("relu", False)]
    assert (kept[0] < 0).any()


# -- dtypes and devices ------------------------------------------------------------------------------------------------


def slope_error(act, x):
    """Beyond the rounding of the result, at worst."""
    model = nn.Sequential(STOCK[act]())
    exact = x.double().requires_grad_()
    model(exact).sum().backward()
    change.apply(sites.Site(model[0], act, ""), types.Proof(False))
    leaf = x.clone().requires_grad_()
    model(leaf).backward(torch.ones_like(x))
    error = (leaf.grad.double() - exact.grad).abs()
    return (error - exact.grad.abs() * torch.finfo(x.dtype).eps).max().item()


@acts
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slopes_are_as_exact_as_said(act, dtype):
    if act in types.KEEPS_OUTPUT:
        return  # as in stock
    bound = types.EXACT
    if act in types.INEXACT:
        bound = types.INEXACT[act][dtype == torch.bfloat16] * (2 if act in ("elu", "celu") else 1)  # alpha
    elif act == "hardtanh":
        assert (
            sites.Site(STOCK[act](), act, "").dtypes(True) is None
        )  # these bounds are exact in half precision
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    assert slope_error(act, every[every.isfinite() & (every.abs() < 1e4)]) <= bound


@acts
def test_slopes_in_float32(act):
    minima = {"gelu": -0.7518, "silu": -1.2785, "mish": -1.1924, "hardswish": -1.5}
    x = torch.linspace(-12, 12, 1_000_001) + (3e-5 if act == "hardsigmoid" else 0)  # not on its corners
    if act in minima:
        x = torch.cat([x, torch.linspace(minima[act] - 1e-2, minima[act] + 1e-2, 1_000_001)])
    assert slope_error(act, x) <= types.EXACT


OF_TORCH = {**STOCK, "gelu_tanh": lambda: nn.GELU(approximate="tanh")}


@pytest.mark.parametrize("act", [act for act in types.INEXACT if act in OF_TORCH])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_sample", [False, True])
def test_half_precision(act, dtype, by_sample, calls):
    model = mlp(OF_TORCH[act](), dtype=dtype)
    x = batch(dtype=dtype)
    row = only(swap(model, sample=x if by_sample else None))
    assert row.changed == (not by_sample)
    if by_sample and act != "softplus":
        assert "exact=False allows it" in row.reason
    assert_as_stock(model, x, rtol=0, atol=0)
    row = only(swap(model, sample=x if by_sample else None, exact=False))
    assert row.changed == (not by_sample or act != "softplus")
    calls.clear()
    step(model, x)
    assert calls == ([(act, True)] if act != "softplus" else [])


@pytest.mark.parametrize("exact", [True, False])
def test_autocast(exact, calls):
    model = mlp(nn.GELU(), dtype=torch.float32)
    x = batch(dtype=torch.float32)
    swap(model, exact=exact)
    with torch.autocast("cpu", torch.bfloat16):
        tolerance = 0 if exact else 3e-2
        assert_as_stock(model, x, rtol=tolerance, atol=tolerance)
    assert calls == ([] if exact else [("gelu", True)])
    assert_as_stock(model, x, rtol=1e-4, atol=1e-5)
    assert calls[-1] == ("gelu", True)
    with torch.autocast("cpu", torch.bfloat16):
        row = only(swap(model, sample=x, exact=exact))
    assert row.changed == (not exact)
    assert ("0.016 in torch.bfloat16" in row.reason) == exact


def test_dtype_changed_later(calls):
    model = mlp(nn.GELU())
    swap(model, sample=batch())
    model.to(torch.bfloat16)
    assert_as_stock(model, batch(dtype=torch.bfloat16), rtol=0, atol=0)
    model.to(torch.float32)
    calls.clear()
    assert_as_stock(model, batch(dtype=torch.float32), rtol=1e-4, atol=1e-5)
    assert calls == [("gelu", True)]


def test_hardtanh_bounds_that_round():
    for bounds, exact in (((-1.0, 1.0), True), ((-0.3, 0.7), False)):
        dtypes = sites.Site(nn.Hardtanh(*bounds), "hardtanh", "").dtypes(False)
        assert (dtypes is None) == exact


@acts
def test_what_memkit_does_not_serve(act):
    """Stock answers, or stock raises."""
    module = STOCK[act]()
    model = nn.Sequential(nn.Identity(), module, nn.Linear(2, 2))
    inputs = {
        "ints": torch.arange(-4, 4),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        "None": None,
    }
    stock = {}
    for name, x in inputs.items():
        try:
            stock[name] = module(x)
        except Exception as error:
            stock[name] = error
    for sample in (False, True):
        if sample:
            change.undo(model)
            change.apply(sites.Site(module, act, ""), types.Proof("auto", 3))
        else:
            assert only(swap(model)).changed
        for name, x in inputs.items():
            if isinstance(stock[name], Exception):
                with pytest.raises((RuntimeError, TypeError, AttributeError)):
                    module(x)
            else:
                got = module(x)
                assert got.dtype == stock[name].dtype
                pairs = (got.unbind(), stock[name].unbind()) if name == "nested" else ([got], [stock[name]])
                for ours, theirs in zip(*pairs, strict=True):
                    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_tensor_subclasses_and_modes():
    class Mine(torch.Tensor):
        pass

    model = mlp(nn.GELU(), dtype=torch.float32)
    swap(model, sample=torch.randn(4, D))
    x = torch.randn(4, D)
    stock = copy.deepcopy(model)
    unswap(stock)
    assert type(model(x.as_subclass(Mine))) is Mine
    torch.testing.assert_close(model(x.as_subclass(Mine)), stock(x.as_subclass(Mine)))
    with torch.device("cpu"):  # a torch function mode
        assert_as_stock(model, x, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.vmap(model)(x), stock(x))
    function = torch.func.grad(lambda x: model(x).sum())
    torch.testing.assert_close(function(x), torch.func.grad(lambda x: stock(x).sum())(x))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), stock(x))
    meta = torch.empty(4, D, device="meta")
    assert copy.deepcopy(model).to("meta")(meta).shape == (4, D)


def test_script_of_a_root_that_was_changed_twice():
    """A Sequential with a batch norm and its activation, and the call that is all `lean`."""
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU()).eval()
    x = torch.randn(4, D)
    stock = model(x)
    swap(model, lean="call")
    torch.testing.assert_close(torch.jit.script(model)(x), stock)


def test_tracers():
    model = mlp(nn.GELU(), dtype=torch.float32)
    x = torch.randn(4, D)
    stock = model(x)
    swap(model)
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), stock)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), stock)
    torch.testing.assert_close(torch.jit.script(model)(x), stock)
    for strict in (False, True):
        exported = torch.export.export(model, (x,), strict=strict)
        torch.testing.assert_close(exported.module()(x), stock)
        assert "memkit" not in str(exported.graph)


@pytest.mark.parametrize("lean", [False, True, "call"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_traces_are_stock_operators(lean, grad, tmp_path):
    """For those who load them without memkit, and for what exports them."""
    model = nn.Sequential(
        *(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
        ),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 4 * D), nn.GELU(), nn.Dropout(0.1)),
        *(nn.Linear(4 * D, D), nn.BatchNorm1d(D), nn.Tanh()),
    )
    x = torch.randn(4, 3, 6, 6)
    swap(model, sample=x, lean=lean)
    model.eval()
    expected = model(x)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(model, x)  # which traces a second time, to compare
    assert "memkit" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), expected)
    traced.save(tmp_path / "traced.pt")
    load = "import sys, torch; print(torch.jit.load(sys.argv[1])(torch.ones(4, 3, 6, 6)).shape, 'memkit' in sys.modules)"
    got = subprocess.run(
        [sys.executable, "-c", load, str(tmp_path / "traced.pt")], capture_output=True, text=True, check=True
    )
    assert got.stdout.split("])")[1].strip() == "False"


@pytest.mark.parametrize("lean", [False, True, "call"])
@pytest.mark.parametrize("train", [False, True])
def test_symbolic_trace_of_layers(lean, train):
    """Whose own forwards branch on their input."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2),
    ).train(train)
    x = torch.randn(2, 3, 8, 8)
    ours = copy.deepcopy(model)
    swap(ours, sample=x, lean=lean)
    traced = torch.fx.symbolic_trace(ours)
    torch.testing.assert_close(traced(x), model(x))
    assert not train or torch.equal(ours[1].running_mean, traced.get_submodule("1").running_mean)
    assert {"0", "4"} <= {node.target for node in traced.graph.nodes if node.op == "call_module"}


@pytest.mark.parametrize("lean", [False, "call"])
def test_features_of_inner_layers(lean):
    feature_extraction = pytest.importorskip("torchvision.models.feature_extraction")
    models = pytest.importorskip("torchvision.models")
    model = models.resnet18(weights=None)
    x = torch.randn(2, 3, 64, 64)
    theirs = feature_extraction.create_feature_extractor(model, ["layer1", "layer3"])(x)
    swap(model, sample=x, lean=lean)
    ours = feature_extraction.create_feature_extractor(model, ["layer1", "layer3"])(x)
    for name, feature in theirs.items():
        torch.testing.assert_close(ours[name], feature, rtol=1e-4, atol=1e-4)


# -- checkpoints --------------------------------------------------------------------------------------------------------


def test_selective_checkpoint():
    """Its dispatch mode asks for the same operators when it recomputes."""

    def policy(context, op, *args, **kwargs):
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    net = nn.Sequential(mlp(nn.GELU()), mlp(nn.ReLU()))
    swap(net)
    model = Block(
        lambda self, x: checkpoint(self.act, self.first(x), use_reentrant=False, context_fn=contexts), net
    )
    assert_as_stock(model, batch())


@some_acts
def test_saved_tensor_hooks(act):
    model = mlp(STOCK[act]())
    swap(model)
    with torch.autograd.graph.save_on_cpu():
        assert_as_stock(model, batch())


CHECKPOINTED = {
    "reentrant": lambda f, h: checkpoint(f, h, use_reentrant=True),
    "by position": lambda f, h: checkpoint(f, h, use_reentrant=False),
    "by keyword": lambda f, h: checkpoint(lambda h=None: f(h), h=h, use_reentrant=False),
    "in a list": lambda f, h: checkpoint(lambda hs: f(hs[0]), [h], use_reentrant=False),
    "in a closure": lambda f, h: checkpoint(lambda: f(h), use_reentrant=False),
}


@pytest.mark.parametrize("how", CHECKPOINTED)
@pytest.mark.parametrize("where", ["first", "inside"])
@pytest.mark.parametrize("seen_by_sample", ["no", "without checkpoint", "with checkpoint"])
@some_acts
def test_checkpoint(act, where, how, seen_by_sample, calls):
    """The recomputation starts from the block's input: an activation that comes first must leave that alone."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.enabled = True
            self.first = nn.Linear(D, D)
            act_and_linear = STOCK[act](), nn.Linear(D, D)
            self.block = nn.Sequential(
                *((nn.Linear(D, D), *act_and_linear) if where == "inside" else act_and_linear)
            )

        def forward(self, x):
            if not self.enabled:
                return self.block(self.first(x))
            return CHECKPOINTED[how](self.block, self.first(x))

    model = Checkpointed().double()
    model.enabled = seen_by_sample != "without checkpoint"
    row = only(swap(model, sample=None if seen_by_sample == "no" else batch()))
    assert row.changed or (where == "first" and seen_by_sample == "with checkpoint")
    model.enabled = True
    calls.clear()
    assert_as_stock(model, batch())
    if where == "first":
        assert not any(overwritten for _, overwritten in calls)
    elif calls:
        assert all(overwritten for _, overwritten in calls)


@pytest.mark.parametrize("lean", [False, "call"])
def test_an_empty_batch_in_training(lean):
    """Passes a batch norm, as in PyTorch."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    )
    assert swap(model, sample=torch.randn(4, 3, 8, 8), lean=lean).rows
    out = model(torch.randn(0, 3, 8, 8))
    assert out.shape == (0, 8, 4, 4)
    out.sum().backward()
    assert all((p.grad == 0).all() for p in model.parameters())


class Drops(nn.Module):
    """Keeps its input in a variable that it does not read any more."""

    def __init__(self, act):
        super().__init__()
        self.linear, self.act, self.out = nn.Linear(8, 8), act, nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        a = self.act(h)
        return self.out(a).neg()


class GoesOn(Drops):
    def forward(self, x):
        h = self.linear(x)
        a = self.act(h)
        return self.out(h + a)


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.SiLU, nn.GELU])
def test_an_activation_that_another_model_holds_too(act, lean):
    shared = act()
    model, other = Drops(shared), GoesOn(shared)
    stock, x = copy.deepcopy(other), torch.randn(4, 8)
    assert swap(model, sample=x, lean=lean).changed
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(other(x), stock(x))


@pytest.mark.parametrize(
    "copied", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_in_place_where_a_variable_is_not_read_again(copied):
    model, x = Drops(nn.SiLU()), torch.randn(4, 8)
    assert only(swap(model, sample=x)).after == "in place"
    changed = copied(model)
    memory = []
    changed.linear.register_forward_hook(lambda module, given, out: memory.append(out.data_ptr()))
    changed.out.register_forward_pre_hook(lambda module, given: memory.append(given[0].data_ptr()))
    changed(x)
    assert memory[0] == memory[1]


class Ordinary(type):
    def __new__(cls, name, bases, held):
        return super().__new__(cls, name, bases, held)


class MadeOrdinarily(nn.Module, metaclass=Ordinary):
    """As fastai's modules: a metaclass that takes no arguments beside."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


@pytest.mark.parametrize("lean", [False, "call"])
def test_a_metaclass_that_takes_no_arguments(lean):
    model, x = nn.Sequential(MadeOrdinarily(), nn.LayerNorm(8)), torch.randn(4, 8)
    expected = model(x)
    report = swap(model, sample=x, lean=lean)
    assert next(row for row in report if row.path == "0").changed
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)
    unswap(model)
    assert type(model[0]) is MadeOrdinarily
