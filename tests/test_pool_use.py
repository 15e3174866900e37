"""pool.use(): every CPU tensor that the thread makes, ops and backward included, lies in the pool."""

import asyncio
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from pool_cases import after_a_thread, in_a_child, in_threads, inside, resident
from torch import nn

from memkit import _C, Pool, PoolExhausted
from memkit.memory import measure

POOL = "64MiB"


def sparse(x):
    return (
        (x.reshape(8, -1).relu().to_sparse() @ torch.ones(x.numel() // 8, 3))
        .to_sparse()
        .coalesce()
        .to_dense()
    )


def attention(x):
    q = x.reshape(1, 2, 16, -1)
    return F.scaled_dot_product_attention(q, q, q)


torch.manual_seed(0)
CONV, LSTM = nn.Conv2d(2, 4, 3), nn.LSTM(16, 8, 2)
BF16 = nn.Linear(16, 16, dtype=torch.bfloat16)
OPS = {
    "gelu": lambda x: F.gelu(x),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "linear bf16": lambda x: F.gelu(BF16(x.reshape(-1, 16).bfloat16())).float(),
    "conv": lambda x: CONV(x.reshape(1, 2, 16, 16)),
    "lstm": lambda x: LSTM(x.reshape(8, 4, 16))[0],
    "sdpa": attention,
    "sparse": sparse,
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2),
    "matmul": lambda x: x.reshape(16, 32) @ x.reshape(32, 16),
    "sort": lambda x: torch.sort(x)[0],
    "svd": lambda x: torch.linalg.svdvals(x.reshape(16, 32)),
    "cat": lambda x: torch.cat([x, x * 2]).cumsum(0),
    "embedding": lambda x: F.embedding(torch.arange(5), x.reshape(16, 32)),
    "norm": lambda x: F.layer_norm(x.reshape(16, 32), (32,)),
    "dropout": lambda x: F.dropout(x, 0.5) * 0 + x,
    "index": lambda x: x[x > 0] * 1.0,
    "mkldnn": lambda x: x.reshape(16, 32).to_mkldnn().to_dense() * 1.0 if not x.requires_grad else x * 1.0,
}


@pytest.mark.parametrize("name", OPS)
def test_results_and_gradients(name, pool):
    op = OPS[name]
    stock = torch.randn(512, generator=torch.Generator().manual_seed(1), requires_grad=True)
    mine = stock.detach().clone().requires_grad_()
    with torch.no_grad():
        op(stock)
    expected = op(stock)
    expected.square().sum().backward()
    with pool.use():
        got = op(mine)
        got.square().sum().backward()
    assert inside(pool, got)
    assert inside(pool, mine.grad)
    assert torch.equal(got, expected)
    assert torch.equal(mine.grad, stock.grad)
    for module in (CONV, LSTM, BF16):
        module.zero_grad()
    del got, mine
    gc.collect()


def test_outside_nothing_changes(pool):
    assert not inside(pool, torch.ones(10))
    with pool.use() as same:
        assert same is pool
        assert inside(pool, torch.ones(10))
        kept = torch.ones(10)
    assert not inside(pool, torch.ones(10))
    assert inside(pool, kept)
    assert (kept + 1 == 2).all()


def test_made_inside_freed_outside_and_the_reverse(pool):
    outer = torch.randn(1000)
    with pool.use():
        made = outer * 2
        del outer
    assert pool.stats().live_blocks == 1
    del made
    assert pool.stats().live_blocks == 0


def test_freed_after_the_pool():
    pool = Pool("1MiB")
    with pool.use():
        made = torch.arange(1000.0)
    pool.close()
    assert made[999] == 999
    del pool
    gc.collect()
    made.resize_(5000)
    assert made[999] == 999


def test_closed_inside():
    pool = Pool("1MiB")
    with pool.use():
        pool.close()
        with pytest.raises(RuntimeError, match="the pool is closed"):
            torch.empty(10)
    assert torch.ones(3).sum() == 3


def test_nested_pools(pool):
    other = Pool("8MiB")
    with pool.use():
        with other.use():
            assert inside(other, torch.ones(3))
            with pool.use():
                assert inside(pool, torch.ones(3))
            assert inside(other, torch.ones(3))
        assert inside(pool, torch.ones(3))


def test_left_in_the_wrong_order(pool):
    other = Pool("1MiB")
    first, second = pool.use(), other.use()
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="innermost use"):
        first.__exit__(None, None, None)
    assert inside(other, torch.ones(3))
    second.__exit__(None, None, None)
    assert not inside(pool, torch.ones(3))
    for one in (first, second):
        with pytest.raises(RuntimeError, match="left before"):
            one.__exit__(None, None, None)


