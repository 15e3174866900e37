"""`swap` turns a model's layers into memkit's, where that is proven to change neither values nor gradients.

What is changed, by module or by function:

- activations: modules whose type is exactly one of torch.nn's, by changing `module.__class__` (types.py), and functions
  that known layers hold, as torch.nn.TransformerEncoderLayer does (recipes.py, where rows for the layers of model
  libraries belong);
- norms, dropouts and max pooling of torch.nn, and a batch norm with the activation behind it in an `nn.Sequential`
  (layers.py); torch.nn's attention and feed-forward networks (library/multihead.py, library/sequences.py);
- modules of model libraries: activations, norms, feed-forward networks, residual blocks, attention and its rotary
  embeddings, and the loss that transformers' causal language models hold (library/).

Which variant of an activation, site by site (structure.py from how modules are put together, prove.py from
a run on a sample that watch.py looks at):

- with the batch norm before it;
- in place, the slope from the output: nothing reads the input afterwards. Each call checks again and goes out of place
  where it must: the proof covers the model as it is called, not what else might be done with it;
- out of place, the slope from the output: nothing changes the output afterwards, and what follows keeps it anyway;
- the slope from one bit an element, where it has two values and nothing else keeps the output;
- unchanged, and the report says why.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from inspect import Parameter, Signature, cleandoc, signature
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._lean import without_lean
from . import change
from .by_sample import swap_by_sample
from .find import ON_REQUEST, OPS, find
from .library import fits, twin_of
from .report import UNPROVEN, Row, SwapReport
from .structure import by_structure, check
from .trial import heap_passed_over, tensors

__all__ = ["Row", "SwapReport", "swap", "unswap"]

NO_HOOKS = "the forward takes gradients by torch.func, where PyTorch allows no saved-tensor hooks"


def swap(
    model: nn.Module,
    *,
    sample: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
    ops: Collection[str] | Literal["all"] = "all",
    exact: bool = True,
    lean: bool | Literal["call"] = False,
) -> SwapReport:
    """Changes a model's activations, norms, dropouts, pooling and what recipes know to variants of less memory, and reports.

    Parameters, hooks, flags, `state_dict`, optimizers, sharing, copies and pickles stay as they are; `repr` too.
    A swapped module goes back to the stock forward in any call that memkit cannot serve, and an activation out of place
    in the mode, training or evaluation, in which nothing was proven of the code that calls it.
    What remains different: dropout drops other elements than stock's under the same seed, as many and as random.
    Backward raises if a hook added later changes an activation's or a norm's output in place, and if the gradient itself
    is to be differentiated (`create_graph=True`) through gelu, silu, mish or hardswish, a norm that keeps its output or a
    loss without logits.

    Args:
        model: changed where it stands. Swap before `torch.compile`, and before DDP, FSDP or DeepSpeed if there is a sample.
            A model swapped before is taken as it was.
        sample: what to call the model with: one tensor, a tuple of arguments or a mapping of keyword arguments.
            The model runs on it three times, five with dropouts, forward and backward, in its present mode and under
            the present autocast; user hooks are called. Random state, gradients, buffers and the modules' attributes, with
            what these hold, are put back afterwards. LayerDrop is set aside for these runs (attributes of the modules
            or of their ``config`` named "layerdrop"). What the sample's control flow does not show, the code that holds an
            activation's input does: where it may read that later on any path, nothing is overwritten.
            Under `torch.no_grad()` it runs forward only, and the report says that no gradients were compared. A model
            that raises once it is swapped, or gives other values or gradients, or keeps more, is tried with parts of
            `ops`: what does not do so stays changed.
            Without a sample, activations are changed only where the structure proves it (in an `nn.Sequential` before a
            layer that keeps its input, in torch.nn's transformer layers), and norms keep their input.
        ops: which, by their names in `memkit.functional`: of activations, of norms ("layer_norm", "rms_norm",
            "group_norm"; "batch_norm_act" for a batch norm with what is behind it), of dropouts ("dropout", ...; "dropout"
            also of calls of `torch.nn.functional.dropout` and `alpha_dropout` in a module's forward),
            "max_pool2d", of feed-forward networks ("act_linear", "gated"), of "attention" (torch.nn.MultiheadAttention
            with the batch first, transformers' layers, recurrences), of rotary embeddings ("apply_rotary") and of losses
            ("cross_entropy"). "gelu" means both forms of gelu, "gelu_tanh" that with approximate="tanh" alone.
            Beside what "all" means, ``ops=["all", "linear_cross_entropy"]`` takes the loss of transformers' causal language
            models straight from what their last layer is given, chunk by chunk: in training with labels such a model then
            returns no logits, which are its largest tensor; it keeps the gradient of that layer's weight, which takes more
            where a batch has fewer tokens than the layer has inputs. It needs a sample with labels.
        exact: only where the slope from the output is off by at most 2e-4, and that only by its own rounding near the
            function's minimum: for gelu, silu, mish, hardswish, elu, selu, celu and softplus in float32 and
            float64. Calls in half precision then stay as in stock, and so do norms whose result is float32 under
            autocast in stock PyTorch.
        lean: for a model that runs inside :class:`memkit.lean`: activations keep their input and their output is
            dropped, exact in every dtype, so that only those that work in place by themselves have to be proven.
            Outside `memkit.lean()` they are stock's, but for attention's dropout and those that a forward calls as
            functions (with "dropout"), of which a seed is kept in either. Attention of torch.nn and of transformers'
            models, and what layers write out in their own code, keeps no weights inside it, recurrences (Mamba, linear
            attention) no states, and layer scales and gates (`gamma * linear(x)`, with "act_linear") no result of the layer.
            Layers with fewer outputs than inputs ("linear", of 2**20 numbers or more) and convolutions ("conv2d") make
            their weights' gradients first, so that an input that was made again is not there beside its own gradient.
            What that attention reads, masks too, may not be changed in place before backward, which says so.
            The sample then is run inside it, too.
            "call": each call of the model runs inside it, so that nothing else has to be written; a part of the model
            that is called by itself does not. Small models in float32 may peak higher than without `lean`
            (docs/limits.md).

    Raises:
        TypeError, ValueError: on unknown arguments, a compiled model, parameters that are not there yet.
        RuntimeError: with `lean`, on a forward that takes gradients by torch.func, where PyTorch allows no saved-tensor
            hooks. Without it, such a model is changed as without a sample.
        Whatever the model raises on the sample; it then is as it was before.

    Example:
        >>> print(memkit.swap(model, sample=batch))
    """
    names = _names(ops)
    if exact not in (True, False):
        raise ValueError(f"swap: expected exact True or False, got {exact!r}")
    if lean not in (True, False, "call"):
        raise ValueError(f"swap: expected lean True, False or 'call', got {lean!r}")
    _check_model(model)
    if sample is not None:
        _check_sample(model, sample)
    previous = change.undo(model)
    try:
        if lean == "call":
            _check_becomes_lean(model)
        if sample is None:
            report = _swap_by_structure(model, names, exact, lean)
        else:
            given = dict(sample) if isinstance(sample, Mapping) else sample
            try:
                with heap_passed_over(), without_lean():
                    report = swap_by_sample(model, given, names, exact, lean)
            except RuntimeError as error:
                if "don't yet support saved tensor hooks" not in str(error):
                    raise
                if lean:
                    raise RuntimeError(f"swap: expected lean=False, as {NO_HOOKS}") from error
                change.undo(model)
                report = _swap_by_structure(model, names, exact, False)
                report = replace(report, note=f"as without a sample: {NO_HOOKS}")
    except BaseException:
        change.undo(model)
        change.redo(previous)
        raise
    if not report.rows and ops != "all":
        report = replace(report, note=f"the model has none of ops {sorted(names)} as a module")
    return replace(report, lean=lean)


def unswap(model: nn.Module) -> None:
    """Undoes `swap`: every class and attribute as before. Does nothing to a model that is not swapped.

    A module whose `forward` somebody wrapped after the swap stays as it is, since the wrapper calls the swapped one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unswap: expected a torch.nn.Module, got {type(model).__name__}")
    change.undo(model)


def _swap_by_structure(model: nn.Module, names: frozenset[str], exact: bool, lean: bool | str) -> SwapReport:
    found = find(model, names, exact, bool(lean))
    found.keep_logits(UNPROVEN)
    pools = {site.module for site in found.layers if site.name == "max_pool2d" and not check(site)}
    decisions = {site: by_structure(site, exact, bool(lean), pools) for site in found.sites}
    change.apply_all(model, decisions, found, lean)
    return SwapReport(found.rows(decisions))


def _names(ops: Any) -> frozenset[str]:
    if isinstance(ops, str):
        if ops == "all":
            return frozenset(OPS)
        unknown = f"{ops!r}, which as a collection is [{ops!r}]"
    elif not isinstance(ops, Collection):
        unknown = type(ops).__name__
    else:
        unknown = ", ".join(repr(name) for name in ops if name not in (*OPS, *ON_REQUEST, "all"))
    if unknown:
        known = ", ".join((*OPS, *ON_REQUEST))
        raise ValueError(f"swap: expected ops 'all' or a collection of {known}; got {unknown}")
    return frozenset(ops) | (frozenset(OPS) if "all" in ops else frozenset())


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("swap: expected a model in Python, got a ScriptModule")
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None or (
            eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)
        ):
            where = f"{path} compiled" if path else "a compiled one"
            raise ValueError(
                f"swap: expected a model that is not compiled yet, got {where}; swap first, then compile"
            )


def _check_becomes_lean(model: nn.Module) -> None:
    stock = type(model)
    if not fits(model, twin_of("lean", stock)):
        raise TypeError(
            f"swap: lean='call' expected {stock.__name__}'s first base to be a Module, got {stock.__bases__[0].__name__}; "
            "put that last, or use lean=True and call the model inside memkit.lean()"
        )


def _check_sample(model: nn.Module, sample: Any) -> None:
    if not isinstance(sample, Tensor | tuple | Mapping):
        raise TypeError(
            f"swap: expected sample to be a tensor, a tuple of arguments or a mapping of keyword arguments, "
            f"got {type(sample).__name__}"
        )
    given = tensors(dict(sample) if isinstance(sample, Mapping) else sample)
    if given and not any(x.numel() for x in given):
        raise ValueError(
            f"swap: expected a sample to compare results of, got tensors of no elements: {list(given[0].shape)}"
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ValueError("swap: expected parameters that are there, got lazy ones; run the model once before")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            "swap: expected parameters that are whole, got some that DeepSpeed's ZeRO 3 has sharded; swap before "
            "deepspeed.initialize, or give no sample"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds = fsdp.FullyShardedDataParallel, fsdp.FSDPModule
        if any(isinstance(module, kinds) for module in model.modules()):
            raise ValueError(
                "swap: expected parameters that are whole, got some that FSDP has sharded; swap before fully_shard or "
                "FullyShardedDataParallel, or give no sample"
            )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "swap: expected parameters that are there, got some on the meta device; load them first, or give no sample"
        )


class _Callable(ModuleType):
    """`memkit.swap` names this package, and is called."""

    __call__ = staticmethod(swap)


sys.modules[__name__].__class__ = _Callable
__signature__ = signature(swap)
_plain = [each.replace(annotation=Parameter.empty) for each in __signature__.parameters.values()]
__doc__ = f"swap{Signature(_plain)}\n\n{cleandoc(swap.__doc__ or '')}"  # what `help` says of what is called
