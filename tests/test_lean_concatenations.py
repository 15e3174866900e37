"""`lean()` drops concatenations whose parts are kept by others, or can be made again."""

import gc
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

ROWS, WIDTH = 64, 256


class Dense(nn.Module):
    """Each layer is given what all before it gave."""

    def __init__(self, layers: int = 6, growth: int = 32):
        super().__init__()
        widths = [WIDTH + growth * i for i in range(layers)]
        self.layers = nn.ModuleList(nn.Linear(width, growth) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        found = [x * 1.0]
        for layer in self.layers:
            found.append(layer(torch.cat(found, -1)))
        return torch.cat(found, 1)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.last = nn.Linear(WIDTH, 128), nn.Linear(WIDTH, 64), nn.Linear(192, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = memkit.functional.gelu(self.one(x)), memkit.functional.silu(self.other(x))
        return self.last(torch.cat(parts, -1))


def given(*shape: int, **options) -> Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)), **options).requires_grad_()


def gradients(model: nn.Module, x: Tensor, *, lean: bool) -> list[Tensor]:
    leaves = [x, *model.parameters()]
    with memkit.lean() if lean else torch.enable_grad():
        loss = model(x).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def same(ours, theirs) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


def saved(model: nn.Module, x: Tensor) -> int:
    def forward() -> Tensor:
        with memkit.lean():
            return model(x)

    return measure(forward).saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Dense, Branches])
def test_gradients_to_the_bit(kind, dtype):
    model, x = kind().to(dtype), given(dtype=dtype)
    same(gradients(model, x, lean=True), gradients(model, x, lean=False))


def test_each_result_is_kept_once():
    model, x = Dense(), given()
    width = WIDTH + 6 * 32
    stock = measure(lambda: model(x)).saved
    # The first result and one more lie in a concatenation that is kept: what is new in it is more than a fourth at first.
    assert saved(model, x) <= 4 * ROWS * width + 4096
    assert stock >= 4 * ROWS * sum(WIDTH + 32 * i for i in range(6))


def test_branches_are_made_again():
    model, x = Branches(), given()
    assert saved(model, x) <= 4 * ROWS * (128 + 64) + 4096  # what gelu and silu are given


def test_one_that_is_mostly_new_is_kept():
    class Joined(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat((x[:, :128] * 2, x[:, 128:] * 3), -1))

    model, x = Joined(WIDTH, 8), given()
    assert saved(model, x) == measure(lambda: model(x)).saved
    same(gradients(model, x, lean=True), gradients(model, x, lean=False))


