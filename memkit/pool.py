"""Tensors from preallocated memory: `Pool`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from . import _C, _pool_snapshot
from ._older import OLD
from ._pool_text import count_text, parse_device, parse_size, size_text
from ._pool_with import PoolReplay, PoolScope, PoolTag, PoolUse
from .plan import Plan, Plans, record


class PoolExhausted(torch.OutOfMemoryError):
    """The pool has no room for an allocation and must not, or cannot, grow. Bytes throughout."""

    def __init__(
        self,
        message: str,
        asked: int = 0,
        free: int = 0,
        largest_free: int = 0,
        fragmentation: float = 0.0,
        holders: Sequence[tuple[str, int, int]] = (),
        limit: str = "",
    ) -> None:
        super().__init__(message)
        self.asked = asked
        self.free = free
        self.largest_free = largest_free
        self.fragmentation = fragmentation
        """1 - largest_free / free: 0 when one block holds all that is free."""
        self.holders = list(holders)
        """The largest holders as (tag, bytes, blocks)."""
        self.limit = limit
        """Why the pool did not grow: "grow" (grow=False), "max", "available" (the system would have to end processes
        for it), or "system" (which refused)."""

    def __reduce__(self) -> tuple[Any, ...]:
        rest = (self.asked, self.free, self.largest_free, self.fragmentation, self.holders, self.limit)
        return type(self), (str(self), *rest)


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds now and has done so far. Bytes, unless said otherwise."""

    allocated: int
    """Of living blocks, as asked for."""
    allocated_peak: int
    active: int
    """Not to be handed out: living blocks, rounded up, and blocks that wait for work in flight."""
    active_peak: int
    reserved: int
    """Taken from the system."""
    reserved_peak: int
    allocations: int
    """How many so far. Of a scope's tensors only the larger blocks count that the scope cuts them from."""
    frees: int
    failures: int
    hits: int
    """Allocations served without asking the system."""
    growths: int
    """How often the pool grew so far."""
    live_blocks: int
    free_blocks: int
    chunks: int
    """Pieces of memory that the system gave and still has out: the first, and one for each growth."""
    free: int
    largest_free: int
    """The most that one allocation can get without growth."""
    fragmentation: float
    """1 - largest_free / free."""


