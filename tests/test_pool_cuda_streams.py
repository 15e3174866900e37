"""Pools in CUDA memory and several streams: who may have memory that another's work may still use."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from pool_cases import busy, cuda_pool, in_threads, inside, two_devices

import memkit
from memkit import Pool

pytestmark = pytest.mark.cuda
MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    with cuda_pool("8MiB", grow=False) as pool:
        yield pool


def copy_late(x: torch.Tensor, stream: torch.cuda.Stream, result: torch.Tensor) -> None:
    """Copies x on a stream that is busy yet, and records it there."""
    stream.wait_stream(torch.cuda.current_stream())
    busy(stream)
    with torch.cuda.stream(stream):
        result.copy_(x)
    x.record_stream(stream)


@pytest.mark.parametrize("seed", range(4))
def test_streams_at_random(seed: int) -> None:
    pool = Pool("1MiB", device="cuda", grow=False)
    dice = random.Random(seed)
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
    longest, count = 1 << 15, 150
    results = torch.zeros(count, longest, device="cuda")
    torch.cuda.synchronize()
    wanted: list[tuple[int, int]] = []
    living: list[tuple[torch.Tensor, int, torch.cuda.Stream]] = []

    def read(x: torch.Tensor, value: int) -> None:
        results[len(wanted), : x.numel()].copy_(x)
        wanted.append((x.numel(), value))

    def made(value: int) -> torch.Tensor:
        return pool.full((dice.randint(1, longest),), float(value))

    while len(wanted) < count:
        stream = dice.choice(streams)
        what = dice.random()
        try:
            with torch.cuda.stream(stream):
                if what < 0.45:
                    living.append((made(len(wanted) + 1), len(wanted) + 1, stream))
                elif what < 0.55:
                    with pool.scope():
                        x = made(-len(wanted) - 1)
                        other = dice.choice(streams)
                        other.wait_stream(stream)
                        with torch.cuda.stream(other):
                            y = made(-len(wanted) - 1)  # in the scope, on another stream
                            read(x, -len(wanted) - 1)
                            x.record_stream(other)
                            y.add_(1).sub_(1)
                            if len(wanted) < count:
                                read(y, int(-len(wanted)))
                        del x, y
        except memkit.PoolExhausted:
            what = 0.6
        if what >= 0.55 and living:
            x, value, owner = living.pop(dice.randrange(len(living)))
            if dice.random() < 0.5 and stream != owner:
                stream.wait_stream(owner)
                busy(stream, 1)
                with torch.cuda.stream(stream):
                    read(x, value)
                x.record_stream(stream)
            else:
                busy(owner, 1)
                with torch.cuda.stream(owner):
                    read(x, value)
            del x
        if dice.random() < 0.03:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    for row, (size, value) in zip(results, wanted, strict=True):
        assert row[:size].eq(value).all()
    living.clear()
    pool.empty(1)  # what was parked comes back
    torch.cuda.synchronize()
    pool.empty(1)
    assert pool.stats().active == 0
    pool.check()


def test_a_scope_has_a_row_for_each_stream(pool: Pool) -> None:
    other = torch.cuda.Stream()
    result = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    busy(torch.cuda.current_stream())
    with pool.scope():
        x = pool.full((1000,), 1.0)
        result.copy_(x)
        del x
    with pool.scope():
        with torch.cuda.stream(other):
            y = pool.full((1000,), 2.0)
            other.synchronize()
        torch.cuda.synchronize()
        assert result.eq(1).all()
        assert y.eq(2).all()
        with (
            pytest.raises(RuntimeError, match="expected no living tensor"),
            pool.scope(),
            torch.cuda.stream(other),
        ):
            kept = pool.zeros(3)
        del y, kept


def test_record_stream_in_a_scope(pool: Pool) -> None:
    other = torch.cuda.Stream()
    result = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with pool.scope():
        x = pool.full((1000,), 1.0)
        copy_late(x, other, result)
        del x
    with pool.scope():
        y = pool.full((1000,), 2.0)
        torch.cuda.current_stream().synchronize()
        del y
    torch.cuda.synchronize()
    assert result.eq(1).all()


def test_a_closed_pool_waits_for_recorded_streams() -> None:
    other = torch.cuda.Stream()
    result = torch.zeros(MIB, device="cuda")
    x = Pool("8MiB", device="cuda").full((MIB,), 1.0)  # and is forgotten
    copy_late(x, other, result)
    del x
    torch.cuda.synchronize()
    assert result.eq(1).all()


def test_threads_with_streams_of_their_own(pool: Pool) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(30):
                x = pool.full((1000 * (1 + i % 3),), float(number))
                x.add_(1).sub_(1)
                if not x.eq(number).all():
                    wrong.append(number)
                del x

    in_threads(work, 4)
    assert not wrong
    assert pool.stats().allocated == 0


@two_devices
def test_a_stream_of_another_device_is_recorded() -> None:
    with Pool("8MiB", device="cuda:0", grow=False) as pool:
        other = torch.cuda.Stream(1)
        busy(other, 300)
        x = pool.zeros(MIB)
        x.record_stream(other)
        del x
        torch.cuda.synchronize(0)
        pool.empty(1)
        assert pool.stats().active == 4 * MIB
        torch.cuda.synchronize(1)
        pool.empty(1)
        assert pool.stats().active == 0


@two_devices
def test_a_pool_on_another_device_than_the_current() -> None:
    assert torch.cuda.current_device() == 0
    n = MIB
    with Pool("6MiB", device="cuda:1", grow=False) as pool:
        result = torch.zeros(n, device="cuda:1")
        torch.cuda.synchronize(1)
        first = torch.cuda.Stream(1)
        busy(first)
        with torch.cuda.stream(first):
            x = pool.full((n,), 1.0)
            result.copy_(x)
            del x
        y = pool.full((n,), 2.0)  # on cuda:1's default stream
        torch.cuda.synchronize(1)
        assert y.device.index == 1
        assert result.eq(1).all()
        assert y.eq(2).all()
        with pool.use():
            assert torch.empty(3, device="cuda:1").device.index == 1
            assert torch.empty(3, device="cuda:0").device.index == 0
        with torch.cuda.device(1):
            assert Pool("1MiB", device="cuda").device == torch.device("cuda:1")


def test_pinned_memory_waits_for_copies_that_go_on() -> None:
    size = 4 * MIB
    with Pool(size, pin_memory=True, grow=False) as pool:
        streams = [torch.cuda.Stream() for _ in range(3)]
        targets = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(6)]
        torch.cuda.synchronize()
        for i, target in enumerate(targets):
            x = pool.full((size,), i, dtype=torch.uint8)
            stream = streams[i % 3]
            busy(stream)
            with torch.cuda.stream(stream):
                target.copy_(x, non_blocking=True)
            del x
        torch.cuda.synchronize()
        for i, target in enumerate(targets):
            assert target.eq(i).all()
        back = pool.empty(size, dtype=torch.uint8)
        back.copy_(targets[3], non_blocking=True)
        torch.cuda.synchronize()
        assert back.eq(3).all()


@two_devices
def test_copies_to_and_from_another_device() -> None:
    with Pool("2MiB", device="cuda:0") as pool:
        early = pool.full((300, 500), 3.0)
        there = early.to("cuda:1")  # whole
        later = pool.full((MIB,), 4.0)  # in pages that come after the devices have met
        turned = torch.empty(500, 300, device="cuda:1").t()
        turned.copy_(early)  # by a kernel that reads over there
        with pool.use():
            back = there.to("cuda:0")
        for tensor, value in ((there, 3), (turned, 3), (later[::2].to("cuda:1"), 4), (back, 3)):
            assert tensor.eq(value).all()
        assert inside(pool, back)


def test_debug_memory_that_another_stream_still_poisons() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with Pool("4MiB", device="cuda", debug=True, grow=False) as pool:
        for i in range(10):
            with torch.cuda.stream(first):
                x = pool.empty(3 * MIB, dtype=torch.uint8)
                x.fill_(1)
                torch.cuda._sleep(1_000_000)
                del x
            with torch.cuda.stream(second):
                y = pool.empty(3_000_000 - 1024 * i, dtype=torch.uint8).fill_(2)
                torch.cuda.synchronize()
                del y
            pool.check()


def test_debug_memory_that_dies_asleep() -> None:
    with Pool("1MiB", device="cuda", debug=True) as pool:
        x = pool.empty(6 * MIB, dtype=torch.uint8, tag="b").fill_(1)
        pool.sleep("b")
        del x
        torch.cuda.synchronize()
        pool.wake()
        pool.check()
