"""pool.use() on CUDA: what torch allocates, on which streams, from which threads, and what graphs record."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from pool_cases import in_threads, inside
from torch import nn

from memkit import Pool, PoolExhausted
from memkit.memory import measure, timeline

pytestmark = pytest.mark.cuda
MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("64MiB", device="cuda") as pool:
        yield pool
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # made on the streams of a test, and kept for them
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
            with pytest.raises(PoolExhausted, match=r"Pool: asked for 40.* must not grow"), pool.use():
                torch.empty(10 * MIB, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"^of another$"):
            fail_within(pool, torch.OutOfMemoryError("of another"))
        with pool.use():
            assert inside(pool, torch.empty(MIB, device="cuda"))


def test_exhaustion_in_backward_is_raised_where_it_was_called() -> None:
    with Pool("24MiB", device="cuda", grow=False) as pool:
        weight = torch.ones(MIB, device="cuda", requires_grad=True)
        with pool.use():
            out = weight * 2 * torch.ones(3 * MIB // 2, device="cuda").sum()
            held = torch.empty(27 * MIB // 8, device="cuda")
            with pytest.raises(torch.OutOfMemoryError, match="Pool: asked for"):
                torch.autograd.grad((out * out).sum(), weight)
            del held
        del out
        gc.collect()
        torch.cuda.synchronize()
        assert pool.stats().allocated == 0


def test_what_was_freed_serves_another_size() -> None:
    with Pool("64MiB", device="cuda", grow=False) as pool:
        for sizes in ((40, 60, 24, 40), (1, 63, 7)):
            with pool.use():
                for size in sizes:
                    assert inside(pool, torch.empty(size * MIB // 4, device="cuda"))


@pytest.mark.alone
def test_closed_within_it() -> None:
    torch.cuda.empty_cache()
    with Pool("32MiB", device="cuda", grow=False) as pool:
        with pool.use():
            x = torch.full((7 * MIB,), 3.0, device="cuda")
        with pool.use():
            pool.close()
            with pytest.raises(RuntimeError, match="closed"):
                torch.empty(20 * MIB, device="cuda")
    with pytest.raises(RuntimeError, match="closed"), pool.use():
        pass
    assert x.eq(3).all()
    free = torch.cuda.mem_get_info()[0]
    del x, pool
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free >= 28 * MIB


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


def test_who_began_last_allocates(pool: Pool) -> None:
    theirs = torch.cuda.MemPool()
    with pool.use():
        with torch.cuda.use_mem_pool(theirs):
            x = torch.empty(1000, device="cuda")
            with pool.use():
                assert inside(pool, torch.empty(1000, device="cuda"))
            assert not inside(pool, torch.empty(1000, device="cuda"))
        assert not inside(pool, x)
        assert inside(pool, torch.empty(1000, device="cuda"))
    del x


def test_other_threads_on_other_streams_go_on_as_before(pool: Pool) -> None:
    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            assert not inside(pool, torch.empty(1000, device="cuda"))

    with pool.use():
        in_threads(work, 1)


def test_a_thread_that_ends_within_it(pool: Pool) -> None:
    kept = []

    def work() -> None:
        use = pool.use()
        use.__enter__()
        kept.append(use)  # and is left by nobody
        assert inside(pool, torch.empty(1000, device="cuda"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()  # returns some time before the thread's end
    for _ in range(1000):
        if not inside(pool, torch.empty(1000, device="cuda")):
            return
        time.sleep(0.01)
    pytest.fail("still served")


def test_what_is_resized_within_it(pool: Pool) -> None:
    outside = torch.zeros(10, device="cuda")
    with pool.use():
        within = torch.ones(10, device="cuda")
        outside.resize_(1000)
        assert inside(pool, outside)
        assert outside[:10].eq(0).all()
        nothing = torch.empty(0, device="cuda")
        assert nothing.data_ptr() == 0
    within.resize_(1000)
    assert not inside(pool, within)
    assert within[:10].eq(1).all()


def test_torch_counts_it(pool: Pool) -> None:
    cuda = torch.cuda
    with pool.use():
        torch.empty(1, device="cuda")  # from now on
    before = cuda.memory_stats()
    cuda.reset_peak_memory_stats()
    with pool.use():
        x = torch.empty(MIB, device="cuda")
        assert cuda.memory_allocated() - before["allocated_bytes.all.current"] == 4 * MIB
        y = torch.empty(7, device="cuda")
        del x
    outside = torch.empty(2 * MIB, device="cuda")  # with y the most so far
    after = cuda.memory_stats()

    def change(name: str, kind: str = "current") -> int:
        return after[f"{name}.{kind}"] - before[f"{name}.{kind}"]

    assert change("requested_bytes.all") == 8 * MIB + 28
    assert change("requested_bytes.small_pool") == 28
    assert change("allocated_bytes.all") == change("active_bytes.all") == 8 * MIB + 512
    assert change("allocation.all") == 2
    assert change("allocation.all", "allocated") == 3
    assert change("allocation.all", "freed") == 1
    assert after["requested_bytes.all.peak"] - before["requested_bytes.all.current"] == 8 * MIB + 28
    assert cuda.max_memory_allocated() - before["allocated_bytes.all.current"] == 8 * MIB + 512
    assert cuda.memory_reserved() >= cuda.memory_allocated()
    del outside
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == cuda.memory_allocated()
    del y
    assert cuda.memory_allocated() == before["allocated_bytes.all.current"]


def test_it_is_measured_as_without_it(pool: Pool) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
    data = torch.randn(128, 64, device="cuda")

    def step() -> None:
        model.zero_grad()
        model(data).square().sum().backward()

    step()
    stock = measure(step, device="cuda")
    with pool.use():
        step()
        within = measure(step, device="cuda")
        curve = timeline(step, device="cuda")
    assert (within.saved, within.live) == (stock.saved, stock.live)
    assert abs(within.peak - stock.peak) < 4096  # where backward frees depends on its thread
    assert max(bytes for _, bytes in curve) == within.peak
    model.zero_grad()


def test_snapshots_of_torch_show_it(pool: Pool) -> None:
    with pool.use():
        x = torch.empty(MIB, device="cuda")
    torch.cuda.memory._record_memory_history(context=None)
    try:
        with pool.use():
            y = torch.empty(3000, device="cuda")
            there = y.data_ptr()
            del y
        found = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(None)
    events = [(e["action"], e["size"]) for e in found["device_traces"][x.device.index] if e["addr"] == there]
    assert events == [("alloc", 12000), ("free_requested", 12000), ("free_completed", 12000)]
    blocks = [block for segment in found["segments"] for block in segment["blocks"]]
    assert [b["requested_size"] for b in blocks if b["address"] == x.data_ptr()] == [4 * MIB]


@pytest.mark.alone
def test_growth_takes_what_torch_keeps_unused() -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    kept = torch.empty(free - 64 * MIB, dtype=torch.uint8, device="cuda")
    del kept  # but not the memory: torch's cache has it
    with Pool("1MiB", device="cuda") as pool:
        assert inside(pool, pool.empty(256 * MIB, dtype=torch.uint8))


def test_torch_hears_of_exhaustion() -> None:
    heard = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *what: heard.append(what[1]))
    before = torch.cuda.memory_stats()["num_ooms"]
    with Pool("2MiB", device="cuda", grow=False) as pool:
        with pool.use(), pytest.raises(torch.OutOfMemoryError, match=r"Pool: asked for 4\.00 MiB"):
            torch.empty(MIB, device="cuda")  # of which nothing else is heard if it is caught
        assert heard[-1] == 4 * MIB
        assert torch.cuda.memory_stats()["num_ooms"] - before == 1
        torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["num_ooms"] == 0
        with pytest.raises(torch.OutOfMemoryError, match=r"^of another$"):
            fail_within(pool, torch.OutOfMemoryError("of another"))


def refused_twice(pool: Pool) -> None:
    errors = []
    with pool.use():
        for size in (MIB, 2 * MIB):
            try:
                torch.empty(size, device="cuda")
            except torch.OutOfMemoryError as error:
                errors.append(error)
        with pool.use():
            pass  # of which neither is
        raise errors[0]


def test_each_refusal_is_raised_where_it_belongs() -> None:
    with Pool("2MiB", device="cuda", grow=False) as pool:
        with pytest.raises(PoolExhausted) as first:
            refused_twice(pool)
        assert first.value.asked == 4 * MIB
        assert type(first.value.__cause__) is torch.OutOfMemoryError


def test_raw_memory_counts_beside_it(pool: Pool) -> None:
    with pool.use():
        x = torch.empty(MIB, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    raw = torch.cuda.caching_allocator_alloc(10 * MIB)
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    torch.cuda.caching_allocator_delete(raw)
    assert x.numel() == MIB


def test_pages_of_several_streams_go_back() -> None:
    with Pool("1MiB", device="cuda") as pool:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        made = []
        for i in range(64):
            with torch.cuda.stream(streams[i % 2]), pool.use():
                made.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
        made.clear()
        assert pool.trim() >= 60 * MIB
        assert pool.stats().reserved == MIB
