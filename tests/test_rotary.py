"""Rotary embeddings: value and gradients, positions, tables, memory, transforms, the module."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rotary_cases import DTYPES, B, D, G, H, S, assert_as_good, heads, layouts, styles
from torch import Tensor, nn

import memkit.functional as M
import memkit.nn
from memkit._reference_rotary import stock, tables
from memkit.memory import measure


@styles
@layouts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [D, 8, 2])
def test_value_and_gradients(
    dtype: torch.dtype, layout: str, interleaved: bool, rotary: int, device: torch.device
) -> None:
    """Tables in float64, in the dtype itself, and with one column a pair; in heavy tails too."""
    torch.manual_seed(0)
    for kind in ("normal", "heavy"):
        q, k = (heads(n, layout, dtype).to(device) for n in (H, G))
        if kind == "heavy":
            q, k = q**3 * 10, k**3 * 10
        cos, sin = (t.to(device, dtype) for t in tables(S + 3, rotary, interleaved=interleaved))
        grads = [torch.randn_like(q), torch.randn_like(k)]
        options: dict[str, Any] = {"interleaved": interleaved, "layout": layout}

        def both(
            f: Callable[..., Any], wide: bool, q: Tensor = q, k: Tensor = k, grads: list[Tensor] = grads
        ) -> list[Tensor]:
            x = [(t.double() if wide else t).detach().requires_grad_() for t in (q, k)]
            y = f(*x)
            return [*y, *torch.autograd.grad(y, x, [g.to(t.dtype) for g, t in zip(grads, x, strict=True)])]

        exact = both(lambda *x: [stock(t, cos.double(), sin.double(), **options) for t in x], True)  # noqa: B023
        usual = both(lambda *x: [stock(t, cos, sin, **options) for t in x], False)  # noqa: B023
        columns = slice(None, None, 2) if interleaved else slice(rotary // 2)
        forms = {
            "as it is": (cos, sin),
            "a sample each": tuple(t.expand(B, -1, -1).contiguous() for t in (cos, sin)),
            "a column a pair": (cos[:, columns], sin[:, columns]),
        }
        for form, pair in forms.items():
            extra = {"rotary_dim": rotary} if form == "a column a pair" else {}
            mine = both(lambda *x: M.apply_rotary(*x, *pair, **options, **extra), False)  # noqa: B023
            for three in zip(mine, usual, exact, strict=True):
                assert_as_good(*three)


@styles
def test_wide_tables_beside_halves(interleaved: bool) -> None:
    """Float32 tables: as close to the truth as the dtype comes, but for where that lies between two of its numbers."""
    for dtype in (torch.float16, torch.bfloat16):
        q = heads(H, "bhsd", dtype)
        cos, sin = tables(S, D, interleaved=interleaved)
        y = M.apply_rotary(q, None, cos.float(), sin.float(), interleaved=interleaved)
        truth = stock(q.double(), cos, sin, interleaved=interleaved)
        least = (truth.to(dtype) - truth).abs()
        assert ((y - truth).abs() <= least + 1e-6).all()


@styles
def test_gradcheck(interleaved: bool) -> None:
    q, k = (heads(n, "bhsd", torch.float64, 6, 3).requires_grad_() for n in (2, 1))
    cos, sin = tables(S, 4, interleaved=interleaved)
    ids = torch.randint(S, (B, 3))

    def f(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return M.apply_rotary(q, k, cos, sin, ids, interleaved=interleaved)

    def in_place(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return M.apply_rotary(q * 1, k * 1, cos, sin, ids, interleaved=interleaved, inplace=True)

    for each in (f, in_place):
        assert torch.autograd.gradcheck(each, (q, k))
        assert torch.autograd.gradgradcheck(each, (q, k))


@styles
@layouts
def test_positions(layout: str, interleaved: bool) -> None:
    q, k = (heads(n, layout) for n in (H, G))
    cos, sin = (t.float() for t in tables(50, D, interleaved=interleaved))
    options: dict[str, Any] = {"interleaved": interleaved, "layout": layout}
    every = torch.randint(50, (B, 2 * S))
    for ids in (every[:, :S], every[:, ::2], every[:1, :S], every[0, :S], every[:1, :S].expand(B, S)):
        wide = ids if ids.dim() == 2 else ids[None]
        for mine, x in zip(M.apply_rotary(q, k, cos, sin, ids, **options), (q, k), strict=True):
            torch.testing.assert_close(mine, stock(x, cos, sin, wide, **options))
    for bad in (torch.full((B, S), 50), torch.full((B, S), -1)):
        before = q.clone()
        with pytest.raises(IndexError, match=r"apply_rotary: expected position_ids in \[0, 49\]"):
            M.apply_rotary(q, k, cos, sin, bad, **options, inplace=True)
        assert torch.equal(q, before)


@styles
def test_tables_are_taken_at_their_word(interleaved: bool) -> None:
    """Columns that differ within a pair: no rotation, but what stock makes of them, and its gradient."""
    q = heads(H, "bhsd", torch.float64).requires_grad_()
    cos, sin = torch.randn(2, S, D, dtype=torch.float64)
    mine, theirs = (
        f(q, cos, sin, interleaved=interleaved)
        for f in (lambda q, *t, **o: M.apply_rotary(q, None, *t, **o), stock)
    )
    torch.testing.assert_close(mine, theirs)
    grad = torch.randn_like(q)
    torch.testing.assert_close(*(torch.autograd.grad(y, q, grad)[0] for y in (mine, theirs)))


def test_tables_that_require_grad() -> None:
    q, k = (heads(n, "bhsd", torch.float64).requires_grad_() for n in (H, G))
    cos, sin = (t.requires_grad_() for t in tables(S, D))
    mine = torch.autograd.grad(
        sum(y.square().sum() * y.sum() for y in M.apply_rotary(q, k, cos, sin)), (q, cos, sin)
    )
    theirs = torch.autograd.grad(
        sum(y.square().sum() * y.sum() for y in (stock(x, cos, sin) for x in (q, k))), (q, cos, sin)
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_angles_of_transformers_and_flash_attn() -> None:
    """[1, S, D] with halves twice; [S, D / 2] beside [B, S, H, D]."""
    q, k = heads(H, "bshd"), heads(G, "bshd")
    cos, sin = (t.float() for t in tables(S, D))
    wanted = [stock(x, cos, sin, layout="bshd") for x in (q, k)]
    got = M.apply_rotary(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None])
    for mine, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.transpose(1, 2), want)
    got = M.apply_rotary(q, k, cos[:, : D // 2], sin[:, : D // 2], layout="bshd", rotary_dim=D)
    for mine, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, want)


# Memory


def test_saved_bytes_and_gradient_in_place() -> None:
    """Nothing but the tables, which the model keeps; the gradient in the incoming one's memory."""
    cos, sin = (t.float() for t in tables(64, 32))
    leaves = [torch.randn(B, n, 64, 32, requires_grad=True) for n in (8, 2)]
    run = lambda inplace: M.apply_rotary(*(x * 1 for x in leaves), cos, sin, inplace=inplace)  # noqa: E731
    elements = sum(x.numel() for x in leaves)
    for inplace in (False, True, "auto"):
        step = measure(lambda inplace=inplace: run(inplace))
        assert (step.saved, step.saved_total) == (0, cos.nbytes + sin.nbytes)
    assert measure(lambda: run(True)).peak < 4 * elements * 1.1
    y = M.apply_rotary(leaves[0], None, cos, sin) * 3
    upstream = torch.ones_like(y)
    assert measure(lambda: y.backward(upstream)).peak <= upstream.nbytes + 64  # stock: three times that


