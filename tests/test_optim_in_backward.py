"""Steps inside of backward: the same weights, and no more than one gradient in memory."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memkit import memory, optim
from memkit.optim import step_in_backward

pytestmark = pytest.mark.usefixtures("repeatable")  # tensors are small


class Tied(nn.Module):
    """Two layers that share a weight, around one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    return model(x).square().sum()


@pytest.mark.parametrize("state_dtype", [None, "8bit"])
def test_same_as_step(state_dtype: str | None) -> None:
    """Tied weights too, a scheduler, and `step()` left in the loop."""
    a, b = pair(Tied)
    plain = optim.AdamW(a.parameters(), lr=1e-2, state_dtype=state_dtype)
    early = optim.AdamW(b.parameters(), lr=1e-2, state_dtype=state_dtype)
    step_in_backward(early)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (plain, early)]
    for step in range(5):
        for model, optimizer, scheduler in ((a, plain, schedulers[0]), (b, early, schedulers[1])):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert all(p.grad is None for p in b.parameters())
    assert same(a, b)
    assert early.state[b.first.weight]["step"] == 5


def test_peak_is_one_gradient() -> None:
    torch.manual_seed(0)
    layers, width, rows = 8, 256, 4
    weight = width * width * 4
    peaks = {}
    for early in (False, True):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        optimizer = optim.AdamW(model.parameters())
        if early:
            step_in_backward(optimizer)

        def step(model: nn.Module = model, optimizer: optim.AdamW = optimizer) -> None:
            model(torch.ones(rows, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # makes the state
        peaks[early] = memory.measure(step).peak
    activations = (layers + 4) * rows * width * 4
    assert layers * weight <= peaks[False] <= layers * weight + activations
    assert weight <= peaks[True] <= weight + activations


def test_accumulation() -> None:
    a, b = pair(Tied)
    plain, early = (
        optim.SGD(a.parameters(), lr=0.1, momentum=0.9),
        optim.SGD(b.parameters(), lr=0.1, momentum=0.9),
    )
    handle = step_in_backward(early)
    for round in range(3):
        loss_of(a, round).backward()
        loss_of(a, 10 + round).backward()
        plain.step()
        plain.zero_grad()
        with handle.accumulate():
            loss_of(b, round).backward()
        assert b.middle.weight.grad is not None
        loss_of(b, 10 + round).backward()
        assert b.middle.weight.grad is None
    assert same(a, b)
    with handle.accumulate():
        loss_of(a, 0).backward()
        loss_of(b, 0).backward()
    plain.step()
    early.step()
    assert same(a, b)


class Branches(nn.Module):
    """Whose batches reach parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def backward(self, side: str, checkpointed: bool = False) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        branch = getattr(self, side)
        y = checkpoint(branch, x, use_reentrant=True) if checkpointed else branch(x)
        (100 * self.stem(y)).square().sum().backward()


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.3}, {"clip_value": 0.1}], ids=str)
@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_sums_that_the_last_batch_does_not_reach(
    options: dict[str, float], by_step: bool, checkpointed: bool
) -> None:
    """They are clipped, used once and gone at the end of backward, or in step() after batches that all accumulate."""
    a, b = pair(Branches)
    plain, early = optim.AdamW(a.parameters()), optim.AdamW(b.parameters())
    handle = step_in_backward(early, **options)
    for _ in range(3):
        sides = ["left", "left", "right"]
        for side in sides:
            a.backward(side, checkpointed)
        for p in a.parameters():
            if "clip_value" in options:
                nn.utils.clip_grad_value_([p], options["clip_value"])
            if "max_norm" in options:
                nn.utils.clip_grad_norm_([p], options["max_norm"])
        plain.step()
        plain.zero_grad()
        with handle.accumulate():
            b.backward(sides[0], checkpointed)
            b.backward(sides[1], checkpointed)
            if by_step:
                b.backward(sides[2], checkpointed)
        if not by_step:
            b.backward(sides[2], checkpointed)
        else:
            assert all(p.grad is not None for p in b.parameters())
            early.step()
        assert all(p.grad is None for p in b.parameters())
        assert same(a, b)


@pytest.mark.parametrize("reached", ["stem", "left"])
def test_sums_wait_for_the_end_of_the_outer_backward(reached: str) -> None:
    """A checkpoint's backward that is one inside of another ends before all have arrived: each is stepped once."""
    model = Branches()
    optimizer = optim.AdamW(model.parameters())
    handle = step_in_backward(optimizer)
    x = torch.ones(2, 4, requires_grad=True)
    with handle.accumulate():
        for each in (model.stem, model.left, model.right):
            each(x).sum().backward()
    inner = checkpoint(model.right, getattr(model, reached)(x), use_reentrant=True)
    inner.sum().backward()
    assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [1] * 6
    assert all(p.grad is None for p in model.parameters())


def test_sums_where_all_that_arrives_does_so_in_an_inner_backward() -> None:
    model = Branches()
    optimizer = optim.AdamW(model.parameters())
    handle = step_in_backward(optimizer)
    for step in (1, 2):
        x = torch.ones(2, 4, requires_grad=True)
        with handle.accumulate():
            for each in (model.left, model.right):
                checkpoint(each, x, use_reentrant=True).sum().backward()
        checkpoint(model.right, x, use_reentrant=True).sum().backward()
        assert [optimizer.state[p]["step"].item() for p in (model.left.weight, model.right.weight)] == [
            step
        ] * 2
        assert all(p.grad is None for p in model.parameters())


def test_a_sum_that_cannot_be_used_leaves_the_others() -> None:
    bag, a, b = nn.EmbeddingBag(4, 4, sparse=True), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    optimizer = optim.SGD([*bag.parameters(), *a.parameters(), *b.parameters()], lr=0.1)
    handle = step_in_backward(optimizer)
    before = a.weight.detach().clone()
    with handle.accumulate():
        a(bag(torch.tensor([[0, 1]]))).sum().backward()
    with pytest.raises((RuntimeError, TypeError), match="expected dense gradients"):
        b(torch.ones(1, 4)).sum().backward()
    b(torch.ones(1, 4)).sum().backward()
    assert a.weight.grad is None
    assert not torch.equal(a.weight, before)


def test_a_parameter_taken_from_its_groups_is_named() -> None:
    layer = nn.Linear(4, 4)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    step_in_backward(optimizer)
    del optimizer.param_groups[0]["params"][0]
    with pytest.raises(RuntimeError, match=r"got one of \[4, 4\] that was taken from its groups"):
        layer(torch.ones(1, 4)).sum().backward()


def test_sums_after_an_error() -> None:
    """They are used by the next backward."""

    def fail(grad: Tensor) -> None:
        raise ValueError("trap")

    a, b = pair(Branches)
    plain, early = optim.SGD(a.parameters(), lr=0.1), optim.SGD(b.parameters(), lr=0.1)
    handle = step_in_backward(early)
    a.backward("left")
    plain.step()
    with handle.accumulate():
        b.backward("left")
    trapped = torch.ones(1, 4, requires_grad=True)
    trapped.register_hook(fail)
    with pytest.raises(ValueError, match="trap"):
        (b.right(trapped).sum() * 0).backward()
    assert b.left.weight.grad is not None
    (b.right(torch.ones(1, 4)).sum() * 0).backward()
    assert same(a, b)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.3}], ids=str)
