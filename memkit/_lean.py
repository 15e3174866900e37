"""`lean`: results of cheap operators are dropped after their consumer's forward and computed again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

from . import _C
from ._modes import in_transform

CHECKPOINTS = "torch.utils.checkpoint", "memkit.swap.library.checkpoint"
"""Modules whose hooks make again what was saved."""


class lean:  # noqa: N801  a context, named as torch.no_grad is
    """Inside, a tensor that autograd saves is dropped where one of memkit's cheap operators made it from what is kept.

    ``Linear(gelu(Linear(x)))`` keeps both the input of gelu, for its slope, and its output, for the second Linear. Inside
    ``lean()`` the output goes with its last reference, and backward computes it again, to the bit, when the second
    Linear asks for it: 2 bytes an element instead of 4 in bfloat16, for one more pass over memory.

    What is rebuilt: results of memkit's activations, of :func:`memkit.functional.act_dropout` and of the norms over rows,
    where they keep their input (``save="input"``, the default out of place of activations with a minimum); of gated units,
    group norm and ``batch_norm_act``; sums (``a + b``) of two such results and what is made of such a sum; what is padded of
    such a result (``constant``, ``reflect``, ``replicate``); views of all these. Of memkit's dropout where what drops is
    such a result, or kept by what made it (relu, softmax). At most three operators, and a padding, run one after the other:
    what would take more is kept.

    Of PyTorch's own operators, by the kernel that made them, results of 2**14 elements or more: products and quotients
    whose factors they keep (``x * gate``), ``glu``, activations that keep their input (``gelu``, ``silu``, ``mish``,
    ``hardswish``, ``hardsigmoid``, ``elu``, ``celu``, ``selu``, ``leaky_relu``, ``prelu``, ``hardtanh``, ``relu6``,
    ``softplus``), ``clamp``, ``pow`` with a number, ``sin``, ``cos`` and ``avg_pool2d``. Not with hooks around that may give
    a tensor back only once, as a checkpoint's do.

    What is joined again: concatenations (``torch.cat``) of such results and of tensors that autograd keeps anyway, for
    others: each result of a DenseNet's layers is kept once, not once for each layer behind it. At most a fourth of one is
    copied. The last one that was made again stays until the next is, for other consumers.

    What is packed: results of memkit's ``relu``, ``relu6`` and ``relu_squared`` and of its dropout behind them or with
    ``p >= 0.5``, on the CPU, with 2**18 elements in rows of 1,024 at least. Where half of one is zero, the other half and a
    bit an element are kept, 2.1 bytes an element instead of 4 in float32; where one in twenty is not, 0.3. On CUDA how
    many there are would have to be waited for, so nothing is packed there.

    The rest is saved as it would be outside, by the saved-tensor hooks around the context if there are any: inside
    ``torch.autograd.graph.save_on_cpu`` or a checkpoint the two work together. Hooks entered inside ``lean()`` take its
    place, as hooks do. Has no effect in compiled code, where the compiler chooses what to recompute, nor in function
    transforms (``torch.func.grad``, ``vmap``), in which PyTorch allows no such hooks: entered around one that takes
    gradients, they raise there. Under ``no_grad`` nothing is saved anyway.

    A result that is changed in place afterwards is kept. Under autograd's rules for saved tensors all the same: changing
    the kept input in place raises in backward, as does changing what a concatenation was made of (through ``.data`` or
    NumPy it is not seen, there as anywhere in autograd); and parts of a graph that a backward has freed are gone for what
    is made again of them.

    Engines that shard parameters (FSDP, DeepSpeed) free their memory between forward and backward. Where
    ``torch.distributed`` is initialized when the context is entered, copies of the parameters that results are made again of
    (of norms, biases, scales) are kept; what PyTorch's operators make of a parameter, or of what has no gradient, is
    then kept itself, as is what hooks inside ``lean()`` took part in. Memory that is gone otherwise raises.

    Example:
        >>> with memkit.lean():
        ...     loss = model(batch).square().mean()
        >>> loss.backward()
    """

    def __init__(self) -> None:
        self._entered: list[saved_tensors_hooks | None] = []

    def __enter__(self) -> lean:
        self._entered.append(None if is_compiling() or in_transform() or is_lean() else _hooks())
        hooks = self._entered[-1]
        if hooks is not None:
            hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered:
            raise RuntimeError("lean: expected to be entered before it is left, got an exit alone")
        hooks = self._entered.pop()
        if hooks is not None:
            hooks.__exit__(kind, error, trace)


def is_lean() -> bool:
    """Whether what autograd saves now is saved by :class:`lean`. Not in compiled code."""
    if is_compiling():
        return False
    hooks = _active_hooks()
    return hooks is not None and (hooks[0] is _C.pack or hasattr(hooks[0], "lean"))


def may_ask_again() -> bool:
    """Whether what is saved now, inside :class:`lean`, may be asked for more than once by one backward."""
    hooks = _active_hooks()
    return hooks is not None and (hooks[0] is _C.pack or getattr(hooks[0], "lean", False))


@contextmanager
def without_lean() -> Iterator[None]:
    """What is saved goes to the hooks around :class:`lean`, if there are any."""
    if not is_lean():
        yield
        return
    autograd: Any = torch._C._autograd
    hooks = _active_hooks()
    autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        autograd._push_saved_tensors_default_hooks(*hooks)


class _Nonzeros(NamedTuple):
    """A tensor of many zeros, its parts as the hooks around keep them."""

    frame: object
    values: Any
    bits: Any


def _active_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # None without


def _hooks() -> saved_tensors_hooks:
    _C.copy_parameters(distributed.is_available() and distributed.is_initialized())
    outer = _active_hooks()
    if outer is None:
        return saved_tensors_hooks(_C.pack, _C.unpack)  # type: ignore[arg-type]
    keep, give_back = outer
    # A checkpoint keeps nothing, and what it computes again need not have as many zeros: other draws of dropout, other
    # rounding. It would refuse another number of them.
    around = getattr(keep, "__module__", None)
    packs = around not in CHECKPOINTS
    # What concatenations share is asked for more than once, which other hooks may not be made for.
    asks_again = around in ("torch.autograd.graph", "memkit.memory._saved")

    def pack(tensor: Tensor) -> Any:
        recipe = _C.recipe(tensor, asks_again)
        if recipe is None and asks_again:
            recipe = _C.concatenation(tensor, keep, give_back)
        if recipe is not None:
            return recipe
        if not packs:
            return keep(tensor)
        nonzeros = _C.nonzeros(tensor)
        if nonzeros is None:
            return _C.keep(tensor, keep, give_back) if asks_again else keep(tensor)
        frame, values, bits = nonzeros
        return _Nonzeros(frame, keep(values), keep(bits))

    vars(pack)["lean"] = asks_again

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _Nonzeros):
            return _C.spread(packed.frame, give_back(packed.values), give_back(packed.bits))
        tensor = _C.unpack(packed)
        return give_back(packed) if tensor is None else tensor

    return saved_tensors_hooks(pack, unpack)
