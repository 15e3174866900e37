"""Norms scaled and shifted for each sample, as diffusion transformers do: inside `lean()` their result is made again."""

import copy
import functools
import pickle
import sys
import types

import pytest
import torch
from swap_cases import assert_as_stock
from torch import nn

import memkit
from memkit import _C, swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

WIDTH, TOKENS = 32, 24


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.scale, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, c):
        scale, shift = self.scale(c), self.shift(c)
        return self.layer(self.norm(x) * (1 + scale[:, None]) + shift[:, None])


class Turned(Block):
    def forward(self, x, c):
        scale, shift = self.scale(c)[:, None], self.shift(c)[:, None]
        return self.layer((scale + 1.0) * self.norm(x) + shift)


class Sliced(Block):
    def forward(self, x, c):
        scale, shift = self.scale(c), self.shift(c)
        return self.layer(self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :])


class Called(Block):
    def forward(self, x, c):
        return self.layer(modulate(self.norm(x), self.shift(c), self.scale(c)))


class Unshifted(Block):
    def forward(self, x, c):
        scale, _ = self.scale(c).unsqueeze(1), self.shift(c)
        return self.layer((self.norm(x) * (1 + scale)).type_as(x)) + self.shift(c)[:, None]


def doubled(function):
    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        return 2 * function(self, *args, **kwargs)

    return forward


class Decorated(Block):
    @doubled
    def forward(self, x, c):
        scale, shift = self.scale(c), self.shift(c)
        return self.layer(self.norm(x) * (1 + scale[:, None]) + shift[:, None])


class Inherits(Turned):
    def forward(self, x, c):
        scale, shift = self.__private(c)
        y = self.norm(x) * (1 + scale) + shift
        return self.layer(y) + super().forward(x, c)

    def __private(self, c):
        return self.scale(c)[:, None], self.shift(c)[:, None]


class Methods(Block):
    def forward(self, x, c):
        return self.layer(self._modulate(self.norm(x), self.shift(c), self.scale(c)))

    def _modulate(self, x, shift, scale):
        return x * (1 + scale[:, None]) + shift[:, None]


class Casts(Block):
    def forward(self, x, c):
        scale, shift = self.scale(c)[:, None], self.shift(c)[:, None]
        y = (self.norm(x.double()) * (scale.double() + 1.0) + shift.to(torch.float64)).type_as(x)
        return self.layer(y)


class Named(Block):
    def forward(self, x, c):
        by = types.SimpleNamespace(scale=self.scale(c)[:, None], shift=self.shift(c)[:, None])
        return self.layer((1 + by.scale) * self.norm(x) + by.shift[:, :WIDTH])


def closes_over(factor):
    class Closure(Block):
        def forward(self, x, c):
            scale, shift = self.scale(c)[:, None], self.shift(c)[:, None]
            return self.layer(self.norm(factor * x) * (1 + scale) + shift)

    return Closure


KINDS = [Block, Turned, Sliced, Called, Unshifted, Decorated, Inherits, Methods, Casts, Named, closes_over(3)]
kinds = pytest.mark.parametrize("kind", KINDS)


def samples(dtype=torch.float64):
    return torch.randn(2, TOKENS, WIDTH, dtype=dtype), torch.randn(2, WIDTH, dtype=dtype)


@kinds
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(kind, by_sample):
    model, given = nn.ModuleList([kind()]).double(), samples()
    model.forward = lambda *args: model[0](*args)
    block = model[0]
    report = swap(block, sample=given if by_sample else None, lean="call")
    assert [row.after for row in report.changed if row.path == ""] == ["in lean()"]
    assert_as_stock(block, *given)
    unswap(block)
    assert type(block) is kind


@kinds
def test_the_norms_input_alone_is_kept(kind):
    model, given = kind(), samples(torch.float32)
    given[0].requires_grad_()
    large = 4 * 2 * TOKENS * WIDTH
    stock = measure(lambda: model(*given)).saved
    swap(model, lean="call")
    ours = measure(lambda: model(*given)).saved
    assert (
        ours <= (2 if kind in (Inherits, Casts) else 1) * large + large // 2
    )  # and what is kept of each sample
    assert ours <= 0.7 * stock


