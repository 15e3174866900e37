"""What the columns share: a training step's results, and a model's blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from memkit.bench.zoo import Subject

Result = tuple[Tensor, list[Tensor]]
"""A step's loss, and its gradients (or the parameters' steps) on this rank."""
Run = Callable[[Subject], Result]


class InapplicableError(Exception):
    """The engine has nothing to do in this model, whoever made its layers."""


def finish(loss: Tensor, model: nn.Module) -> Result:
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def steps(
    model: nn.Module,
    train: Callable[[], Tensor],
    whole: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Result:
    """For engines that leave no gradients behind: how far SGD at a rate of 1 goes. Inside `whole()` parameters are whole."""
    with whole():
        before = [p.detach().clone() for p in model.parameters()]
    loss = train()
    with whole():
        return loss.detach(), [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]


def blocks(model: nn.Module) -> list[str]:
    """Paths of a model's blocks, in order: what its outermost lists hold, or where it has none its own children.

    A Sequential of one block is a wrapper of it.
    """

    def compound(module: nn.Module, path: str) -> list[str]:
        prefix = f"{path}." if path else ""
        return [f"{prefix}{name}" for name, child in module.named_children() if any(child.children())]

    found: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{block}.") or path == block for block in found):
            continue
        least = 1 if isinstance(module, nn.ModuleList) else 2 if isinstance(module, nn.Sequential) else None
        each = compound(module, path)
        if least is not None and len(each) >= least:
            found += each
    return found or compound(model, "")
