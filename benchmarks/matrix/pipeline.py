"""A model in two stages of torch.distributed.pipelining, cut before the middle one of its blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils import _pytree as pytree

from memkit.bench.zoo import Subject, cross_entropy, output_of

from .step import Result, blocks

MICROBATCHES = 2


class ReachedError(Exception):
    """The cut, by the first stage."""


def is_encoder_decoder(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


class Stage(nn.Module):
    """The model's own forward, up to the cut or from it on. Activations travel; all else comes from the sample."""

    def __init__(
        self, model: nn.Module, sample: dict[str, Tensor], rank: int, shared: dict[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        paths = blocks(model)
        middle = len(paths) // 2
        self.model = model
        self.rank = rank
        self.shared = shared or {}
        self.received: tuple[Tensor, ...] = ()
        self.travelling: list[int] = []
        cut = model.get_submodule(paths[middle])
        if is_encoder_decoder(model):
            cut = model.get_decoder()  # type: ignore[operator]  # all its blocks read the encoder's output
        before = [model.get_submodule(path) for path in paths[:middle]]
        outputs: dict[nn.Module, Any] = {}
        hooks = [block.register_forward_hook(lambda m, _, out: outputs.update({m: out})) for block in before]
        hooks.append(cut.register_forward_pre_hook(self.find, with_kwargs=True))
        self.call(sample)
        for hook in hooks:
            hook.remove()
        cut.register_forward_pre_hook(self.at_cut, with_kwargs=True)
        for block in before if rank else ():  # what they return is overwritten at the cut
            out = pytree.tree_map_only(Tensor, Tensor.detach, outputs[block])
            block.forward = lambda *args, out=out, **kwargs: out

    def call(self, sample: dict[str, Tensor]) -> Tensor:
        """The logits."""
        out = self.model(*sample.values()) if "0" in sample else self.model(**sample, **self.shared)
        logits: Tensor | None = getattr(out, "logits", None)
        return output_of(out) if logits is None else logits  # type: ignore[no-any-return]

    def find(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, _ = pytree.tree_flatten((args, kwargs))
        self.travelling = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]

    def at_cut(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self.rank == 0:
            raise ReachedError(*(leaves[i].contiguous() for i in self.travelling))  # gloo sends no others
        for i, x in zip(self.travelling, self.received, strict=True):
            leaves[i] = x
            if x.requires_grad:
                x.register_hook(Tensor.contiguous)
        return pytree.tree_unflatten(leaves, spec)

    def forward(self, *received: Tensor, **sample: Tensor) -> Any:
        self.received = received
        try:
            return self.call(sample)
        except ReachedError as reached:
            return reached.args


def inputs(subject: Subject) -> dict[str, Tensor]:
    """By keyword, or by position as text. Without labels: the loss is taken behind the last stage."""
    if not isinstance(subject.sample, dict):
        return {str(i): x for i, x in enumerate(subject.sample)}
    found = {name: x for name, x in subject.sample.items() if name != "labels"}
    if is_encoder_decoder(subject.model):
        found["decoder_input_ids"] = subject.sample["labels"]
    return found


def pipelined(subject: Subject) -> Result:
    rank, given = dist.get_rank(), inputs(subject)
    rows = len(next(iter(given.values())))
    sample = {name: x for name, x in given.items() if len(x) == rows}
    shared = {name: x for name, x in given.items() if len(x) != rows}  # as positions, by all of a batch
    example = {name: x.chunk(MICROBATCHES)[0] for name, x in sample.items()}
    stage = Stage(subject.model, example, rank, shared)
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu")),
        n_microbatches=MICROBATCHES,
        loss_fn=lambda logits, _: cross_entropy(logits),
    )
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(**sample)
    else:
        schedule.step(**sample, target=torch.zeros(rows), losses=losses)
    loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    return loss, [p.grad for p in stage.parameters() if p.grad is not None]
