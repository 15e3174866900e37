"""Layer scale and gates in the code of libraries: inside `lean()` the layer's result is not kept for them."""

import copy
import pickle

import pytest
import torch
from swap_cases import assert_as_stock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit import swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

WIDTH, TOKENS, BATCH = 96, 64, 16


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_gate, self.gamma = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return x + self.gamma * self.layer(self.norm(x))


class ByAModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.ls = LayerScale()

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return x + self.ls(self.layer(self.norm(x)))


class ByAMethod(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x, out = x, self.layer(self.norm(x))
        if self.gamma is not None:
            out = out.mul(self.gamma.reshape(1, 1, -1))
        return x + out


class Gated(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        gate_msa = self.to_gate(c)
        return x + gate_msa.unsqueeze(1) * self.layer(self.norm(x))


class Sliced(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        gate = self.to_gate(c)
        out = self.layer(self.norm(x))
        return x + out * gate[:, None]


def modulate(x: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    return x + gate[:, None] * y


class ByAFunction(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return modulate(x, self.to_gate(c), self.layer(self.norm(x)))


class Turned(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        out = self.layer(self.norm(x)).transpose(1, 2)
        return x + (self.gamma[:, None] * out).mT


class Modulated(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.to_gate(c), self.to_gate(c + 1), self.to_gate(c - 1)
        out = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return x + gate[:, None] * self.layer(out)


class ByHelper(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return x + self._attn(x, c)

    def _attn(self, x: Tensor, c: Tensor) -> Tensor:
        return self.layer(self.norm(x)) * self.gamma


KINDS = [Block, ByAModule, ByAMethod, Gated, Sliced, Turned, Modulated, ByHelper, ByAFunction]
kinds = pytest.mark.parametrize("kind", KINDS)


def samples(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    return x, torch.randn(BATCH, WIDTH, dtype=dtype, requires_grad=True)


@kinds
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(kind: type[Block], by_sample: bool) -> None:
    model, (x, c) = kind().double(), samples()
    report = swap(model, sample=(x, c) if by_sample else None, lean="call")
    where = "ls" if kind is ByAModule else ""
    assert [row.after for row in report.changed if row.path == where] == ["in lean()"], report
    assert_as_stock(model, x, c)
    unswap(model)
    assert type(model) is kind


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Modulated])  # whose twin does both
def test_the_layers_result_is_not_kept(kind: type[Block]) -> None:
    model, (x, c) = kind(), samples(torch.float32)

    def saved() -> int:
        return measure(lambda: model(x, c)).saved

    swap(model, ops=["layer_norm", "rms_norm"], lean="call")
    without = saved()
    unswap(model)
    swap(model, ops=["layer_norm", "rms_norm", "act_linear"], lean="call")
    sums = 8 * WIDTH * (BATCH if kind in (Gated, Sliced, ByAFunction) else 1)
    assert without - saved() == 4 * BATCH * TOKENS * WIDTH - sums


def test_it_belongs_to_act_linear() -> None:
    def taken(*ops: str) -> list[str]:
        return [row.path for row in swap(Block(), ops=list(ops), lean="call").changed]

    assert taken("act_linear") == [""]
    assert taken("layer_norm", "attention") == ["norm"]


def test_outside_lean_it_is_stock() -> None:
    model, (x, c) = Block(), samples(torch.float32)
    stock = copy.deepcopy(model)
    swap(model, ops=["act_linear"], lean=True)
    before, after = (measure(lambda each=each: each(x, c)).saved for each in (stock, model))
    assert after == before
    with memkit.lean():
        assert "linear_scale" in model(x, c).grad_fn.next_functions[1][0].name()
    with memkit.lean(), torch.no_grad():
        assert torch.equal(model(x, c), stock(x, c))


class First(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.gamma * self.layer(x)


@pytest.mark.parametrize(("tokens", "needs_grad"), [(TOKENS, True), (1, True), (TOKENS, False)])
def test_a_row_says_where_it_did_nothing(tokens: int, needs_grad: bool) -> None:
    """A layer whose input needs no gradient keeps no weight, of which the numbers' gradient is made."""
    model, (x, c) = First(), samples(torch.float32)
    report = swap(
        model, ops=["act_linear"], sample=(x[:, :tokens].detach().requires_grad_(needs_grad), c), lean="call"
    )
    (row,) = report.rows
    does_nothing = tokens == 1 or not needs_grad
    assert ("for many rows whose input needs a gradient" in row.reason) == does_nothing, report


class Numbers(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        gamma, gates = 3, [2.0]
        return self.layer(x) * gamma * gates[0] + len(gates * gamma)


class Inner(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        def scaled(out: Tensor) -> Tensor:
            return out * self.gamma

        return scaled(self.layer(x)) + (lambda out: out * self.gamma)(self.layer(x))


class Part(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        gate = self.to_gate(x)
        return gate.sigmoid() * self.layer(x) * self.gamma


class InPlace(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        out = self.layer(x)
        out *= self.gamma.detach()
        return out * self.gamma


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gamma.requires_grad_(False)


class Checkpointed(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return x + self.gamma * checkpoint(self.layer, self.norm(x), use_reentrant=False)


class OtherMul(Block):
    """What is called mul is a method."""

    def mul(self, gate: Tensor) -> Tensor:
        return self.layer(gate)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        gate = self.to_gate(x)
        return self.mul(gate) + self.to_gate(x).mul(gate)


class Expanded(Block):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        gate = self.to_gate(c)[:, None].expand(-1, TOKENS, -1)
        return x + gate * self.layer(self.norm(x))


@pytest.mark.parametrize("kind", [Numbers, Inner, Part, InPlace, Frozen, Checkpointed, OtherMul, Expanded])
def test_code_that_it_is_not_for(kind: type[Block]) -> None:
    model, (x, c) = kind().double(), samples()
    swap(model, lean="call")
    assert_as_stock(model, x, c)


def test_copies_pickles_and_compilers() -> None:
    model, (x, c) = Gated(), samples(torch.float32)
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(each(x, c), stock(x, c))
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x, c), stock(x, c))


def test_function_transforms() -> None:
    model, (x, c) = Gated().double(), samples()
    stock = copy.deepcopy(model)
    swap(model, lean="call")

    def loss(parameters: dict[str, Tensor], each: nn.Module) -> Tensor:
        return torch.func.functional_call(each, parameters, (x, c)).sin().sum()

    ours, theirs = (torch.func.grad(loss)(dict(m.named_parameters()), m) for m in (model, stock))
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name])
