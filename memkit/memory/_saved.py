"""Which storages autograd saves for backward, seen through saved-tensor hooks that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import _C
from ._meters import Meter

_functorch: Any = torch._C._functorch
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class SavedStorages:
    """Adds up the storages that autograd saves while `hooks()` are active, without keeping any of them alive.

    What is gone again when a backward begins was not saved for it. A weak reference to each keeps its address
    from naming another one later.
    """

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self._meter = meter
        self._device = device
        self._seen: dict[int, tuple[_C.StorageRef, Any]] = {}
        self._pending: list[int] = []  # seen since the last backward began

    def hooks(self) -> AbstractContextManager[None]:
        outer = _active_hooks()
        if outer is None:
            return saved_tensors_hooks(self._pack, self._unpack)
        # Only the innermost hooks are called, so those around this are called from here.
        outer_pack, outer_unpack = outer

        def pack(tensor: torch.Tensor) -> Any:
            self._note(tensor)
            return outer_pack(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            self._begin()
            return outer_unpack(packed)

        return saved_tensors_hooks(pack, unpack)

    def close(self) -> tuple[int, int]:
        """Bytes of the storages that are younger than the meter's start, and of all."""
        saved = sum(storage.nbytes for storage, mark in self._seen.values() if self._meter.is_new(mark))
        total = sum(storage.nbytes for storage, _ in self._seen.values())
        self._seen.clear()
        self._pending.clear()
        return saved, total

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        self._note(tensor)
        # Not the tensor itself: an output that its own node saves would keep the graph alive for ever.
        return tensor.detach(), tensor._version

    def _note(self, tensor: torch.Tensor) -> None:
        for part in parts(tensor):
            if part.device != self._device:
                continue
            storage = _C.StorageRef(part)
            if storage.key not in self._seen:
                self._seen[storage.key] = storage, self._meter.mark(storage)
                self._pending.append(storage.key)

    def _begin(self) -> None:
        if not self._pending or torch._C._current_graph_task_id() == -1:
            return
        for key in self._pending:
            if not self._seen[key][0].is_alive:
                del self._seen[key]
        self._pending.clear()

    def _unpack(self, packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        self._begin()
        tensor, version = packed
        # With hooks, autograd leaves this check to them.
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                f"expected version {version} instead."
            )
        return tensor


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor: none for opaque layouts, several for sparse ones and wrapper subclasses."""
    for part in parts(tensor):
        yield part.untyped_storage()


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that it consists of."""
    inner: list[Any] = []
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        named = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
        inner = [each for each in named if isinstance(each, torch.Tensor)]  # a DTensor names its mesh too
    elif _functorch.is_functorch_wrapped_tensor(tensor):
        inner = [_functorch.get_unwrapped(tensor)]
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        inner = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        inner = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        inner = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    for each in inner:
        yield from parts(each)


def _active_hooks() -> Hooks | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
