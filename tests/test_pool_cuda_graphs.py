"""Pools in CUDA memory and captured graphs: what a graph uses is its own until it dies, and nothing disturbs a capture."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from pool_cases import busy, cuda_pool

import memkit
from memkit import Pool

pytestmark = pytest.mark.cuda
MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    with cuda_pool("8MiB", max="256MiB") as pool:
        yield pool


@pytest.fixture
def small() -> Iterator[Pool]:
    with cuda_pool("8MiB", grow=False) as pool:
        yield pool


def settled(pool: Pool) -> int:
    """Bytes in use, when what died has been seen to."""
    gc.collect()
    torch.cuda.synchronize()
    pool.empty(1)
    torch.cuda.synchronize()
    pool.empty(1)
    return pool.stats().active


def noise(pool: Pool, size: int = 1000, count: int = 50) -> list[torch.Tensor]:
    return [pool.full((size,), 9.0) for _ in range(count)]


def test_side_streams_join_and_leave(pool: Pool) -> None:
    static = torch.zeros(1000, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        x = pool.empty(1000).copy_(static)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            y = pool.empty(1000).copy_(x)
            y.mul_(2)
            z = pool.empty(1000).fill_(1)
            y.add_(z)
            del z
            z = pool.empty(1000).fill_(3)
            y.mul_(z)
            y.record_stream(here)
        here.wait_stream(side)
        x.copy_(y)
        del y, z
    kept = noise(pool)
    for value in (1.0, 5.0):
        static.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert x.eq((2 * value + 1) * 3).all()
    assert all(one.eq(9).all() for one in kept)
    del x, kept, graph
    assert settled(pool) == 0


def test_two_graphs_at_once(pool: Pool) -> None:
    statics = [torch.zeros(1000, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
    for i, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            scratch = pool.empty(1000).copy_(statics[i])
            outs.append(pool.empty(1000).copy_(scratch))
            del scratch
            outs[i].mul_(i + 2)
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.stream(stream):
            graph.capture_end()
    kept = noise(pool)
    for i in range(2):
        statics[i].fill_(7)
    for i in (1, 0):
        graphs[i].replay()
        torch.cuda.synchronize()
    assert [out.unique().item() for out in outs] == [14, 21]
    assert all(one.eq(9).all() for one in kept)
    graphs[0].reset()
    del kept
    kept = noise(pool)
    graphs[1].replay()
    torch.cuda.synchronize()
    assert outs[1].eq(21).all()
    assert all(one.eq(9).all() for one in kept)
    del outs, kept, graphs, graph
    assert settled(pool) == 0


@pytest.mark.parametrize("outside", [False, True])
def test_scopes_in_a_capture(pool: Pool, outside: bool) -> None:
    static = torch.zeros(1000, device="cuda")
    out = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def record(graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.graph(graph), pool.scope():
            x = pool.empty(1000).copy_(static)
            with pool.scope():
                y = pool.empty(1000).copy_(x)
                y.mul_(2)
                x.add_(y)
                del y
            out.copy_(x)
            del x

    if outside:  # whose row goes back at its end, while the graph stays
        with pool.scope():
            before = pool.full((1000,), 3.0)
            record(graph)
            assert before.eq(3).all()
            del before
    else:
        record(graph)
    for value in (1.0, 4.0):
        kept = noise(pool)
        with pool.scope():
            row = noise(pool)
            static.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert out.eq(3 * value).all()
            assert all(one.eq(9).all() for one in [*kept, *row])
            del row
        del kept
    del graph
    assert settled(pool) == 0


def test_a_scope_in_a_capture_that_finds_no_clean_memory(small: Pool) -> None:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def record(graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                with small.scope():
                    small.empty(100)
            finally:
                graph.capture_end()

    with torch.cuda.stream(stream):
        small.zeros(2 * MIB - 128)
    with pytest.raises(RuntimeError, match="its own stream used before"):
        record(graph)
    del graph
    assert settled(small) == 0


def test_a_capture_waits_for_other_streams(small: Pool) -> None:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    seen = torch.zeros(2 * MIB - 128, device="cuda")
    torch.cuda.synchronize()
    busy(stream)
    with torch.cuda.stream(stream):
        late = small.full((2 * MIB - 128,), 7.0)
        seen.copy_(late)
        del late
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="relaxed")
        x = small.zeros(MIB)
        x.add_(3)
        graph.capture_end()
    graph.replay()
    torch.cuda.current_stream().synchronize()  # the graph first, if nobody waited for the other stream
    torch.cuda.synchronize()
    assert seen.eq(7).all()
    assert x.eq(3).all()
    del x, graph
    assert settled(small) == 0


def test_what_other_streams_are_done_with_is_clean_in_a_capture(small: Pool) -> None:
    small.zeros(2 * MIB - 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which synchronizes the device
        x = small.zeros(MIB)
        x.add_(3)
    graph.replay()
    assert x.sum().item() == 3 * MIB


def test_a_refused_capture_can_be_tried_again(small: Pool) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        small.zeros(2 * MIB - 128)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="synchronize"), torch.cuda.graph(graph, stream=stream):
        small.zeros(MIB)
    del graph
    assert settled(small) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        x = small.zeros(MIB)
        x.add_(2)
    graph.replay()
    assert x.sum().item() == 2 * MIB


def test_a_stream_that_captures_lends_nothing(small: Pool) -> None:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    static = torch.zeros(3, device="cuda")
    with torch.cuda.stream(stream):
        small.zeros(2 * MIB - 128)
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="relaxed")
        static.add_(1)
    with pytest.raises(memkit.PoolExhausted):
        small.zeros(MIB)  # to wait for the stream would join its capture
    assert not torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(stream):
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert static.eq(1).all()
    small.zeros(MIB)
    del graph
    assert settled(small) == 0


def test_dropping_what_a_capturing_stream_was_recorded_for(small: Pool) -> None:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    static = torch.zeros(3, device="cuda")
    x, y = small.zeros(1000), small.zeros(1000)
    with small.scope():
        z = small.zeros(1000)
        for tensor in (x, y, z):
            tensor.record_stream(stream)
        del tensor
        with torch.cuda.graph(graph, stream=stream):
            static.add_(1)
            del x  # before the pool knows of the capture
            small.empty(10).fill_(1)
            del y, z
    graph.replay()
    torch.cuda.synchronize()
    assert static.eq(1).all()
    del graph
    assert settled(small) == 0


def test_a_capture_that_fails(small: Pool) -> None:
    graph = torch.cuda.CUDAGraph()

    def record() -> None:
        with torch.cuda.graph(graph):
            small.zeros(MIB).record_stream(torch.cuda.default_stream())
            with small.scope():
                small.zeros(10)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record()
    graph.reset()
    assert settled(small) == 0
    assert small.full((2 * MIB - 128,), 2.0).sum().item() == 4 * MIB - 256


INVALID_CAPTURE = """
import gc
import torch
from memkit import Pool
small = Pool("8MiB", device="cuda", grow=False)
graph = torch.cuda.CUDAGraph()
for invalid in lambda x: torch.cuda.synchronize(), lambda x: x.sum().item():
    here = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            x = small.zeros(1000)
            invalid(x)
    except RuntimeError:
        torch.cuda.set_stream(here)
    else:
        raise AssertionError("a capture that survives")
    x = None