@kinds
def test_without_lean_it_is_stock(kind):
    model, given = kind().double(), samples()
    given[0].requires_grad_()
    swap(model, ops={"layer_norm", "rms_norm"}, lean=True)
    plain = copy.deepcopy(model)
    swap(plain, ops={"layer_norm"}, lean=True)
    assert torch.equal(model(*given), plain(*given))
    assert measure(lambda: model(*given)).saved == measure(lambda: plain(*given)).saved
    assert_as_stock(model, *given)


def test_needs_both_norms_among_ops():
    assert not swap(Block(), ops={"gelu"}, lean="call").changed


def test_the_function_is_the_one_of_the_time(monkeypatch):
    model, given = Called().double(), samples()
    swap(model, lean="call")
    before = model(*given)
    monkeypatch.setattr(sys.modules[__name__], "modulate", lambda x, shift, scale: 0 * x)
    torch.testing.assert_close(model(*given), model.layer(0 * given[0]))
    monkeypatch.undo()
    assert torch.equal(model(*given), before)


def test_lines_of_errors_are_those_of_the_source():
    model = Block().double()
    swap(model, lean="call")
    x, c = samples()
    with pytest.raises(RuntimeError) as raised:
        model(x, torch.cat([c, c, c]))
    lines = [frame.lineno for frame in raised.traceback if frame.path.name == "test_swap_modulated.py"]
    assert lines[-1] == Block.forward.__code__.co_firstlineno + 1


def bump():
    global counted
    counted += 1


class Counts(Block):
    def forward(self, x, c):
        scale, shift = self.scale(c)[:, None], self.shift(c)[:, None]
        before = counted
        bump()
        return self.layer(self.norm(x) * (1 + scale) + shift) * (counted - before)


class Compares(Block):
    def forward(self, x, c):
        assert modulate is self.held
        assert modulate.mark == 1
        return self.layer(modulate(self.norm(x), self.shift(c), self.scale(c)))

    held = staticmethod(modulate)


modulate.mark = 1


class Numbers(Block):
    def forward(self, x, c):
        n = len(c)
        scale, shift = 2, 1
        return self.layer(x * (1 + scale) + shift)[:, : (n + 1) * n] + n * (1 + n)


class Full(Block):
    """A scale and shift for each token."""

    def forward(self, x, c):
        scale, shift = self.scale(x), self.shift(x)
        return self.layer(self.norm(x) * (1 + scale) + shift)


class Changes(Block):
    def forward(self, x, c):
        scale, shift = self.scale(c)[:, None], self.shift(c)[:, None]
        y = self.norm(x) * (1 + scale) + shift
        z = self.layer(y.square())
        y.add_(1)
        return z + y.exp()


class Assigns(Block):
    def forward(self, x, c):
        scale, shift = self.scale(c)[:, None], self.shift(c)[:, None]
        return self.layer(self.norm(shift := x) * (1 + scale) + shift)


class WritesGlobals(Block):
    def forward(self, x, c):
        global counted
        counted = counted + 1
        scale, shift = self.scale(c)[:, None], self.shift(c)[:, None]
        return self.layer(self.norm(x) * (1 + scale) + shift)


counted = 0


@pytest.mark.parametrize("kind", [Numbers, Full, Assigns, WritesGlobals, Counts, Compares])
def test_what_it_is_not_for(kind):
    model, given = kind().double(), samples()
    swap(model, lean="call")
    assert_as_stock(model, *given)