def test_parameters_that_thaw(options: dict[str, float]) -> None:
    """What is frozen at first is stepped once it has gradients, and stays frozen until then."""
    model = Branches()
    model.left.requires_grad_(False)
    optimizer = optim.AdamW(model.parameters())
    handle = step_in_backward(optimizer, **options)
    assert not model.left.weight.requires_grad
    before = model.left.weight.clone()
    model.backward("left")
    assert torch.equal(model.left.weight, before)
    assert model.left.weight.grad is None
    assert not optimizer.state[model.left.weight]
    model.left.requires_grad_(True)
    for step in (1, 2):
        model.backward("left")
        assert model.left.weight.grad is None
        assert optimizer.state[model.left.weight]["step"] == step
    handle.remove()
    model.backward("left")
    assert model.left.weight.grad is not None


def test_after_an_error() -> None:
    """What had arrived is used, nothing stays behind, the next backward is whole."""

    class Trap(torch.autograd.Function):
        armed = True

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            if Trap.armed:
                raise ValueError("trap")
            return grad

    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = optim.AdamW([*first.parameters(), *last.parameters()])
    handle = step_in_backward(optimizer)
    before = first.weight.detach().clone(), last.weight.detach().clone()
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="trap"):
        last(Trap.apply(first(x))).sum().backward()
    assert torch.equal(first.weight, before[0])
    assert not torch.equal(last.weight, before[1])
    assert all(p.grad is None for p in (first.weight, last.weight))
    Trap.armed = False
    last(Trap.apply(first(x))).sum().backward()
    assert [optimizer.state[p]["step"].item() for p in (first.weight, last.weight)] == [1, 2]
    with pytest.raises(KeyError), handle.accumulate():
        raise KeyError
    last(first(x)).sum().backward()
    assert optimizer.state[last.weight]["step"] == 3