# Transforms, compilers


@styles
def test_transforms(interleaved: bool) -> None:
    cos, sin = (t.float() for t in tables(S, 16, interleaved=interleaved))
    x = torch.randn(3, B, H, S, D)
    f = lambda x: M.apply_rotary(x, x[:, :2], cos, sin, interleaved=interleaved)  # noqa: E731
    want = lambda x: (stock(x, cos, sin, interleaved=interleaved),)  # noqa: E731
    torch.testing.assert_close(torch.vmap(f)(x)[0], torch.vmap(want)(x)[0])
    _, tangent = torch.func.jvp(f, (x[0],), (x[1],))
    torch.testing.assert_close(tangent[0], want(x[1])[0])
    (slope,) = torch.func.vjp(lambda x: f(x)[0], x[0])[1](x[1])
    torch.testing.assert_close(slope, torch.func.vjp(lambda x: want(x)[0], x[0])[1](x[1])[0])


@pytest.mark.parametrize("inplace", [False, True, "auto"])
@styles
def test_compile(interleaved: bool, inplace: bool | str) -> None:
    cos, sin = (t.float() for t in tables(S, 16, interleaved=interleaved))
    ids = torch.randint(S, (B, S))

    def f(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return M.apply_rotary(q * 2, k * 2, cos, sin, ids, interleaved=interleaved, inplace=inplace)

    leaves = [heads(n, "bhsd").requires_grad_() for n in (H, G)]
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(sum(y.sin().sum() for y in g(*leaves)), leaves) for g in (compiled, f))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_opcheck() -> None:
    ops = torch.ops.memkit
    cos, sin = (t.float() for t in tables(S, 16))
    ids = torch.randint(S, (B, S))
    for grad in (False, True):
        q, k = (heads(n, "bhsd").requires_grad_(grad) for n in (H, G))
        torch.library.opcheck(ops._rotary.default, (q, k, cos, sin, ids, False, 1, 0, False))
        torch.library.opcheck(
            ops._rotary.default, (q.transpose(1, 2), None, cos, sin, None, True, 2, 16, True)
        )
    torch.library.opcheck(
        ops._rotary_.default,
        (q.detach(), k.detach(), cos, sin, ids, False, 1, 0, False),
        test_utils="test_schema",
    )