def test_parts_without_gradient_other_dims_and_dtypes():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.next = nn.Conv2d(8, 24, 3, padding=1), nn.Conv2d(32, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            act = memkit.functional.silu(self.conv(x))
            return self.next(torch.cat((act, torch.ones_like(x), torch.empty(0)), -3))

    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = Joined().to(memory_format=memory_format)
        x = torch.randn(2, 8, 16, 16).to(memory_format=memory_format).requires_grad_()
        same(gradients(model, x, lean=True), gradients(model, x, lean=False))

    class Promoted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            halves = memkit.functional.silu(x[:, :200].bfloat16())
            return torch.cat((halves, memkit.functional.silu(x[:, 200:])), 1).square()

    x = given()
    same(gradients(Promoted(), x, lean=True), gradients(Promoted(), x, lean=False))


def test_a_view_of_one():
    class Split(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            joined = torch.cat((memkit.functional.silu(x), memkit.functional.gelu(x)), -1)
            first, second = joined.view(2, -1, 2 * WIDTH).transpose(0, 1).chunk(2, -1)
            return first.square() * second.exp()

    x = given()
    same(gradients(Split(), x, lean=True), gradients(Split(), x, lean=False))


@pytest.mark.parametrize("which", ["part", "joined"])
def test_what_changes_in_place_afterwards(which):
    """What was kept is what it was before."""

    def loss(x: Tensor, change: bool = True) -> Tensor:
        part = memkit.functional.silu(x)
        joined = torch.cat((part, memkit.functional.gelu(x)), -1)
        squares = joined.square().sum()
        if change:
            (part if which == "part" else joined).mul_(2)
        return squares

    x = given()
    with memkit.lean():
        ours = loss(x)
    same(torch.autograd.grad(ours, x), torch.autograd.grad(loss(x, change=False), x))


def changed_before_it_is_kept(x):
    part = x * 1.0
    joined = torch.cat((part, part), -1)
    with torch.no_grad():
        part.mul_(2)
    return joined.square().sum() + 0 * part.square().sum()


def changed_before_it_is_joined(x):
    part = x * 1.0
    squares = part.square()  # keeps it
    with torch.no_grad():
        part.mul_(2)
    return torch.cat((part, part), -1).square().sum() + 0 * squares.detach().sum()


def joined_and_changed(x):
    one, other = x * 1.0, x * 2.0
    joined = torch.cat((one, other), -1)
    with torch.no_grad():
        joined.mul_(2)
    return joined.square().sum() + torch.cat((one, other), -1).pow(3).sum()


def changed_between_two(x):
    one, other = x * 1.0, x * 2.0
    squares = torch.cat((one, other), -1).square().sum()
    one.detach().clamp_(min=0)
    return squares + torch.cat((one, other), -1).pow(3).sum()


def joined_in_another_dtype(x):
    one, other = x.bfloat16() * 1, x * 2.0
    squares = torch.cat((one, other), -1).square().sum()
    return squares + (torch.cat((one, one), -1) @ torch.ones(2 * WIDTH, 8).bfloat16()).float().sum()


def changed_by_its_consumers(x):
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return x.mul_(2 * grad)

    joined = torch.cat((memkit.functional.silu(x), memkit.functional.gelu(x)), -1)
    return (
        Overwrites.apply(joined.clone() if not memkit._lean.is_lean() else joined).sum() + joined.pow(3).sum()
    )


@pytest.mark.parametrize(
    "loss",
    [
        changed_before_it_is_kept,
        changed_before_it_is_joined,
        joined_and_changed,
        changed_between_two,
        joined_in_another_dtype,
        changed_by_its_consumers,
    ],
)
def test_values_are_those_of_the_time(loss):
    x = given()
    with memkit.lean():
        ours = loss(x)
    for mine, other in zip(torch.autograd.grad(ours, x), torch.autograd.grad(loss(x), x), strict=True):
        torch.testing.assert_close(mine, other)


class Named(Dense):
    """Says what it has joined."""

    def forward(self, x: Tensor) -> Tensor:
        found = [x * 1.0]
        for layer in self.layers:
            joined = torch.cat(found, -1)
            memkit._C.note_joined(joined, found)
            found.append(layer(joined))
            if len(found) == 4 and self.changes:
                found[2].detach().mul_(3)
        return found[-1]

    changes = False


@pytest.mark.parametrize("changes", [False, True])
def test_tensors_that_are_named(changes):
    model, x = Named(), given()
    model.changes = changes
    same(gradients(model, x, lean=True), gradients(model, x, lean=False))
    with torch.no_grad():
        x[0] = torch.nan  # which no comparison finds equal
    kept = saved(model, x)
    assert kept <= 4 * ROWS * (WIDTH + 6 * 32) * (1 + changes) + 4096
    assert changes == (kept > 4 * ROWS * (WIDTH + 6 * 32) + 4096)


def test_hooks_of_another_region_stay_there():
    """Those around one part may round; a concatenation outside of them is exact."""
    x = given()

    def loss(round_part: bool) -> Tensor:
        part, other = x * 1.0, x * 2.0
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda y: y.bfloat16(), lambda y: y.float()),
            memkit.lean(),
        ):
            squares = part.square().sum() * round_part
        with memkit.lean():
            return torch.cat((part, part), -1).pow(3).sum() + 0 * squares + other.sum()

    same(torch.autograd.grad(loss(True), x), torch.autograd.grad(loss(False), x))


def test_hooks_that_give_back_once():
    model, x, held = Dense(), given(), {}

    def keep(tensor: Tensor) -> int:
        held[len(held)] = tensor.detach()
        return len(held) - 1

    def give_back(number: int) -> Tensor:
        tensor, held[number] = held[number], None
        assert tensor is not None
        return tensor

    theirs = gradients(model, x, lean=False)
    with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
        same(gradients(model, x, lean=True), theirs)


