"""What the pool's tests share; the fixture `pool` is in conftest."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from memkit import Pool

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def inside(pool: Pool, tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is the pool's."""
    address = tensor.untyped_storage().data_ptr()
    return any(start <= address < start + size for start, size, _ in pool._core.chunks())


def resident() -> int:
    """Bytes of this process's memory that are backed: counted, where statm adds up what each processor was told last."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss:")) << 10


@contextmanager
def cuda_pool(capacity: str, **options: Any) -> Iterator[Pool]:
    """A pool on the GPU that is checked at the end."""
    with Pool(capacity, device="cuda", **options) as pool:
        yield pool
        torch.cuda.synchronize()
        pool.check()


def busy(stream: torch.cuda.Stream, milliseconds: int = 50) -> None:
    """Work on a stream that is still going on when this returns."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000 * milliseconds)


def in_threads(work: Callable[[int], object], count: int) -> None:
    """Calls work(0), work(1), ... in so many threads at once; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def in_a_child(work: Callable[[], object]) -> None:
    """Calls it in a forked child; AssertionError with the child's traceback if it raises there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)  # a child that hangs
            work()
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4096:])
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, said


def after_a_thread(work: Callable[[], object], condition: Callable[[], bool]) -> bool:
    """Whether the condition holds once a thread has done the work; what a thread owns goes a moment after join()."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()
