"""swap with a sample: what reads an activation's input on a path that the sample does not take, or past the dispatcher."""

import copy
import functools
import io
import pickle
import sys
import types
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from swap_cases import Block, D, assert_as_stock, batch, only, step
from torch import nn

from memkit import swap
from memkit.swap import results
from memkit.swap.later import Flow, reads_parameter, variables

pytestmark = pytest.mark.usefixtures("repeatable")


def compared(model, x):
    """The step of a swapped model and of its stock copy, both on another path than the sample's."""
    stock = copy.deepcopy(model)
    report = swap(model, sample=x)
    for each in (model, stock):
        each.other = True
    torch.testing.assert_close(step(model, x), step(stock, x), rtol=1e-7, atol=1e-8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x), rtol=1e-7, atol=1e-8)
    return report


# -- paths that the sample does not take -------------------------------------------------------------------------------


def penalty(self, x):
    h = self.first(x)
    y = self.second(self.act(h))
    if self.other:
        y = y + h.square().mean()
    return y


def in_the_next_round(self, x):
    h, y = self.first(x), 0
    for i in range(2 if self.other else 1):
        y = y + h if i else self.second(self.act(h))
    return y


def conditional_expression(self, x):
    h = self.first(x)
    return self.second(self.act(h) + h if self.other else self.act(h))


def with_an_old_name(self, x):
    h = old = self.first(x)
    h = self.act(h)
    return self.second(h + old if self.other else h)


def in_a_tuple(self, x):
    h = (self.first(x),)
    y = self.second(self.act(h[0]))
    return y + h[0] if self.other else y


def in_an_attribute(self, x):
    self.kept = self.first(x)
    y = self.second(self.act(self.kept))
    y = y + self.kept if self.other else y
    self.kept = None
    return y


def of_a_function_within(self, x):
    h = self.first(x)

    def more():
        return h

    y = self.second(self.act(h))
    return y + more() if self.other else y


def of_the_caller(self, x):
    def rest(h):
        return self.second(self.act(h))

    h = self.first(x)
    y = rest(h)
    return y + h if self.other else y


def of_the_callers_caller(self, x):
    def rest(held):
        return self.second(self.tail(held))

    h = self.first(x)
    y = rest(h)
    return y + h if self.other else y


def of_a_caller_by_a_list(self, x):
    def rest(held):
        return self.second(self.act(held[0]))

    held = [self.first(x)]
    y = rest(held)
    return y + held[0] if self.other else y


def of_all_arguments(self, x):
    def rest(*held):
        y = self.second(self.act(*held))
        return y + held[0] if self.other else y

    return rest(self.first(x))


def of_a_decorated_function(self, x):
    def decorated(*held, **named):
        y = rest(*held, **named)
        return y + held[0] if self.other else y

    def rest(h):
        return self.second(self.act(h))

    return decorated(self.first(x))


def by_locals(self, x):
    h = self.first(x)
    y = self.second(self.act(h))
    return y + locals()["h"] if self.other else y


def after_an_error(self, x):
    h = self.first(x)
    try:
        y = self.second(self.act(h))
        if self.other:
            raise MemoryError
    except MemoryError:
        y = self.second(h)
    return y


def on_another_line(self, x):
    h = self.first(x)
    if self.other:
        y = self.act(h)
        return self.second(y) + h
    return self.second(self.act(h))


TAKEN_LATER = [
    penalty,
    in_the_next_round,
    conditional_expression,
    with_an_old_name,
    in_a_tuple,
    in_an_attribute,
    of_a_function_within,
    of_the_caller,
    of_the_callers_caller,
    of_a_caller_by_a_list,
    of_all_arguments,
    of_a_decorated_function,
    by_locals,
    after_an_error,
]


def build(run):
    model = Block(run)
    model.other, model.tail = False, nn.Sequential(model.act)
    return model


@pytest.mark.parametrize("run", TAKEN_LATER)
def test_a_path_that_the_sample_does_not_take(run):
    row = only(compared(build(run), batch()))
    assert row.after == "output"
    assert "not in place: its input" in row.reason


