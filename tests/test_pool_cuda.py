"""Pools in CUDA memory: streams, graphs, torch's own allocations, sleep."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.cuda._memory_viz
from pool_cases import busy, cuda_pool, in_a_child, two_devices
from torch import nn

import memkit

pytestmark = pytest.mark.cuda
MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[memkit.Pool]:
    with cuda_pool("64MiB", grow=False) as pool:
        yield pool


def test_tensors(pool: memkit.Pool) -> None:
    x = pool.empty(1000, 33, dtype=torch.bfloat16).normal_()
    assert x.is_cuda
    assert x.device == pool.device
    assert x.data_ptr() % 512 == 0
    y = pool.empty_like(x).copy_(x)
    assert torch.equal(x, y)
    assert pool.stats().live_blocks == 2
    z = pool.zeros(7, requires_grad=True)
    (z * 2).sum().backward()
    assert torch.equal(z.grad, torch.full((7,), 2.0, device="cuda"))
    del x, y, z
    assert pool.stats().allocated == 0


def test_reserves_once(pool: memkit.Pool) -> None:
    reserved = pool.stats().reserved
    for size in (1, 4096, 5 * MIB, 40 * MIB):
        pool.empty(size, dtype=torch.uint8).zero_()
    assert pool.stats().reserved == reserved
    with pytest.raises(memkit.PoolExhausted, match="asked"):
        pool.empty(65 * MIB, dtype=torch.uint8)


def test_reuse_on_the_same_stream_is_at_once(pool: memkit.Pool) -> None:
    x = pool.empty(40 * MIB, dtype=torch.uint8)
    at = x.data_ptr()
    del x
    assert pool.empty(40 * MIB, dtype=torch.uint8).data_ptr() == at


def test_another_stream_waits_for_the_memory_it_takes_over(pool: memkit.Pool) -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    n = 40 * MIB // 4
    result = torch.empty(n, device="cuda")
    torch.cuda.synchronize()
    busy(first)
    with torch.cuda.stream(first):
        x = pool.full((n,), 1.0)
        result.copy_(x)
        del x
    with torch.cuda.stream(second):
        y = pool.full((n,), 2.0)  # the same memory: there is no other
    torch.cuda.synchronize()
    assert result.eq(1).all()
    assert y.eq(2).all()


def test_record_stream_keeps_the_block_until_the_other_stream_is_there(pool: memkit.Pool) -> None:
    other = torch.cuda.Stream()
    n = 40 * MIB // 4
    result = torch.empty(n, device="cuda")
    x = pool.full((n,), 1.0)
    other.wait_stream(torch.cuda.current_stream())
    busy(other)
    with torch.cuda.stream(other):
        result.copy_(x)
    x.record_stream(other)
    del x
    assert pool.stats().active >= 40 * MIB  # parked
    with pytest.raises(memkit.PoolExhausted):
        pool.empty(n)
    torch.cuda.synchronize()
    y = pool.full((n,), 2.0)
    torch.cuda.synchronize()
    assert result.eq(1).all()
    assert y.eq(2).all()


def test_record_stream_of_other_tensors_is_torchs() -> None:
    memkit.Pool("1MiB", device="cuda").close()
    x = torch.ones(MIB, device="cuda")
    x.record_stream(torch.cuda.Stream())
    assert x.sum().item() == MIB


def test_a_scope_returns_its_memory_in_stream_order(pool: memkit.Pool) -> None:
    with pool.scope():
        x = pool.full((MIB,), 3.0)
        total = x.sum()
        del x
    y = pool.full((MIB,), 5.0)
    assert total.item() == 3 * MIB
    assert y.sum().item() == 5 * MIB


def test_a_graph_keeps_what_it_uses() -> None:
    with memkit.Pool("8MiB", device="cuda", max="256MiB") as pool:
        static = torch.full((MIB,), 1.0, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scratch = pool.empty(MIB)
            scratch.copy_(static)
            scratch.mul_(2)
            out = pool.empty(MIB)
            out.copy_(scratch)
            del scratch
        before = pool.stats().reserved
        noise = [
            pool.full((MIB,), 9.0) for _ in range(20)
        ]  # grows in between; must not get the graph's scratch
        assert pool.stats().reserved > before
        for value in (1.0, 4.0):
            static.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert out.eq(2 * value).all()
        assert all(tensor.eq(9).all() for tensor in noise)
        del out, noise
        held = pool.stats().active
        graph.reset()
        del graph
        gc.collect()
        torch.cuda.synchronize()
        pool.empty(1)
        assert pool.stats().active <= held
        pool.check()


def test_use_serves_forward_and_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    x = torch.randn(64, 256, device="cuda")
    want = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    with memkit.Pool("256MiB", device="cuda") as pool:
        with pool.use():
            loss = model(x).square().mean()
            got = torch.autograd.grad(loss, list(model.parameters()))
        assert pool.stats().allocated > 0
        torch.testing.assert_close(got, want)
        outside = torch.empty(MIB, device="cuda")
        start = outside.data_ptr()
        assert not any(a <= start < a + size for a, size, _ in pool._core.chunks())
        del got, loss
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        pool.check()


def test_nested_use_takes_the_innermost() -> None:
    with memkit.Pool("64MiB", device="cuda") as outer, memkit.Pool("64MiB", device="cuda") as inner:
        with outer.use():
            a = torch.empty(MIB, device="cuda")
            with inner.use():
                b = torch.empty(MIB, device="cuda")
            c = torch.empty(MIB, device="cuda")

        def lies_in(pool: memkit.Pool, tensor: torch.Tensor) -> bool:
            return any(at <= tensor.data_ptr() < at + size for at, size, _ in pool._core.chunks())

        assert lies_in(outer, a)
        assert lies_in(inner, b)
        assert lies_in(outer, c)
        del a, b, c
        torch.cuda.empty_cache()


@pytest.mark.alone
def test_sleep_gives_memory_back_and_keeps_contents_and_addresses(pool: memkit.Pool) -> None:
    x = pool.empty(8 * MIB).normal_()
    copy, at = x.clone(), x.data_ptr()
    free = torch.cuda.mem_get_info()[0]
    given = pool.sleep()
    assert given >= 32 * MIB
    assert torch.cuda.mem_get_info()[0] - free >= 32 * MIB
    pool.wake()
    assert x.data_ptr() == at
    assert torch.equal(x, copy)


def test_memory_freed_asleep_serves_another_tag(pool: memkit.Pool) -> None:
    first, second = (pool.full((2 * MIB,), 3.0, tag="weights") for _ in range(2))
    at = first.data_ptr()
    assert pool.sleep("weights") > 0
    del first
    other = pool.full((2 * MIB,), 5.0)
    assert other.data_ptr() == at
    assert other.eq(5).all()
    pool.wake()
    assert second.eq(3).all()
    assert other.eq(5).all()


class Beyond:
    """Bytes at an address, whoever they belong to."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3
        }  # fmt: skip