class Pool(_C.PoolBase):
    """Scratch memory taken from the system once, and handed out as tensors from any thread.

    Args:
        size: bytes as an int, or text like "512MiB" ("KiB" is 1024 bytes, "KB" is 1000).
        device: "cpu", "cuda" or "cuda:N". On CUDA a block that dies is reused on its own stream at once, on another
            one after a wait in stream order; `Tensor.record_stream` is honoured; what a captured graph uses stays until
            it dies.
        pin_memory: page-locked host memory, for transfers to a GPU. Memory of a tensor that dies while a copy may
            still read it is not reused before the devices are done.
        grow: whether to take more from the system when `size` is used up: what is lacking, in whole pages of 2 MiB, and a
            sixteenth of what there is, up to 64 MiB, ahead. It lies behind what there is, so that nothing is cut in two:
            addresses for all of the machine's memory are reserved for that, unless they are limited (`ulimit -v`).
            Pinned memory and CUDA drivers that map no virtual memory: chunks of 64 MiB, or of what is asked for if that
            is more. Tensors never move.
        max: bytes that growth stops at, as `size`.
        debug: fills new memory with NaN and freed memory with another pattern, guards both ends of each block
            (outside scopes and captures), and notes Python stacks. Much slower.

    Memory is touched in advance, so that a tensor costs no page faults. A block returns to the pool with the
    last reference to its storage: views, autograd, numpy and DLPack keep it. Tensors stay valid when the pool is
    closed or forgotten. `resize_` beyond a block moves the tensor to a larger one. In a forked child a pool serves
    nothing and frees nothing. Results of `empty` hold whatever was there before, as in `torch.empty`.

    `memkit.memory.measure` counts what comes from a pool through `use()`, not tensors made by the pool's methods.

    Raises:
        PoolExhausted: there is no room (also for the pool itself).
        ValueError: a size, limit or device that makes no sense or is absent.

    Example:
        >>> pool = memkit.Pool("512MiB")
        >>> x = pool.empty(4096, 4096, dtype=torch.bfloat16)
        >>> with pool.scope():
        ...     y = pool.empty_like(x)
        ...     del y
    """

    def __init__(
        self,
        size: int | str,
        device: torch.device | str = "cpu",
        *,
        pin_memory: bool = False,
        grow: bool = True,
        max: int | str | None = None,
        debug: bool = False,
    ) -> None:
        for name, flag in (("pin_memory", pin_memory), ("grow", grow), ("debug", debug)):
            if not isinstance(flag, bool):
                raise TypeError(f"Pool: expected {name} to be a bool, got {type(flag).__name__}")
        nbytes = parse_size(size, "Pool")
        limit = 0 if max is None else parse_size(max, "Pool", "max")
        if 0 < limit < nbytes:
            raise ValueError(f"Pool: expected a max of at least the size, got {max!r} and {size!r}")
        target = parse_device(device, pin_memory)
        self._core = core = _C.Pool(str(target), pin_memory, nbytes, limit, grow, 64 << 20, debug)
        self._replays: WeakKeyDictionary[Plan, _C.PoolReplay] = WeakKeyDictionary()
        self._warned: WeakSet[Plan] = WeakSet()
        self._id = core.id
        functions = core.functions()
        self._empty, self._empty_strided = functions["empty"], functions["empty_strided"]
        self._zeros, self._ones, self._full = functions["zeros"], functions["ones"], functions["full"]
        self.device = target
        self.pin_memory = pin_memory
        self.debug = debug

    # -- tensors

    def empty(
        self,
        *size: Any,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        requires_grad: bool = False,
        tag: str | None = None,
    ) -> Tensor:
        """As `torch.empty`. `tag`: whom the memory is for, in reports and errors. The pool keeps every name: use few."""
        # Only compilers come here and to the next three, and calls through the class: an instance answers with C
        # functions, see PoolBase.
        shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
        made: Tensor = torch.ops.memkit.pool_empty(
            self._id, shape, dtype=dtype, memory_format=memory_format, tag=tag or ""
        )
        return made.requires_grad_() if requires_grad else made

    def zeros(self, *size: Any, **options: Any) -> Tensor:
        """As `torch.zeros`; options as in `empty`."""
        return _filled(self.empty(*size, **options), 0)

    def ones(self, *size: Any, **options: Any) -> Tensor:
        """As `torch.ones`; options as in `empty`."""
        return _filled(self.empty(*size, **options), 1)

    def full(
        self, size: Sequence[int], fill_value: complex, *, dtype: torch.dtype | None = None, **options: Any
    ) -> Tensor:
        """As `torch.full`, which takes the dtype from the value where none is given; options as in `empty`."""
        if dtype is None and type(fill_value) is not float:
            dtype = _DTYPES.get(type(fill_value)) or torch.full((), fill_value).dtype
        return _filled(self.empty(size, dtype=dtype, **options), fill_value)

    def empty_strided(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        tag: str | None = None,
    ) -> Tensor:
        """As `torch.empty_strided`."""
        if torch.compiler.is_compiling():
            made: Tensor = torch.ops.memkit.pool_empty_strided(
                self._id, size, stride, dtype=dtype, tag=tag or ""
            )
            return made.requires_grad_() if requires_grad else made
        return self._empty_strided(
            _tuple("size", size), _tuple("stride", stride), dtype=dtype, requires_grad=requires_grad, tag=tag
        )

    def empty_like(
        self,
        input: Tensor,
        *,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.preserve_format,
        requires_grad: bool = False,
        tag: str | None = None,
    ) -> Tensor:
        """As `torch.empty_like`: dense, in the order of the input's memory. On the pool's device."""
        _check_tensor(input, "empty_like")
        dtype = dtype or input.dtype
        if memory_format is not torch.preserve_format or input.is_contiguous():
            order = torch.contiguous_format if memory_format is torch.preserve_format else memory_format
            return self.empty(
                input.shape, dtype=dtype, memory_format=order, requires_grad=requires_grad, tag=tag
            )
        stride = torch.empty_like(input, device="meta").stride()
        return self.empty_strided(input.shape, stride, dtype=dtype, requires_grad=requires_grad, tag=tag)

    def new_like(self, input: Tensor, *, tag: str | None = None) -> Tensor:
        """A tensor of the input's shape, dtype and very strides, gaps and overlaps included."""
        _check_tensor(input, "new_like")
        return self.empty_strided(input.shape, input.stride(), dtype=input.dtype, tag=tag)

    # -- where allocations go

    def scope(self) -> PoolScope:
        """`with pool.scope():` tensors that this thread makes from the pool lie one behind the other; all go at its end.

        May be nested. On CUDA each stream, and what a graph captures, has its own row. Raises RuntimeError at the end if
        a tensor of the scope is still alive, and names it; that tensor stays valid. An error inside the `with` is passed
        on instead.
        """
        return PoolScope(self)

    def use(self) -> PoolUse:
        """`with pool.use():` every tensor that this thread makes on the pool's device lives in the pool, gradients too.

        May be nested, also with other pools: the innermost serves. Other threads go on as before; on CUDA those that
        work on the same stream do not, because backward runs on a thread of its own. What `torch.cuda` tells of memory
        counts these tensors as allocated and reserved, and its snapshots and history show them. What cuBLAS works in it
        keeps for each stream, 66 MiB on an H200, wherever the stream's first product was: better not in here.

        What a graph records comes from torch's memory for the graph, not from the pool; so does what is made in a
        `torch.cuda.use_mem_pool()` that begins inside.

        Without room for a tensor it raises PoolExhausted; on CUDA as it ends, inside torch's own OutOfMemoryError, which
        kernels know that try again with less.

        A process that is forked inside (a DataLoader's worker) goes on with torch's own allocator.
        """
        return PoolUse(self)

    def record(self, fn: Callable[..., Any], *args: Any, budget: float = 1.0, **kwargs: Any) -> Plan:
        """Calls `fn(*args, **kwargs)` once and plans its allocations for `replay`, within about `budget` seconds.

        As `memkit.plan.record`. Record a step that is like those to come: not the first, in which the optimizer makes its
        state.
        """
        if self._core.closed():
            raise RuntimeError("Pool.record: expected an open pool, got one that was closed")
        return record(fn, *args, budget=budget, **kwargs)

    def replay(self, plan: Plan | Plans, *, signature: Any = None) -> PoolReplay:
        """`with pool.replay(plan):` as `use()`, but the step's allocations get the places that the plan has for them.

        Each is checked: one of another size, out of order, or whose place is still in use, comes from the pool as in
        `use()`, and is counted; the first time that happens with a plan there is a warning. `plan.height` bytes are taken
        from the pool for the step, and kept as long as something that a step made is alive in them.

        Args:
            plan: from `record`; or several, of which the one with this `signature` is replayed (`signature_of` of the
                step's arguments). Without one for it the step runs as in `use()`, and counts as unplanned.

        The `with` gives a `PoolReplay` with the numbers. One step of a plan at a time. CPU only.
        """
        return PoolReplay(self, plan, signature)

    def tag(self, name: str) -> PoolTag:
        """`with pool.tag("name"):` what this thread allocates from the pool, unless it says another tag, has this one."""
        return PoolTag(self, name)

    # -- reports

    def stats(self) -> PoolStats:
        return PoolStats(**self._core.stats())

    def reset_peaks(self) -> None:
        """Peaks start again at what is there now."""
        self._core.reset_peaks()

    def holders(self) -> list[tuple[str, int, int]]:
        """(tag, bytes, blocks), the largest first; the tag "" is for what has none."""
        return self._core.holders()

    def check(self) -> str:
        """Looks at every block. Returns a line of numbers; raises RuntimeError if anything is wrong, and says what.

        In debug mode also the guards of living blocks, unless the pool sleeps, and what was found wrong so far:
        overwritten guards, wrong frees.
        """
        wrong = [text for text in (self._core.check(), *self._core.violations()) if text]
        if wrong:
            raise RuntimeError("Pool.check: " + "; ".join(wrong))
        return repr(self)

    def snapshot(self, path: str | Path) -> None:
        """Writes a file that PyTorch's memory viewers open, also for a pool on the CPU.

        Open the file at https://pytorch.org/memory_viz, or turn it into a page for a browser with
        `python -m torch.cuda._memory_viz trace_plot FILE -o page.html`. It shows the blocks that are alive now, not how they
        came to be, with their tags and, in debug mode, the Python stacks that made them.
        """
        _pool_snapshot.write(self._core.chunks(), self.device, Path(path))

    def __repr__(self) -> str:
        if self._core.inherited():
            return f"Pool(of the parent process, {self.device})"
        s = self.stats()
        state = ", closed" if self._core.closed() else ", asleep" if self._core.asleep() else ""
        kind = f"pinned {self.device}" if self.pin_memory else str(self.device)
        return (
            f"Pool({size_text(s.reserved)} on {kind}: {size_text(s.allocated)} in {count_text(s.live_blocks, 'block')}, "
            f"peak {size_text(s.allocated_peak)}, largest free {size_text(s.largest_free)}{state})"
        )

    # -- memory

    def trim(self) -> int:
        """Gives what is free beyond the pool's size back to the system; returns how many bytes.

        Whole pages of 2 MiB, wherever they lie (of pinned memory: chunks that nobody uses).
        """
        return self._core.trim()

    def sleep(self, tag: str | None = None, *, file: str | Path | None = None) -> int:
        """Writes contents to a file, gives the memory back to the system; addresses stay. Returns the bytes given back.

        Those are whole pages (4 KiB; on CUDA the driver's, mostly 2 MiB). A page goes if all tensors in it sleep: with a
        tag, small tensors that lie among others give back little or nothing.

        Args:
            tag: only what has this tag, in scopes and replays, too. By default all of the pool.
            file: a path, by default of a temporary one. Its contents are lost; until `wake()` no other pool may use it.

        Until `wake()` nobody may read or write the tensors that sleep, nor replay a graph that does, and nothing can be
        allocated from the pool, or under the tag. Freeing is allowed, and so is `close()`. While this call or `wake()` is
        under way, all that others allocate from the pool waits for its end.

        Raises:
            TypeError: a tag that is no string.
            ValueError: a tag that nothing in this pool ever had.
            RuntimeError: the pool is closed, sleeps already, its contents do not fit the file, another pool sleeps in
                the file, or a graph is being captured; it stays as it was.
        """
        if tag is not None and not isinstance(tag, str):
            raise TypeError(f"Pool.sleep: expected tag to be a str or None, got {type(tag).__name__}")
        if tag == "":
            raise ValueError("Pool.sleep: expected a tag or None, got an empty one")
        with tempfile.TemporaryFile() if file is None else Path(file).open("a+b") as out:  # emptied later
            return self._core.sleep(tag or "", out.fileno())

    def wake(self) -> None:
        """Undoes `sleep()`: every tensor is as it was.

        Raises RuntimeError where the pool is awake, and where memory or the file's contents are missing: then it still
        sleeps, and `wake()` may be called again.
        """
        self._core.wake()

    def close(self) -> None:
        """Serves no more. Memory goes back to the system, with the last tensor in it where there is one."""
        self._core.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("Pool: expected to stay in its process, got pickled or copied; its tensors can be")