def test_what_is_not_joined_costs_no_depth():
    """A concatenation that is kept is as good as any other input."""

    def forward(x: Tensor, join: bool) -> Tensor:
        y = torch.cat((x[:, :128] * 2, x[:, 128:] * 3), -1) if join else x * 2
        y = memkit.functional.layer_norm(y, (WIDTH,), save="input")
        return memkit.functional.gelu(memkit.functional.silu(y)) @ torch.ones(WIDTH, 8)

    x, kept = given(), []
    for join in (False, True):
        with memkit.lean():
            kept.append(measure(forward, x, join).saved)
    assert kept[0] == kept[1]


def test_backward_twice_and_higher_derivatives():
    model, x = Dense().double(), given(dtype=torch.float64)

    def second(lean: bool) -> list[Tensor]:
        with memkit.lean() if lean else torch.enable_grad():
            loss = model(x).pow(3).mean()
        once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return [*once, slope.detach(), *torch.autograd.grad(slope.square().sum(), [x, *model.parameters()])]

    for mine, other in zip(second(True), second(False), strict=True):
        torch.testing.assert_close(mine, other)


def test_hooks_and_checkpoints_around():
    model, x = Dense(), given()
    theirs = gradients(model, x, lean=False)
    with torch.autograd.graph.save_on_cpu():
        same(gradients(model, x, lean=True), theirs)
    kept = []

    def keep(tensor: Tensor) -> int:
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(keep, kept.__getitem__):
        same(gradients(model, x, lean=True), theirs)
    inside = nn.Module()
    inside.forward = lambda x: checkpoint(model, x, use_reentrant=False)
    inside.parameters = model.parameters
    same(gradients(inside, x, lean=True), theirs)

    def call(x: Tensor) -> Tensor:
        with memkit.lean():
            return model(x)

    inside.forward = lambda x: checkpoint(call, x, use_reentrant=False)
    same(gradients(inside, x, lean=False), theirs)


def test_nothing_is_held_afterwards():
    model, x = Dense(), given()

    def steps() -> None:
        for _ in range(50):
            gradients(model, x, lean=True)
        gc.collect()

    steps()
    assert measure(steps).live == 0


def test_graph_that_is_dropped():
    """Without a backward, parts go with it."""
    model, x = Dense(), given()

    def forward() -> None:
        with memkit.lean():
            model(x)

    assert measure(forward).live == 0


def test_from_several_threads():
    model, failures = Dense(), []

    def work() -> None:
        try:
            x = given()
            for _ in range(20):
                same(gradients(model, x, lean=True), gradients(model, x, lean=False))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_what_has_no_bytes_is_kept_as_it_is():
    rows = torch.eye(8).to_sparse().requires_grad_()
    x = given(8, 4)
    with memkit.lean():
        ours = torch.sparse.mm(torch.cat((rows * 2, rows * 3), 0), x).square().sum()
    theirs = torch.cat((2 * torch.eye(8), 3 * torch.eye(8))) @ x
    torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs.square().sum(), x))


@pytest.mark.parametrize(
    "view", [Tensor.conj, lambda x: x.mT.conj().mT, lambda x: x.conj().real, torch.view_as_real]
)
def test_views_of_complex_concatenations(view):
    x, w = given(dtype=torch.complex64), given(2 * WIDTH, 8, dtype=torch.complex64)
    found = []
    for lean in (False, True):
        with memkit.lean() if lean else torch.enable_grad():
            a, b = x * 1.0, x * (2 + 1j)
            kept = a.square().abs().sum() + b.square().abs().sum()
            seen = view(torch.cat((a, b), -1))
            out = seen @ w if seen.is_complex() else seen * seen.detach()
            loss = out.abs().sum() + kept
        found.append(torch.autograd.grad(loss, [x, w], allow_unused=True))
    for mine, stock in zip(*reversed(found), strict=True):
        assert mine is stock if stock is None else torch.equal(mine, stock)
