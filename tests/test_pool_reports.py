"""A pool's numbers, snapshots and debug mode; sleep."""

import ctypes
import gc
import itertools
import os
import pickle
import runpy
import sys
import threading

import numpy
import pytest
import torch
from pool_cases import in_threads, resident

from memkit import Pool

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


# -- reports -----------------------------------------------------------------------------------------------------------


def test_stats_and_repr():
    pool = Pool("1MiB")
    a = pool.empty(1000, dtype=torch.uint8, tag="a")
    with pool.tag("b"):
        b = pool.empty(3000, dtype=torch.uint8)
        with pool.tag("c"):
            c = pool.empty(10, dtype=torch.uint8)
            d = pool.empty(20, dtype=torch.uint8, tag="d")
        e = pool.empty(1, dtype=torch.uint8)
    s = pool.stats()
    assert (s.allocated, s.live_blocks, s.allocations, s.frees) == (4031, 5, 5, 0)
    assert s.reserved == MIB == s.active + s.free
    assert (s.hits, s.growths, s.chunks) == (5, 0, 1)
    assert pool.holders() == [("b", 3001, 2), ("a", 1000, 1), ("d", 20, 1), ("c", 10, 1)]
    assert repr(pool).startswith("Pool(1 MiB on cpu: 3.937 KiB in 5 blocks, peak 3.937 KiB, largest free ")
    del a, b, c, d, e
    assert pool.stats().allocated_peak == 4031
    pool.reset_peaks()
    assert pool.stats().allocated_peak == 0
    assert pool.check() == repr(pool)
    one = pool.empty(1)
    assert repr(pool) == "Pool(1 MiB on cpu: 4 B in 1 block, peak 4 B, largest free 0.9999 MiB)"
    del one
    with pytest.raises(ValueError, match="expected a name"):
        pool.tag("")


def test_tags_are_the_threads(pool):
    made = []
    with pool.tag("mine"):
        in_threads(lambda _: made.append(pool.empty(1)), 1)
    assert [tag for tag, _, _ in pool.holders()] == [""]


def test_tags_left_in_any_order(pool):
    outer, inner = pool.tag("outer"), pool.tag("inner")
    with outer, pytest.raises(RuntimeError, match="expected a tag that this thread is in, got one"):
        in_threads(lambda _: outer.__exit__(None), 1)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None)
    held = [pool.empty(1)]
    inner.__exit__(None)
    held.append(pool.empty(2))
    assert [tag for tag, _, _ in pool.holders()] == ["", "inner"]

    def use_the_same(_):
        with outer:
            ready.wait()
            held.append(pool.empty(1))
            ready.wait()

    ready = threading.Barrier(2)
    in_threads(use_the_same, 2)
    assert pool.holders()[0] == ("", 8, 1)
    assert ("outer", 8, 2) in pool.holders()


def test_snapshot(tmp_path, monkeypatch):
    pool = Pool("2MiB", debug=True)
    held = [pool.empty(1000, tag="weights"), pool.empty(5)]
    path = tmp_path / "pool.pickle"
    pool.snapshot(path)
    with path.open("rb") as file:
        data = pickle.load(file)
    from torch.cuda import _memory_viz

    segment = data["segments"][0]
    assert segment["total_size"] == 2 * MIB == sum(block["size"] for block in segment["blocks"])
    blocks = segment["blocks"]
    assert all(a["address"] + a["size"] == b["address"] for a, b in itertools.pairwise(blocks))
    live = [block for block in blocks if block["state"] == "active_allocated"]
    assert [block["requested_size"] for block in live] == [4000, 20]
    assert live[0]["frames"][0]["name"] == "weights"
    assert any(frame["name"] == "test_snapshot" for frame in live[1]["frames"])
    assert "2.0MiB" in _memory_viz.segsum(data).replace(" ", "")
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in plot(data)
    page = tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", ["_memory_viz", "trace_plot", str(path), "-o", str(page)])
    monkeypatch.delitem(sys.modules, "torch.cuda._memory_viz")  # read again, as python -m does
    runpy.run_module("torch.cuda._memory_viz", run_name="__main__")
    assert page.exists()
    assert len(held) == 2


def test_profiler_sees_the_pool(pool):
    with torch.profiler.profile(profile_memory=True) as profile:
        with torch.profiler.record_function("making"):
            made = pool.empty(1000)
        with torch.profiler.record_function("dropping"):
            del made
    memory = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    assert memory["making"] == 4000
    assert memory["dropping"] == -4000
    pool.empty(10)


