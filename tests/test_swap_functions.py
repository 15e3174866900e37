"""Activations that a forward calls as functions: inside `lean()` their results are made again."""

import copy
import functools
import gc
import importlib
import inspect
import math
import pickle
import sys
import warnings
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from swap_cases import assert_as_stock, step
from torch import nn

from memkit import swap, unswap
from memkit.memory import measure
from memkit.swap.library.twin import twin_of

pytestmark = pytest.mark.usefixtures("repeatable")


def gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def mish(x):  # is none
    return x * torch.tanh(x)


class Vocoder(nn.Module):
    """As HiFi-GAN's: the sum is kept by nobody but the activation."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x, slope=0.1):
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, slope))
        return x


class WrittenOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)

    def forward(self, x):
        return self.other(gelu(self.one(x)))


class Qualified(WrittenOut):
    def forward(self, x):
        y = torch.nn.functional.softplus(self.one(x), beta=2.0, threshold=10.0)
        return self.other(nn.functional.elu(y, alpha=0.5)) + torch.selu(y)


class Gelus(WrittenOut):
    def forward(self, x):
        return self.other(F.gelu(F.gelu(self.one(x), approximate="tanh")))


def renames(function):
    """A decorator as libraries have for arguments that get new names."""

    @functools.wraps(function)
    def renamed(*args, **kwargs):
        if "old" in kwargs:
            kwargs["x"] = kwargs.pop("old")
        return function(*args, **kwargs)

    return renamed


class Decorated(WrittenOut):
    @renames
    @renames
    def forward(self, x):
        return self.other(gelu(self.one(x)))


KINDS = pytest.mark.parametrize("kind", [Vocoder, WrittenOut, Qualified, Gelus, Decorated])


def samples(dtype=torch.float64):
    return torch.randn(2, 4, 9, dtype=dtype, requires_grad=True)


@KINDS
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(kind, by_sample):
    model, x = nn.Sequential(kind(), nn.Tanh()).double(), samples()
    report = swap(model, sample=x if by_sample else None, lean="call")
    assert {row.path: row.after for row in report.changed}["0"] == "in lean()"
    for _ in range(2):
        assert_as_stock(model, x)
        model.eval()


@pytest.mark.parametrize(
    ("kind", "kept"), [(Vocoder, 3), (WrittenOut, 4), (Qualified, 3), (Gelus, 3), (Decorated, 4)]
)
def test_the_input_alone_is_kept(kind, kept):
    model, x = kind(), samples(torch.float32)
    assert measure(lambda: model(x)).saved == kept * x.nbytes
    swap(model, lean="call")
    assert measure(lambda: model(x)).saved == x.nbytes


@KINDS
def test_without_lean_it_is_stock(kind):
    model, x = kind().double(), samples()
    stock = measure(lambda: model(x)).saved
    assert not swap(model).changed
    swap(model, lean=True)
    assert measure(lambda: model(x)).saved == stock
    assert_as_stock(model, x)


def test_what_is_changed_afterwards_is_kept():
    class Changes(Vocoder):
        def forward(self, x):
            y = F.leaky_relu(x, 0.2)
            y += 1
            z = F.leaky_relu(self.convs[0](y), 0.3, True)
            return self.convs[1](F.elu(z + 1, inplace=True))

    model, x = Changes().double(), samples()
    swap(model, lean="call")
    assert_as_stock(model, x)


def test_decorators_see_calls_as_before():
    model, x = Decorated().double(), samples()
    stock = copy.deepcopy(model)
    assert swap(model, lean="call").changed
    torch.testing.assert_close(model(old=x), stock(old=x))


class Table:  # keeps what it wraps where nobody sees it
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __get__(self, module, kind=None):
        return functools.partial(self.function, module)


def test_decorators_that_cannot_be_made_again_stay():
    class Hidden(WrittenOut):
        forward = Table(WrittenOut.forward)

    model = Hidden().double()
    assert twin_of("lean", Hidden) is twin_of("lean", Hidden)
    assert not swap(model, lean="call").changed
    assert_as_stock(model, samples())


def test_what_stays_as_it_is():
    class Own(WrittenOut):
        def forward(self, x):
            return self.other(mish(self.one(x)))

    class KeepsResult(WrittenOut):
        def forward(self, x):
            return self.other(torch.tanh(F.relu(self.one(x))))

    class Named(WrittenOut):
        def forward(self, x):
            return torch.neg(self.gelu(x))

        def gelu(self, x):
            return self.one(x)

    for kind in (Own, KeepsResult, Named):
        model = kind().double()
        assert not swap(model, lean="call").changed
        assert_as_stock(model, samples())
    assert not swap(Vocoder(), lean="call", ops={"gelu"}).changed
    assert swap(Vocoder(), lean="call", ops={"leaky_relu"}).changed


class ByIdentity(WrittenOut):
    act = staticmethod(F.gelu)

    def forward(self, x):
        return self.other(F.gelu(x) if self.act is F.gelu else x)


class ByName(WrittenOut):
    def forward(self, x):
        return self.other(F.gelu(x)) if F.gelu.__name__ == "gelu" else x


class Stores(WrittenOut):
    def forward(self, x):
        self.act = gelu
        return self.other(gelu(x))


class PassesTheModule(WrittenOut):
    def forward(self, x, name="silu"):
        return self.other(F.gelu(x)) + getattr(F, name)(x)


class SeesGlobals(WrittenOut):
    def forward(self, x):
        return self.other(F.gelu(x)) + len(globals()) * 0


class WritesGlobals(WrittenOut):
    def forward(self, x):
        global counted
        counted = counted + 1
        return self.other(F.gelu(x))


counted = 0


def count():
    global counted
    counted += 1


class CountsByFunction(WrittenOut):
    def forward(self, x):
        before = counted
        count()
        return self.other(F.gelu(self.one(x))) * (counted - before)


def test_names_are_those_of_the_module_at_the_time():
    model = CountsByFunction().double()
    assert swap(model, lean="call").changed
    assert_as_stock(model, samples())


class Patched(WrittenOut):
    pass


def test_a_class_that_was_patched_since():
    model = Patched().double()
    swap(model, lean="call")
    unswap(model)
    Patched.forward = lambda self, x: 3 * self.other(F.gelu(self.one(x)))
    swap(model, lean="call")
    assert_as_stock(model, samples())


class Compiles(WrittenOut):
    def forward(self, x):
        return self.other(torch.compile(lambda x: F.gelu(x), backend="eager", fullgraph=True)(x))


class Compiled(WrittenOut):
    @torch.compile(backend="eager", fullgraph=True)
    def forward(self, x):
        return F.gelu(x) * counted


class Counts(WrittenOut):
    def forward(self, x):
        F.calls = 1
        return self.other(F.gelu(x))


@pytest.mark.parametrize(
    "kind",
    [ByIdentity, ByName, Stores, PassesTheModule, SeesGlobals, WritesGlobals, Counts, Compiles, Compiled],
)
def test_a_forward_that_does_more_than_call_them_stays(kind):
    model = kind().double()
    assert not swap(model, lean="call").changed
    assert_as_stock(model, samples())


@pytest.mark.parametrize(
    "source",
    [
        "def gelu(x): return x * 0.5 * (1 + torch.erf(x / math.sqrt(2.0))) * (x.abs() < 50)",
        "def gelu(x): return x * 0.5 * (1 + torch.erf(x / math.sqrt(2.0))) if x.dim() < 3 else x",
        "def gelu(x):\n  calls.append(1)\n  return x * 0.5 * (1 + torch.erf(x / math.sqrt(2.0)))",
        "def gelu(x):\n  global n\n  n = 1\n  return x * 0.5 * (1 + torch.erf(x / math.sqrt(2.0)))",
        "def gelu(x): return torch.nn.functional.gelu(x) if not flag else x",
        "def gelu(x): return torch.nn.functional.gelu(x.contiguous())",
        "def outer():\n  half = 0.5\n  def gelu(x): return x * half * (1 + torch.erf(x / math.sqrt(2.0)))\n"
        "  return gelu\ngelu = outer()",
    ],
)
def test_functions_that_may_do_more_are_not_taken(source, monkeypatch):
    known = {"torch": torch, "math": math, "calls": [], "flag": False}
    exec(source, known)
    monkeypatch.setitem(globals(), "gelu", known["gelu"])
    assert not swap(WrittenOut(), lean="call").changed


def scale(x):
    return x


def test_the_module_around_it_is_live(monkeypatch):
    class Scaled(WrittenOut):
        def forward(self, x):
            return scale(self.other(F.gelu(self.one(x))))

    model, x = Scaled().double(), samples()
    swap(model, lean="call")
    one = model(x)
    monkeypatch.setitem(globals(), "scale", lambda x: 2 * x)
    torch.testing.assert_close(model(x), 2 * one)


def test_classes_inside_and_readers_of_frames_find_the_module():
    class Inside(WrittenOut):
        def forward(self, x):
            class Kept:
                base = math.pi

            found = sys._getframe().f_globals.get("counted", 7)
            return self.other(F.gelu(x)) * Kept.base + found

    model = Inside().double()
    stock, x = copy.deepcopy(model), samples()
    assert swap(model, lean="call").changed
    torch.testing.assert_close(model(x), stock(x))


def swish(x):
    return F.silu(x, inplace=True)


def test_a_function_that_writes_into_its_argument_stays():
    class Written(WrittenOut):
        def forward(self, x):
            x = x * 2
            swish(x)
            return self.other(x)

    model = Written().double()
    assert not swap(model, lean="call").changed
    assert_as_stock(model, samples())


SCALE = 1.0


def quick_gelu(x):
    return x * torch.sigmoid(SCALE * 1.702 * x)


def test_numbers_of_a_module_are_looked_at_again(monkeypatch):
    class Scaled(WrittenOut):
        def forward(self, x):
            return self.other(quick_gelu(x))

    model = Scaled().double()
    stock, x = copy.deepcopy(model), samples()
    assert swap(model, lean="call").changed
    torch.testing.assert_close(model(x), stock(x))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    torch.testing.assert_close(model(x), stock(x))


def test_what_is_patched_later_is_called(monkeypatch):
    model, x = Gelus().double(), samples()
    swap(model, lean="call")
    monkeypatch.setattr(F, "gelu", lambda x, **kwargs: x)
    torch.testing.assert_close(model(x), model.other(model.one(x)))


def test_what_is_patched_during_a_forward_is_called():
    class Patching(Gelus):
        def forward(self, x):
            with mock.patch.object(F, "gelu", lambda x, **kwargs: 3 * x):
                return self.other(F.gelu(self.one(x)))

    model, x = Patching().double(), samples()
    swap(model, lean="call")
    for _ in range(2):
        torch.testing.assert_close(model(x), model.other(3 * model.one(x)))


def test_a_forward_that_is_written_anew():
    class Fresh(Gelus):
        def forward(self, x, times=1.0, *, more=0.0):
            return self.other(F.gelu(self.one(x))) * times + more

    def changed(self, x, times=1.0, *, more=0.0):
        return self.other(F.gelu(self.one(x))) * times + more + 100

    model, x = Fresh().double(), samples()
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    before, forward = model(x), Fresh.forward
    forward.__defaults__ = (2.0,)
    torch.testing.assert_close(model(x), 2 * before)
    forward.__kwdefaults__ = {"more": 5.0}
    torch.testing.assert_close(model(x), 2 * before + 5)
    forward.__code__ = changed.__code__
    torch.testing.assert_close(model(x), stock(x))
    torch.testing.assert_close(model(x), 2 * before + 105)


def passed_on(function):
    @functools.wraps(function)
    def called(*args, **kwargs):
        return function(*args, **kwargs)

    return called


def test_what_a_decorated_forward_and_a_class_inside_read_is_live(monkeypatch):
    class Decorated(Gelus):
        @passed_on
        def forward(self, x, times=1.0):
            return self.other(F.gelu(self.one(x))) * times

    class Inside(Gelus):
        def forward(self, x):
            class Kept:
                scale = SCALE

            return self.other(F.gelu(self.one(x))) * Kept.scale

    x = samples()
    models = Decorated().double(), Inside().double()
    for model in models:
        assert swap(model, lean="call").changed
    before = [model(x) for model in models]
    Decorated.forward.__wrapped__.__defaults__ = (2.0,)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    for model, out in zip(models, before, strict=True):
        torch.testing.assert_close(model(x), 2 * out)
    forwards = [lambda self, x, times=times: times * x for times in (3, 4)]
    (cell,) = Decorated.forward.__closure__
    for forward, times in zip(forwards, (3, 4), strict=True):
        cell.cell_contents = Decorated.forward.__wrapped__ = forward
        assert torch.equal(models[0](x), times * x)


SHIFT: Any = None


def test_tensors_that_a_module_held_are_not_kept(monkeypatch):
    class Shifted(Gelus):
        def forward(self, x):
            return self.other(F.gelu(self.one(x))) + SHIFT

    shift = torch.ones((), dtype=torch.double)
    monkeypatch.setitem(globals(), "SHIFT", shift)
    model, gone = Shifted().double(), weakref.ref(shift)
    swap(model, lean="call")
    model(samples())
    monkeypatch.setitem(globals(), "SHIFT", 0.0)
    monkeypatch.undo()
    del shift, model
    gc.collect()
    assert gone() is None


LIBRARY = """
import torch.nn.functional as F
from torch import nn

