"""swap and torch.nn.MultiheadAttention with the batch first."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import memkit
from memkit import swap, unswap
from memkit.memory import measure

N, L, S, E, H = 3, 7, 9, 32, 8  # heads so narrow that the weights are larger than a query
DOUBLE = {"dtype": torch.float64}


def attention(**options: Any) -> Any:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, **{"batch_first": True, **DOUBLE, **options})
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def swapped(module: nn.Module, **options: Any) -> Any:
    ours = copy.deepcopy(module)
    report = swap(ours, ops=["attention"], **options)
    assert [row.after for row in report.rows] == ["memkit"], report
    return ours


def tensors(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value: of how many tensors."""
    torch.manual_seed(1)
    query, key, value = (torch.randn(N, t, E, dtype=dtype, requires_grad=True) for t in (L, S, S))
    return {"self": (query, query, query), "memory": (query, key, key), "three": (query, key, value)}[kind]


def run(module: Any, given: tuple[Tensor, ...], **how: Any) -> list[Tensor | None]:
    torch.manual_seed(2)
    out, weights = module(*given, **how)
    leaves = [*dict.fromkeys(given), *(p for p in module.parameters() if p.requires_grad)]
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    if weights is not None and weights.requires_grad:
        loss = loss + (weights * torch.arange(weights.shape[-1], dtype=weights.dtype)).sum()
    return [out, weights, *torch.autograd.grad(loss, leaves)]


def same(ours: list[Tensor | None], theirs: list[Tensor | None], **how: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, **how)


def masks(kind: str, dtype: torch.dtype, keys: int) -> dict[str, Any]:
    torch.manual_seed(3)
    padding = torch.arange(keys) >= torch.tensor([[keys], [keys - 2], [3]])
    causal = torch.ones(L, keys, dtype=torch.bool).triu(1)
    each = torch.rand(N * H, L, keys) < 0.3
    each[..., 0] = False
    added = torch.zeros(N * H, L, keys, dtype=dtype).masked_fill(each, float("-inf"))
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "causal": {"attn_mask": causal},
        "hint": {"attn_mask": causal, "is_causal": True},
        "hint and padding": {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding},
        "each": {"attn_mask": each},
        "added": {"attn_mask": added},
        "added and padding": {
            "attn_mask": added,
            "key_padding_mask": torch.zeros(N, keys, dtype=dtype).masked_fill(padding, -3.0),
        },
    }[kind]


ALL_MASKS = ["none", "padding", "causal", "hint", "hint and padding", "each", "added", "added and padding"]


@pytest.mark.parametrize("mask", ALL_MASKS)
@pytest.mark.parametrize("kind", ["self", "memory", "three"])
@pytest.mark.parametrize("bias", [True, False])
def test_is_stock(kind: str, mask: str, bias: bool) -> None:
    module = attention(bias=bias)
    how = masks(mask, torch.float64, L if kind == "self" else S)
    given = tensors(kind)
    theirs = run(module, given, need_weights=False, **how)
    same(run(swapped(module), given, need_weights=False, **how), theirs)