# -- debug mode --------------------------------------------------------------------------------------------------------


def test_debug_poison():
    pool = Pool("1MiB", debug=True)
    made = pool.empty(100)
    assert made.isnan().all()
    assert pool.empty(100, dtype=torch.bfloat16).isnan().all()
    peek = numpy.frombuffer((ctypes.c_char * 400).from_address(made.data_ptr()), dtype=numpy.float32)
    del made
    assert (peek > 3e38).all()


def test_debug_canaries(capfd):
    pool = Pool("1MiB", debug=True)
    made = pool.empty(10, tag="culprit")
    beyond = torch.frombuffer((ctypes.c_char * 48).from_address(made.data_ptr()), dtype=torch.uint8)
    pool.check()
    beyond[40:] = 0
    with pytest.raises(RuntimeError, match=r"something wrote after its block: 40 bytes at .* of culprit"):
        pool.check()  # while it lives
    assert capfd.readouterr().err == ""
    del made
    with pytest.raises(RuntimeError, match=r"something wrote after its block: 40 bytes at .* of culprit"):
        pool.check()
    assert "culprit" in capfd.readouterr().err


def test_debug_guards_while_others_allocate():
    """Guards that are still being written are nobody's fault; those of what sleeps cannot be read."""
    pool = Pool("64MiB", debug=True)

    def work(seed):
        for i in range(200):
            made = pool.full((1 + seed * 1000 + i,), 1.0)
            del made

    def look(seed):
        for _ in range(200):
            pool.check()

    in_threads(lambda seed: (look if seed % 2 else work)(seed), 4)
    kept = pool.full((1000,), 2.0)
    pool.sleep()
    pool.check()
    pool.wake()
    pool.check()
    assert (kept == 2).all()


# -- sleep -------------------------------------------------------------------------------------------------------------


def test_sleep_and_wake(tmp_path):
    pool = Pool("64MiB")
    held = [pool.full((n,), float(n)) for n in (1, 1000, 1_000_000, 5_000_000)]
    addresses = [t.data_ptr() for t in held]
    before = resident()
    assert pool.sleep() == pool.stats().reserved
    assert before - resident() > 60 * MIB
    assert "asleep" in repr(pool)
    with pytest.raises(RuntimeError, match="a pool that sleeps; call wake"):
        pool.empty(1)
    with pytest.raises(RuntimeError, match="sleeps already"):
        pool.sleep()
    del held[1]
    pool.wake()
    assert [t.data_ptr() for t in held] == [addresses[0], *addresses[2:]]
    assert all((t == t.numel()).all() for t in held)
    pool.check()
    with pytest.raises(RuntimeError, match="awake"):
        pool.wake()
    pool.sleep(file=tmp_path / "contents")
    assert (tmp_path / "contents").stat().st_size >= 24_000_000
    pool.wake()
    assert (held[1] == 1_000_000).all()


def test_sleep_of_a_tag():
    pool = Pool("64MiB")
    weights = [pool.full((1_000_000,), 3.0, tag="weights") for _ in range(2)]
    cache = pool.full((1_000_000,), 4.0, tag="cache")
    assert 8_000_000 - 2 * PAGE < pool.sleep("weights") <= 8_000_000
    with pytest.raises(RuntimeError, match="a tag that sleeps"):
        pool.empty(1, tag="weights")
    assert (cache == 4).all()
    del weights[0]
    other = pool.full((1_000_000,), 5.0)  # where the freed one was
    pool.wake()
    assert (weights[0] == 3).all()
    assert (other == 5).all()
    assert (cache == 4).all()
    with pytest.raises(ValueError, match="expected a tag or None"):
        pool.sleep("")
    with pytest.raises(TypeError, match=r"^Pool\.sleep: expected tag to be a str or None, got int"):
        pool.sleep(3)


