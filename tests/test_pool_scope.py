"""pool.scope(): bump allocation that ends with its `with`, or says which tensor did not."""

import gc
import threading

import pytest
import torch
from pool_cases import after_a_thread, in_threads

from memkit import Pool, PoolExhausted


def test_tensors_lie_one_behind_the_other(pool):
    with pool.scope() as same:
        assert same is pool
        a, b, c = pool.empty(16), pool.zeros(100), pool.empty_like(torch.empty(3))
        assert b.data_ptr() - a.data_ptr() == 64
        assert c.data_ptr() - b.data_ptr() == 448
        first = a.data_ptr()
        del a, b, c
        again = pool.empty(1)
        assert again.data_ptr() > first  # memory comes back at the end
        del again
    assert pool.stats().live_blocks == 0
    with pool.scope():
        assert pool.empty(4).data_ptr() == first


def test_one_object_in_two_threads(pool):
    scope, both, first_left = pool.scope(), threading.Barrier(2), threading.Event()

    def work(number):
        if number == 1:
            first_in.wait()
        with scope:
            first_in.set()
            both.wait()
            pool.empty(16)
            if number == 1:
                first_left.wait(10)
        first_left.set()

    first_in = threading.Event()
    in_threads(work, 2)
    assert pool.stats().allocated == 0
    with pytest.raises(RuntimeError, match="expected a scope that this thread is in"):
        scope.__exit__(None, None, None)


def test_a_living_tensor_is_named(pool):
    kept = []

    def keep():
        kept.append(pool.full((10,), 3.0, tag="mask"))
        kept.append(pool.empty(2000, dtype=torch.uint8)[5:])

    with pytest.raises(RuntimeError) as caught, pool.scope():
        keep()
    text = str(caught.value)
    assert text.startswith(
        "Pool.scope: expected no living tensor of the scope at its end, got 2: "
        "mask, (10,) torch.float32, 40 B; untagged, (1995,) torch.uint8 and (2000,) torch.uint8, 1.9"
    )
    # What lives stays valid, and in nobody's way.
    with pool.scope():
        other = pool.full((1000,), 9.0)
        assert (other == 9).all()
        del other
    assert (kept[0] == 3).all()
    kept.clear()


def test_many_living_tensors(pool):
    kept = []
    with pytest.raises(RuntimeError, match=r"got 1000: .*, \.\.\."), pool.scope():
        kept.extend(pool.empty(1) for _ in range(1000))
    kept.clear()


def test_debug_names_the_stack():
    pool = Pool("1MiB", debug=True)
    kept = []

    def culprit():
        kept.append(pool.empty(3))

    with (
        pytest.raises(RuntimeError, match=r"innermost first\)\n  .*test_pool_scope.py:\d+ in culprit"),
        pool.scope(),
    ):
        culprit()


def test_an_error_inside_is_passed_on(pool):
    kept = []

    def fail():
        kept.append(pool.empty(3))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), pool.scope():
        fail()
    kept.clear()
    gc.collect()
    with pool.scope():
        assert pool.empty(3).numel() == 3


def test_nested(pool):
    with pool.scope():
        outer = pool.full((10,), 1.0)
        for _ in range(3):
            with pool.scope():
                inner = pool.full((1000,), 2.0)
                address = inner.data_ptr()
                del inner
        after = pool.empty(1)
        assert after.data_ptr() == address  # the inner scope's memory
        assert (outer == 1).all()
        del outer, after


def test_an_inner_survivor_belongs_to_the_outer_scope(pool):
    with pool.scope():
        with pytest.raises(RuntimeError, match="got 1"), pool.scope():
            kept = pool.empty(3)
        del kept


def test_outer_left_first(pool):
    outer, inner = pool.scope(), pool.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="innermost scope"):
        outer.__exit__(None, None, None)
    with pool.scope(), pytest.raises(RuntimeError, match="one that has ended"):
        inner.__exit__(None, None, None)
    assert pool.stats().live_blocks == 0


def test_two_pools_interleaved(pool):
    other = Pool("1MiB")
    first, second = pool.scope(), other.scope()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    a = other.empty(16)
    b = other.empty(16)
    assert b.data_ptr() - a.data_ptr() == 64
    del a, b
    second.__exit__(None, None, None)


def test_scopes_are_the_threads(pool):
    def work(seed):
        for _ in range(100):
            with pool.scope():
                held = [pool.full((50,), float(seed + i)) for i in range(20)]
                assert all(t[0] == t[49] == seed + i for i, t in enumerate(held))
                del held

    kept = []
    with pool.scope():
        mine = pool.full((50,), 7.0)
        in_threads(work, 8)
        in_threads(lambda _: kept.append(pool.empty(1)), 1)  # outside the scope: it may stay
        assert mine.eq(7).all()
        del mine
    kept.clear()


def test_freed_by_another_thread(pool):
    with pool.scope():
        held = [pool.empty(3)]
        in_threads(lambda _: held.clear(), 1)


def test_beyond_the_region_and_the_pool():
    pool = Pool("1MiB", grow=False)
    for _ in range(3):  # regions are merged: a steady state
        with pool.scope():
            held = [pool.empty(30_000, dtype=torch.uint8) for _ in range(20)]
            del held
    with pytest.raises(PoolExhausted, match=r"asked for 2\.00 MiB"), pool.scope():
        pool.empty(2 << 20, dtype=torch.uint8)
    assert pool.stats().live_blocks == 0


def test_autograd_inside(pool):
    weight = torch.randn(20, 20, requires_grad=True)
    expected = torch.autograd.grad((weight @ weight).sin().sum(), weight)[0]
    with pool.use(), pool.scope():
        got = torch.autograd.grad((weight @ weight).sin().sum(), weight)[0]
        same = torch.equal(got, expected)
        del got
    assert same


def test_after_close():
    pool = Pool("1MiB")
    pool.close()
    with pytest.raises(RuntimeError, match="expected an open pool"), pool.scope():
        pass


def test_closed_inside():
    pool = Pool("1MiB")
    with pool.scope():
        pool.empty(3)
        pool.close()
    gc.collect()
    assert pool.stats().reserved == 0


def test_resident_memory_stays_flat(pool):
    for _ in range(20_000):
        with pool.scope():
            pool.empty(1000)
    assert pool.stats().growths == 0


def test_a_scope_that_nobody_left_ends_with_the_outer_one():
    pool = Pool("4MiB")

    def interrupted():
        pool.scope().__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pool.scope():
        interrupted()
    for _ in range(20_000):
        pool.empty(1000)
    assert pool.stats().growths == 0


def test_what_lives_in_scopes_that_nobody_left_stays():
    pool = Pool("4MiB")
    kept = []

    def careless():
        pool.scope().__enter__()
        kept.append(pool.full((1000,), 3.0))

    with pytest.raises(RuntimeError, match="innermost scope"), pool.scope():
        careless()
    with pool.scope():
        pool.full((1000,), 4.0)
    assert kept.pop().eq(3).all()
    assert pool.stats().live_blocks == 0


def test_one_object_entered_twice(pool):
    scope = pool.scope()
    with scope:
        a = pool.full((10,), 1.0)
        with scope:
            pool.empty(10)
        assert a.eq(1).all()
        del a
    assert pool.stats().live_blocks == 0


def test_a_thread_that_ends_leaves_its_scopes(pool):
    def work():
        pool.tag("leaked").__enter__()
        pool.scope().__enter__()
        pool.empty(10)

    assert after_a_thread(work, lambda: pool.stats().live_blocks == 0)
