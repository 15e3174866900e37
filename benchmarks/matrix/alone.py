"""Columns of one process: autocast, checkpoints, torch.compile, torch.export."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memkit.bench.zoo import Subject

from .step import Result, Run, blocks, finish


def plain(subject: Subject) -> Result:
    return finish(subject.loss(), subject.model)


def amp(subject: Subject) -> Result:
    with torch.autocast("cpu", torch.bfloat16):
        loss = subject.loss()
    return finish(loss, subject.model)


def checkpointed(implementation: CheckpointImpl, **options: Any) -> Run:
    def run(subject: Subject) -> Result:
        sample = list(subject.sample.values() if isinstance(subject.sample, dict) else subject.sample)
        # A reentrant checkpoint looks for an input that requires grad, and may be given no tuple of such tensors, as
        # rotary embeddings of positions are: the first one.
        sample[0].requires_grad_(sample[0].is_floating_point() and implementation is CheckpointImpl.REENTRANT)
        chosen = {subject.model.get_submodule(path) for path in blocks(subject.model)}
        wrapper = partial(checkpoint_wrapper, checkpoint_impl=implementation, **options)
        apply_activation_checkpointing(subject.model, wrapper, chosen.__contains__)
        return plain(subject)

    return run


def selective() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compiled(subject: Subject) -> Result:
    torch._dynamo.reset()
    model = torch.compile(subject.model, backend="aot_eager", fullgraph=True)
    return finish(Subject(model, subject.sample).loss(), subject.model)


def exported(subject: Subject) -> Result:
    """The forward in evaluation: its outputs stand for gradients."""
    model: nn.Module = subject.model.eval()
    kwargs = subject.sample if isinstance(subject.sample, dict) else {}
    args = () if kwargs else tuple(subject.sample)
    with torch.no_grad():
        out = torch.export.export(model, args, kwargs, strict=False).module()(*args, **kwargs)
    values = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,)
    found = [value for value in values if isinstance(value, Tensor)]
    return found[0].mean(), found


ALONE: dict[str, Run] = {
    "plain": plain,
    "AMP": amp,
    "checkpoint": checkpointed(CheckpointImpl.NO_REENTRANT),
    "checkpoint reentrant": checkpointed(CheckpointImpl.REENTRANT),
    "checkpoint selective": checkpointed(CheckpointImpl.NO_REENTRANT, context_fn=selective),
    "compile": compiled,
    "export": exported,
}