@pytest.mark.parametrize("known", [(), ("weights", "cache")])
def test_sleep_of_a_tag_that_nobody_used(known):
    pool = Pool("1MiB")
    held = [pool.full((10,), 3.0, tag=name) for name in known]
    names = ", ".join(map(repr, known)) or "so far none"
    for _ in range(2):  # asking does not make it known
        with pytest.raises(ValueError, match=rf"^Pool.sleep: .* knows \({names}\), got 'wieghts'"):
            pool.sleep("wieghts")
    assert "asleep" not in repr(pool)
    with pytest.raises(RuntimeError, match="expected a pool that sleeps, got one that is awake"):
        pool.wake()
    held.append(pool.full((10,), 3.0))
    assert all(t.eq(3).all() for t in held)
    pool.check()


def test_small_neighbours_give_their_pages_back():
    pool = Pool("8MiB", grow=False)
    held = [pool.full((20,), float(i), tag="small") for i in range(4000)]
    pool.sleep("small")  # a first time, after which the lists that it makes are no new memory
    pool.wake()
    before = resident()
    given = pool.sleep("small")
    assert 4000 * 128 - 2 * PAGE < given <= 4000 * 128
    assert before - resident() > given - 64 * 1024
    del held[::3]
    others = [pool.full((20,), -1.0) for _ in range(500)]  # on pages that others of the tag share
    pool.wake()
    pool.check()
    kept = [i for i in range(4000) if i % 3]
    assert all(t.eq(i).all() for i, t in zip(kept, held, strict=True))
    assert all(t.eq(-1).all() for t in others)


def test_a_page_with_what_stays_awake_stays():
    pool = Pool("8MiB")
    held = [pool.full((20,), float(i), tag="even" if i % 2 == 0 else "odd") for i in range(400)]
    assert pool.sleep("even") == 0
    assert all(held[i].eq(i).all() for i in range(1, 400, 2))
    pool.wake()
    assert all(t.eq(i).all() for i, t in enumerate(held))


@pytest.mark.parametrize("tag", [None, "weights"])
def test_a_pool_closed_asleep_wakes(tag):
    pool = Pool("8MiB")
    held = [pool.full((300_000,), float(i), tag="weights") for i in range(3)]
    pool.sleep(tag)
    del held[1]
    pool.close()
    assert "closed" in repr(pool)
    with pytest.raises(RuntimeError, match="expected an open pool, got one that was closed"):
        pool.sleep(tag)
    with pytest.raises(RuntimeError, match=r"closed|sleeps"):
        pool.empty(1)
    pool.wake()
    assert held[0].eq(0).all()
    assert held[1].eq(2).all()
    with pytest.raises(RuntimeError, match="got one that is awake"):
        pool.wake()
    pool.check()


def test_a_closed_pool_does_not_sleep():
    pool = Pool("8MiB")
    held = pool.full((300_000,), 3.0)
    pool.close()
    with pytest.raises(RuntimeError, match=r"Pool.sleep: expected an open pool, got one that was closed"):
        pool.sleep()
    with pytest.raises(RuntimeError, match=r"Pool.wake: expected a pool that sleeps"):
        pool.wake()
    assert held.eq(3).all()