class Imports(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x):
        from .other import scale

        x, y = (self.one(each) for each in (x, 2 * x))
        return [scale(F.gelu(each)).sum() for each in (x, y) if isinstance(each, object)][len("x")]
"""


def test_what_it_imports_and_builtins(tmp_path, monkeypatch):
    library = tmp_path / "some_library"
    library.mkdir()
    for name, text in {
        "__init__": "",
        "model": LIBRARY,
        "other": "def scale(x):\n    return 3 * x\n",
    }.items():
        (library / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("some_library.model").Imports().double()
    assert swap(model, lean="call").changed
    assert_as_stock(model, torch.randn(3, 4, dtype=torch.float64, requires_grad=True))


def test_warnings_are_shown_once():
    class Warns(WrittenOut):
        def forward(self, x):
            warnings.warn("once", stacklevel=1)
            return self.other(F.gelu(x))

    model = Warns().double()
    assert swap(model, lean="call").changed
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            model(samples())
    assert len(seen) == 1


def test_bad_arguments_are_stocks():
    model = Vocoder().double()
    swap(model, lean="call")
    with pytest.raises(TypeError):
        model(samples(), slope="much")
    with pytest.raises(TypeError, match="int"):
        model(3)
    with pytest.raises(TypeError, match="Parameter"):
        model(samples(), slope=nn.Parameter(torch.tensor(0.1)))
    assert model(samples(), slope=-0.5).requires_grad


class Unusual(WrittenOut):
    """What stock allows and memkit's functions refuse."""

    def forward(self, x):
        x = F.softplus(input=x, beta=0.0) * 0 + F.hardtanh(x, -1.0, math.nan)
        return F.leaky_relu(input=x, negative_slope=0.5)