@pytest.mark.parametrize("mask", ["none", "padding", "causal", "added and padding"])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("kind", ["self", "three"])
@pytest.mark.parametrize("lean", [False, "call"])
def test_weights(kind: str, average: bool, mask: str, lean: Any) -> None:
    module = attention(dropout=0.0)
    how = masks(mask, torch.float64, L if kind == "self" else S)
    given = tensors(kind)
    theirs = run(module, given, average_attn_weights=average, **how)
    same(run(swapped(module, lean=lean), given, average_attn_weights=average, **how), theirs)


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_draws_the_same(lean: Any, need_weights: bool) -> None:
    module = attention(dropout=0.4)
    given = tensors("memory")
    theirs = run(module, given, need_weights=need_weights)
    same(run(swapped(module, lean=lean), given, need_weights=need_weights), theirs)
    module.eval()
    same(
        run(swapped(module, lean=lean), given, need_weights=need_weights),
        run(module, given, need_weights=need_weights),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_and_in_half(dtype: torch.dtype) -> None:
    module = attention(dtype=dtype)
    given = tensors("self", dtype)
    how = {"need_weights": False, "key_padding_mask": masks("padding", dtype, L)["key_padding_mask"]}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        theirs, ours = run(module, given, **how), run(swapped(module), given, **how)
    assert ours[0] is not None
    assert theirs[0] is not None
    assert ours[0].dtype == theirs[0].dtype
    same(ours, theirs, rtol=0.03, atol=0.3)


def test_what_is_kept() -> None:
    x = torch.randn(8, 64, 128, requires_grad=True)
    module = nn.MultiheadAttention(128, 4, batch_first=True)
    ours = copy.deepcopy(module)
    swap(ours)
    size = x.numel() * 4

    def of(module: nn.Module) -> Tensor:
        y = x.exp()  # which is kept
        out: Tensor = module(y, y, y, need_weights=False)[0]
        return out

    stock, memkit_ = (measure(lambda m=m: of(m)).saved for m in (module, ours))  # type: ignore[misc]
    assert memkit_ < 5.2 * size < 6 * size < stock  # y, three projections, the result


def test_in_lean_no_weights_are_kept() -> None:
    for dropout, how in ((0.0, {}), (0.1, {"need_weights": False})):
        x = torch.randn(2, 256, 64, requires_grad=True)
        module = nn.MultiheadAttention(64, 4, dropout, batch_first=True)
        ours = copy.deepcopy(module)
        swap(ours, lean="call")
        weights = 2 * 4 * 256 * 256 * 4
        stock, memkit_ = (measure(lambda m=m: m(x, x, x, **how)[0]).saved for m in (module, ours))  # noqa: B023
        assert stock > weights > 3 * memkit_, (dropout, stock, memkit_)


def test_what_stays() -> None:
    class Own(nn.MultiheadAttention):
        pass

    for module in (
        nn.MultiheadAttention(E, H),
        nn.MultiheadAttention(E, H, batch_first=True, kdim=8),
        nn.MultiheadAttention(E, H, batch_first=True, add_bias_kv=True),
        nn.MultiheadAttention(E, H, batch_first=True, add_zero_attn=True),
        Own(E, H, batch_first=True),
    ):
        assert not swap(module, ops=["attention"]).rows


def test_calls_that_are_left_to_stock() -> None:
    module = attention()
    ours = swapped(module)
    x = torch.randn(L, E, **DOUBLE, requires_grad=True)  # without a batch
    same(run(ours, (x, x, x)), run(module, (x, x, x)))
    y = tensors("self")
    learned = torch.randn(L, L, **DOUBLE, requires_grad=True)
    for how in ({"attn_mask": learned}, {"need_weights": True}):
        same(run(ours, y, **how), run(module, y, **how))
    with torch.no_grad():
        for mode in (True, False):
            module.train(mode)
            ours.train(mode)
            assert all(torch.equal(a, b) for a, b in zip(ours(*y), module(*y), strict=True))
    for wrong in (
        {"is_causal": True},
        {"attn_mask": torch.zeros(L, L + 1, **DOUBLE)},
        {"key_padding_mask": torch.zeros(N, L + 1, dtype=torch.bool)},
    ):
        with pytest.raises((RuntimeError, AssertionError)) as theirs:
            module(*y, need_weights=False, **wrong)
        with pytest.raises(theirs.type) as mine:
            ours(*y, need_weights=False, **wrong)
        assert str(mine.value) == str(theirs.value)


class Drawn(nn.Module):
    """A weight that is another one each time."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.randn_like(weight)


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("name", ["in_proj_weight", "out_proj.weight"])
def test_weights_parametrized_afterwards_are_made_as_often_as_in_stock(name: str, lean: Any) -> None:
    x, found = torch.randn(2, 5, E, **DOUBLE), []
    for module in (attention(), swapped(attention(), sample=(x, x, x), lean=lean)):
        owner, _, last = name.rpartition(".")
        register_parametrization(module.get_submodule(owner), last, Drawn(), unsafe=True)
        torch.manual_seed(0)
        found.append(module(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("shape", [(0, L), (N, 0), (1, 1)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    module = attention()
    x = torch.randn(*shape, E, **DOUBLE, requires_grad=True)
    how = {"need_weights": False}
    same(run(swapped(module), (x, x, x), **how), run(module, (x, x, x), **how))


def test_rows_without_a_key() -> None:
    module = attention()
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[1] = True
    how = {"need_weights": False, "key_padding_mask": padding}
    same(run(swapped(module), tensors("self"), **how), run(module, tensors("self"), **how), equal_nan=True)


def test_rows_without_a_key_whose_weights_are_returned() -> None:
    """In lean() as scaled_dot_product_attention defines them, where stock's are NaN."""
    module = attention()
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[1] = True
    how = {"key_padding_mask": padding}
    out, weights, *_ = run(swapped(module, lean="call"), tensors("self"), **how)
    theirs, their_weights, *_ = run(module, tensors("self"), **how)
    assert out is not None and weights is not None and theirs is not None and their_weights is not None  # noqa: PT018
    assert weights[1].eq(0).all()
    torch.testing.assert_close(out[1], module.out_proj.bias.expand(L, E))
    assert theirs[1].isnan().all()
    torch.testing.assert_close((out[::2], weights[::2]), (theirs[::2], their_weights[::2]))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("lean", [False, "call"])
def test_transformer(norm_first: bool, lean: Any) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(E, H, 2, 2, 64, 0.0, batch_first=True, norm_first=norm_first, **DOUBLE)
    ours = copy.deepcopy(model)
    report = swap(ours, lean=lean)
    assert sum(row.before == "MultiheadAttention" for row in report.changed) == 6
    source, target = torch.randn(N, S, E, **DOUBLE), torch.randn(N, L, E, **DOUBLE)
    causal = nn.Transformer.generate_square_subsequent_mask(L, **DOUBLE)
    padding = torch.arange(S) >= torch.tensor([[S], [S - 2], [3]])

    def grads(m: Any) -> list[Tensor | None]:
        out = m(
            source,
            target,
            tgt_mask=causal,
            tgt_is_causal=True,
            memory_key_padding_mask=padding,
            src_key_padding_mask=torch.zeros(N, S, **DOUBLE).masked_fill(padding, float("-inf")),
        )
        return [out, *torch.autograd.grad(out.square().sum(), [*m.parameters()])]

    same(grads(ours), grads(model))
    assert [*ours.state_dict()] == [*model.state_dict()]
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        same(grads(made), grads(model))
    unswap(ours)
    assert all(type(a) is type(b) for a, b in zip(ours.modules(), model.modules(), strict=True))
    ours.eval(), model.eval()
    swap(ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(source, target), model(source, target))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("lean", [False, True, "call"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_a_checkpoint_draws_twice_the_same(
    ours: bool, need_weights: bool, lean: Any, reentrant: bool
) -> None:
    """Of a dropout behind it, memkit's or stock's, which draws in the order of its input's memory."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(E, H, 0.2, batch_first=True, **DOUBLE)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, need_weights=need_weights)[0]
            return x + self.dropout(out)

    block = Block()
    swap(block, ops=["attention", *(["dropout"] if ours else [])], lean=lean)
    x = tensors("self")[0]

    def gradients(call: Any) -> list[Tensor]:
        torch.manual_seed(5)
        with memkit.lean() if lean is True else nullcontext():
            y = call(x)
        weights = torch.linspace(-1, 1, y.numel(), **DOUBLE).view(y.shape)
        return [y, *torch.autograd.grad((y * weights).sum(), [*block.parameters(), x])]

    def whole(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=reentrant)
        return y

    if reentrant:  # which knows backward() alone
        torch.manual_seed(5)
        theirs = gradients(block)
        torch.manual_seed(5)
        with memkit.lean() if lean is True else nullcontext():
            y = whole(x)
        weights = torch.linspace(-1, 1, y.numel(), **DOUBLE).view(y.shape)
        (y * weights).sum().backward()
        grads = [p.grad for p in block.parameters()]
        same([y, *grads, x.grad], [*theirs])
    else:
        same([*gradients(whole)], [*gradients(block)])


def test_compiled() -> None:
    module = attention()
    ours = torch.compile(swapped(module), backend="aot_eager", fullgraph=True)
    padding = masks("padding", torch.float64, L)
    how = {"need_weights": False, **padding}
    same(run(ours, tensors("self"), **how), run(module, tensors("self"), **how))


def test_function_transforms() -> None:
    module = attention()
    ours = swapped(module)
    x = tensors("self")[0].detach()

    def loss(m: Any) -> Any:
        def of(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            x = x[None]
            out = torch.func.functional_call(m, parameters, (x, x, x), {"need_weights": False})[0]
            return out.square().sum()

        return torch.func.vmap(torch.func.grad(of), (None, 0))(dict(m.named_parameters()), x)

    theirs, mine = loss(module), loss(ours)
    same([*mine.values()], [*theirs.values()])


def test_second_derivatives() -> None:
    module = swapped(attention())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        x = torch.randn(1, 3, E, **DOUBLE, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda x: module(x, x, x, need_weights=False)[0], (x,))