def test_subclasses_and_modes_take_torch_ops() -> None:
    class Sub(Tensor):
        pass

    cos, sin = (t.float() for t in tables(S, D))
    q = heads(H, "bhsd")
    assert type(M.apply_rotary(q.as_subclass(Sub), None, cos, sin)) is Sub


# Edges


def test_odd_sizes_and_special_values() -> None:
    for shape in ((0, H, S, D), (B, 0, S, D), (B, H, 0, D), (1, 1, 1, 2), (1, 3, 5, 1026), (3, 1, 65, 2)):
        x = torch.randn(shape, requires_grad=True)
        cos, sin = (t.float() for t in tables(shape[2], shape[3]))
        for interleaved in (False, True):
            y, want = (
                M.apply_rotary(x, None, cos, sin, interleaved=interleaved),
                stock(x, cos, sin, interleaved=interleaved),
            )
            torch.testing.assert_close(y, want)
            torch.testing.assert_close(*(torch.autograd.grad(t.sum(), x)[0] for t in (y, want)))
    x = torch.randn(1, 1, 4, 8)
    x[0, 0, 0, 0], x[0, 0, 1, 5], x[0, 0, 2, 2] = float("nan"), float("inf"), -float("inf")
    cos, sin = (t.float() for t in tables(4, 8))
    torch.testing.assert_close(M.apply_rotary(x, None, cos, sin), stock(x, cos, sin), equal_nan=True)


def test_bad_input() -> None:
    q, k = heads(H, "bhsd"), heads(G, "bhsd")
    cos, sin = (t.float() for t in tables(S, D))
    ids = torch.zeros(B, S, dtype=torch.long)
    cases: tuple[tuple[Any, type[Exception], str], ...] = (
        (lambda: M.apply_rotary(q[0], None, cos, sin), ValueError, "expected q with 4 dimensions"),
        (lambda: M.apply_rotary(q, k[:, :, 1:], cos, sin), ValueError, "expected q and k alike"),
        (lambda: M.apply_rotary(q, k.double(), cos, sin), TypeError, "expected q and k of one dtype"),
        (lambda: M.apply_rotary(q, k, cos, sin[1:]), ValueError, "expected cos and sin of one shape"),
        (lambda: M.apply_rotary(q, k, cos, sin.double()), TypeError, "expected cos and sin of one dtype"),
        (
            lambda: M.apply_rotary(q, k, cos[1:], sin[1:]),
            ValueError,
            r"expected cos and sin of \[positions, columns\]",
        ),
        (
            lambda: M.apply_rotary(q, k, cos[None, None], sin[None, None]),
            ValueError,
            "expected cos and sin of",
        ),
        (lambda: M.apply_rotary(q, k, cos[:, :7], sin[:, :7]), ValueError, "expected tables with a column"),
        (lambda: M.apply_rotary(q, k, *tables(S, D + 2)), ValueError, "expected tables with a column"),
        (lambda: M.apply_rotary(q, k, cos, sin, rotary_dim=6), ValueError, "expected tables with a column"),
        (lambda: M.apply_rotary(q, k, cos, sin, ids.int()), TypeError, "expected position_ids in int64"),
        (lambda: M.apply_rotary(q, k, cos, sin, ids[:, 1:]), ValueError, "expected position_ids of"),
        (lambda: M.apply_rotary(q, k, cos, sin, layout="sbhd"), ValueError, "expected layout"),
        (lambda: M.apply_rotary(q, k, cos, sin, inplace=1), ValueError, "expected inplace"),
        (lambda: M.apply_rotary(q.long(), k, cos, sin), TypeError, "expected float32"),
        (lambda: M.apply_rotary(q.to_sparse(), None, cos, sin), RuntimeError, "expected a dense"),
        (
            lambda: M.apply_rotary(q, k, cos.to("meta"), sin.to("meta")),
            RuntimeError,
            "expected all tensors on one",
        ),
        (lambda: memkit.nn.RotaryEmbedding(7), ValueError, "RotaryEmbedding: expected an even dim"),
        (lambda: memkit.nn.RotaryEmbedding(4.0), TypeError, "RotaryEmbedding: expected dim to be an int"),
        (
            lambda: memkit.nn.RotaryEmbedding(8, base=0),
            ValueError,
            "RotaryEmbedding: expected a base above 0",
        ),
        (lambda: memkit.nn.RotaryEmbedding(8, base=math.nan), ValueError, "RotaryEmbedding: expected a base"),
        (lambda: memkit.nn.RotaryEmbedding(8, base="a"), TypeError, "RotaryEmbedding: expected base to be a"),
        (lambda: memkit.nn.RotaryEmbedding(8, layout="bsdh"), ValueError, "RotaryEmbedding: expected layout"),
        (
            lambda: memkit.nn.RotaryEmbedding(8, inplace="yes"),
            ValueError,
            "RotaryEmbedding: expected inplace",
        ),
        (
            lambda: memkit.nn.RotaryEmbedding(D + 2)(q, k),
            ValueError,
            "RotaryEmbedding: expected heads of at least",
        ),
    )
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