def test_the_reason_names_variable_and_line():
    row = only(swap(build(penalty), sample=batch()))
    line = penalty.__code__.co_firstlineno + 4
    assert f"its input, `h`, may be read later in penalty (line {line})" in row.reason


def called_on_another_line(self, x):
    def rest(h):
        return self.second(self.act(h))

    again = rest
    h = self.first(x)
    if self.other:
        y = again(h)
        return y + h
    return rest(h)


def called_in_another_way(self, x):
    if self.other:
        h = (self.first(x),)
        y = self.act(*h)
        return self.second(y) + h[0]
    return self.second(self.act(self.first(x)))


@pytest.mark.parametrize("run", [on_another_line, called_on_another_line, called_in_another_way])
def test_another_line_than_the_sample_runs(run):
    """There as many references as on the sample do harm."""
    assert only(compared(build(run), batch())).after == "in place"


# -- what is read past the dispatcher ----------------------------------------------------------------------------------


def saved_and_loaded(h):
    file = io.BytesIO()
    torch.save(h, file)
    file.seek(0)
    return torch.load(file).std()


READERS = {
    "numpy": lambda h: h.numpy().std(),
    "a function of NumPy": lambda h: np.asarray(np.abs(np.asarray(h))).mean(),
    "dlpack": lambda h: np.from_dlpack(h).std(),
    "tolist": lambda h: sum(h[0].tolist()),
    "repr": lambda h: float(repr(h[0, 0]).split("(")[1].split(",")[0]),
    "pickle": lambda h: pickle.loads(pickle.dumps(h)).std(),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("act", [nn.SiLU, nn.ELU])
def test_a_reader_past_the_dispatcher(reader, act):
    def run(self, x):
        h = self.first(x)
        y = self.second(self.act(h))
        self.read = float(READERS[reader](h.detach()))
        return y

    model = Block(run, act())
    stock = copy.deepcopy(model)
    row = only(swap(model, sample=batch()))
    assert row.after != "in place"
    x = batch()
    model(x)
    stock(x)
    assert model.read == stock.read


def test_an_argument_that_is_read_past_the_dispatcher():
    """It lies on the interpreter's stack, in no variable that is read later."""

    def add(numbers, y):
        return y + numbers.detach().numpy().std()

    def run(self, x):
        h = self.first(x)
        return self.second(add(h, self.act(h)))

    model = Block(run)
    assert "held by more than variables" in only(swap(model, sample=batch())).reason
    assert_as_stock(model, batch())


def test_a_hook_past_the_dispatcher():
    model = Block(lambda self, x: self.second(self.act(self.first(x))))
    stock, read = copy.deepcopy(model), []
    for each in (model, stock):
        each.act.register_forward_hook(
            lambda module, given, out: read.append(given[0].detach().numpy().std())
        )
    assert "a forward hook may read its input" in only(swap(model, sample=batch())).reason
    x = batch()
    read.clear()
    model(x)
    stock(x)
    assert read[0] == read[1]


@pytest.mark.parametrize("hook", [lambda module, given, out: None, lambda *given: None])
def test_a_hook_that_reads_no_argument(hook):
    model = Block(lambda self, x: self.second(self.act(self.first(x))))
    model.act.register_forward_hook(hook)
    assert only(swap(model, sample=batch())).after == "in place"


def test_a_hook_that_comes_later_and_is_given_the_same():
    """Of a module around the activation."""
    model = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.SiLU(), nn.Linear(D, D))).double()
    assert only(swap(model, sample=batch())).after == "in place"
    kept = []
    model[1].register_forward_hook(lambda module, given, out: kept.append(given[0].detach().numpy().copy()))
    x = batch()
    model(x)
    torch.testing.assert_close(torch.from_numpy(kept[0]), model[0](x).detach())


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda module, given, out: out, False),
        (lambda module, given, out: given, True),
        (lambda *given: None, False),
        (lambda module, *given: given[1], True),
        (lambda module, given, out: lambda: given, True),
        (print, True),
    ],
)
def test_what_reads_a_parameter(function, reads):
    assert reads_parameter(function, 1) == reads


# -- what stays in place -----------------------------------------------------------------------------------------------