def test_what_is_written_to_afterwards():
    model, given = Changes().double(), samples()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(*given).sum().backward()
    swap(model, lean="call")
    ours = torch.autograd.grad(model(*given).sum(), list(model.parameters()))

    def stock(x, c):
        scale, shift = model.scale(c)[:, None], model.shift(c)[:, None]
        y = nn.functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        return model.layer(y.square()) + (y + 1).exp()

    for mine, other in zip(
        ours, torch.autograd.grad(stock(*given).sum(), list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_a_source_that_is_another():
    names = {"Block": Block, "__name__": "elsewhere"}
    exec(
        "class Executed(Block):\n  def forward(self, x, c):\n    s = self.scale(c)[:, None]\n"
        "    return self.layer(self.norm(x) * (1 + s) + s)",
        names,
    )
    model, given = names["Executed"]().double(), samples()
    assert not any(row.path == "" for row in swap(model, lean="call").changed)
    assert_as_stock(model, *given)


def test_survives_copies_and_pickles():
    model, given = Block().double(), samples()
    swap(model, lean="call")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(*given), model(*given))


def test_compiled_and_transformed():
    model, given = Called().double(), samples()
    stock = copy.deepcopy(model)
    swap(model, lean=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), stock(*given))
    with memkit.lean():
        model(*given).sum().backward()
    parameters, each = dict(model.named_parameters()), [x[:, None] for x in given]

    def gradients(model):
        def loss(parameters, x, c):
            return torch.func.functional_call(model, parameters, (x, c)).square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, *each)

    theirs = gradients(stock)
    for name, ours in gradients(model).items():
        torch.testing.assert_close(ours, theirs[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("others", [None, torch.float32])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_the_operator_to_the_bit(dtype, others, shift, turned):
    x = torch.randn(3, 20, 8, dtype=dtype, requires_grad=True)
    scale, moved = (torch.randn(3, 1, 8, dtype=others or dtype, requires_grad=True) for _ in range(2))
    leaves = [x, scale, moved] if shift else [x, scale]

    def stock():
        product = scale * x if turned else x * scale
        return product + moved if shift else product

    ours = _C.scale_shift(scale if turned else x, x if turned else scale, moved if shift else None)
    theirs = stock()
    assert torch.equal(ours, theirs)
    assert ours.dtype == theirs.dtype
    weight = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, leaves, weight)
    for mine, other in zip(torch.autograd.grad(ours, leaves, weight), expected, strict=True):
        assert torch.equal(mine, other)


def test_the_operators_derivatives():
    x = torch.randn(2, 8, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(3, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(2, 1, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_C.scale_shift, (x, scale, shift))
    assert torch.autograd.gradgradcheck(_C.scale_shift, (x, scale, shift))
    y = memkit.functional.silu(x)
    for frozen in (scale, shift):
        frozen.requires_grad_(False)
        leaves = [each for each in (x, scale, shift) if each.requires_grad]
        ours = torch.autograd.grad(_C.scale_shift(y, scale, shift).exp().sum(), leaves, retain_graph=True)
        theirs = torch.autograd.grad((y * scale + shift).exp().sum(), leaves, retain_graph=True)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)


def test_batched_gradients():
    x = torch.randn(2, 8, 6, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.randn(2, 1, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with memkit.lean():
        y = _C.scale_shift(memkit.functional.silu(x), scale, shift)
    z = nn.functional.silu(x) * scale + shift
    weights = torch.randn(3, *y.shape, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad(out, [x, scale, shift], weights, is_grads_batched=True) for out in (y, z)
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_what_becomes_of_the_shift_is_nothing_to_it():
    x, scale, shift = torch.randn(4, 8, 6), torch.randn(6, requires_grad=True), torch.zeros(6)
    layer = nn.Linear(6, 6)
    with memkit.lean():
        out = layer(_C.scale_shift(x, scale, shift))
    expected = torch.autograd.grad(layer(x * scale + shift).sum(), layer.weight)
    shift.add_(1)
    assert torch.equal(*torch.autograd.grad(out.sum(), layer.weight), *expected)


def test_the_operator_leaves_the_rest_to_stock():
    x, scale, shift = torch.randn(4, 8, 6, requires_grad=True), torch.randn(6), torch.randn(6)
    assert _C.scale_shift(x, scale.clone().requires_grad_(), shift) is not None
    assert _C.scale_shift(x, scale, shift) is None  # which does not keep x
    assert _C.scale_shift(x.detach(), scale, shift) is None
    assert _C.scale_shift(x, torch.randn(2, 4, 8, 6), None) is None
    assert _C.scale_shift(x, torch.randn(5, 1, 1, 6), None) is None
    assert _C.scale_shift(x, scale, torch.randn(4, 8, 6)) is None
    assert _C.scale_shift(x, scale.to("meta"), None) is None
    assert _C.scale_shift(x, scale.long(), None) is None
    assert _C.scale_shift(x, scale.cfloat(), None) is None
    with torch.no_grad():
        assert _C.scale_shift(x, scale, shift) is None
    assert _C.scale_shift(torch.randn(0, 6, requires_grad=True), torch.randn(6), None) is None
