"""The compiled module. One section for each source file that adds to it."""  # noqa: N999

from torch import Tensor

# csrc/bindings.cpp

def cpu_isa() -> str:
    """The instruction set that the CPU loops run with: v4 (AVX-512), v3 (AVX2) or base."""

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
