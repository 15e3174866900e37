"""What swap finds out of classes and functions does not outlive them."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from memkit import lean as in_lean
from memkit import swap, unswap
from memkit.swap.library import twin
from memkit.swap.library.remembered import Remembered

MODES = [(False, False), (False, True), (True, True), ("call", False), ("call", True)]


def made():
    """As a notebook's cell makes one, which is run again."""
    weights = torch.ones(64)

    class GELU(nn.Module):
        def forward(self, x):
            return F.gelu(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)
            self.act = GELU()

        def forward(self, x):
            inner = F.gelu(self.act(self.up(self.norm(x)))) * weights
            return x + self.down(F.dropout(inner, 0.1, self.training))

    return Net(), weakref.ref(weights)


@pytest.mark.parametrize(("lean", "sampled"), MODES)
def test_classes_made_in_a_function_die(lean, sampled):
    def trained():
        model, weights = made()
        x = torch.randn(4, 8)
        swap(model, sample=x if sampled else None, lean=lean)
        for _ in range(2):
            with in_lean() if lean is True else torch.enable_grad():
                loss = model(x).sum()
            loss.backward()
        return [weights, *(weakref.ref(kind) for kind in {type(model), type(model.act)})]

    found = trained()
    gc.collect()
    assert [each() for each in found] == [None] * 3


@pytest.mark.parametrize("lean", [False, "call"])
def test_classes_of_parametrized_layers_die(lean):
    def kind():
        model = nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.GELU(), nn.Linear(8, 8))
        swap(model, sample=torch.randn(4, 8), lean=lean)
        return weakref.ref(type(model[0]))

    found = kind()
    gc.collect()
    assert found() is None


def test_a_class_has_one_twin():
    """Else what was compiled of one would be compiled anew."""
    model, _ = made()
    swap(model)
    stock, twin = type(model)._stock, type(model)
    found = weakref.ref(twin)
    del twin
    unswap(model)
    gc.collect()
    other = stock()
    swap(other)
    swap(model)
    assert type(model) is type(other) is found()
    derived = type("Derived", (stock,), {})
    further = derived()
    swap(further)
    assert issubclass(type(further), derived)


def test_a_class_that_is_pickled_by_value_has_none():
    model, _ = made()
    swap(model)
    twins = vars(type(model)._stock)["_memkit_twins"]
    assert twins
    assert type(pickle.loads(pickle.dumps(twins))) is dict  # which needs no memkit
    assert not pickle.loads(pickle.dumps(twins))


def test_remembered():
    class Layer:
        def call(self):
            pass

    class Slots:
        __slots__ = ()

    remembered, function = Remembered(), lambda: None
    layers = [Layer(), Layer()]
    keys = [(Layer, function), (Layer, None), (function,), *((layer.call,) for layer in layers)]
    for at, key in enumerate(keys):
        remembered.of(*key)["at"] = at
    assert [remembered.of(*key) for key in keys] == [{"at": at} for at in range(len(keys))]
    assert remembered.of(layers[0].call) == {"at": 3}
    slots = Slots()
    remembered.of(slots)["at"] = 0
    assert remembered.of(slots) == {}


def test_threads_get_one_class(monkeypatch):
    class Norm(nn.LayerNorm):
        pass

    together, made_anew = threading.Barrier(2), twin._new

    def slow(kind, stock):
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # the other thread, if it may come as far
        return made_anew(kind, stock)

    monkeypatch.setattr(twin, "_new", slow)
    kind = next(iter(twin.MIXINS))
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: twin.twin_of(kind, Norm), range(2))
    assert one is other
