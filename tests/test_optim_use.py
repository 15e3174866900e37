"""What the optimizers of PyTorch do, and what they refuse."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import (
    RULES,
    distance,
    each_rule,
    equal,
    gradients,
    parameters,
    train,
)
from torch import Tensor, nn

import memkit
from memkit import optim

pytestmark = pytest.mark.usefixtures("repeatable")  # tensors are small


def test_groups_schedulers_and_closures() -> None:
    a, b = parameters(), parameters()
    results = []
    for params, make in ((a, optim.AdamW), (b, lambda g, **o: torch.optim.AdamW(g, fused=True, **o))):
        optimizer = make([{"params": params[:2], "lr": 1e-2}, {"params": params[2:4]}], lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        losses = []
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": params[4:], "weight_decay": 0.5})

            def closure(step: int = step, params: list[nn.Parameter] = params) -> int:
                assert torch.is_grad_enabled()
                gradients(params, step)
                return step

            losses.append(optimizer.step(closure))
            scheduler.step()
        results.append(losses)
    assert results[0] == results[1] == list(range(6))
    assert distance(a, b) <= 4


def test_missing_gradients() -> None:
    a, b = parameters(), parameters()
    ours, theirs = optim.AdamW(a), torch.optim.AdamW(b, fused=True)
    for step in range(4):
        for params, optimizer in ((a, ours), (b, theirs)):
            gradients(params, step)
            for i, p in enumerate(params):
                if (i + step) % 3 == 0:
                    p.grad = None
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in params)
    assert distance(a, b) <= 4
    assert [ours.state[p]["step"].item() for p in a] == [theirs.state[p]["step"].item() for p in b]
    ours.step()  # without any gradient


def test_frozen_parameters_take_no_state_until_they_thaw() -> None:
    p, q = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10), requires_grad=False)
    optimizer = optim.AdamW([p, q])
    p.grad = torch.ones(10)
    optimizer.step()
    assert q not in optimizer.state
    q.requires_grad_()
    q.grad = torch.ones(10)
    optimizer.step()
    assert optimizer.state[q]["step"] == 1
    assert optimizer.state[p]["step"] == 2
    assert (q != 1).all()


def test_state_that_was_cleared_starts_again() -> None:
    a, b = parameters(), parameters()
    ours, theirs = optim.AdamW(a), torch.optim.AdamW(b, fused=True)
    for params, optimizer in ((a, ours), (b, theirs)):
        train(optimizer, params, 2)
        optimizer.state.clear()
        train(optimizer, params, 2)
    assert distance(a, b) <= 4


def test_layouts() -> None:
    """Parameters and gradients of any strides; an expanded gradient; views of one memory."""
    base = torch.randn(6, 8, 3, 3)
    makers: tuple[Callable[[], Tensor], ...] = (
        lambda: base.clone().to(memory_format=torch.channels_last),
        lambda: base[0, 0].clone().t(),
        lambda: torch.arange(40.0)[::2],
        lambda: torch.arange(33.0)[1:],
        lambda: torch.arange(12.0).view(3, 4).t()[::2],
    )
    for make in makers:
        a, b = nn.Parameter(make()), nn.Parameter(make())
        assert a.stride() == make().stride()
        for grad in (torch.randn(a.shape), torch.ones(()).expand(a.shape), torch.randn_like(a)):
            for state_dtype in (None, "8bit"):
                ours, theirs = optim.AdamW([a], state_dtype=state_dtype), torch.optim.AdamW([b])
                for _ in range(2):
                    a.grad, b.grad = grad, grad.clone()
                    ours.step()
                    theirs.step()
                assert torch.allclose(a, b, rtol=2e-6, atol=1e-6)


def test_what_lies_beside_a_view_stays() -> None:
    memory = torch.zeros(40)
    p = nn.Parameter(memory[1::2])
    p.grad = torch.ones(20)
    optim.AdamW([p]).step()
    assert (memory[::2] == 0).all()
    assert (memory[1::2] != 0).all()


def test_dtypes_in_one_group() -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    mixed = [nn.Parameter(torch.ones(5000, dtype=d)) for d in dtypes]
    for state_dtype in (None, torch.bfloat16, "8bit", torch.float32):
        optimizer = optim.AdamW(mixed, state_dtype=state_dtype)
        for p in mixed:
            p.data.fill_(1)
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        for p in mixed:
            assert torch.allclose(p.double(), torch.full((5000,), 1 * (1 - 1e-5) - 1e-3).double(), rtol=8e-3)
        kept = optimizer.state[mixed[1]]["exp_avg"].dtype
        assert kept is torch.float64


def test_tensor_learning_rate_and_changed_options() -> None:
    a, b = parameters(), parameters()
    ours, theirs = (
        optim.AdamW(a, lr=torch.tensor(1e-2)),
        torch.optim.AdamW(b, lr=torch.tensor(1e-2), fused=True),
    )
    for step in range(4):
        for params, optimizer in ((a, ours), (b, theirs)):
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            train(optimizer, params, 1, start=step)
    assert distance(a, b) <= 4


def test_grad_scaler() -> None:
    a, b = parameters(), parameters()
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    ours, theirs = optim.AdamW(a, lr=1e-2), torch.optim.AdamW(b, lr=1e-2, fused=True)
    for step in range(6):
        for params, optimizer, scaler in ((a, ours, scalers[0]), (b, theirs, scalers[1])):
            gradients(params, step)
            for p in params:
                p.grad *= scaler.scale(torch.ones(()))
            if step == 2:
                params[1].grad[7] = math.inf
            if step == 4:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        for p, q in zip(a, b, strict=True):
            assert torch.allclose(p.grad, q.grad, equal_nan=True)  # unscaled, as PyTorch leaves them
    assert distance(a, b) <= 4
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert ours.state[a[0]]["step"] == 5
    assert not hasattr(ours, "grad_scale")


def test_versions_tell_autograd() -> None:
    p = nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    optim.SGD([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_pool() -> None:
    with memkit.Pool("4MiB") as pool:
        a, b = parameters(), parameters()
        held, free = optim.AdamW(a, state_dtype="8bit", pool=pool), optim.AdamW(b, state_dtype="8bit")
        train(held, a, 3)
        train(free, b, 3)
        assert equal(a, b)
        assert pool.stats().live_blocks == 3
        assert pool.holders()[0][0] == "AdamW"
        copied = copy.deepcopy(held)
        assert copied.param_groups[0]["state_dtype"] == "8bit"
        del held
        assert pool.stats().live_blocks == 0


@each_rule
def test_hooks_and_profiler_names(rule: str) -> None:
    make, _, options = RULES[rule]
    params = parameters()
    optimizer = make(params, **options)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, s: seen.append(type(s["state"].get(0, {}).get("step")))
    )
    train(optimizer, params, 1)
    assert seen == ["before", "after"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[2] in (Tensor, type(None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.AdamW(p, lr=-1.0), "AdamW: expected lr of at least 0, got -1"),
        (lambda p: optim.AdamW(p, lr=torch.ones(2)), "AdamW: expected lr of one element"),
        (lambda p: optim.AdamW(p, betas=(1.0, 0.9)), "AdamW: expected betas"),
        (lambda p: optim.AdamW(p, betas=0.9), "AdamW: expected betas of two numbers, got 0.9"),
        (lambda p: optim.AdamW([{"params": p, "betas": (0.9,)}]), "AdamW: expected betas of two numbers"),
        (lambda p: optim.AdamW(p, eps=-1.0), "AdamW: expected eps"),
        (lambda p: optim.AdamW(p, weight_decay=math.nan), "AdamW: expected weight_decay"),
        (lambda p: optim.AdamW(p, state_dtype="4bit"), "AdamW: expected state_dtype None, .* got '4bit'"),
        (lambda p: optim.AdamW(p, state_dtype=torch.float16), "AdamW: expected state_dtype"),
        (lambda p: optim.AdamW(p, block_size=64.0), "AdamW: expected block_size 64, 128 or 256, got 64.0"),
        (lambda p: optim.AdamW(p, block_size=100), "AdamW: expected block_size 64, 128 or 256, got 100"),
        (lambda p: optim.AdamW(p, amsgrad=True, state_dtype="8bit"), "AdamW: expected amsgrad without"),
        (lambda p: optim.AdamW([{"params": p, "eps": -2.0}]), "AdamW: expected eps"),
        (lambda p: optim.SGD(p, momentum=-0.5), "SGD: expected momentum"),
        (lambda p: optim.SGD(p, nesterov=True), "SGD: expected with nesterov"),
    ],
)
def test_bad_options(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters())


def test_bad_types() -> None:
    with pytest.raises(TypeError, match=r"AdamW: expected a memkit.Pool or None, got str"):
        optim.AdamW(parameters(), pool="1MiB")
    with pytest.raises(TypeError, match=r"SGD: expected parameters of float32, .* got torch.complex64"):
        optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    optimizer = optim.AdamW(parameters())
    with pytest.raises(TypeError, match="AdamW: expected parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


def test_bad_gradients_write_nothing() -> None:
    params = parameters()
    optimizer = optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    train(optimizer, params, 1)
    before = [p.detach().clone() for p in params]
    gradients(params, 1)
    params[3].grad = torch.randn(64, 80).to_sparse()
    with pytest.raises(RuntimeError, match="AdamW: expected dense gradients, got a Sparse one"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert optimizer.state[params[0]]["step"] == 1
    train(optimizer, params, 1)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_infinite_weights_stay_without_decay(name: str) -> None:
    found = []
    for module in (optim, torch.optim):
        param = nn.Parameter(torch.tensor([1.0, math.inf, -math.inf]))
        param.grad = torch.ones(3)
        getattr(module, name)([param], lr=0.1, weight_decay=0).step()
        found.append(param.detach())
    torch.testing.assert_close(*found)
