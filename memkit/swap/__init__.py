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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature, cleandoc, signature
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._lean import without_lean
from . import change
from .find import ON_REQUEST, OPS, Found, find
from .layers import Choice
from .library import dropped, fits, served, twin_of
from .prove import prove
from .report import UNPROVEN, Row, SwapReport
from .sites import Decision, Decisions
from .structure import by_structure, check
from .trial import TOLERANCE, WIDER, Outcome, Trial, exact_convolutions, heap_passed_over, tensors
from .types import HALVES

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
            the present autocast; user hooks are called. Random state, gradients, buffers and the modules' attributes are put
            back afterwards. The proof holds for the control flow that the sample takes. Under `torch.no_grad()` it runs
            forward only, and the report says that no gradients were compared. Without a sample,
            activations are changed only where the structure proves it (in an `nn.Sequential` before a layer that keeps
            its input, in torch.nn's transformer layers), and norms keep their input.
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
        found = find(model, names, exact, bool(lean))
        if sample is None:
            report = _swap_by_structure(model, found, exact, lean)
        else:
            given = dict(sample) if isinstance(sample, Mapping) else sample
            try:
                with heap_passed_over(), without_lean():
                    report = _swap_by_sample(Trial(model, given), found, exact, lean)
            except RuntimeError as error:
                if "don't yet support saved tensor hooks" not in str(error):
                    raise
                if lean:
                    raise RuntimeError(f"swap: expected lean=False, as {NO_HOOKS}") from error
                change.undo(model)
                report = _swap_by_structure(model, find(model, names, exact, False), exact, False)
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


def _swap_by_structure(model: nn.Module, found: Found, exact: bool, lean: bool | str) -> SwapReport:
    found.keep_logits(UNPROVEN)
    pools = {site.module for site in found.layers if site.name == "max_pool2d" and not check(site)}
    decisions = {site: by_structure(site, exact, bool(lean), pools) for site in found.sites}
    _apply(model, decisions, found, lean)
    return SwapReport(_rows(decisions, found))


def _swap_by_sample(trial: Trial, found: Found, exact: bool, lean: bool | str) -> SwapReport:
    decisions, dtypes, idle = prove(trial, found.sites, found.norms, exact, bool(lean))
    found.in_lean = [(module, twin) for module, twin in found.in_lean if module not in idle]
    changes = any(decision.proof for decision in decisions.values()) or found.changes_others
    if not changes and lean != "call":
        return SwapReport(_rows(decisions, found))
    # Elements dropped are not the same: compared without those dropouts, counted with them.
    dropouts = [site.module for site, d in decisions.items() if d.proof and "dropout" in site.name]

    def change_over() -> None:
        _apply(trial.model, decisions, found, lean)
        trial.in_lean = lean is True  # with "call" the model is by itself

    def change_back() -> None:
        change.undo(trial.model)
        trial.in_lean = False

    stock = trial.run("stock", dropouts)
    before = trial.run("stock, with dropout").saved if dropouts else stock.saved
    served.difference_update(found.may_be_idle)
    swapped, error = _tried(trial, change_over, dropouts)
    if swapped is None:  # of what it differentiates itself, a norm may have kept too little
        change_back()
        decisions = {site: _from_input(decision) for site, decision in decisions.items()}
        swapped, error = _tried(trial, change_over, dropouts)
    if swapped is None:
        change_back()
        decisions = _refused(decisions, found, f"the swapped model raises on the sample: {error}")
        return SwapReport(_rows(decisions, found), before, before)
    found.note_idle()
    dtypes = dtypes or {parameter.dtype for parameter in trial.model.parameters()}
    tolerance = max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    note = "" if torch.is_grad_enabled() else "autograd was off, so gradients were not compared"
    if not (note or stock.gradients):
        note = "nothing requires a gradient, so no gradients were compared and nothing is saved"
    if not stock.has_finite_output:
        note = "each output on the sample holds NaN or infinity, so outputs were not compared"
    if not swapped.agrees_with(stock, tolerance):
        # Rounding may be what a model with kinks, or a norm over few values, makes much of. Then stock does it too.
        change_back()
        tolerance = _widened(trial, stock, dropouts, tolerance)
        change_over()
    narrow = _narrow(trial, dtypes)
    exact_alike = partial(_exact_alike, trial, stock, swapped, dropouts, narrow, change_over, change_back)
    if not swapped.agrees_with(stock, tolerance) and not (narrow in HALVES and exact_alike()):
        change_back()
        repeats = stock.agrees_with(trial.run("stock, again", dropouts), tolerance)
        # A kink that rounding crosses lies elsewhere on a sample whose numbers are a little others.
        nearby = 0.01, 0.02
        theirs = [_disturbed(trial, "stock, its sample changed", dropouts, x) for x in nearby if repeats]
        change_over()
        ours = [_disturbed(trial, "swapped, its sample changed", dropouts, x) for x in nearby if repeats]
        if not repeats:
            note = "stock does not repeat itself on the sample, so values were not compared"
        elif not (
            all(a and b and a.agrees_with(b, tolerance) for a, b in zip(ours, theirs, strict=True))
            or (narrow not in HALVES and exact_alike())
        ):
            change_back()
            reason = "values or gradients of the swapped model differ on the sample"
            decisions = _refused(decisions, found, reason)
            return SwapReport(_rows(decisions, found), before, before, note)
    if found.heads and (why := _why_logits(trial, found, dropouts, tolerance)):
        change_back()
        found.keep_logits(why)
        change_over()
    after = swapped.saved
    if dropouts or found.dropouts:
        dropped.difference_update(found.dropouts)
        after = trial.run("swapped, with dropout", drops=True).saved
        found.note_dropped()
    if before is not None and after is not None and after > 1.02 * before:
        change_back()
        decisions = _refused(decisions, found, "swapped, the model would keep more on the sample")
        after = before
    elif found.heads:  # a long batch gains by that what a short one does not
        after = trial.run("swapped, without logits", drops=True, logits=False).saved
    return SwapReport(_rows(decisions, found), before, after, note)


def _why_logits(trial: Trial, found: Found, dropouts: Sequence[nn.Module], tolerance: float) -> str:
    """Why a language model goes on returning them; nothing if its loss and gradients are the same without."""
    served.difference_update(found.heads)
    trial.but_logits = True
    try:
        kept = trial.run("swapped, logits not compared", dropouts)
        without = trial.run("swapped, without logits", dropouts, logits=False)
    except Exception as error:
        return f"without logits the model raises on the sample: {type(error).__name__}: {error}"
    finally:
        trial.but_logits = False
    if not (served.issuperset(found.heads) and kept.gradients):
        return "on the sample, no step of training with labels"
    return (
        ""
        if without.agrees_with(kept, tolerance)
        else "without logits, values or gradients differ on the sample"
    )


def _tried(
    trial: Trial, change_over: Callable[[], None], dropouts: Sequence[nn.Module]
) -> tuple[Outcome | None, str]:
    """The outcome of the swapped model, or what it raises, which stock did not."""
    change_over()
    try:
        return trial.run("swapped", dropouts), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _from_input(decision: Decision) -> Decision:
    """Of a norm that may keep its output: as in stock."""
    if not isinstance(decision.proof, Choice) or decision.proof.save != "auto":
        return decision
    proof, before = decision.proof._replace(save="input"), decision.bytes_before
    return Decision(proof, "keeps its input: the forward differentiates", before, before)


def _disturbed(trial: Trial, phase: str, dropouts: Sequence[nn.Module], noise: float) -> Outcome | None:
    """Nothing where the model takes no other numbers."""
    try:
        return trial.run(phase, dropouts, noise)
    except Exception:
        return None


def _widened(trial: Trial, stock: Outcome, dropouts: Sequence[nn.Module], tolerance: float) -> float:
    """For what the stock model makes of rounding alone, up to a bound."""
    for noise in (1e-3 * tolerance, 1e-2 * tolerance):
        rounded = _disturbed(trial, "stock, its sample rounded", dropouts, noise)
        while rounded and not rounded.agrees_with(stock, tolerance / 2) and tolerance < 0.25:
            tolerance *= 2
    return tolerance


def _narrow(trial: Trial, dtypes: Collection[torch.dtype]) -> torch.dtype | None:
    """The dtype that the model computes in, or of several the one that rounds most; None where there is no wider one."""
    device = trial.device().type
    if torch.is_autocast_enabled(device):
        dtypes = {torch.get_autocast_dtype(device)}
    return max((dtype for dtype in dtypes if dtype in WIDER), key=TOLERANCE.__getitem__, default=None)


def _exact_alike(
    trial: Trial,
    stock: Outcome,
    swapped: Outcome,
    dropouts: Sequence[nn.Module],
    narrow: torch.dtype | None,
    change_over: Callable[[], None],
    change_back: Callable[[], None],
) -> bool:
    """Whether a model whose dtype leaves nothing of its gradients to compare (in half precision a deep network with batch
    norms, as it is initialised; in float32 one with norms over two values) agrees with the stock one in a wider one, and
    has none that is farther from that than twice as far as the stock one's, whose sample is rounded in several ways."""
    if narrow is None:
        return False
    wide, device = WIDER[narrow], trial.device().type
    tolerance = TOLERANCE[wide]
    rounded = [stock]
    try:
        exact = trial.widened(wide)
        if exact is None:
            return False
        with torch.autocast(device, enabled=False), exact_convolutions(trial.device()):
            ours = exact.run(f"swapped, in {wide}", dropouts)
        change_back()
        for share in (0.01, 0.02, 0.04):
            rounded.append(trial.run("stock, its sample rounded", dropouts, noise=share * TOLERANCE[narrow]))
        change.undo(exact.model)
        exact.in_lean = False
        with torch.autocast(device, enabled=False), exact_convolutions(trial.device()):
            theirs = exact.run(f"stock, in {wide}", dropouts)
            if not ours.agrees_with(theirs, tolerance):
                tolerance = _widened(exact, theirs, dropouts, tolerance)
    except Exception:  # it needs the dtype that it has, or more memory than there is
        return False
    finally:
        change_back()
        change_over()
    return ours.agrees_with(theirs, tolerance) and swapped.is_as_near(rounded, theirs, TOLERANCE[narrow])


def _refused(decisions: Decisions, found: Found, reason: str) -> Decisions:
    """For all that would have been changed."""
    found.others = [
        replace(row, after="unchanged", reason=reason) if row.changed else row for row in found.others
    ]
    return {
        site: Decision(None, reason if d.proof else d.reason, d.bytes_before, d.bytes_before)
        for site, d in decisions.items()
    }


def _apply(model: nn.Module, decisions: Decisions, found: Found, lean: bool | str) -> None:
    for site, decision in decisions.items():
        if decision.proof is not None:
            change.apply(site, decision.proof)
    change.apply_others(found)
    if lean == "call":
        root: Any = model
        root.__class__ = twin_of("lean", type(model))


def _rows(decisions: Decisions, found: Found) -> tuple[Row, ...]:
    return (*(site.row(decision) for site, decision in decisions.items()), *found.others)


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