def test_clipping() -> None:
    """Each gradient by itself, values first."""
    a, b = pair(Tied)
    plain, early = optim.SGD(a.parameters(), lr=0.1), optim.SGD(b.parameters(), lr=0.1)
    step_in_backward(early, max_norm=0.5, clip_value=0.2)
    for step in range(3):
        loss_of(a, step).backward()
        for p in a.parameters():
            nn.utils.clip_grad_value_([p], 0.2)
            nn.utils.clip_grad_norm_([p], 0.5)
        plain.step()
        plain.zero_grad()
        loss_of(b, step).backward()
    assert same(a, b)


def test_second_backward_raises() -> None:
    model, _ = pair(Tied)
    step_in_backward(optim.AdamW(model.parameters()))
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_checkpointed() -> None:
    """A weight of two checkpointed blocks is stepped once."""
    a, b = pair(Tied)
    optimizers = [optim.AdamW(m.parameters(), lr=1e-2) for m in (a, b)]
    step_in_backward(optimizers[1])
    x = torch.randn(4, 8)
    for model in (a, b):
        h = x
        for layer in (model.first, model.middle, model.last):
            h = checkpoint(layer, h, use_reentrant=False)
        h.sum().backward()
    optimizers[0].step()
    assert same(a, b)


def test_grad_scaler_is_refused() -> None:
    model, _ = pair(Tied)
    optimizer = optim.AdamW(model.parameters())
    handle = step_in_backward(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="AdamW: expected no GradScaler with step_in_backward"):
        scaler.step(optimizer)
    handle.remove()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)


def test_remove_groups_and_copies() -> None:
    a, b = pair(Tied)
    plain, early = optim.AdamW(a.middle.parameters()), optim.AdamW(b.middle.parameters())
    handle = step_in_backward(early)
    for optimizer, model in ((plain, a), (early, b)):
        optimizer.add_param_group({"params": [model.first.weight], "lr": 0.1})
    copied = copy.deepcopy(early)
    assert copied._in_backward is None
    for step in range(2):
        loss_of(a, step).backward()
        plain.step()
        plain.zero_grad()
        a.zero_grad()
        loss_of(b, step).backward()
        b.zero_grad()
    assert same(a, b)
    handle.remove()
    handle.remove()
    loss_of(b, 0).backward()
    assert b.middle.weight.grad is not None
    step_in_backward(early)


def test_what_changes_between_backwards_and_inside_of_one() -> None:
    """Groups are looked at once a backward, or where a parameter is new."""
    a, b = pair(Tied)
    plain, early = (
        optim.SGD([{"params": m.middle.parameters()}, {"params": m.first.parameters()}], lr=0.1)
        for m in (a, b)
    )
    step_in_backward(early)

    def step(seed: int) -> None:
        loss_of(a, seed).backward()
        plain.step()
        a.zero_grad()
        loss_of(b, seed).backward()
        b.last.bias.grad = None
        assert same(a, b)

    step(0)
    for optimizer in (plain, early):
        optimizer.param_groups[0]["momentum"] = 0.9
    step(1)
    step(2)
    for optimizer in (plain, early):
        optimizer.state.clear()
    step(3)
    for wanted in (False, True):
        for model in (a, b):
            model.middle.weight.requires_grad_(wanted)
        step(4)
    plain.add_param_group({"params": [a.last.bias], "lr": 0.5})

    def add(grad: Tensor) -> None:
        handle.remove()
        early.add_param_group({"params": [b.last.bias], "lr": 0.5})

    handle = b.last.bias.register_hook(add)
    step(5)
    step(6)


