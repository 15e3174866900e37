"""`measure(fn).saved`: bytes saved for backward, worked out by hand; and that looking changes nothing."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memkit
from memkit import _C, functional
from memkit._lean import is_lean
from memkit.memory import measure

N = 1000
BYTES = 4 * N  # of a float32 tensor of N elements


@pytest.fixture
def w():
    return torch.linspace(-1, 1, N, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_by_linear_gelu_linear(dtype):
    tokens, width, hidden = 10, 16, 64
    model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).to(dtype)
    data = torch.randn(tokens, width, dtype=dtype)
    elements = tokens * hidden
    # h and gelu(h): in bfloat16 4 bytes an element. The input and the weight that its gradient needs: from before.
    for fn in (lambda: model(data), lambda: model(data).sum().backward()):
        got = measure(fn)
        assert got.saved == 2 * elements * dtype.itemsize
        assert got.saved_total == got.saved + data.nbytes + model[2].weight.nbytes
    relu = nn.Sequential(model[0], nn.ReLU(), model[2])
    assert measure(relu, data).saved == elements * dtype.itemsize


SAVED = {  # name: (function of a leaf, bytes it saves)
    "its own output": (lambda w: w.exp(), BYTES),
    "a leaf": (lambda w: w.sin(), 0),
    "one tensor by three nodes": (lambda w: (lambda y: y * y + y.sin())(w.exp()), BYTES),
    "views of one storage": (lambda w: (lambda y: y[:10].sin().sum() + y[10:].cos().sum())(w * w), BYTES),
    "a part, which keeps the whole": (lambda w: (w * w)[:1].sin(), BYTES),
    "a constant from inside": (lambda w: w * torch.full((N,), 2.0), BYTES),
    "nothing without grad": (lambda w: w.detach().exp().sin(), 0),
    "once for each time": (lambda w: [w.exp().sum().backward() for _ in range(20)], 20 * BYTES),
    "a sparse matrix": (
        lambda w: torch.sparse.mm(torch.eye(10).to_sparse(), w.view(10, 100)),
        10 * 2 * 8 + 10 * 4,
    ),
}


@pytest.mark.parametrize("case", SAVED)
def test_saved(case, w):
    fn, saved = SAVED[case]
    assert measure(fn, w).saved == saved


def test_saved_of_before_is_left_out(w):
    constant = torch.ones(N)
    got = measure(lambda: w * constant)
    assert (got.saved, got.saved_total) == (0, BYTES)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_saved_by_checkpointed_blocks(use_reentrant, w):
    def model():
        y = w * 1
        for _ in range(3):
            y = checkpoint(lambda v: v.exp().sin().exp().sin(), y, use_reentrant=use_reentrant)
        return y

    assert measure(model).saved == 3 * BYTES  # the blocks' inputs
    step = measure(lambda: model().sum().backward())
    assert step.saved >= 3 * BYTES
    got, w.grad = w.grad, None
    y = w * 1
    for _ in range(3):
        y = y.exp().sin().exp().sin()
    y.sum().backward()
    assert torch.equal(got, w.grad)


def test_hooks_around_the_call_keep_working(w):
    packed = []
    with saved_tensors_hooks(lambda t: packed.append(t.nbytes) or t.detach() * 2, lambda t: t):
        got = measure(lambda: w.exp())
    assert packed == [BYTES]
    assert got.saved == BYTES
    got.result.sum().backward()
    assert torch.equal(w.grad, 2 * w.detach().exp())


def test_hooks_inside_the_call_keep_working(w):
    def fn():
        with save_on_cpu():
            y = w.exp()
        return y.sin()

    got = measure(fn)
    assert got.saved == BYTES  # the input of sin; the output of exp went to the hook
    got.result.sum().backward()
    v = w.detach().clone().requires_grad_()
    v.exp().sin().sum().backward()
    assert torch.equal(w.grad, v.grad)


@pytest.mark.parametrize("around", [nullcontext, save_on_cpu])
def test_what_lean_drops_does_not_count(around):
    """With lean around the call as with lean in it; afterwards it goes on as it did."""
    first, second = nn.Linear(64, 256), nn.Linear(256, 64)
    data = torch.randn(128, 64)

    def model():
        return second(functional.gelu(first(data))).sum()

    def inside():
        with memkit.lean():
            return model()

    with around():
        stock, expected = measure(model), measure(inside)
        with memkit.lean():
            got = measure(model)
            assert is_lean()
    assert got.saved == expected.saved == stock.saved / 2
    assert (got.peak, got.live) == (expected.peak, expected.live)
    parameters = [*first.parameters(), *second.parameters()]
    assert all(map(torch.equal, *(torch.autograd.grad(each.result, parameters) for each in (stock, got))))


def test_the_hooks_of_saved_change_no_memory(w):
    model = nn.Sequential(nn.Linear(N, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(), nn.LayerNorm(64))
    data = torch.randn(8, N)

    def step():
        model(data).square().sum().backward()
        model.zero_grad()

    step()
    tap = _C.Tap()
    step()
    tap.stop()
    got = measure(step)
    assert (got.live, got.peak, got.allocations) == tap.read()


def test_nothing_is_kept_alive(w):
    """A graph dies with its last reference, without the garbage collector: exp saves its own output."""
    tap = _C.Tap()
    gc.disable()
    try:
        got = measure(lambda: w.exp().sum())
        assert tap.read()[0] == BYTES + 4
        del got
        assert tap.read()[0] == 0
    finally:
        gc.enable()


def test_backward_after_the_measurement(w):
    y = measure(lambda: w.exp().sin()).result
    y.sum().backward()
    assert torch.allclose(w.grad, w.detach().exp() * w.detach().exp().cos())


def test_an_overwritten_saved_tensor_is_still_an_error(w):
    def fn():
        y = w.exp()
        y.add_(1)
        return y

    y = measure(fn).result
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"
    ):
        y.sum().backward()


def test_second_derivatives(w):
    def fn():
        (first,) = torch.autograd.grad(w.exp().sum(), w, create_graph=True)
        return torch.autograd.grad(first.sum(), w)[0]

    assert torch.allclose(measure(fn).result, w.detach().exp())


@pytest.mark.slow
def test_compiled_function(w):
    fn = torch.compile(lambda v: v.exp().sin().exp(), backend="aot_eager")
    fn(w).sum().backward()
    got, w.grad = w.grad, None
    measured = measure(lambda: fn(w))
    assert measured.saved > 0
    measured.result.sum().backward()
    assert torch.equal(got, w.grad)


@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
def test_auto_on_a_view_that_autograd_recorded(name: str) -> None:
    """Overwritten, autograd would copy it into its base in backward; as an output kept it costs what in place does."""
    linear, second = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    x = torch.randn(4, 128, 64)

    def first(x: Tensor) -> Tensor:  # as Linear itself does up to PyTorch 2.14
        return linear(x.flatten(0, 1)).view(4, 128, 256)

    act = partial(getattr(functional, name), inplace="auto")

    def peak_and_saved(act: Callable[[Tensor], Tensor]) -> tuple[int, int]:
        measured = measure(lambda: second(act(first(x))).sum().backward())
        return measured.peak, measured.saved

    peak_and_saved(act)
    peak, saved = peak_and_saved(act)
    stock_peak, stock_saved = peak_and_saved(getattr(torch.nn.functional, name))
    elements = 4 * 128 * 256
    assert saved == elements * 4 + (0 if name == "relu" else elements // 8)
    assert peak <= stock_peak
    assert saved <= stock_saved
    hidden = first(x)
    before = hidden.detach().clone()
    act(hidden)
    assert torch.equal(hidden, before)


def test_what_is_gone_when_backward_begins_was_not_saved(w):
    def branch():
        return w.detach().requires_grad_() * 2

    def step(drops: bool, steps: int = 1) -> None:
        for _ in range(steps):
            kept = branch().sigmoid()  # saves its result
            if drops:
                del kept
            w.exp().sum().backward()

    one = measure(step, False).saved
    assert one == 2 * w.nbytes
    assert measure(step, True).saved == w.nbytes
    assert measure(step, True, 3).saved == 3 * w.nbytes  # what backward let go of was saved for it


def test_hooks_around_see_what_is_gone_too(w):
    def step() -> None:
        w.sigmoid()
        w.exp().sum().backward()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        assert measure(step).saved == w.nbytes