def test_generators_that_end_in_the_wrong_order(pool):
    def within(one):
        with one.use():
            yield

    other = Pool("1MiB")
    first, second = within(pool), within(other)
    next(first), next(second)
    with pytest.raises(RuntimeError, match="innermost use"):
        first.close()
    assert inside(other, torch.ones(3))
    second.close()
    assert not inside(other, torch.ones(3))


def test_left_by_another_thread(pool):
    use, failed = pool.use(), []
    use.__enter__()

    def leave():
        try:
            use.__exit__(GeneratorExit, GeneratorExit(), None)
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "got one of another thread" in failed[0]
    assert inside(pool, torch.ones(3))
    use.__exit__(None, None, None)
    assert not inside(pool, torch.ones(3))


def test_tasks_that_take_turns(pool):
    """Neither's use() goes on after both have ended."""
    other = Pool("1MiB")

    async def work(one, seconds):
        with one.use():
            await asyncio.sleep(seconds)

    async def both():
        return await asyncio.gather(work(pool, 0.05), work(other, 0.2), return_exceptions=True)

    found = asyncio.run(both())
    assert "innermost use" in str(found[0])
    assert found[1] is None
    assert not any(inside(each, torch.ones(3)) for each in (pool, other))


def test_an_error_inside(pool):
    with pytest.raises(ZeroDivisionError), pool.use():
        _ = 1 / 0
    assert not inside(pool, torch.ones(3))


def test_threads(pool):
    def work(seed):
        mine = Pool("16MiB") if seed % 2 else pool
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
        for _ in range(50):
            with mine.use():
                x = torch.full((16, 32), 1.0 + seed)
                assert inside(mine, x)
                model(x).sum().backward()
            assert not inside(mine, torch.ones(2))

    in_threads(work, 8)


def test_other_threads_go_on_as_before(pool):
    seen = []
    with pool.use():
        in_threads(lambda _: seen.append(torch.ones(10)), 1)
    assert not inside(pool, seen[0])


def test_exhausted_in_an_op_and_in_backward():
    pool = Pool("1MiB", grow=False)
    with pytest.raises(PoolExhausted, match=r"asked for 4\.00 MiB") as caught, pool.use():
        torch.randn(1 << 20)
    assert caught.value.asked == 4 << 20

    weight = torch.ones(4, requires_grad=True)
    total = (weight.repeat(200_000) * 2).sum()
    with pytest.raises(PoolExhausted), pool.use():
        total.backward()
    gc.collect()
    assert torch.ones(2).sum() == 2
    with pool.use():
        assert torch.ones(2).sum() == 2


def test_zero_bytes(pool):
    with pool.use():
        assert torch.empty(0).numel() == 0
    assert pool.stats().allocations == 0


def test_resize_inside(pool):
    with pool.use():
        made = torch.ones(10)
        made.resize_(10_000)
        assert inside(pool, made)
    made.resize_(100_000)
    assert not inside(pool, made)
    assert (made[:10] == 1).all()
    assert pool.stats().live_blocks == 0