def rebound(self, x):
    h = self.first(x)
    h = self.act(h)
    return self.second(h) + h if self.other else self.second(h)


def in_a_loop(self, x):
    h = x
    for _ in range(2):
        h = self.first(h)
        h = self.act(h)
    return self.second(h)


def within_a_context(self, x):
    h = self.first(x)
    with nullcontext():
        h = self.second(self.act(h))
    return h + h


def metadata(self, x):
    h = self.first(x)
    y = self.second(self.act(h))
    if h is not None and h.dtype == y.dtype and self.other:
        y = y + h.new_zeros(h.size(0), 1)
    return y.view(h.shape)


def deleted(self, x):
    h = self.first(x)
    y = self.act(h)
    del h
    return self.second(y)


def walrus(self, x):
    h = self.first(x)
    return self.second(h) if (h := self.act(h)) is not None else h


def given_by_a_caller(self, x):
    return self.second(self.tail(self.tail[0](self.first(x))))


def given_by_callers(self, x):
    h = self.first(x)
    h = self.tail(h)
    return self.second(h)


@pytest.mark.parametrize(
    "run",
    [rebound, in_a_loop, within_a_context, metadata, deleted, walrus, given_by_a_caller, given_by_callers],
)
def test_in_place(run, calls):
    model = build(run)
    if run is given_by_a_caller:
        model.tail = nn.Sequential(nn.Identity(), nn.Sequential(nn.Sequential(model.act)))
    row = only(compared(model, batch()))
    assert row.after == "in place", row
    calls.clear()
    model.other = False
    assert_as_stock(model, batch())
    assert any(overwritten for _, overwritten in calls)


# -- objects that a model returns --------------------------------------------------------------------------------------


class Plain:
    def __init__(self, y, hidden):
        self.y, self.hidden = y, hidden


class Slots:
    __slots__ = ("hidden", "y")

    def __init__(self, y, hidden):
        self.y, self.hidden = y, hidden


class Members(list):
    """With an attribute that PyTorch's trees do not look at."""


def members(y, hidden):
    made = Members([y])
    made.hidden = hidden
    return made


def attribute(y, hidden):
    y.hidden = hidden
    return y


RESULTS = {
    "namespace": (lambda y, h: types.SimpleNamespace(y=y, hidden=h), lambda out: (out.y, out.hidden)),
    "object": (Plain, lambda out: (out.y, out.hidden)),
    "slots": (Slots, lambda out: (out.y, out.hidden)),
    "objects": (
        lambda y, h: Plain([Slots(y, {"h": h})], None),
        lambda out: (out.y[0].y, out.y[0].hidden["h"]),
    ),
    "generator": (lambda y, h: (each for each in (y, h)), tuple),
    "closure": (lambda y, h: lambda: (y, h), lambda out: out()),
    "default": (lambda y, h: lambda held=(y, h): held, lambda out: out()),
    "partial": (lambda y, h: functools.partial(lambda a, b: (a, b), y, h), lambda out: out()),
    "method": (lambda y, h: Plain(y, h).__init__, lambda out: (out.__self__.y, out.__self__.hidden)),
    "members": (members, lambda out: (out[0], out.hidden)),
    "attribute": (attribute, lambda out: (out, out.hidden)),
}


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("kind", RESULTS)
def test_an_object_is_looked_through(kind, lean):
    make, take = RESULTS[kind]

    def run(self, x):
        return make(*hidden_too(self, x))

    def hidden_too(self, x):
        h = self.first(x)
        return self.second(self.act(h)), h

    model = Block(run)
    stock = copy.deepcopy(model)
    report = swap(model, sample=batch(), lean=lean)
    assert lean or only(report).after == "output", report
    assert "no gradients were compared" not in report.note
    x, kept = batch(), []
    for each in (model, stock):
        y, hidden = take(each(x))
        (y.square().sum() + hidden.square().sum()).backward()
        kept.append([y.detach(), hidden.detach(), each.first.weight.grad])
    torch.testing.assert_close(*kept, rtol=1e-7, atol=1e-8)