@pytest.mark.parametrize("tag", [None, "weights"])
def test_a_wake_that_fails_can_be_called_again(tag, tmp_path):
    pool = Pool("8MiB")
    held = [pool.full((100_000,), float(i), tag="weights") for i in range(5)]
    path = tmp_path / "contents"
    pool.sleep(tag, file=path)
    contents = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(len(contents) // 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected a file that holds what sleeps, got its end"):
            pool.wake()
        assert "asleep" in repr(pool)
        pool.check()
        with pytest.raises(RuntimeError, match="call wake"):
            pool.empty(1, tag="weights")
    with path.open("r+b") as file:
        file.write(contents)
    pool.wake()
    assert all(t.eq(i).all() for i, t in enumerate(held))
    pool.check()


def test_a_file_is_its_sleepers_until_it_wakes(tmp_path):
    path = tmp_path / "contents"
    path.write_bytes(b"old" * 1000)
    pool, other = Pool("8MiB"), Pool("8MiB")
    held, others = pool.full((1000,), 3.0), other.full((1000,), 5.0)
    with pytest.raises(ValueError, match=r"Pool\.sleep: expected a tag that this pool knows"):
        pool.sleep("unknown", file=path)
    assert path.read_bytes() == b"old" * 1000
    pool.sleep(file=path)
    assert path.stat().st_size >= held.nbytes
    with pytest.raises(RuntimeError, match=r"Pool\.sleep: expected a pool that is awake"):
        pool.sleep(file=path)
    with pytest.raises(
        RuntimeError, match=r"Pool\.sleep: expected a file of its own, got one that another pool"
    ):
        other.sleep(file=path)
    assert others.eq(5).all()
    pool.wake()
    assert held.eq(3).all()
    other.sleep(file=path)
    other.wake()
    assert others.eq(5).all()


def test_a_sleep_that_fails_leaves_the_pool_awake():
    pool = Pool("8MiB")
    held = pool.full((1_000_000,), 3.0)
    with pytest.raises(RuntimeError, match="No space left on device"):
        pool.sleep(file="/dev/full")
    with pytest.raises(FileNotFoundError):
        pool.sleep(file="/nowhere/at/all")
    assert held.eq(3).all()
    pool.empty(1)
    pool.check()


def test_sleep_of_a_tag_reaches_into_scopes():
    with Pool("64MiB") as pool, pool.scope():
        kept = pool.full((1_000_000,), 4.0)
        state = pool.full((1_000_000,), 3.0, tag="state")
        address = state.data_ptr()
        assert 4_000_000 - 2 * PAGE < pool.sleep("state") <= 4_000_000
        assert not state[2000:-2000].any()  # but for its first and its last page, which it shares
        assert (kept == 4).all()
        with pytest.raises(RuntimeError, match="a tag that sleeps"):
            pool.empty(1, tag="state")
        pool.wake()
        assert (state == 3).all()
        assert state.data_ptr() == address
        with pool.scope():
            gone = pool.full((1_000_000,), 5.0, tag="state")
            pool.sleep("state")
            del gone
        with pool.scope():
            other = pool.full((1_000_000,), 6.0)  # where the freed one was
            pool.wake()
            assert (other == 6).all()
            del other
        assert (state == 3).all()
        del state, kept


def test_sleep_of_a_tag_reaches_what_outlived_its_scope():
    pool = Pool("64MiB")
    with pytest.raises(RuntimeError, match="state"), pool.scope():
        state = pool.full((1_000_000,), 3.0, tag="state")
    assert 4_000_000 - 2 * PAGE < pool.sleep("state") <= 4_000_000
    pool.wake()
    assert (state == 3).all()


def test_sleep_of_a_tag_reaches_into_replays():
    pool = Pool("64MiB")

    def step():
        return torch.full((1_000_000,), 3.0)

    with pool.replay(pool.record(step)) as replay, pool.tag("state"):
        made = step()
    assert replay.served == 1
    assert 4_000_000 - 2 * PAGE < pool.sleep("state") <= 4_000_000
    assert not made[2000:-2000].any()
    pool.wake()
    assert (made == 3).all()


def test_sleep_of_the_tag_of_plans_leaves_what_is_in_them():
    pool = Pool("64MiB")

    def step(value):
        return torch.full((1_000_000,), value)

    plan = pool.record(step, 3.0)
    with pool.replay(plan):
        old = step(3.0)
    assert [tag for tag, _, _ in pool.holders()] == ["plan"]
    pool.sleep("plan")
    del old
    with pool.replay(plan) as replay:
        new = step(4.0)
    assert replay.served == 1
    pool.wake()
    assert (new == 4).all()


def test_sleep_in_debug_mode_keeps_to_its_own_memory():
    capacity = 4 * MIB
    neighbour = Pool(capacity, grow=False)
    pool = Pool(capacity, grow=False, debug=True)  # often right below the neighbour
    theirs = neighbour.full((capacity // 4,), 1.0)
    mine = pool.full(((capacity - 128) // 4,), 2.0)
    pool.sleep()
    theirs.fill_(9.0)
    pool.wake()
    assert theirs.eq(9).all()
    assert mine.eq(2).all()


def test_debug_guards_survive_sleep():
    pool = Pool("16MiB", debug=True)
    a, b, c = pool.full((300_000,), 3.0), pool.full((300_000,), 4.0), pool.full((77,), 5.0)
    pool.sleep()
    del b
    pool.wake()
    pool.check()
    assert a.eq(3).all()
    assert c.eq(5).all()
    del a, c
    pool.check()


@pytest.mark.parametrize("tag", [None, "weights"])
def test_a_pool_that_dies_asleep_wakes_its_tensors(tag):
    pool = Pool("8MiB")
    held = pool.full((1_000_000,), 3.0, tag="weights")
    pool.sleep(tag)
    del pool
    gc.collect()
    assert held.eq(3).all()