def test_measure_is_exact(pool):
    x = torch.ones(1000)
    with pool.use():
        got = measure(lambda: x.exp().neg().abs())
    assert (got.peak, got.live, got.allocations) == (8000, 4000, 3)

    def within():
        with pool.use():
            return x.exp().neg().abs()

    again = measure(within)
    assert (again.peak, again.live, again.allocations) == (8000, 4000, 3)
    weight = torch.ones(1000, requires_grad=True)

    def step():
        with pool.use():
            weight.exp().sum().backward()

    stock = measure(lambda: weight.exp().sum().backward())
    weight.grad = None
    mine = measure(step)
    assert (mine.peak, mine.live, mine.saved) == (stock.peak, stock.live, stock.saved)
    assert measure(lambda: pool.empty(1000)).peak == 0  # not torch's allocator


def test_tap_counts_a_release_after_close():
    pool = Pool("1MiB")
    tap = _C.Tap()
    with pool.use():
        made = torch.ones(100)
    pool.close()
    del made
    assert tap.read() == (0, 400, 1)
    tap.stop()


def test_tags(pool):
    with pool.use(), pool.tag("activations"):
        kept = torch.ones(250)
    assert pool.holders() == [("activations", 1000, 1)]
    del kept


def test_debug_mode():
    pool = Pool("16MiB", debug=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    expected = model(x)
    with pool.use():
        got = model(x)
        got.sum().backward()
        assert torch.empty(10).isnan().all()
    assert torch.equal(got, expected)
    pool.check()


def test_training(pool):
    def train(use):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(8):
            data, target = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
            optimizer.zero_grad()
            with use():
                loss = F.cross_entropy(model(data), target)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    from contextlib import nullcontext

    assert train(pool.use) == train(nullcontext)
    gc.collect()
    assert pool.stats().growths == 0


def test_resident_memory_stays_flat(pool):
    def churn(n):
        with pool.use():
            for i in range(n):
                torch.empty(i % 3000 + 1)

    churn(10_000)
    before = resident()
    churn(100_000)
    assert resident() - before < 2 << 20


def test_fork(pool):
    with pool.use():
        held = [torch.ones(1000)]

        def work():  # as a DataLoader's worker does: from torch's allocator
            assert torch.ones(10).sum() == 10
            held.clear()
            with pytest.raises(RuntimeError, match="made before a fork"), pool.use():
                pass

        in_a_child(work)
    assert held[0].sum() == 1000
    held.clear()


def check_new_tensors(count):
    gc.collect()
    held = [torch.full((1000,), float(i)) for i in range(count)]
    assert all(bool((t == i).all()) for i, t in enumerate(held))


def test_the_thread_keeps_a_pool_that_nobody_left():
    def work(_):
        Pool("16MiB").use().__enter__()
        check_new_tensors(100)

    in_threads(work, 1)


def test_the_thread_keeps_a_replay_that_nobody_left():
    def work(_):
        pool = Pool("16MiB")
        plan = pool.record(lambda: [torch.ones(1000) for _ in range(100)])
        pool.replay(plan).__enter__()
        del pool, plan
        check_new_tensors(200)

    in_threads(work, 1)


def test_a_thread_that_ends_lets_the_pool_go():
    def work():
        pool = Pool("1MiB")
        numbers.append(pool._id)
        pool.use().__enter__()

    def gone():
        gc.collect()
        try:
            torch.ops.memkit.pool_empty(numbers[0], [3])
        except ValueError as error:
            return "living pool" in str(error)
        return False

    numbers = []
    assert after_a_thread(work, gone)


def test_one_object_entered_twice(pool):
    use = pool.use()
    with use:
        with use:
            assert inside(pool, torch.ones(3))
        assert inside(pool, torch.ones(3))
    assert not inside(pool, torch.ones(3))
    nested = pool.use()
    with nested, Pool("1MiB").use(), nested:
        pass
    assert not inside(pool, torch.ones(3))


def test_a_closed_pool_is_not_entered():
    pool = Pool("1MiB")
    plan = pool.record(lambda: None)
    pool.close()
    for entering in (pool.use(), pool.replay(plan)):
        with pytest.raises(RuntimeError, match="expected an open pool"):
            entering.__enter__()
    assert torch.ones(3).sum() == 3