def test_bad_arguments() -> None:
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match=r"step_in_backward: expected an optimizer of memkit.optim, got SGD"):
        step_in_backward(torch.optim.SGD(params))  # type: ignore[arg-type]
    optimizer = optim.SGD(params)
    with pytest.raises(TypeError, match="step_in_backward: expected max_norm to be a number, got str"):
        step_in_backward(optimizer, max_norm="a")
    with pytest.raises(ValueError, match="step_in_backward: expected max_norm above 0 or None, got 0"):
        step_in_backward(optimizer, max_norm=0)
    step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="step_in_backward: expected an optimizer without it"):
        step_in_backward(optimizer)


def test_one_optimizer_a_parameter() -> None:
    """A second one would find no gradient."""
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = optim.SGD(layer.parameters()), optim.AdamW([*other.parameters(), layer.bias])
    handle = step_in_backward(first)
    expected = (
        r"step_in_backward: expected parameters that no other optimizer steps in backward, got one of \[2\]"
    )
    with pytest.raises(RuntimeError, match=expected):
        step_in_backward(second)
    assert not other.weight._post_accumulate_grad_hooks
    third = optim.SGD(other.parameters())
    added = step_in_backward(third)
    with pytest.raises(RuntimeError, match=expected):
        third.add_param_group({"params": [layer.bias]})
    assert len(third.param_groups) == 1
    handle.remove()
    added.remove()
    step_in_backward(second)


def test_gradient_that_a_hook_has_freed() -> None:
    layer = nn.Linear(2, 2, bias=False)
    before = layer.weight.detach().clone()

    def free(param: Tensor) -> None:
        param.grad = None

    layer.weight.register_post_accumulate_grad_hook(free)
    optimizer = optim.SGD(layer.parameters())
    step_in_backward(optimizer, max_norm=1.0)
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight, before)


def test_sparse_gradient_raises_and_goes() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = optim.AdamW(table.parameters())
    step_in_backward(optimizer)
    before = table.weight.detach().clone()
    with pytest.raises(RuntimeError, match="AdamW: expected dense gradients"):
        table(torch.tensor([1])).sum().backward()
    assert torch.equal(table.weight, before)
    assert table.weight.grad is None


@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
@pytest.mark.parametrize("engine", ["DDP", "FSDP", "fully_shard"])
def test_gradients_that_are_reduced_after_they_arrive(engine: str) -> None:
    """Refused before a weight is written: each rank would step by its own."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: nn.Module = nn.Linear(8, 8)
        if engine == "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        elif engine == "FSDP":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            fully_shard(model)
        handle = step_in_backward(optim.SGD(model.parameters(), lr=0.1))
        before = [p.detach().clone() for p in model.parameters()]
        if engine == "fully_shard":  # hands them over when they are reduced
            loss_of(model, 0).backward()
            assert all(p.grad is None for p in model.parameters())
        else:
            with pytest.raises(
                RuntimeError, match="step_in_backward: expected a gradient that is whole when it"
            ):
                loss_of(model, 0).backward()
            assert all(map(torch.equal, model.parameters(), before))
        handle.remove()
    finally:
        dist.destroy_process_group()


def test_parameters_and_optimizer_die_together() -> None:
    """What holds a parameter's hooks is hidden from the garbage collector."""
    model = nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters())
    step_in_backward(optimizer)
    model(torch.ones(2, 4)).sum().backward()
    gone = weakref.ref(model.weight), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_an_optimizer_that_was_freed_leaves_gradients_and_says_so() -> None:
    model = nn.Linear(4, 4)
    handle = step_in_backward(optim.AdamW(model.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is None  # the handle keeps it
    del handle
    gc.collect()
    with pytest.warns(UserWarning, match="step_in_backward: the optimizer was freed"):
        model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    before = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 4)).sum().backward()  # once
    assert torch.equal(model.weight, before)
    optimizer = optim.AdamW(model.parameters())
    step_in_backward(optimizer)
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    assert not torch.equal(model.weight, before)
