"""Calls that backward makes again: what is kept, what comes out, and under what they are made."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from time import sleep
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.swap.library.checkpoint import checkpointed

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).mul(0.5).softmax(-1).square() @ value


def leaves(n: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 5, 4, dtype=dtype, requires_grad=True) for _ in range(n)]


def grads(out: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.sin().sum(), wanted)


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, ours, theirs))


def test_values_and_what_is_kept() -> None:
    given = leaves()
    out = checkpointed(attention, *given)
    assert torch.equal(out, attention(*given))
    assert same(grads(out, given), grads(attention(*given), given))
    kept = memkit.memory.measure(lambda: checkpointed(attention, *[x * 2 for x in given])).saved
    stock = memkit.memory.measure(lambda: attention(*[x * 2 for x in given])).saved
    assert kept == sum(x.nbytes for x in given) < stock


def test_named_and_others() -> None:
    query, key, value = leaves()

    def function(query: Tensor, scale: float, *, key: Tensor, value: Tensor, power: int) -> Tensor:
        return attention(query * scale, key, value) ** power

    def call(how: Callable[..., Tensor]) -> Tensor:
        return how(query, 0.5, key=key, value=value, power=2)

    ours = call(lambda *a, **k: checkpointed(function, *a, **k))
    assert same(grads(ours, [query, key, value]), grads(call(function), [query, key, value]))


def test_stops_where_all_is_made() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        y = x.exp().sin()
        calls.append("behind")
        return y

    (x,) = leaves(1)
    checkpointed(function, x).sum().backward()
    assert calls == ["behind"]  # the last result saved is what sin is of


def test_twice() -> None:
    given = leaves()
    out = checkpointed(attention, *given).sin().sum()
    first = torch.autograd.grad(out, given, retain_graph=True)
    assert same(torch.autograd.grad(out, given), first)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_in_part_then_whole() -> None:
    given = leaves()
    out = checkpointed(attention, *given).sin().sum()
    part = torch.autograd.grad(out, given[2:], retain_graph=True)
    whole = torch.autograd.grad(out, given)
    expected = torch.autograd.grad(attention(*given).sin().sum(), given)
    assert same(part, expected[2:])
    assert same(whole, expected)


def test_second_order() -> None:
    given = leaves()
    torch.autograd.gradcheck(lambda *x: checkpointed(attention, *x), given)
    torch.autograd.gradgradcheck(lambda *x: checkpointed(attention, *x), given)


@pytest.mark.parametrize("place", ["argument", "name", "read"])
def test_changed_in_between(place: str) -> None:
    x, y = (each * 1 for each in leaves(2))

    def function(x: Tensor, other: Tensor | None = None) -> Tensor:
        return (x * y).exp().sin()

    read = {"reads": [y]} if place == "read" else {"other": y} if place == "name" else {}
    out = checkpointed(function, x, *([y] if place == "argument" else []), **read)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_draws_the_same_and_leaves_the_generator() -> None:
    (x,) = leaves(1)

    def function(x: Tensor) -> Tensor:
        return nnf.dropout(x.exp(), 0.5).sin()

    torch.manual_seed(3)
    ours = checkpointed(function, x)
    torch.manual_seed(3)
    stock = function(x)
    torch.rand(7)
    before = torch.get_rng_state()
    found = grads(ours, [x])
    assert torch.equal(torch.get_rng_state(), before)
    assert same(found, grads(stock, [x]))


def test_without_rng_the_generator_is_drawn_from() -> None:
    (x,) = leaves(1)
    out = checkpointed(lambda x: nnf.dropout(x.exp(), 0.5).sin(), x, rng=False)
    before = torch.get_rng_state()
    out.sum().backward()
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("around", ["forward", "backward"])
def test_autocast(around: str) -> None:
    given = leaves(dtype=torch.float32)

    def gradients(how: Attention) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "forward"):
            out = how(*given)
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "backward"):
            return torch.autograd.grad(out, given, torch.ones_like(out))

    assert same(gradients(lambda *x: checkpointed(attention, *x)), gradients(attention))


@pytest.mark.parametrize("inside", [True, False])
def test_default_device(inside: bool) -> None:
    devices = []

    def function(x: Tensor) -> Tensor:
        devices.append(torch.empty(1).device.type)
        return x.exp().sin()

    (x,) = leaves(1)
    forward, backward = ("meta", "cpu") if inside else ("cpu", "meta")
    with torch.device(forward):
        out = checkpointed(function, x)
    with torch.device(backward):
        out.backward(torch.ones_like(out, device="cpu"))
    assert devices == [forward, forward]


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    given = leaves()

    def function(*given: Tensor) -> Tensor:
        return checkpointed(attention, *(x.sin() for x in given)).cos()

    out = checkpoint(function, *given, use_reentrant=reentrant)
    expected = torch.autograd.grad(attention(*(x.sin() for x in given)).cos().sum(), given)
    out.sum().backward()
    assert same(tuple(x.grad for x in given if x.grad is not None), expected)


def test_inside_another_and_around_a_checkpoint() -> None:
    given = leaves()

    def function(*given: Tensor) -> Tensor:
        inner = checkpointed(attention, *(x.sin() for x in given))
        return checkpoint(torch.cos, inner.exp(), use_reentrant=False).sin()

    assert same(grads(checkpointed(function, *given), given), grads(function(*given), given))


def test_hooks_around_have_what_is_given() -> None:
    given = leaves()
    seen: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        seen.append(x)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = checkpointed(attention, *given)
    assert [id(x) for x in seen] == [id(x) for x in given]
    assert same(grads(out, given), grads(attention(*given), given))


def test_lean_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packing of zeros goes by their number, which may be another one in the second run."""
    (x,) = leaves(1, torch.float32)
    wide = torch.randn(512, 2048, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with memkit.lean():
            hidden = memkit.functional.relu(wide * x.sum())
            return (hidden * hidden.cos()).sin()

    expected = grads(function(x), [x])
    monkeypatch.setattr(memkit._C, "nonzeros", lambda _: pytest.fail("packed"))
    assert same(grads(checkpointed(function, x), [x]), expected)


def test_nothing_is_left_of_the_second_run() -> None:
    (x,) = leaves(1)

    def function(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.exp()
        return x.sin()

    def run() -> None:
        checkpointed(function, x).sum().backward()

    run()
    gc.disable()
    try:
        assert memkit.memory.measure(run).live == 0
    finally:
        gc.enable()


def test_what_backward_has_used_is_freed() -> None:
    """One link after the other, as without: at the peak there are all of them and a gradient."""
    x = torch.randn(2**16, requires_grad=True)
    x.grad = torch.zeros_like(x)

    def function(x: Tensor) -> Tensor:
        for _ in range(16):
            x = x.sigmoid()
        return x

    out = checkpointed(function, x)
    assert memkit.memory.measure(lambda: out.backward(x.detach())).peak < 17.1 * x.nbytes


def test_graph_dies_with_its_result() -> None:
    (x,) = leaves(1)
    given = x * 1
    out = checkpointed(lambda x: x.exp().sin(), given)
    storage, given = ref(given), None  # type: ignore[assignment]
    gc.disable()
    try:
        del out
        assert storage() is None
    finally:
        gc.enable()


def test_other_tensors_than_before() -> None:
    runs = []

    def function(x: Tensor) -> Tensor:
        runs.append(x)
        return x.exp().sin().cos() if len(runs) == 1 else x.exp()

    (x,) = leaves(1)
    with pytest.raises(RuntimeError, match="got another one: fewer tensors were saved"):
        checkpointed(function, x).sum().backward()


def test_a_tensor_of_another_shape() -> None:
    runs = []

    def function(x: Tensor) -> Tensor:
        runs.append(x)
        return x[: 3 - len(runs)].exp().sin()

    (x,) = leaves(1)
    with pytest.raises(RuntimeError, match=r"was saved as \[2, 5, 4\] of torch.float64, is now \[1, 5, 4\]"):
        checkpointed(function, x).sum().backward()


def test_a_function_that_swallows_the_stop() -> None:
    def function(x: Tensor) -> Tensor:
        x = x.exp()
        try:
            x = x.sin()
        except BaseException:
            x = x.sin()
        return x

    (x,) = leaves(1)
    with pytest.raises(RuntimeError, match="got another one: more tensors were saved"):
        checkpointed(function, x).sum().backward()


def test_looked_at_outside_of_backward() -> None:
    """Each look makes it again, of arguments as they are."""
    x = leaves(1)[0] * 1
    out, other = checkpointed(lambda x: (x.sin(), x.cos()), x)
    assert torch.equal(out.grad_fn._saved_self, x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _ = other.grad_fn._saved_self


def test_nothing_is_left_of_a_graph_that_is_retained() -> None:
    x = torch.randn(2**10, requires_grad=True)
    x.grad = torch.zeros_like(x)
    out = checkpointed(lambda x: x.sigmoid().tanh().sigmoid(), x)
    assert memkit.memory.measure(lambda: out.backward(x.detach(), retain_graph=True)).live == 0


def test_what_nobody_asks_for_is_not_kept() -> None:
    """Of results that died, whose saved tensors are made with the others."""
    x = torch.randn(2**10, requires_grad=True)
    x.grad = torch.zeros_like(x)
    out, _ = checkpointed(lambda x: (x.sigmoid().tanh(), x.exp().sin().exp()), x)
    del _
    assert memkit.memory.measure(lambda: out.backward(x.detach(), retain_graph=True)).live == 0


def test_changed_between_two_backwards() -> None:
    x = leaves(1)[0] * 1
    out, other = checkpointed(lambda x: (x.sin(), x.cos()), x)
    out.sum().backward(inputs=[x], retain_graph=True)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward(inputs=[x])


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_frozen_in_between(trained: bool, lean: bool) -> None:
    """Or no longer: what is saved, and which gradients there are, was decided in forward."""
    (x,) = leaves(1)
    scale = torch.nn.Parameter(torch.full((4,), 0.3, dtype=torch.float64), requires_grad=trained)
    held = torch.nn.Parameter(torch.full((4,), 0.7, dtype=torch.float64), requires_grad=trained)

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return x + (x * scale).sin().square() / held

    def gradient(how: Callable[..., Tensor]) -> Tensor:
        for each in (scale, held):
            each.requires_grad_(trained)
        with memkit.lean() if lean else nullcontext():
            out = how(x, scale).sin().sum()
        for each in (scale, held):
            each.requires_grad_(not trained)
        return torch.autograd.grad(out, x)[0]

    ours = gradient(lambda *given: checkpointed(function, *given, reads=[held]))
    assert scale.requires_grad is held.requires_grad is not trained
    assert torch.equal(ours, gradient(function))


def test_compiled() -> None:
    given = leaves()
    compiled = torch.compile(lambda *x: checkpointed(attention, *x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(grads(compiled(*given), given), grads(attention(*given), given))


def test_errors_of_the_function() -> None:
    (x,) = leaves(1)
    runs = []

    def function(x: Tensor) -> Tensor:
        runs.append(x)
        if len(runs) == 2:
            raise KeyError("its own")
        return x.exp().sin()

    out = checkpointed(function, x).sum()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="its own"):
        out.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_without_gradients() -> None:
    given = leaves()
    with torch.no_grad():
        assert not checkpointed(attention, *given).requires_grad
    assert not checkpointed(attention, *(x.detach() for x in given)).requires_grad


def test_threads() -> None:
    given = leaves()

    def slowly(*given: Tensor) -> Tensor:
        weights = given[0].sin()
        sleep(1e-3)  # for the others
        return attention(weights, *given[1:])

    out = checkpointed(slowly, *given).sin().sum()
    expected = torch.autograd.grad(slowly(*given).sin().sum(), given)
    found: list[tuple[Tensor, ...]] = []

    def run() -> None:
        for _ in range(20):
            found.append(torch.autograd.grad(out, given, retain_graph=True))

    threads = [Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 80
    assert all(same(each, expected) for each in found)
