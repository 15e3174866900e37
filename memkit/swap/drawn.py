"""What random numbers a run draws, of the generators that everybody shares."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Generators(NamedTuple):
    """Their states: a run that draws a number leaves others, whatever it does with it."""

    torchs: Tensor
    of_devices: list[Tensor]
    pythons: Any
    numpys: bytes | None
    """None: not imported."""


def generators() -> Generators:
    cuda: Any = torch.cuda
    numpys = None
    if "numpy" in sys.modules:
        import numpy as np

        numpys = pickle.dumps(np.random.get_state())
    of_devices = cuda.get_rng_state_all() if cuda.is_initialized() else []
    return Generators(torch.get_rng_state(), of_devices, random.getstate(), numpys)


def drew_alike(one: Generators, other: Generators) -> bool:
    """Whether the generators are in the same states. One that came in between (a module that is imported in a call) does not
    count."""
    pairs = zip((one.torchs, *one.of_devices), (other.torchs, *other.of_devices), strict=False)
    numpys = None in (one.numpys, other.numpys) or one.numpys == other.numpys
    return numpys and one.pythons == other.pythons and all(torch.equal(a, b) for a, b in pairs)


def and_draws_nothing(check: Callable[[], bool]) -> bool:
    """Of a check that runs something, whether it holds and nothing was drawn; what was is put back."""
    before = generators()
    held = check()
    if drew_alike(before, generators()):
        return held
    torch.set_rng_state(before.torchs)
    if before.of_devices:
        torch.cuda.set_rng_state_all(before.of_devices)
    random.setstate(before.pythons)
    if before.numpys is not None:
        import numpy as np

        np.random.set_state(pickle.loads(before.numpys))  # ours
    return False


def seed_all(number: int) -> None:
    """As `torch.manual_seed`, which keeps a trace of its caller for each kind of device that is not in use, a millisecond's
    work."""
    cuda: Any = torch.cuda
    torch.default_generator.manual_seed(number)
    if cuda.is_initialized():
        cuda.manual_seed_all(number)
    random.seed(number)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(number)