class Twice(WrittenOut):
    def forward(self, x):
        return gelu(x, x)


class OtherName(WrittenOut):
    def forward(self, x):
        return gelu(input=x)


class GivenTwice(WrittenOut):
    def forward(self, x):
        return F.elu(x, 1.0, alpha=2.0)


def test_what_stock_takes_is_taken():
    model, x = Unusual().double(), samples()
    stock = copy.deepcopy(model)
    assert swap(model, lean="call").changed
    torch.testing.assert_close(model(x), stock(x), equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Twice, "positional"), (OtherName, "unexpected keyword"), (GivenTwice, "multiple values")],
)
def test_what_stock_refuses_is_refused(kind, text):
    model = kind()
    assert swap(model, lean="call").changed
    with pytest.raises(TypeError, match=text):
        model(samples())


def test_it_is_called_as_stock_is():
    model = Vocoder()
    signature = inspect.signature(model.forward)
    swap(model, lean="call")
    assert inspect.signature(model.forward) == signature
    traced = torch.fx.symbolic_trace(WrittenOut())
    swapped = WrittenOut()
    swap(swapped, lean="call")
    assert [n.op for n in torch.fx.symbolic_trace(swapped).graph.nodes] == [n.op for n in traced.graph.nodes]
    exported = torch.export.export(
        swapped, (), {"x": samples(torch.float32)}, dynamic_shapes={"x": {0: torch.export.Dim("n")}}
    )
    x = torch.randn(5, 4, 9)
    torch.testing.assert_close(exported.module()(x=x), swapped(x))