# The module


@styles
@layouts
def test_module(layout: str, interleaved: bool) -> None:
    rope = memkit.nn.RotaryEmbedding(16, 4, interleaved=interleaved, layout=layout)
    assert not rope.state_dict()
    assert not list(rope.parameters())
    q, k = (heads(n, layout) for n in (H, G))
    cos, sin = (t.float() for t in tables(40, 16, interleaved=interleaved))
    options: dict[str, Any] = {"interleaved": interleaved, "layout": layout}
    for mine, x in zip(rope(q, k), (q, k), strict=True):
        torch.testing.assert_close(mine, stock(x, cos, sin, **options))
    assert rope.cos.size(0) == 8  # grown from 4: S is 7
    ids = torch.randint(40, (B, S))
    ids[0, 0] = 39
    torch.testing.assert_close(rope(q, position_ids=ids), stock(q, cos, sin, ids, **options))
    assert rope.cos.size(0) >= 40
    half = rope.to(torch.bfloat16)
    assert half.cos.dtype == torch.float32
    torch.testing.assert_close(
        half.cos, cos[: half.cos.size(0), ::2] if interleaved else cos[: half.cos.size(0), :8]
    )
    assert half(q.bfloat16()).dtype == torch.bfloat16


def test_tables_of_a_model_made_without_memory() -> None:
    want = memkit.nn.RotaryEmbedding(16, 64)
    with torch.device("meta"):
        model = torch.nn.Sequential(memkit.nn.RotaryEmbedding(16, 64, device="meta"))
    rope = model.to_empty(device="cpu")[0]
    assert torch.equal(rope.cos, want.cos)
    assert torch.equal(rope.sin, want.sin)
    shared = want.cos.data_ptr()
    assert want.float().cos.data_ptr() == shared  # as it was


def test_a_block_of_attention_trains_the_same() -> None:
    class Attention(nn.Module):
        def __init__(self, ours: bool) -> None:
            super().__init__()
            self.qkv, self.out, self.ours = nn.Linear(32, (4 + 2 * 2) * 8), nn.Linear(32, 32), ours
            self.rope = memkit.nn.RotaryEmbedding(8, layout="bshd", inplace="auto")

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).split((32, 16, 16), -1)
            q, k, v = (t.unflatten(-1, (-1, 8)) for t in (q, k, v))
            if self.ours:
                q, k = self.rope(q, k)
            else:
                cos, sin = (t.float() for t in tables(x.size(1), 8))
                q, k = (stock(t, cos, sin, layout="bshd") for t in (q, k))
            y = F.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
            )
            return self.out(y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    mine, theirs = Attention(True), Attention(False)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(2, 11, 32)
    for model in (mine, theirs):
        model(x).square().mean().backward()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    with torch.no_grad():
        torch.testing.assert_close(mine(x), theirs(x))