@pytest.mark.parametrize(("offset", "where"), [(4000, "after"), (-1, "before"), (3999, "")])
def test_debug_finds_what_was_written_beyond_the_end(offset: int, where: str) -> None:
    with memkit.Pool("8MiB", device="cuda", debug=True) as pool:
        x = pool.empty(1000, tag="victim")
        assert x.isnan().all()
        torch.as_tensor(Beyond(x.data_ptr() + offset, 1), device="cuda").fill_(7)
        del x
        if where:
            with pytest.raises(RuntimeError, match=f"wrote {where} its block: 4000 bytes at .* of victim"):
                pool.check()
        else:
            pool.check()


def test_debug_poisons_what_was_freed() -> None:
    with memkit.Pool("8MiB", device="cuda", debug=True) as pool:
        x = pool.full((1000,), 2.0)
        at = x.data_ptr()
        stream = torch.cuda.Stream()
        x.record_stream(stream)
        del x
        torch.cuda.synchronize()
        torch.as_tensor(Beyond(at + 4000, 1), device="cuda").fill_(7)
        torch.cuda.synchronize()
        pool.empty(1)
        assert torch.as_tensor(Beyond(at + 2048, 1900), device="cuda").eq(0x7F).all()
        with pytest.raises(RuntimeError, match="wrote after"):  # found when nobody uses it any more
            pool.check()


def test_freed_asleep_and_used_after_waking(pool: memkit.Pool) -> None:
    first, second = (pool.full((4 * MIB,), 3.0, tag="weights") for _ in range(2))
    assert pool.sleep("weights") > 0
    at = first.data_ptr()
    del first
    pool.wake()
    other = pool.full((4 * MIB,), 5.0)
    assert other.data_ptr() == at
    assert other.eq(5).all()
    assert second.eq(3).all()


