"""swap: whatever a module of a known name does, swap() leaves it as it is and raises nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit import swap
from memkit.swap.library.activations import library_activation

WIDTH = 16


def init_plain(self: Any) -> None:
    nn.Module.__init__(self)


def init_norm(self: Any) -> None:
    nn.Module.__init__(self)
    self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6


def init_layers(self: Any) -> None:
    nn.Module.__init__(self)
    self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)


def init_star(self: Any) -> None:
    nn.Module.__init__(self)
    self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
    self.relu = nn.ReLU()


def fails(self: Any, x: Tensor) -> Tensor:
    raise RuntimeError("no")


FORWARDS: dict[str, Callable[..., Any]] = {
    "another dtype": lambda self, x: nn.functional.silu(x.float()),
    "half precision": lambda self, x: nn.functional.silu(x).bfloat16(),
    "another shape": lambda self, x: x.mean(-1),
    "nothing of it": lambda self, x: x[:0],
    "a view": lambda self, x: x.view(-1),
    "sparse": lambda self, x: x.flatten(0, -2).to_sparse(),
    "a tuple": lambda self, x: (x, x),
    "nothing": lambda self, x: None,
    "an array": lambda self, x: x.detach().numpy(),
    "a subclass": lambda self, x: x.as_subclass(type("Other", (Tensor,), {})),
    "two arguments": lambda self, x, mask: x * mask,
    "an empty tuple": lambda self, x: torch.sigmoid(x) + x.new_zeros(()),
    "an error": fails,
}
INITS = {
    "Swish": init_plain,
    "Tanh": init_plain,
    "RMSNorm": init_norm,
    "Mlp": init_layers,
    "StarReLU": init_star,
}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("does", FORWARDS)
def test_what_a_known_name_stands_for_elsewhere(does: str, name: str, lean: bool) -> None:
    init = INITS[name]
    cls = type(name, (nn.Module,), {"__init__": lambda self: init(self), "forward": FORWARDS[does]})
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.ModuleList([cls()]))
    swap(model, lean=lean)
    assert type(model[2][0]) is cls


class Odd(nn.Module):
    """Says of its weight what no module does."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    @property
    def weight(self) -> Tensor:
        raise RuntimeError("not yet")

    def forward(self, x: Tensor) -> Tensor:
        return x


Odd.__name__ = "RMSNorm"


def test_a_class_that_raises_where_it_is_asked() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Odd())
    swap(model)
    assert type(model[1]) is Odd


class Widening(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x.double())


Widening.__name__ = "Swish"


def test_an_activation_that_gives_another_dtype_is_none() -> None:
    assert library_activation(Widening()) is None