del graph
gc.collect()
for _ in range(2):
    torch.cuda.synchronize()
    small.empty(1)
assert small.stats().active == 0, small
"""


def test_an_invalid_capture_loses_no_memory() -> None:
    """In a process of its own: torch stays on the capture's stream, and before 2.12 its allocator with the capture."""
    subprocess.run([sys.executable, "-P", "-c", INVALID_CAPTURE], check=True)


def test_growth_and_trim_in_a_capture() -> None:
    with Pool("4MiB", device="cuda", max="100MiB") as pool:
        spare = pool.empty(20 * MIB, dtype=torch.uint8)
        graph = torch.cuda.CUDAGraph()
        assert pool.stats().reserved > 4 * MIB
        with torch.cuda.graph(graph):
            x = pool.zeros(MIB)
            reserved = pool.stats().reserved
            del spare
            assert pool.trim() == 0  # would wait for the device
            assert pool.stats().reserved == reserved
            with pytest.raises(memkit.PoolExhausted):
                pool.zeros(24 * MIB)  # nor is anything given back for it
            y = pool.zeros(2 * MIB)
            assert pool.stats().reserved > reserved  # rather than waiting for the stream of what was freed
            x.add_(4)
            y.add_(x[:1])
        graph.replay()
        assert x.sum().item() == 4 * MIB
        assert y.eq(4).all()
        del x, y, graph
        assert settled(pool) == 0
        assert pool.trim() > reserved - 4 * MIB
        assert pool.stats().reserved == 4 * MIB


