"""What saved-tensor hooks hand back is looked at before a kernel reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import memkit.functional as M

WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda t: t.flatten()[:1],
    "empty": lambda t: t.new_empty(0),
    "twice": lambda t: torch.cat([t.flatten()] * 2),
    "meta": lambda t: t.to("meta"),
}


def leaf(*shape: int) -> Tensor:
    return torch.rand(shape).add_(0.5).requires_grad_()


ROWS, WIDTH = 4, 6
TARGET = torch.arange(ROWS)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "layer_norm": (
        lambda x, w, b: M.layer_norm(x, (WIDTH,), w, b),
        (leaf(ROWS, WIDTH), leaf(WIDTH), leaf(WIDTH)),
    ),
    "layer_norm of its input": (
        lambda x, w, b: M.layer_norm(x, (WIDTH,), w, b, save="input"),
        (leaf(ROWS, WIDTH), leaf(WIDTH), leaf(WIDTH)),
    ),
    "rms_norm": (lambda x, w: M.rms_norm(x, (WIDTH,), w), (leaf(ROWS, WIDTH), leaf(WIDTH))),
    "add_layer_norm": (
        lambda x, r, w, b: torch.cat(M.add_layer_norm(x, r, (WIDTH,), w, b)),
        (leaf(ROWS, WIDTH), leaf(ROWS, WIDTH), leaf(WIDTH), leaf(WIDTH)),
    ),
    "group_norm": (lambda x, w, b: M.group_norm(x, 2, w, b), (leaf(2, 4, 6, 6), leaf(4), leaf(4))),
    "batch_norm_act": (
        lambda x: M.batch_norm_act(x, None, None, training=True, act="relu"),
        (leaf(2, 4, 6, 6),),
    ),
    "cross_entropy": (lambda x: M.cross_entropy(x, TARGET), (leaf(ROWS, WIDTH),)),
    "cross_entropy of rows": (lambda x: M.cross_entropy(x, TARGET, reduction="none"), (leaf(ROWS, WIDTH),)),
    "linear_cross_entropy": (
        lambda x, w: M.linear_cross_entropy(x, w, TARGET),
        (leaf(ROWS, WIDTH), leaf(5, WIDTH)),
    ),
    "linear_cross_entropy of rows": (
        lambda x, w: M.linear_cross_entropy(x, w, TARGET, reduction="none"),
        (leaf(ROWS, WIDTH), leaf(5, WIDTH)),
    ),
    "act_linear": (M.act_linear, (leaf(ROWS, WIDTH), leaf(5, WIDTH))),
    "norm_linear": (lambda x, w: M.norm_linear(x, w, norm="layer_norm"), (leaf(ROWS, WIDTH), leaf(5, WIDTH))),
    "act_conv2d": (M.act_conv2d, (leaf(2, 4, 6, 6), leaf(3, 4, 1, 1))),
    "softmax": (lambda x: M.softmax(x, -1), (leaf(ROWS, WIDTH),)),
    "gelu": (M.gelu, (leaf(ROWS, WIDTH),)),
    "hardswish in place": (lambda x: M.hardswish(x * 1, inplace=True), (leaf(ROWS, WIDTH),)),
    "max_pool2d": (lambda x: M.max_pool2d(x, 2), (leaf(2, 4, 6, 6),)),
    "apply_rotary": (
        lambda q: M.apply_rotary(q, None, torch.ones(6, 2), torch.ones(6, 2)),
        (leaf(1, 2, 6, 4),),
    ),
}


def gradients(case: str, unpack: Callable[[int, Tensor], Tensor]) -> tuple[int, list[Tensor]]:
    """How many tensors were saved, and the inputs' gradients with these taken for them."""
    function, inputs = CASES[case]
    saved: list[Tensor] = []

    def pack(x: Tensor) -> int:
        saved.append(x.detach())
        return len(saved) - 1

    with saved_tensors_hooks(pack, lambda i: unpack(i, saved[i])):
        out = function(*inputs).sum()
    count = len(saved)
    return count, list(torch.autograd.grad(out, inputs))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused(case: str, wrong: str) -> None:
    count, right = gradients(case, lambda _, x: x)
    assert count
    refused = 0
    for changed in range(count):
        try:
            _, found = gradients(case, lambda i, x, changed=changed: WRONG[wrong](x) if i == changed else x)
        except (RuntimeError, ValueError, TypeError) as error:
            assert "INTERNAL ASSERT" not in str(error)  # noqa: PT017
            refused += 1
        else:  # it was not needed, or is the same in this shape
            for g, exact in zip(found, right, strict=True):
                torch.testing.assert_close(g, exact)
    assert refused