def _tuple(name: str, numbers: Any) -> tuple[Any, ...]:
    try:
        return tuple(numbers)
    except TypeError:
        got = type(numbers).__name__
        raise TypeError(f"Pool.empty_strided: expected {name} to be a tuple of ints, got {got}") from None


def _check_tensor(input: Any, name: str) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"Pool.{name}: expected input to be a Tensor, got {type(input).__name__}")
    if input.layout is not torch.strided:
        raise ValueError(f"Pool.{name}: expected a strided tensor, got one of {input.layout}")


class _Method:
    """A method as an old compiler finds it, which asks the instance for what is a function in its class."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __get__(self, pool: Pool | None, owner: type[Pool]) -> Callable[..., Tensor]:
        return self.function if pool is None else partial(self.function, pool)


if OLD:
    for _name in ("empty", "zeros", "ones", "full"):
        setattr(Pool, _name, _Method(vars(Pool)[_name]))

_DTYPES = {int: torch.int64, bool: torch.bool}


def _filled(made: Tensor, value: Any) -> Tensor:
    if made.requires_grad:
        with torch.no_grad():
            return made.fill_(value)
    return made.fill_(value)


# What compilers see of the operators: shapes and strides. Never merged or reordered: see csrc/torch/schemas.cpp.


def _fake_empty(
    pool: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    tag: str = "",
) -> Tensor:
    return torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)


def _fake_empty_strided(
    pool: int, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, tag: str = ""
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


torch.library.register_fake("memkit::pool_empty", _fake_empty)
torch.library.register_fake("memkit::pool_empty_strided", _fake_empty_strided)