@pytest.mark.alone
def test_a_pool_that_goes_in_a_capture_does_not_end_it() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # what the first capture and kernels take stays
        torch.zeros(3, device="cuda").add_(1)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
    pool = Pool("64MiB", device="cuda")
    x = pool.zeros(1000)
    pool.close()
    with torch.cuda.graph(graph):
        static.add_(1)
        del pool, x
    graph.replay()
    torch.cuda.synchronize()
    assert static.eq(1).all()
    Pool("2MiB", device="cuda").close()
    assert free - torch.cuda.mem_get_info()[0] < 32 * MIB


@pytest.mark.alone
@pytest.mark.parametrize("forgotten", [False, True])
def test_memory_of_a_graph_that_outlives_its_pool(forgotten: bool) -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    pool = Pool("64MiB", device="cuda", grow=False)
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(1000, device="cuda")
    with torch.cuda.graph(graph):
        x = pool.full((12 * MIB,), 3.0)
        out.copy_(x[:1000])
        del x
    pool.close()
    if forgotten:
        del pool
    graph.replay()
    torch.cuda.synchronize()
    assert out.eq(3).all()
    assert free - torch.cuda.mem_get_info()[0] >= 48 * MIB
    del graph
    gc.collect()
    torch.cuda.synchronize()
    big = torch.empty(32 * MIB, device="cuda")  # torch asks the driver for it
    del big
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 32 * MIB


def test_resize_in_a_capture_is_the_graphs(pool: Pool) -> None:
    x = pool.empty(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.resize_(1000)
        x.fill_(3)
    del x
    kept = noise(pool)
    graph.replay()
    torch.cuda.synchronize()
    assert all(one.eq(9).all() for one in kept)


def test_results_used_on_another_stream_after_the_graph_is_gone(small: Pool) -> None:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    result = torch.zeros(1000, device="cuda")
    with torch.cuda.graph(graph, stream=stream):
        x = small.full((1000,), 1.0)
    graph.replay()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    result.copy_(x)
    del graph
    gc.collect()
    del x
    with torch.cuda.stream(stream):
        y = small.full((2 * MIB - 128,), 2.0)
        stream.synchronize()
    torch.cuda.synchronize()
    assert result.eq(1).all()
    del y


def test_debug_in_a_capture() -> None:
    with Pool("8MiB", device="cuda", debug=True) as pool:
        before, graph = pool.full((1000,), 1.0), torch.cuda.CUDAGraph()
        other, static = pool.full((1000,), 5.0), torch.zeros(1000, device="cuda")
        with torch.cuda.graph(graph):
            static.copy_(before)
            del other  # is not poisoned by each replay
            x = pool.full((1000,), 2.0)
            static.add_(x)
        kept = noise(pool)
        graph.replay()
        torch.cuda.synchronize()
        assert static.eq(3).all()
        assert all(one.eq(9).all() for one in kept)
        del x, before, kept
        pool.check()
        graph.replay()
        del graph
        settled(pool)
        pool.check()


def test_graphs_and_sleep(small: Pool) -> None:
    static, graph = torch.zeros(1000, device="cuda"), torch.cuda.CUDAGraph()
    weight = small.full((MIB,), 2.0, tag="weights")
    with torch.cuda.graph(graph):
        x = small.empty(1000).copy_(static)
        x.mul_(weight[:1000])
        with pytest.raises(RuntimeError, match="captured"):
            small.sleep()
    for tag in (None, "weights"):
        small.sleep(tag)
        small.wake()
        static.fill_(4)
        graph.replay()
        torch.cuda.synchronize()
        assert x.eq(8).all()
        assert weight.eq(2).all()
