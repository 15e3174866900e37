"""pool.use() on CUDA: what torch allocates, on which streams, from which threads, and what graphs record."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from pool_cases import in_threads, inside
from torch import nn

from memkit import Pool, PoolExhausted

pytestmark = pytest.mark.cuda
MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("64MiB", device="cuda") as pool:
        yield pool
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # made on the streams of a test, and kept for them
        pool.trim()
        pool.check()
        assert pool.stats().allocated == 0


def test_backward_on_a_side_stream(pool: Pool) -> None:
    side = torch.cuda.Stream()
    weight = torch.ones(1000, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with pool.use(), torch.cuda.stream(side):
        out = weight * 2
        out.sum().backward()
    torch.cuda.synchronize()
    assert inside(pool, out)
    assert inside(pool, weight.grad)
    assert weight.grad.eq(2).all()
    weight.grad = None


def test_threads_of_one_pool(pool: Pool) -> None:
    model = nn.Linear(100, 100).cuda()
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                with pool.use():
                    x = torch.full((100, 100), float(number), device="cuda")
                    got = torch.autograd.grad(model(x).sum(), model.weight)[0]
                assert inside(pool, x)
                assert inside(pool, got)
                assert got.eq(100 * number).all()

    in_threads(work, 4)


def test_threads_of_two_pools_on_one_stream(pool: Pool) -> None:
    entered, done = threading.Event(), threading.Event()
    with Pool("8MiB", device="cuda") as other:

        def work(number: int) -> None:
            if number:
                entered.wait()
                with other.use():
                    assert inside(other, torch.empty(1000, device="cuda"))
                done.set()
            else:
                with pool.use():
                    entered.set()
                    done.wait()
                    assert inside(pool, torch.empty(1000, device="cuda"))

        in_threads(work, 2)
        torch.cuda.empty_cache()


def test_an_exception_ends_it(pool: Pool) -> None:
    with Pool("8MiB", device="cuda") as other:
        with pool.use():
            with contextlib.suppress(ZeroDivisionError), other.use():
                assert inside(other, torch.empty(10, device="cuda"))
                raise ZeroDivisionError
            assert inside(pool, torch.empty(10, device="cuda"))
            with other.use(), pool.use():
                assert inside(pool, torch.empty(10, device="cuda"))
        assert not inside(pool, torch.empty(10, device="cuda"))
        torch.cuda.empty_cache()


@pytest.mark.parametrize("within", [False, True])
def test_what_a_graph_records_is_torchs(pool: Pool, within: bool) -> None:
    static = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def record() -> torch.Tensor:
        with torch.cuda.graph(graph):
            if not within:
                return (static * 2).add(1)
            with pool.use():
                return (static * 2).add(1)

    with pool.use():
        first = torch.empty(1000, device="cuda")
        out = record()
        kept = [torch.full((1000,), 9.0, device="cuda") for _ in range(50)]
    assert inside(pool, first)
    assert all(inside(pool, one) for one in kept)
    assert not inside(pool, out)
    for value in (3.0, 4.0):
        static.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert out.eq(2 * value + 1).all()
    assert all(one.eq(9).all() for one in kept)


def fail_within(pool: Pool, error: Exception) -> None:
    with pool.use():
        torch.empty(1, device="cuda")
        raise error


def test_exhaustion_tells_of_the_pool() -> None:
    with Pool("32MiB", device="cuda", grow=False) as pool:
        for _ in range(2):
            with (
                pytest.raises(torch.OutOfMemoryError, match=r"Pool: asked for 40.* must not grow") as caught,
                pool.use(),
            ):
                torch.empty(10 * MIB, device="cuda")
            assert not isinstance(caught.value, PoolExhausted)
            assert "Tried to allocate 40" in str(caught.value)
        with pytest.raises(torch.OutOfMemoryError, match=r"^of another$"):
            fail_within(pool, torch.OutOfMemoryError("of another"))
        with pool.use():
            assert inside(pool, torch.empty(MIB, device="cuda"))
        torch.cuda.empty_cache()


@pytest.mark.alone
def test_closed_while_torch_caches_its_memory() -> None:
    torch.cuda.empty_cache()
    with Pool("32MiB", device="cuda", grow=False) as pool:
        with pool.use():
            x = torch.full((MIB,), 3.0, device="cuda")
        with pool.use():
            pool.close()
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(20 * MIB, device="cuda")
    with pytest.raises(RuntimeError, match="closed"), pool.use():
        pass
    assert x.eq(3).all()
    free = torch.cuda.mem_get_info()[0]
    del x, pool
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free >= 32 * MIB


def test_torch_keeps_its_order_between_streams(pool: Pool) -> None:
    side = torch.cuda.Stream()
    result = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    with pool.use():
        x = torch.full((MIB,), 1.0, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            result.copy_(x)
        x.record_stream(side)
        del x
        y = torch.full((MIB,), 2.0, device="cuda")
    torch.cuda.synchronize()
    assert result.eq(1).all()
    assert y.eq(2).all()
