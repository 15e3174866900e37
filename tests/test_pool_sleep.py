"""Pools that go to sleep and wake while other threads allocate."""

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
import torch

from memkit import Pool

MIB = 1 << 20


def bytes_of(pool: Pool, mebibytes: int) -> torch.Tensor:
    return pool.empty(mebibytes * MIB, dtype=torch.uint8)


def resized(pool: Pool, mebibytes: int) -> torch.Tensor:
    return pool.empty(1, dtype=torch.uint8).resize_(mebibytes * MIB)


def tagged(pool: Pool, mebibytes: int) -> torch.Tensor:
    with pool.tag("cache"):
        return bytes_of(pool, mebibytes)


class Call(threading.Thread):
    """A call in a thread of its own, from go() on: a thread that starts may have to wait until others have their pages."""

    def __init__(self, work: Callable[..., object], *args: object) -> None:
        super().__init__(daemon=True)
        self.work, self.args, self.result, self.error = work, args, None, None
        self.begin = threading.Event()
        self.start()

    def go(self):
        self.begin.set()
        time.sleep(0.003)
        return self

    def run(self) -> None:
        self.begin.wait()
        try:
            self.result = self.work(*self.args)
        except Exception as error:
            self.error = error

    def end(self):
        self.join()
        if self.error:
            raise self.error
        return self.result


class SlowSleep:
    """pool.sleep() into a pipe, which lasts from begin() to end(). Such a pool never wakes."""

    def __init__(self, pool: Pool, tag: str) -> None:
        self.pool = pool
        self.reader, self.writer = os.pipe()
        self.call = Call(pool._core.sleep, tag, self.writer)

    def begin(self) -> None:
        self.call.go()
        while "asleep" not in repr(self.pool):
            time.sleep(0.0002)  # others want the GIL

    def end(self) -> None:
        while self.call.is_alive():  # the pool keeps an end of its own
            if select.select([self.reader], [], [], 0.01)[0]:
                os.read(self.reader, MIB)
        os.close(self.reader)
        os.close(self.writer)
        self.call.end()


@pytest.mark.parametrize("work", [bytes_of, resized])
def test_what_is_freed_while_its_tag_goes_to_sleep_is_nobodys(work):
    for _ in range(10):
        pool = Pool("40MiB")
        freed = tagged(pool, 20)
        kept = tagged(pool, 19)
        sleep = SlowSleep(pool, "cache")
        big = Call(bytes_of, pool, 300)
        small = Call(lambda pool=pool: work(pool, 20).fill_(7))
        big.go()
        small.go()  # waits until the other has its memory
        sleep.begin()
        in_time = big.is_alive() and small.is_alive()
        del freed
        small.join(0.5)
        sleep.end()
        assert small.end().eq(7).all()
        assert big.end().numel() == 300 * MIB
        del kept
        if in_time:
            return
    pytest.fail("never asleep before memory had come")


@pytest.mark.parametrize("tag", ["", "cache"])
def test_nothing_that_grows_is_given_to_those_who_sleep(tag):
    for _ in range(10):
        pool = Pool("40MiB")
        kept = tagged(pool, 30)
        sleep = SlowSleep(pool, tag)
        big = Call(tagged, pool, 300).go()
        sleep.begin()
        in_time = big.is_alive()
        big.join(0.5)
        sleep.end()
        del kept
        if in_time:
            with pytest.raises(RuntimeError, match=r"awake, got an allocation from a .* that sleeps"):
                big.end()
            return
    pytest.fail("never asleep before memory had come")


def test_what_is_freed_while_its_tag_wakes_is_nobodys():
    for _ in range(2):
        pool = Pool("160MiB")
        kept = tagged(pool, 120).fill_(1)
        freed = tagged(pool, 40).fill_(1)
        pool.sleep("cache")
        big = Call(lambda pool=pool: bytes_of(pool, 120).fill_(3))
        small = Call(lambda pool=pool: bytes_of(pool, 38).fill_(7))
        wake = Call(pool.wake)
        big.go()
        small.go()
        wake.go()
        time.sleep(0.005)
        del freed
        wake.end()
        assert small.end().eq(7).all()
        assert big.end().eq(3).all()
        assert kept.eq(1).all()


def test_who_waits_for_a_sleep_is_served_if_that_fails():
    pool = Pool("4MiB")
    kept = tagged(pool, 1).fill_(1)
    with subprocess.Popen(["sleep", "0.5"], stdin=subprocess.PIPE) as reader:
        sleep = Call(pool._core.sleep, "cache", reader.stdin.fileno()).go()
        calls = [Call(lambda work=work: work(pool, 1).fill_(2)).go() for work in (bytes_of, tagged)]
        assert all(call.is_alive() for call in calls)
        with pytest.raises(RuntimeError, match="Broken pipe"):
            sleep.end()
    assert all(call.end().eq(2).all() for call in calls)
    assert kept.eq(1).all()
    pool.check()


def test_other_threads_go_on_while_an_allocation_waits_for_a_sleep():
    pool = Pool("4MiB")
    kept = tagged(pool, 1)
    with subprocess.Popen(["sh", "-c", "sleep 1; cat > /dev/null"], stdin=subprocess.PIPE) as slow:
        try:
            sleep = Call(pool._core.sleep, "cache", slow.stdin.fileno()).go()
            start = time.monotonic()
            other = Call(bytes_of, pool, 1).go()
            assert time.monotonic() - start < 0.5
            assert sleep.is_alive()
            sleep.end()
            assert other.end().numel() == MIB
        finally:
            slow.kill()  # the pool keeps an end of its own
    del kept


def test_a_plan_takes_no_memory_of_a_pool_that_sleeps():
    pool = Pool("4MiB")
    kept = tagged(pool, 1)
    plan = pool.record(torch.empty, 1000)
    pool.sleep()
    with pytest.raises(RuntimeError, match="got an allocation from a pool that sleeps"), pool.replay(plan):
        pass
    pool.wake()
    for asleep in (False, True):
        if asleep:
            pool.sleep("cache")
        with pool.replay(plan) as replay:
            torch.empty(1000)
        assert (replay.served, replay.fell_back) == (1, 0)
    pool.wake()
    assert kept.numel() == MIB
