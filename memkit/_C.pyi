"""The compiled module. One section for each source file that adds to it."""  # noqa: N999

from collections.abc import Sequence

from torch import Tensor

# csrc/torch/fast_call.cpp

def activation(
    op: str,
    input: Tensor,
    bias: Tensor | None,
    dim: int,
    params: tuple[float, ...],
    inplace: bool | str,
    save: str,
) -> Tensor | None:
    """An activation in eager mode; None where the call has to go through torch.ops."""

# csrc/torch/tap.cpp

class Tap:
    """Counts the CPU tensor storage of the process (every thread), from its creation until `stop()`.

    Any number may run at once, nested or not. Bytes are those torch asked its allocator for.
    """

    def __init__(self, samples: int = 0) -> None:
        """`samples`: record bytes alive at every allocation and release, thinned out to so many points."""

    def stop(self) -> None:
        """Ends the counting; a second call does nothing."""

    def read(self) -> tuple[int, int, int]:
        """Bytes alive and their peak, above the start (negative where more was freed), and allocations."""

    def samples(self) -> list[tuple[float, int]]:
        """Seconds since the start and bytes alive. The first is (0.0, 0), the last is now, or the end."""

    def covers(self, storage: int) -> bool:
        """Whether a living `torch.UntypedStorage`, given by its `_cdata`, got its memory since the start."""

# csrc/torch/planning.cpp

Row = tuple[int, int, int]  # size in bytes, lower, upper: alive in [lower, upper) of any clock

class Recorder:
    """Records the CPU tensor storage that the creating thread allocates, in order, until `stop()`."""

    def stop(self) -> None:
        """Ends the recording; a second call does nothing."""

    def buffers(self) -> list[Row]:
        """Stops, and tells every allocation. The clock counts these and their releases, by whatever thread.

        What was never released lives until the end. Requested sizes, above 0.
        """

def solve_plan(
    buffers: Sequence[Row], alignment: int, budget: float, seed: int
) -> tuple[list[int], int, int, bool, str, float]:
    """Offsets, height and lower bound in bytes, whether no plan is lower, what found it, and the seconds.

    Searches for at most about `budget` seconds, without Python's lock.
    """

def check_plan(buffers: Sequence[Row], offsets: Sequence[int], alignment: int) -> str | None:
    """What is wrong with the offsets: not aligned, or an overlap of buffers alive together. None: they are sound."""