def test_survives_copies_and_goes_back():
    model, x = Vocoder().double(), samples()
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, Vocoder)
        assert_as_stock(other, x)
    unswap(model)
    assert type(model) is Vocoder
    for ours, theirs in zip(step(model, x), step(stock, x), strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(model.state_dict(), stock.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    model, x = Gelus(), samples(torch.float32)
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    with torch.autocast("cpu", dtype):
        ours, theirs = model(x), stock(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)
    (one,), (other,) = (torch.autograd.grad(y.float().square().sum(), x) for y in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


def test_compiled_and_traced():
    model, x = Vocoder(), samples(torch.float32)
    expected = model(x)
    swap(model, lean="call")
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    torch.testing.assert_close(torch.jit.trace(model, (x,))(x), expected)
    (row,) = torch.func.vmap(model)(x[None])
    torch.testing.assert_close(row, expected)


def test_a_lambda_behind_another_statement_of_its_line_is_left():
    if True:

        class Doubles(nn.Module):
            pass

        factor = 2; Doubles.forward = lambda self, x: F.gelu(x) * factor  # fmt: skip  # noqa: E702

    model = nn.Sequential(nn.Linear(8, 8), Doubles())
    x = torch.randn(4, 8)
    stock = model(x)
    swap(model, sample=x)
    assert torch.equal(model(x), stock)
