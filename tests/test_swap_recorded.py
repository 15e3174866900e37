"""swap: a layer that records something for others, in whatever way, records it afterwards too."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit import swap
from memkit.swap.library.reads import marks, why_stock_has_to_run

WIDTH = 16
HOWS: list[dict[str, Any]] = [{}, {"sample": True}, {"lean": "call"}]
RECORDED: list[Tensor] = []
BY_NAME: dict[str, Tensor] = {}
LAST: Any = None


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)
        self.init()

    def init(self) -> None:
        pass

    def recorded(self) -> Any:
        raise NotImplementedError

    def note(self, hidden: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(x))
        self.note(hidden)
        return self.fc2(hidden)


class Entry(FeedForward):
    def init(self) -> None:
        self.stats: dict[str, Any] = {"h": None}

    def note(self, hidden: Tensor) -> None:
        self.stats["h"] = hidden

    def recorded(self) -> Any:
        return self.stats["h"]


class OtherName(Entry):
    def note(self, hidden: Tensor) -> None:
        stats = self.stats
        stats["h"] = hidden


class Deep(FeedForward):
    def init(self) -> None:
        self.stats: dict[str, Any] = {"a": {"h": None}}

    def note(self, hidden: Tensor) -> None:
        self.stats["a"].update(h=hidden)

    def recorded(self) -> Any:
        return self.stats["a"]["h"]


class OfAMethod(Entry):
    def held(self) -> dict[str, Any]:
        return self.stats

    def note(self, hidden: Tensor) -> None:
        self.held()["h"] = hidden


class Item(FeedForward):
    def init(self) -> None:
        self.last: Any = [None]

    def note(self, hidden: Tensor) -> None:
        self.last[0] = hidden

    def recorded(self) -> Any:
        return self.last[0]


class InALoop(FeedForward):
    def init(self) -> None:
        self.logs: Any = [[None], [None]]

    def note(self, hidden: Tensor) -> None:
        for log in self.logs:
            log.pop()
            log.append(hidden)

    def recorded(self) -> Any:
        return self.logs[1][-1]


class OfAnObject(FeedForward):
    def init(self) -> None:
        self.context = SimpleNamespace(h=None)

    def note(self, hidden: Tensor) -> None:
        self.context.h = hidden

    def recorded(self) -> Any:
        return self.context.h


class OfALayer(FeedForward):
    def init(self) -> None:
        self.fc1.last = None

    def note(self, hidden: Tensor) -> None:
        self.fc1.last = hidden

    def recorded(self) -> Any:
        return self.fc1.last


class BySetattr(FeedForward):
    last = None

    def note(self, hidden: Tensor) -> None:
        setattr(self, "last", hidden)  # noqa: B010

    def recorded(self) -> Any:
        return self.last


class InItsDictionary(BySetattr):
    def note(self, hidden: Tensor) -> None:
        self.__dict__["last"] = hidden


class OfItsClass(FeedForward):
    last: Any = None

    def note(self, hidden: Tensor) -> None:
        type(self).last = hidden

    def recorded(self) -> Any:
        return type(self).last


class InAGlobal(FeedForward):
    def note(self, hidden: Tensor) -> None:
        RECORDED.append(hidden)

    def recorded(self) -> Any:
        return RECORDED[-1]


def keep(where: dict[str, Tensor], hidden: Tensor) -> None:
    where["h"] = hidden


class ByAFunction(FeedForward):
    def note(self, hidden: Tensor) -> None:
        keep(BY_NAME, hidden)

    def recorded(self) -> Any:
        return BY_NAME["h"]


class AsAGlobal(FeedForward):
    def note(self, hidden: Tensor) -> None:
        global LAST
        LAST = hidden

    def recorded(self) -> Any:
        return LAST


class Recorder:
    def __init__(self) -> None:
        self.h: Any = None

    def note(self, hidden: Tensor) -> None:
        self.h = hidden


class ByAnObject(FeedForward):
    def init(self) -> None:
        self.recorder = Recorder()

    def note(self, hidden: Tensor) -> None:
        self.recorder.note(hidden)

    def recorded(self) -> Any:
        return self.recorder.h


class Called(FeedForward):
    def init(self) -> None:
        self.last: list[Any] = []
        self.record: Callable[[Tensor], None] = self.last.append

    def note(self, hidden: Tensor) -> None:
        self.record(hidden)

    def recorded(self) -> Any:
        return self.last[-1]


class CalledLater(Called):
    def init(self) -> None:
        self.last = []
        self.record = lambda hidden: None

    def later(self) -> None:
        self.record = self.last.append


class CalledIfThere(Called):
    def init(self) -> None:
        self.last = []
        self.record = None  # type: ignore[assignment]

    def note(self, hidden: Tensor) -> None:
        if self.record is not None:
            self.record(hidden)

    def later(self) -> None:
        self.record = self.last.append


class AsData(FeedForward):
    def init(self) -> None:
        self.register_buffer("mean", torch.zeros(32))

    def note(self, hidden: Tensor) -> None:
        self.mean.data = self.mean.data * 0.9 + hidden.detach().mean(0) * 0.1

    def recorded(self) -> Any:
        return self.mean


class OfSomeSizes(AsData):
    """In place, but not of what it is verified with."""

    def note(self, hidden: Tensor) -> None:
        if hidden.shape[0] == 4 and hidden.dim() == 2:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)


class Limited(FeedForward):
    def note(self, hidden: Tensor) -> None:
        with torch.no_grad():
            self.fc2.weight.detach().clamp_(-0.1, 0.1)

    def recorded(self) -> Any:
        return self.fc2.weight


def recording(forward: Any) -> Any:
    @functools.wraps(forward)
    def around(self: Any, x: Tensor) -> Tensor:
        out: Tensor = forward(self, x)
        RECORDED.append(out)
        return out

    return around


class Decorated(FeedForward):
    @recording
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))

    def recorded(self) -> Any:
        return RECORDED[-1]


KINDS: list[type[FeedForward]] = [
    *(
        Entry,
        OtherName,
        Deep,
        OfAMethod,
        Item,
        InALoop,
        OfAnObject,
        OfALayer,
        BySetattr,
        InItsDictionary,
        OfItsClass,
    ),
    *(InAGlobal, AsAGlobal, ByAFunction, ByAnObject, Called, CalledLater, CalledIfThere, AsData),
    *(OfSomeSizes, Limited, Decorated),
]


def model_of(part: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH))


def inputs() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def values(model: Any) -> list[Tensor]:
    """With a loss on what is recorded, as one on hidden features."""
    out = model(inputs())
    recorded = model[1].recorded()
    loss = out.square().sum() + recorded.square().sum()
    parameters = list(model[1].fc1.parameters())
    return [out.detach(), recorded.detach().clone(), *torch.autograd.grad(loss, parameters)]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_is_recorded(kind: type[FeedForward], how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stock = model_of(kind())
    ours = copy.deepcopy(stock)
    swap(ours, **{**how, **({"sample": inputs()} if "sample" in how else {})})
    for model in (stock, ours):
        if hasattr(part := model[1], "later"):
            part.later()
        elif kind is Called:  # a method of the other's list, else
            part.record = part.last.append
    for _ in range(2):
        for a, b in zip(values(ours), values(stock), strict=True):
            torch.testing.assert_close(a, b)


def test_a_report_says_what_is_changed() -> None:
    reasons = [
        row.reason
        for kind in (Entry, OfAnObject, InAGlobal)
        for row in swap(model_of(kind()))
        if row.path == "1"
    ]
    assert reasons == [
        "Entry changes stats in each call",
        "OfAnObject changes context.h in each call",
        "InAGlobal changes RECORDED in each call",
    ]


class Own(FeedForward):
    """Changes what it has made."""

    def init(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.scale, self.seen = 1.0, torch.zeros(())

    def note(self, hidden: Tensor) -> None:
        sizes = {"rows": hidden.shape[0]}
        sizes["columns"] = hidden.shape[-1]
        both = [hidden]
        both.append(hidden * self.scale)
        total = hidden.new_zeros(())
        total[()] = 1.0
        total.add_(self.seen.add(1.0)).mul_(2.0)


def test_what_a_layer_makes_it_may_change() -> None:
    model = model_of(Own())
    (row,) = [row for row in swap(model) if row.path == "1"]
    assert (row.after, row.reason) == ("memkit", "")
    assert not why_stock_has_to_run(Own())


def test_members_are_compared_by_what_they_are() -> None:
    for kind in (Entry, Deep, Item, InALoop, OfAnObject):
        part: Any = kind()
        before = marks(part)
        assert marks(part) == before
        part.note(torch.zeros(3))
        assert marks(part) != before


class Snake1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.seen = nn.Parameter(torch.ones(1)), []  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return x + torch.sin(self.alpha * x) ** 2 / self.alpha


def test_what_records_is_not_run_again() -> None:
    model: Any = model_of(Snake1d())
    swap(model, lean="call")
    model(inputs()).sum().backward()
    assert len(model[1].seen) == 1
