"""Plans served from a pool, and what happens where a step does not go by them."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from pool_cases import after_a_thread, in_threads, inside
from torch import Tensor, nn

import memkit
from memkit.plan import Plan, Plans, signature_of


def training(seed: int = 0) -> tuple[nn.Module, Callable[[Tensor], float]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


def batch(n: int = 32) -> Tensor:
    return torch.randn(n, 64, generator=torch.Generator().manual_seed(n))


@pytest.fixture
def pool():
    with memkit.Pool("32MiB", grow=False) as pool:
        yield pool
        pool.check()


def test_every_allocation_of_a_step_gets_its_place_and_the_numbers_are_stocks(pool: memkit.Pool) -> None:
    _, stock = training()
    want = [stock(batch()) for _ in range(5)]
    _, step = training()
    got = [step(batch())]
    plan = pool.record(step, batch())
    assert plan.gap == 0
    x = batch()
    for _ in range(2):
        with pool.replay(plan) as replay:
            step(x)
        assert (replay.served, replay.fell_back, replay.mismatch) == (replay.planned, 0, "")
        assert replay.planned == len(plan.buffers)
    _, step = training()
    got = []
    for i in range(5):
        if i < 2:
            got.append(step(batch()))
        else:
            with pool.replay(plan) as replay:
                got.append(step(x))
            assert replay.fell_back == 0
    assert got == want


def test_the_plan_takes_its_height_and_no_more(pool: memkit.Pool) -> None:
    _, step = training()
    step(batch())
    plan = pool.record(step, batch())
    x = batch()
    pool.reset_peaks()
    with pool.replay(plan):
        step(x)
    assert plan.height <= pool.stats().allocated_peak <= plan.height + 64


def test_memory_goes_back_when_nothing_of_a_step_is_alive(pool: memkit.Pool) -> None:
    def step() -> float:
        return (torch.ones(1000) * 2).sum().item()

    plan = pool.record(step)
    with pool.replay(plan):
        assert step() == 2000
    with pool.replay(pool.record(lambda: torch.ones(7).sum().item())):
        torch.ones(7).sum().item()
    with pool.replay(plan):
        kept = torch.ones(1000)  # alive in the plan's memory, beyond its step
        kept = kept * 3
    before = pool.stats().allocated
    assert kept.eq(3).all()
    del kept
    with pool.replay(pool.record(lambda: None)):
        pass
    assert pool.stats().allocated < before


def test_who_lacks_memory_gets_what_an_idle_plan_holds(pool: memkit.Pool) -> None:
    """Of the pool's 32 MiB: another tensor, one of torch's, a scope's, another plan's, and the system."""

    def step() -> float:
        return torch.ones(6 << 20).sum().item()

    def larger() -> float:
        return torch.ones(7 << 20).sum().item()

    plan, other = pool.record(step), pool.record(larger)
    for lacks in (
        lambda: pool.empty(7 << 20),
        lambda: torch.empty(7 << 20),
        lambda: pool.empty(7 << 20, tag="scoped"),
    ):
        with pool.replay(plan) as replay:
            step()
        assert pool.stats().active >= 24 << 20
        with pool.use(), pool.scope():
            made = lacks()
            assert inside(pool, made)
            with pytest.raises(memkit.PoolExhausted):
                pool.empty(2 << 20)
            del made
    with pool.replay(plan):
        step()
    made = pool.empty(1).resize_(6 << 20)
    assert inside(pool, made)
    del made
    with pool.replay(plan):
        step()
    with pool.replay(other) as replay:
        larger()
    assert replay.fell_back == 0
    pool.close()
    assert pool.stats().reserved == 0


def test_what_outlives_a_step_is_not_overwritten_by_the_next(pool: memkit.Pool) -> None:
    def step(value: float) -> Tensor:
        scratch = torch.full((1000,), value)
        return scratch * 2

    plan = pool.record(step, 1.0)
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for value in (1.0, 2.0, 3.0):
            with pool.replay(plan) as replay:
                kept.append(step(value))
    assert replay.fell_back == 1
    assert "place to be free" in replay.mismatch
    assert repr(replay) == f"PoolReplay(4 allocations planned, 3 served, 1 fell back: {replay.mismatch})"
    for value, tensor in zip((1.0, 2.0, 3.0), kept, strict=True):
        assert tensor.eq(2 * value).all()


def test_a_stray_allocation_leaves_the_rest_of_the_step_to_the_plan(pool: memkit.Pool) -> None:
    _, step = training()
    x = batch()
    step(x)
    plan = pool.record(step, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pool.replay(plan) as replay:
            step(batch())  # which makes the batch in the step
    assert replay.served == replay.planned
    assert replay.fell_back == 1


def test_another_shape_falls_back_is_counted_and_warned_of_once(pool: memkit.Pool) -> None:
    _, step = training()
    step(batch())
    plan = pool.record(step, batch())
    _, other = training()
    other(batch(16))
    want = other(batch(16))
    _, again = training()
    again(batch(16))
    x = batch(16)
    with (
        pytest.warns(
            RuntimeWarning, match="expected 32768 bytes, got 16384.*one shape: record one for each.*Plans"
        ),
        pool.replay(plan) as replay,
    ):
        got = again(x)
    assert got == want
    assert replay.fell_back > 0
    assert replay.served + replay.fell_back >= replay.planned
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pool.replay(plan):
            step(batch(16))


def test_one_plan_a_signature(pool: memkit.Pool) -> None:
    _, step = training()
    step(batch())
    plans = Plans()
    for n in (16, 32):
        plans.add(pool.record(step, batch(n)))
    for n in (32, 16, 16, 32):
        x = batch(n)
        with pool.replay(plans, signature=signature_of(x)) as replay:
            step(x)
        assert (replay.served, replay.fell_back) == (replay.planned, 0)
        assert replay.plan is plans[signature_of(batch(n))]
    with pool.replay(plans, signature=signature_of(batch(8))) as replay:
        step(batch(8))
    assert replay.plan is None
    assert replay.planned == 0


def test_tensors_asked_of_the_pool_are_not_part_of_the_plan(pool: memkit.Pool) -> None:
    plan = pool.record(lambda: torch.ones(100).sum().item())
    with pool.replay(plan) as replay:
        scratch = pool.empty(50)
        torch.ones(100).sum().item()
    assert replay.fell_back == 0
    assert scratch.numel() == 50


def test_other_threads_go_on_as_before(pool: memkit.Pool) -> None:
    plan = pool.record(lambda: torch.ones(100).sum().item())
    with pool.replay(plan) as replay:
        in_threads(lambda _: torch.ones(12345), 1)
        torch.ones(100).sum().item()
    assert replay.fell_back == 0


def test_an_error_in_the_step_passes_and_the_next_step_is_served(pool: memkit.Pool) -> None:
    def step(fail: bool) -> float:
        x = torch.ones(100)
        if fail:
            raise KeyError("mine")
        return (x * 2).sum().item()

    plan = pool.record(step, False)
    with pytest.raises(KeyError, match="mine"), pool.replay(plan):
        step(True)
    with pool.replay(plan) as replay:
        assert step(False) == 200
    assert replay.fell_back == 0


def test_no_room_for_the_plan() -> None:
    plan = memkit.plan.record(lambda: torch.ones(1 << 20).sum().item())
    with memkit.Pool("1MiB", grow=False) as small:
        with pytest.raises(memkit.PoolExhausted), small.replay(plan):
            pass
        small.check()
        assert torch.ones(3).sum() == 3


def test_refusals(pool: memkit.Pool) -> None:
    plan = pool.record(lambda: torch.ones(100).sum().item())
    with pytest.raises(TypeError, match=r"Pool.replay: expected a Plan or Plans, got dict"):
        pool.replay({})  # type: ignore[arg-type]
    with (
        pool.replay(plan),
        pytest.raises(RuntimeError, match="one step of a plan at a time"),
        pool.replay(plan),
    ):
        pass
    other = memkit.Pool("1MiB")
    outer, inner = pool.replay(plan), other.use()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="innermost"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"), pool.replay(plan):
        pass
    with pytest.raises(RuntimeError, match=r"^Pool\.record: expected an open pool, got one that was closed$"):
        pool.record(list)


def test_a_plan_that_is_not_aligned_as_the_pool_is_refused(pool: memkit.Pool) -> None:
    plan = Plan.solve([(100, 0, 2)], alignment=1)
    with pytest.raises(ValueError, match="expected a plan aligned to multiples of 64 bytes, got one to 1"):
        pool.replay(plan)


def test_solve_by_hand_and_replay(pool: memkit.Pool) -> None:
    plan = Plan.solve([(400, 0, 2), (400, 1, 3)])
    with pool.replay(plan) as replay:
        a = torch.empty(100)
        b = torch.empty(100)
        assert abs(a.data_ptr() - b.data_ptr()) >= 400
    assert replay.served == 2


def test_equal_plans_and_the_life_of_the_first(pool: memkit.Pool) -> None:
    first = pool.record(lambda: torch.ones(1000).sum().item())
    second = copy.deepcopy(first)
    assert second == first
    r1, r2 = pool.replay(first), pool.replay(second)
    del r1, first
    gc.collect()
    with r2:
        torch.ones(1000).sum().item()
    assert r2.fell_back == 0
    with pool.replay(second):
        torch.ones(1000).sum().item()


def test_a_thread_that_ends_leaves_its_step(pool: memkit.Pool) -> None:
    plan = pool.record(lambda: torch.ones(1000).sum().item())
    blocks = pool.stats().live_blocks

    def left() -> bool:
        pool.replay(pool.record(lambda: None)).__enter__().__exit__(
            None
        )  # gives memory back that no step is in
        return pool.stats().live_blocks == blocks

    assert after_a_thread(lambda: pool.replay(plan).__enter__(), left)
    with pool.replay(plan) as replay:
        torch.ones(1000).sum().item()
    assert replay.fell_back == 0


def test_one_object_entered_twice_without_a_plan(pool: memkit.Pool) -> None:
    replay = pool.replay(Plans(), signature="unknown")
    with replay, memkit.Pool("1MiB").use(), replay:
        pass
    made = torch.ones(3)
    assert pool.stats().live_blocks == 0
    del made
