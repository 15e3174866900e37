"""swap: options that are None, words, functions and a class's numbers that a forward reads are followed when they change."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit import swap

WIDTH = 16
HOWS: list[dict[str, Any]] = [{}, {"sample": True}]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)
        self.init()

    def init(self) -> None:
        pass

    def hidden(self, x: Tensor) -> Tensor:
        return self.act(self.fc1(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x))


class Adapted(FeedForward):
    def init(self) -> None:
        self.adapter: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found = self.fc2(self.hidden(x))
        return found if self.adapter is None else found + self.adapter(x)

    def later(self) -> None:
        torch.manual_seed(9)
        self.adapter = nn.Linear(WIDTH, WIDTH)


class Registered(Adapted):
    def init(self) -> None:
        self.register_module("adapter", None)


class Masked(FeedForward):
    def init(self) -> None:
        self.mask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return self.fc2(hidden if self.mask is None else torch.where(self.mask, hidden, 0.0))

    def later(self) -> None:
        self.mask = torch.arange(32) % 2 == 0


class Pruned(FeedForward):
    def init(self) -> None:
        self.register_buffer("keep", None)

    def forward(self, x: Tensor) -> Tensor:
        keep: Any = self.keep
        hidden = self.hidden(x)
        if keep is None:
            return self.fc2(hidden)
        return nn.functional.linear(hidden[..., keep.long()], self.fc2.weight[:, keep], self.fc2.bias)

    def later(self) -> None:
        self.keep = torch.arange(0, 32, 2)


class Gained(FeedForward):
    def init(self) -> None:
        self.register_parameter("gain", None)

    def forward(self, x: Tensor) -> Tensor:
        gain: Any = self.gain
        found = self.fc2(self.hidden(x))
        return found if gain is None else found * gain

    def later(self) -> None:
        self.gain = nn.Parameter(torch.full((WIDTH,), 3.0))


class Worded(FeedForward):
    def init(self) -> None:
        self.mode = "plain"

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if self.mode == "double":
            hidden = hidden * 2
        elif self.mode != "plain":
            raise ValueError(self.mode)
        return self.fc2(hidden)

    def later(self) -> None:
        self.mode = "double"


class LookedUp(Worded):
    factors = {"plain": 1.0, "double": 2.0}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x)) * self.factors[self.mode]


class Sized(FeedForward):
    def init(self) -> None:
        self.width = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x)).view(*x.shape[:-1], self.width)

    def later(self) -> None:
        self.width = -1  # what is left


def as_it_is(x: Tensor) -> Tensor:
    return x


def doubled(x: Tensor) -> Tensor:
    return 2 * x


class Behind(FeedForward):
    def init(self) -> None:
        self.behind: Any = as_it_is

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.fc2(self.hidden(x)))

    def later(self) -> None:
        self.behind = doubled


class Ordered(FeedForward):
    def init(self) -> None:
        self.register_buffer("order", torch.arange(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x)[..., self.order])

    def later(self) -> None:
        self.order = torch.arange(31, -1, -1)


class OfItsClass(FeedForward):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x)) * type(self).scale

    def later(self) -> None:
        cls: Any = next(base for base in type(self).__mro__ if "scale" in vars(base))
        cls.scale = 2.0

    def before(self) -> None:
        cls: Any = next(base for base in type(self).__mro__ if "scale" in vars(base))
        cls.scale = 1.0


class ByTheClassName(OfItsClass):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x)) * ByTheClassName.scale


class InAStaticMethod(OfItsClass):
    scale = 1.0

    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        return x * InAStaticMethod.scale

    def forward(self, x: Tensor) -> Tensor:
        return InAStaticMethod.scaled(self.fc2(self.hidden(x)))


class InAClassMethod(OfItsClass):
    scale = 1.0

    @classmethod
    def scaled(cls, x: Tensor) -> Tensor:
        return x * cls.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.fc2(self.hidden(x)))


class Shadowed(OfItsClass):
    """Its own number is not the one that it reads."""

    scale = 1.0

    def init(self) -> None:
        self.scale = 5.0


class Asked(FeedForward):
    def init(self) -> None:
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x)) * getattr(self, "scale")  # noqa: B009

    def later(self) -> None:
        self.scale = 2.0


class AskedInVain(Asked):
    def init(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x)) * getattr(self, "scale", 1.0)


class AskedBySomeName(Asked):
    def forward(self, x: Tensor) -> Tensor:
        found = self.fc2(self.hidden(x))
        for name in ("sca", "shi"):
            found = found * getattr(self, name + "le", 1.0)
        return found


class Swish(nn.Module):
    beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(type(self).beta * x)

    def later(self) -> None:
        Swish.beta = 2.0

    def before(self) -> None:
        Swish.beta = 1.0


KINDS: list[type[Any]] = [
    *(Adapted, Registered, Masked, Pruned, Gained, Worded, LookedUp, Sized, Behind, Ordered),
    *(
        OfItsClass,
        ByTheClassName,
        InAStaticMethod,
        InAClassMethod,
        Shadowed,
        Asked,
        AskedInVain,
        AskedBySomeName,
    ),
    Swish,
]
STAYS = {Registered, Ordered, Shadowed, Swish}


def inputs() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def model_of(part: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), part)


def values(model: Any) -> list[Tensor]:
    out = model(inputs())
    slopes = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, list(model.parameters()), slopes)]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_later(kind: type[Any], how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stock: Any = model_of(kind())
    ours: Any = copy.deepcopy(stock)
    swap(ours, **{**how, **({"sample": inputs()} if "sample" in how else {})})
    assert (type(ours[1]) is kind) == (kind in STAYS)
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    for each in (ours, *copies):
        for a, b in zip(values(each), values(stock), strict=True):
            torch.testing.assert_close(a, b)
    try:
        for model in (stock, ours, *copies):
            model[1].later()
        for each in (ours, *copies):
            for a, b in zip(values(each), values(stock), strict=True):
                torch.testing.assert_close(a, b)
    finally:
        if hasattr(stock[1], "before"):
            stock[1].before()


class ItsOwn(nn.Module):
    """Its twin asks for the activation in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.down_proj, self.act_fn = nn.Linear(32, WIDTH), nn.functional.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_what_the_twin_calls_is_not_watched() -> None:
    stock: Any = model_of(ItsOwn())
    ours: Any = copy.deepcopy(stock)
    swap(ours)
    assert type(ours[1]) is not ItsOwn
    assert "_memkit_reads" not in vars(ours[1])
    stock[1].act_fn = ours[1].act_fn = torch.tanh
    for a, b in zip(values(ours), values(stock), strict=True):
        torch.testing.assert_close(a, b)