@pytest.mark.alone
@pytest.mark.parametrize("tag", [None, "weights"])
def test_waking_without_memory_can_be_tried_again(pool: memkit.Pool, tag: str | None) -> None:
    x = pool.full((8 * MIB,), 3.0, tag="weights")
    at = x.data_ptr()
    assert pool.sleep(tag) >= 32 * MIB
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 8 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="memory for what slept"):
        pool.wake()
    assert "asleep" in repr(pool)
    with pytest.raises(RuntimeError, match="awake"):
        pool.empty(1, tag="weights")
    del hog
    torch.cuda.empty_cache()
    pool.wake()
    assert x.data_ptr() == at
    assert x.eq(3).all()


def test_sleep_waits_for_all_streams(pool: memkit.Pool) -> None:
    stream = torch.cuda.Stream()
    x = pool.zeros(MIB)
    stream.wait_stream(torch.cuda.current_stream())
    busy(stream)
    with torch.cuda.stream(stream):
        x.fill_(4)
    pool.sleep()
    pool.wake()
    assert x.eq(4).all()


def test_a_closed_pool_dies_asleep() -> None:
    with memkit.Pool("8MiB", device="cuda") as pool:
        x = pool.full((MIB,), 2.0)
        pool.sleep()
    del pool
    assert x.eq(2).all()


def test_plans_are_for_the_cpu(pool: memkit.Pool) -> None:
    with memkit.Pool("1MiB") as host:
        plan = host.record(lambda: torch.ones(100))
    with pytest.raises(RuntimeError, match="expected a pool on the CPU, got one on cuda:0"):
        pool.replay(plan)


def test_snapshot_opens_in_torchs_viewer(pool: memkit.Pool, tmp_path: Path) -> None:
    x, stream = pool.empty(1000, tag="activations"), torch.cuda.Stream()
    y = pool.empty(2000)
    y.record_stream(stream)
    del y
    path = tmp_path / "pool.pickle"
    pool.snapshot(path)
    snapshot = pickle.loads(path.read_bytes())
    page = torch.cuda._memory_viz.trace_plot(snapshot)
    assert "activations" in str(snapshot)
    assert "<html" in page.lower() or "<!doctype" in page.lower()
    (segment,) = snapshot["segments"]
    assert segment["device"] == pool.device.index
    assert segment["allocated_size"] == 4096
    assert torch.cuda._memory_viz.segsum(snapshot)
    assert x.numel() == 1000


def test_the_profiler_sees_its_memory(pool: memkit.Pool) -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        x = pool.empty(1000)
        y = pool.empty(500)
        del x
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in events]
    assert [change for change in changes if change in (4000, 2000, -4000)] == [4000, 2000, -4000]
    assert y.numel() == 500


def test_a_forked_child_leaves_it_alone(pool: memkit.Pool) -> None:
    x, y = pool.full((MIB,), 2.0), pool.zeros(100)
    y.record_stream(torch.cuda.Stream())
    held = {"x": x, "y": y}
    del y

    def child() -> None:
        with pytest.raises(RuntimeError, match="fork"):
            pool.empty(10)
        held.clear()  # frees nothing, and calls nothing of CUDA's
        assert "parent" in repr(pool)

    in_a_child(child)
    assert x.eq(2).all()
    assert held["y"].eq(0).all()
    assert pool.stats().live_blocks == 2


@two_devices
def test_two_devices() -> None:
    with memkit.Pool("8MiB", device="cuda:0") as one, memkit.Pool("8MiB", device="cuda:1") as two:
        assert one.empty(10).device.index == 0
        assert two.empty(10).device.index == 1


def test_pinned_memory_is_not_rounded_to_a_power_of_two() -> None:
    size = 129 * MIB + 512 * 1024
    with memkit.Pool(size, pin_memory=True, grow=False) as pool:
        x = pool.empty(size, dtype=torch.uint8)
        assert x.is_pinned()
        assert pool.stats().reserved < size + 4 * MIB
        x.fill_(3)
        y = x.cuda(non_blocking=True)
        del x
        z = pool.empty(size, dtype=torch.uint8).fill_(4)
        torch.cuda.synchronize()
        assert y.eq(3).all()
        assert z[0] == 4
