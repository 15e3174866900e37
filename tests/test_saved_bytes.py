"""Bytes an element kept for backward, in bfloat16 and under autocast: stock PyTorch, memkit's operators, its consumers.

Each storage once; weights, their casts and the block's input not counted, the input of a norm is. ``pytest -s`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit
import memkit.functional as M
from memkit.memory import measure

ROWS, IN, HIDDEN = 64, 32, 128
BITS, ROW, SEED = 1 / 8, 4 / HIDDEN, 8 / (ROWS * HIDDEN)


class Block:
    """Layers around an operator. Under autocast parameters are float32, and so is the stream that a norm reads."""

    def __init__(self, amp: bool) -> None:
        torch.manual_seed(0)
        dtype = torch.float32 if amp else torch.bfloat16
        self.first, self.second = nn.Linear(IN, HIDDEN, dtype=dtype), nn.Linear(IN, HIDDEN, dtype=dtype)
        self.down = nn.Linear(HIDDEN, IN, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=dtype))
        self.input = torch.randn(ROWS, IN, dtype=dtype, requires_grad=True)
        self.residual = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True)

    @property
    def layer(self) -> tuple[Tensor, Tensor]:
        return self.down.weight, self.down.bias

    def h(self) -> Tensor:
        return self.first(self.input)

    def up(self) -> Tensor:
        return self.second(self.input)

    def stream(self) -> Tensor:
        return self.residual * 1  # saves nothing


Form = Callable[[Block], Tensor]
Line = tuple[str, str, Form, float, float]  # pattern, form, bytes, bytes under autocast
STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def lean(form: Form) -> Form:
    def call(b: Block) -> Tensor:
        with memkit.lean():
            return form(b)

    return call


def activations() -> Iterator[Line]:
    for name, theirs, output in (
        ("gelu", 4, 2 + BITS),
        ("silu", 4, 2 + BITS),
        ("relu", 2, 2),
        ("relu_squared", 4, 2),
    ):
        pattern, mine, stock = f"Linear -> {name} -> Linear", getattr(M, name), STOCK[name]

        def form(function: Callable[..., Tensor], **how: Any) -> Form:
            return lambda b: b.down(function(b.h(), **how))

        yield pattern, "stock", form(stock), theirs, theirs
        yield pattern, "in place", form(mine, inplace=True), output, output
        yield pattern, "save='output'", form(mine, save="output"), output, output
        yield pattern, "lean", lean(form(mine, save="input")), 2, 2
        yield pattern, "consumer", lambda b, name=name: M.act_linear(b.h(), *b.layer, name), 2, 2


def gated() -> Iterator[Line]:
    for pattern, act, stock in (("SwiGLU -> Linear", "silu", F.silu), ("GeGLU -> Linear", "gelu", F.gelu)):
        yield pattern, "stock", lambda b, stock=stock: b.down(stock(b.h()) * b.up()), 8, 8
        form: Form = lambda b, act=act: b.down(M.gated(b.h(), b.up(), act))  # noqa: E731
        yield pattern, "functional", form, 6, 6
        yield pattern, "lean", lean(form), 4, 4
        yield pattern, "consumer", lambda b, act=act: M.glu_linear(b.h(), b.up(), *b.layer, act), 4, 4


def norms() -> Iterator[Line]:
    shape = (HIDDEN,)
    yield (
        "LayerNorm -> Linear",
        "stock",
        lambda b: b.down(F.layer_norm(b.stream(), shape, b.scale)),
        4 + ROW,
        6 + 2 * ROW,
    )
    # Beside the input: its float32 form and the normalised one, the product with the weight.
    yield (
        "RMSNorm -> Linear",
        "stock",
        lambda b: b.down(F.rms_norm(b.stream(), shape, b.scale)),
        10 + ROW,
        10 + ROW,
    )
    for pattern, name, statistics in (("LayerNorm", "layer_norm", 2), ("RMSNorm", "rms_norm", 1)):
        pattern += " -> Linear"

        def form(b: Block, name: str = name, **how: Any) -> Tensor:
            return b.down(getattr(M, name)(b.stream(), shape, b.scale, **how))

        rest = statistics * ROW
        yield pattern, "functional", form, 2 + ROW, 2 + ROW
        yield pattern, "lean", lean(lambda b, form=form: form(b, save="input")), 2 + rest, 4 + rest
        yield (
            pattern,
            "consumer",
            lambda b, name=name: M.norm_linear(b.stream(), *b.layer, norm=name, norm_weight=b.scale),
            2 + rest,
            2 + ROW,
        )


def dropouts() -> Iterator[Line]:
    pattern = "Dropout -> Linear"
    yield pattern, "stock", lambda b: b.down(F.dropout(b.h())), 4, 4
    yield pattern, "functional", lambda b: b.down(M.dropout(b.h())), 2 + SEED, 2 + SEED
    yield pattern, "consumer", lambda b: M.dropout_linear(b.h(), *b.layer), 2 + SEED, 2 + SEED
    pattern = "gelu -> Dropout -> Linear"
    output, both = 2 + BITS + SEED, 2 + SEED
    yield pattern, "stock", lambda b: b.down(F.dropout(F.gelu(b.h()))), 6, 6
    yield pattern, "in place", lambda b: b.down(M.act_dropout(b.h(), "gelu", inplace=True)), output, output
    yield (
        pattern,
        "save='output'",
        lambda b: b.down(M.act_dropout(b.h(), "gelu", save="output")),
        output,
        output,
    )
    yield pattern, "lean", lean(lambda b: b.down(M.act_dropout(b.h(), "gelu"))), both, both
    yield pattern, "consumer", lambda b: M.dropout_linear(b.h(), *b.layer, act="gelu"), both, both


TABLE: list[Line] = [*activations(), *gated(), *norms(), *dropouts()]


def saved(form: Form, amp: bool) -> float:
    block = Block(amp)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        form(block)  # the weights' casts are autocast's from now on
        return measure(form, block, device="cpu").saved / (ROWS * HIDDEN)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    ("pattern", "form", "call", "eager", "amp"), TABLE, ids=[f"{p}: {f}" for p, f, *_ in TABLE]
)
def test_row(pattern: str, form: str, call: Form, eager: float, amp: float) -> None:
    found = saved(call, False), saved(call, True)
    print(f"\n{pattern:32} {form:16} {found[0]:7.4f} {found[1]:7.4f}", end="")
    if (
        form == "stock" and "Norm" in pattern
    ):  # what is in these differs from one PyTorch to the next, by statistics
        assert found == pytest.approx((eager, amp), abs=0.1)
    else:
        assert found == (eager, amp)


@pytest.mark.parametrize("act", [nn.GELU, nn.SiLU, nn.ReLU])
def test_swapped(act: type[nn.Module]) -> None:
    """As a model has it, changed by swap: the output and a bit, or the output."""
    wanted = 2.0 if act is nn.ReLU else 2 + BITS
    for amp in (False, True):
        block = Block(amp)
        model = nn.Sequential(block.first, act(), block.down)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            memkit.swap(model, sample=block.input.detach(), exact=False)
            model(block.input)
            assert measure(model, block.input).saved / (ROWS * HIDDEN) == wanted