def test_of_what_cannot_be_looked_into_nothing_is_overwritten():
    def run(self, x):
        h = self.first(x).detach()
        memory, y = h.untyped_storage(), self.second(self.act(h.requires_grad_()))
        del h
        return y, memory

    assert "UntypedStorage" in only(swap(Block(run), sample=batch())).reason


def test_so_many_objects_are_looked_at(monkeypatch):
    monkeypatch.setattr(results, "LOOKED_AT", 100)
    found = []
    chain = None
    for _ in range(90):
        chain = [chain]
    assert results.look_through([chain, torch.ones(2)], found) == ""
    assert len(found) == 1
    assert results.look_through([[chain] for _ in range(20)], []) == "list"


@pytest.mark.parametrize(
    "held", [nn.Linear(2, 2), nn, sys.modules, test_so_many_objects_are_looked_at, Plain]
)
def test_what_is_everybodys_is_not_a_results(held):
    found = []
    held = {"memkit": sys.modules["memkit"]} if held is sys.modules else held
    assert results.look_through(Plain(held, vars(torch)), found) == ""
    assert not found


# -- the flow of a function --------------------------------------------------------------------------------------------


def call(value):
    """Where the functions below are looked at."""
    frame = sys._getframe(1)
    held = [name for name, each in variables(frame).items() if each is value]
    flow = Flow(frame.f_code)
    lines = {name: flow.later(name, frame.f_lasti, frame.f_lineno) for name in held}
    FOUND.append({name: line and line - frame.f_code.co_firstlineno for name, line in lines.items()})
    return object()


FOUND = []


def straight(h):
    return call(h)


def stored(h):
    h = call(h)
    return h, h


def branch(h, other=False):
    y = call(h)
    if other:
        y = h
    return y


def pair(h, other=False):
    y = z = call(h)
    return (z, h) if other else y


def loop(h):
    for i in range(1):
        if i:
            print(h)
        call(h)


def loop_that_stores(h):
    while h is not None:
        h = call(h)
        break
    return h


def walrus_in_a_call(h):
    return isinstance(h := call(h), str) and h


def context(h):
    with nullcontext():
        h = str(call(h))
    return h, h


def context_that_reads(h):
    with nullcontext():
        call(h)
    return h


def finally_(h):
    try:
        h = str(call(h))
    finally:
        FOUND.sort(key=len)
    return h


def handler(h):
    try:
        y = str(call(h))
    except ValueError:
        y = h
    return y


def comprehension(h):
    h = call(h)
    return [h is None for h in (h,)]


def comprehension_that_reads(h):
    y = call(h)
    return y, [h for _ in range(0)]


def deleted_(h):
    y = call(h)
    del h
    return y


def captured(h):
    def within():
        return h

    y = call(h)
    return within() if y is None else y


def captured_afterwards(h):
    h = call(h)
    return lambda: h


def shape(h):
    y = call(h)
    return y if h is None else (y, h.shape, h.ndim)


def one_line(h, other=False):
    return (call(h), h) if other else call(h)


def one_line_that_reads_nothing(h, other=False):
    return (call(h), other) if other else call(h)


def generator(h):
    yield call(h)
    yield h


def match(h, other=0):
    y = call(h)
    match other:
        case 1:
            return h
    return y


def raised(h, other=False):
    y = call(h)
    if other:
        raise ValueError(h)
    return y


class Shape:
    shape, ndim = (), 0


FLOWS = [
    (straight, None),
    (stored, None),
    (branch, 3),
    (pair, 2),
    (loop, 3),
    (loop_that_stores, None),
    (walrus_in_a_call, None),
    (context, None),
    (context_that_reads, 3),
    (finally_, None),
    (handler, 4),
    (comprehension, None),
    (comprehension_that_reads, 2),
    (deleted_, None),
    (captured, 5),
    (captured_afterwards, None),
    (shape, None),
    (one_line, 1),
    (one_line_that_reads_nothing, None),
    (generator, 2),
    (match, 4),
    (raised, 3),
]


@pytest.mark.parametrize(("function", "line"), FLOWS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_flow(function, line):
    FOUND.clear()
    result = function(Shape())
    if function is generator:
        list(result)
    (found,) = FOUND
    assert found["h"] == line
