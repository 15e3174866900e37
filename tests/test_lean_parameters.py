"""What lean() makes again of parameters, where an engine frees their memory between forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import saved_tensors_hooks

import memkit

F = memkit.functional
ROWS, WIDTH = 64, 512

LAYERS: dict[str, Callable[["Unit", Tensor], Tensor]] = {
    "layer_norm": lambda unit, x: F.layer_norm(x, (WIDTH,), unit.weight, unit.bias, save="input"),
    "rms_norm": lambda unit, x: F.rms_norm(x, (WIDTH,), unit.weight, save="input"),
    "group_norm": lambda unit, x: F.group_norm(x, 8, unit.weight, unit.bias),
    "batch_norm_act": lambda unit, x: F.batch_norm_act(
        x, None, None, unit.weight, unit.bias, training=True, act="silu"
    ),
    "bias_act": lambda unit, x: F.bias_act(x, unit.bias, "gelu", save="input"),
    "gelu of a norm": lambda unit, x: F.gelu(
        F.layer_norm(x, (WIDTH,), unit.weight, unit.bias, save="input"), save="input"
    ),
    "product": lambda unit, x: x * unit.weight,
    "product with a view": lambda unit, x: x * unit.weight.view(1, WIDTH),
    "product with what is frozen": lambda unit, x: F.gelu(x, save="input") * unit.frozen,
    "prelu": lambda unit, x: nn.functional.prelu(x, unit.weight),
    "function of a product": lambda unit, x: nn.functional.silu(x * unit.weight),
}


class Unit(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return LAYERS[self.name](self, self.layer(x))


def free(unit: nn.Module) -> Callable[[], None]:
    """As FSDP does: the memory goes, and comes back to the same storage."""
    parts = [p.untyped_storage() for p in unit.parameters()]
    held = [(part, part.nbytes(), part.clone()) for part in parts]

    def give_back() -> None:
        for part, nbytes, values in held:
            part.resize_(nbytes)
            part.copy_(values)

    for part in parts:
        part.resize_(0)
    return give_back


def step(name: str, *, lean: bool, frees: bool) -> list[Tensor]:
    torch.manual_seed(1)
    first, second = Unit(name), Unit(name)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with memkit.lean() if lean else torch.enable_grad():
        between = first(x)
        if frees:
            give_back = free(first)
            between.register_hook(lambda _: give_back())  # before the backward of what is in it
        out = second(between)
    out.square().mean().backward()
    found = [x.grad, *(p.grad for unit in (first, second) for p in unit.parameters())]
    return [grad for grad in found if grad is not None]


@pytest.fixture
def sharding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    yield
    monkeypatch.undo()
    with memkit.lean():  # as it is again
        pass


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_where_memory_is_gone(name: str, sharding: None) -> None:
    for one, other in zip(
        step(name, lean=True, frees=True), step(name, lean=False, frees=False), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_without_copies_it_raises(name: str) -> None:
    with pytest.raises(RuntimeError, match="memory was freed after forward"):
        step(name, lean=True, frees=True)


def test_a_view_of_a_parameter_is_joined_as_it_was(sharding: None) -> None:
    """Of a concatenation, what somebody keeps of a parameter is not counted on."""

    def run(*, lean: bool) -> list[Tensor]:
        torch.manual_seed(1)
        first, second = Unit("layer_norm"), nn.Linear(WIDTH, 8)
        first.prompt = nn.Parameter(torch.randn(ROWS * WIDTH))
        x = torch.randn(ROWS, WIDTH)
        with memkit.lean() if lean else torch.enable_grad():
            y, prompt = first.layer(x), first.prompt.view(ROWS, WIDTH)
            side = (y * prompt).sum()
            between = torch.cat([F.gelu(y, save="input"), prompt])
            give_back = free(first) if lean else None
            out = second(between)
            if give_back is not None:
                between.register_hook(lambda _: give_back())
        (out.square().mean() + 0 * side).backward()
        return [p.grad for p in (*first.parameters(), *second.parameters()) if p.grad is not None]

    for one, other in zip(run(lean=True), run(lean=False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["layer_norm", "product"])
def test_made_under_other_hooks(name: str, sharding: None) -> None:
    """There are no copies, so it is kept."""

    def run(*, lean: bool) -> list[Tensor]:
        torch.manual_seed(1)
        first, second = Unit(name), Unit(name)
        x = torch.randn(ROWS, WIDTH)
        with memkit.lean() if lean else torch.enable_grad():
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                between = first(x)
            if lean:
                give_back = free(first)
                between.register_hook(lambda _: give_back())
            out = second(between)
        out.square().mean().backward()
        return [p.grad for p in (*first.parameters(), *second.parameters()) if p.grad is not None]

    for one, other in zip(run(lean=True), run(lean=False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_call_made_again_raises() -> None:
    from memkit.swap.library.checkpoint import checkpointed

    x, weight = torch.randn(4, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
    out = checkpointed(lambda x: (x * weight).sin(), x, reads=[weight])
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="memory was freed after forward"):
        out.sum().backward()


@pytest.mark.parametrize("backward", [False, True])
def test_copies_are_small_and_go_with_the_graph(
    backward: bool, sharding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live() -> int:
        unit, x = Unit("layer_norm"), torch.randn(ROWS, WIDTH)

        def step() -> Tensor:
            with memkit.lean():
                out = unit(x).sum()
            if backward:
                out.backward()
            return out  # whose graph stays, without what it kept

        return memkit.memory.measure(step).live

    copied = live()
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    assert copied - live() == (0 if backward else 2 * 4 * WIDTH)
