"""What the pool's tests share; the fixture `pool` is in conftest."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch

from memkit import Pool


def inside(pool: Pool, tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is the pool's."""
    address = tensor.untyped_storage().data_ptr()
    return any(start <= address < start + size for start, size, _ in pool._core.chunks())


def resident() -> int:
    """Bytes of this process's memory that are backed."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def after_a_thread(work: Callable[[], object], condition: Callable[[], bool]) -> bool:
    """Whether the condition holds once a thread has done the work; what a thread owns goes a moment after join()."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()
