"""Softmax and log_softmax: value and gradients, dims, masks, in place, memory, transforms, the modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memkit.functional as M
import memkit.nn
from memkit._reference_softmax import stock
from memkit.memory import measure

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
logs = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


def ours(x: Tensor, dim: int = -1, *, log: bool = False, **options: Any) -> Tensor:
    return (M.log_softmax if log else M.softmax)(x, dim, **options)


def inputs(kind: str, shape: tuple[int, ...]) -> Tensor:
    """float64 values that bfloat16 holds exactly."""
    x = torch.randn(shape, dtype=torch.float64)
    if kind == "far":
        x = x * 4 + 300
    elif kind == "sharp":
        x = x**3 * 10
    elif kind == "narrow":
        x = x * 1e-3
    return x.bfloat16().double()


def assert_as_good(mine: Tensor, theirs: Tensor, truth: Tensor) -> None:
    assert mine.dtype == theirs.dtype
    assert mine.shape == truth.shape
    assert torch.equal(mine.isinf(), truth.isinf())
    finite = ~truth.isinf()
    mine, theirs, truth = mine[finite], theirs[finite], truth[finite]
    if mine.dtype == torch.float64:  # stock is no truth here: its sums over long rows are less exact
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)
        return
    if truth.numel() == 0:
        return
    floor = torch.finfo(mine.dtype).eps * truth.abs().max() * 0.5
    assert (mine - truth).abs().max() <= 2 * (theirs - truth).abs().max() + floor


def both(f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = f(x)
    return y.detach(), torch.autograd.grad(y, x, grad.to(y.dtype))[0]


def compare(*draws: Tensor, dim: int = -1, **options: Any) -> None:
    """Value and gradient against stock's error, fresh and in place; over all draws, where one number of one row is as exact
    as luck has it."""
    for way in zip(*(three_ways(x, dim, **options) for x in draws), strict=True):
        for of_draws in zip(*way, strict=True):  # the value, then the gradient
            mine, theirs, truth = (
                torch.cat([x.flatten() for x in each]) for each in zip(*of_draws, strict=True)
            )
            assert_as_good(mine, theirs, truth)


def three_ways(x: Tensor, dim: int, **options: Any) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """(mine, stock's, exact) value and gradient, of mine out of place and in place."""
    grad = torch.randn(x.shape, dtype=torch.float64).bfloat16().double().to(x.device)
    if options.get("log") and ("mask" in options or "causal" in options):
        grad = grad * (stock(x.double(), dim, **wide(options)) != -torch.inf)
    exact = both(lambda x: stock(x, dim, **wide(options)), x.double(), grad)
    usual = both(lambda x: stock(x, dim, **options), x, grad)
    fresh = both(lambda x: ours(x, dim, **options), x, grad)
    over = both(lambda x: ours(x * 1, dim, **options, inplace=True), x, grad)
    mask = options.get("mask")
    from_rounded = (
        options.get("log") and mask is not None and mask.dtype == torch.float32 and x.dtype.itemsize == 2
    )
    ways = []
    for mine in (fresh, over):
        assert all(a.shape == b.shape for a, b in zip(mine, exact, strict=True))
        if from_rounded:
            assert_of_rounded_output(mine[1], *exact, grad, dim)
        ways.append(list(zip(mine, usual, exact, strict=True))[: 1 if from_rounded else 2])
    return ways


def assert_of_rounded_output(mine: Tensor, y: Tensor, truth: Tensor, grad: Tensor, dim: int) -> None:
    """Beside a mask of float32 stock keeps an output of float32. The gradient g - e^y sum(g) of a y that was rounded to half
    precision, by u |y| at most: off by u |y| e^y |sum(g)|, and its own rounding."""
    u = torch.finfo(mine.dtype).eps / 2
    y = y.masked_fill(y == -torch.inf, 0)
    total, terms = grad.sum(dim, keepdim=True).abs(), grad.abs().sum(dim, keepdim=True)
    bound = u * truth.abs() + y.exp() * (
        (u * y.abs()).expm1() * total + torch.finfo(torch.float32).eps * terms
    )
    assert ((mine.double() - truth).abs() <= 1.01 * bound + torch.finfo(mine.dtype).tiny).all()


def wide(options: dict[str, Any]) -> dict[str, Any]:
    mask = options.get("mask")
    return options | ({} if mask is None or mask.dtype == torch.bool else {"mask": mask.double()})


@logs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "far", "sharp", "narrow"])
def test_rows(kind: str, dtype: torch.dtype, log: bool, device: torch.device) -> None:
    """Kept in the cache, longer than a chunk, longer than what is kept; a thread's share of rows."""
    torch.manual_seed(0)
    for shape in ((5, 1), (7, 3), (300, 64), (3, 5, 33), (4, 2049), (2, 40000), (11,), (0, 4), (4, 0)):
        if shape[-1] == 0:
            assert ours(torch.empty(shape, dtype=dtype, device=device), log=log).shape == shape
        else:
            compare(inputs(kind, shape).to(device, dtype), log=log)


@pytest.mark.parametrize("kind", ["normal", "far", "narrow"])
def test_float64_against_long_double(kind: str) -> None:
    """Within 4 ulp of each value; stock's sum over 40,000 costs it up to 146."""
    for shape in ((300, 64), (2, 40000)):
        x = inputs(kind, shape)
        z = x.numpy().astype(numpy.longdouble)
        e = numpy.exp(z - z.max(-1, keepdims=True))
        truth = e / e.sum(-1, keepdims=True)
        ulps = abs(M.softmax(x, -1).numpy() - truth) / truth / torch.finfo(torch.float64).eps
        assert float(ulps.max()) < 4


@logs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_dims(dtype: torch.dtype, log: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    x = inputs("normal", (3, 5, 4, 7)).to(device, dtype)
    for dim in range(-4, 4):
        compare(x, dim=dim, log=log)
        compare(x, dim=dim, log=log, scale=0.3)
    compare(inputs("far", (2, 9, 600)).to(device, dtype), dim=1, log=log)
    compare(x.transpose(1, 3), log=log)
    compare(x[:, ::2], dim=1, log=log)
    compare(torch.tensor(2.0, dtype=dtype, device=device), dim=0, log=log)


def masks(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    *_, h, q, k = shape
    keep = torch.rand(shape) < 0.7
    keep[..., 1, :] = False  # a row of which nothing is left
    added = torch.randn(shape).to(dtype).masked_fill(~keep, -torch.inf)
    return {
        "bool": {"mask": keep},
        "bool keys": {"mask": keep[:, :1, :1]},
        "bool queries": {"mask": keep[0, 0, :, :1]},
        "bool heads": {"mask": keep[:, :, :1, :1].clone()},
        "bool strided": {"mask": keep.transpose(-1, -2).contiguous().transpose(-1, -2)},
        "added": {"mask": added},
        "added wide": {"mask": added.float()},
        "added keys": {"mask": added[0, 0, 0]},
        "added heads": {"mask": torch.randn(h, 1, 1).to(dtype)},
        "added batch and query": {"mask": torch.randn(shape[0], 1, q, k).to(dtype)},
        "causal": {"causal": True},
        "all": {"mask": added, "causal": True, "scale": 0.25},
        "bool all": {"mask": keep, "causal": True, "scale": 0.25},
    }


@logs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks(dtype: torch.dtype, log: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    for shape in ((2, 3, 9, 33), (2, 2, 40, 17)):
        x = inputs("normal", shape).to(device, dtype)
        for options in masks(shape, dtype).values():
            here = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
            compare(x, log=log, **here)


@logs
def test_masks_along_other_dims_and_long_rows(log: bool) -> None:
    x = torch.randn(4, 6, 5)
    keep = torch.rand(4, 6, 5) < 0.7
    keep[:, :, 2] = False
    for dim in (0, 1):
        compare(x, dim=dim, log=log, mask=keep)
        compare(x, dim=dim, log=log, mask=torch.randn(6, 1))
    x = torch.randn(3, 5, 2, 2, 2, 7)  # a mask of many dimensions
    compare(x, log=log, mask=torch.randn(3, 1, 2, 1, 2, 7))
    x = torch.randn(16, 40000)  # of two rows chance decides: how the logarithm of a sum is rounded
    compare(x, log=log, mask=torch.rand(40000) < 0.5, scale=2.0)
    compare(x, log=log, causal=True)


def test_as_attention_masks() -> None:
    """The same rows as scaled_dot_product_attention, whose weights the identity shows; rows of nothing are 0."""
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)
    eye = torch.eye(6).expand(2, 3, 6, 6)
    keep = torch.rand(4, 6) < 0.6
    keep[2] = False
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"mask": keep},
        {"mask": torch.randn(4, 6).masked_fill(~keep, -torch.inf)},
    )
    for options in (*cases, {"causal": True}):
        with sdpa_kernel(SDPBackend.MATH):
            want = F.scaled_dot_product_attention(
                q, k, eye, attn_mask=options.get("mask"), is_causal=options.get("causal", False)
            )
        mine = M.softmax(q @ k.transpose(-1, -2), -1, scale=8**-0.5, **options)
        torch.testing.assert_close(mine, want)
    assert (M.softmax(torch.randn(4, 6), -1, mask=keep)[2] == 0).all()
    assert (M.log_softmax(torch.randn(4, 6), -1, mask=keep)[2] == -torch.inf).all()


@logs
def test_gradcheck(log: bool) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(3, 5) < 0.7
    keep[:, 0], keep[1] = True, False
    keep[1, 0] = True
    added = torch.randn(3, 1, dtype=torch.float64)
    seen = torch.ones(3, 5, dtype=torch.bool).tril()
    cases: tuple[tuple[dict[str, Any], Tensor | None], ...] = (
        ({}, None),
        ({"dim": 1}, None),
        ({"scale": 0.7, "mask": added}, None),
        ({"mask": keep}, keep),
        ({"causal": True}, seen),
    )
    for options, visible in cases:

        def f(x: Tensor, inplace: bool = False, options: Any = options, visible: Any = visible) -> Tensor:
            y = ours(x * 1, log=log, **options, inplace=inplace)
            return y if visible is None else y.masked_fill(~visible, 0)

        assert torch.autograd.gradcheck(f, x)
        assert torch.autograd.gradgradcheck(f, x)
        assert torch.autograd.gradcheck(lambda x, f=f: f(x, True), x)


@logs
def test_a_mask_that_requires_grad(log: bool) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(3, 1, 5, dtype=torch.float64, requires_grad=True).squeeze(1)
    mine, theirs = (f(x, log=log, mask=mask, scale=0.5) for f in (ours, stock))
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (x, mask)) for y in (mine, theirs)), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(
        lambda x, m: ours(x, log=log, mask=m), (x, mask.detach().requires_grad_())
    )


# dtypes


@logs
def test_dtype(log: bool) -> None:
    x = torch.randn(5, 70).bfloat16()
    for inplace in (False, "auto"):
        mine = both(
            lambda x, inplace=inplace: ours(x * 1, log=log, dtype=torch.float32, inplace=inplace),
            x,
            torch.ones(5, 70),
        )
        theirs = both(
            lambda x: (F.log_softmax if log else F.softmax)(x, -1, dtype=torch.float32), x, torch.ones(5, 70)
        )
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)
    with pytest.raises(TypeError, match="expected, in place, an input of the output's dtype"):
        ours(x, log=log, dtype=torch.float32, inplace=True)


def test_autocast() -> None:
    """On the CPU both keep their dtype, as in stock."""
    x = torch.randn(5, 70, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        half = x @ torch.randn(70, 30)
        assert half.dtype == torch.bfloat16
        assert M.softmax(half, -1).dtype == torch.bfloat16
        assert M.softmax(x, -1).dtype == torch.float32
        y = M.log_softmax(half, -1)
        assert y.dtype == F.log_softmax(half, -1).dtype == torch.bfloat16
        compiled = torch.compile(lambda h: (M.log_softmax(h, -1), M.softmax(h, -1)), backend="aot_eager")
        assert [t.dtype for t in compiled(half)] == [torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(y, F.log_softmax(half.float(), -1).bfloat16())
    y.square().sum().backward()
    assert x.grad is not None


# In place, memory


@logs
def test_in_place(log: bool) -> None:
    x = torch.randn(4, 6, 5)
    for dim in (-1, 1, 0):
        for view in (lambda x: x, lambda x: x.transpose(0, 2), lambda x: x[:, ::2]):
            base = x.clone()
            h = view(base)
            want = (F.log_softmax if log else F.softmax)(h, dim)
            others = base.clone()
            view(others).copy_(want)
            assert ours(h, dim, log=log, inplace=True) is h
            torch.testing.assert_close(base, others)  # nothing beside h is touched


@logs
def test_in_place_refused(log: bool) -> None:
    leaf = torch.randn(4, 6, requires_grad=True)
    cases = (
        (leaf, "a leaf that requires grad"),
        (leaf.sigmoid(), "the output of SigmoidBackward"),
        (ours(leaf, log=log), "the output of memkit::"),
        (leaf.detach()[:1].expand(4, 6), "expanded"),
        ((leaf * 1).chunk(2)[0], "one of several views"),
    )
    for x, why in cases:
        with pytest.raises(RuntimeError, match=f"softmax: expected, in place, .*{why}"):
            ours(x, log=log, inplace=True)
        before = x.detach().clone()
        torch.testing.assert_close(ours(x, log=log, inplace="auto"), stock(x, log=log))
        assert torch.equal(x.detach(), before)
    h = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="softmax: expected, in place, a mask in memory of its own"):
        ours(h, log=log, mask=h, inplace=True)
    y = ours(leaf * 1, log=log)
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@logs
def test_auto_and_bytes(log: bool) -> None:
    """In place nothing is allocated; saved is the output alone; the gradient takes the incoming one's memory."""
    leaf = torch.randn(64, 128, requires_grad=True)
    n = leaf.nbytes

    def run(inplace: bool | str) -> Tensor:
        return ours(leaf * 1, log=log, inplace=inplace)

    for inplace in (False, True, "auto"):
        step = measure(lambda inplace=inplace: run(inplace))
        assert step.saved == n
        assert step.peak <= (2 if inplace is False else 1) * n + 64
    with torch.no_grad():
        h = torch.randn(64, 128)
        at = h.data_ptr()
        assert ours(h, log=log, inplace="auto").data_ptr() == at
    y = ours(leaf, log=log)
    upstream = torch.randn_like(y)
    z = y * upstream
    assert measure(lambda: z.backward(upstream)).peak <= n + 64


def test_attention_saves_one_tensor_less() -> None:
    q = torch.randn(2, 4, 32, 8, requires_grad=True)
    k, v = torch.randn_like(q), torch.randn_like(q)
    keep = torch.rand(32, 32) < 0.8
    scores = 2 * 4 * 32 * 32 * 4

    def usual() -> Tensor:
        return stock(q @ k.mT, scale=0.3, mask=keep, causal=True) @ v

    def fused() -> Tensor:
        return M.softmax(q @ k.mT, -1, scale=0.3, mask=keep, causal=True, inplace="auto") @ v

    torch.testing.assert_close(usual(), fused())
    torch.testing.assert_close(*(torch.autograd.grad(f().sin().sum(), q)[0] for f in (usual, fused)))
    assert measure(fused).peak < measure(usual).peak - scores
    small = q.nbytes + 1024
    assert measure(fused).saved <= scores + small


# Transforms, compilers


@logs
def test_transforms(log: bool) -> None:
    x = torch.randn(4, 3, 5)
    keep = torch.rand(3, 5) < 0.7
    for options in ({}, {"mask": keep}, {"causal": True, "scale": 2.0}):

        def f(x: Tensor, options: Any = options) -> Tensor:
            return ours(x, log=log, **options).exp() if log else ours(x, log=log, **options)

        def want(x: Tensor, options: Any = options) -> Tensor:
            return stock(x, log=log, **options).exp() if log else stock(x, log=log, **options)

        torch.testing.assert_close(torch.vmap(f)(x), torch.vmap(want)(x))
        torch.testing.assert_close(torch.func.jacfwd(f)(x[0]), torch.func.jacfwd(want)(x[0]))
        torch.testing.assert_close(torch.func.jacrev(f)(x[0]), torch.func.jacrev(want)(x[0]))


@logs
@pytest.mark.parametrize("inplace", [False, True, "auto"])
def test_compile(log: bool, inplace: bool | str) -> None:
    leaf = torch.randn(4, 3, 5, requires_grad=True)
    keep = torch.rand(3, 5) < 0.9
    keep[:, 0] = True

    def f(x: Tensor) -> Tensor:
        return ours(x * 2, log=log, mask=keep, inplace=inplace).masked_fill(~keep, 0) * 3

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(g(leaf).sin().sum(), leaf)[0] for g in (compiled, f))
    torch.testing.assert_close(got, want)


def test_opcheck() -> None:
    ops = torch.ops.memkit
    keep = torch.rand(4, 6) < 0.7
    for grad in (False, True):
        x = torch.randn(3, 4, 6, requires_grad=grad)
        torch.library.opcheck(ops._softmax.default, (x, -1, keep, 0.5, True, False, torch.float32))
        torch.library.opcheck(ops._softmax.default, (x, 0, None, 1.0, False, True, torch.float32))
        torch.library.opcheck(ops._softmax.default, (x, 1, torch.randn(6), 1.0, False, False, torch.float64))
    x, y = torch.randn(2, 3, 4, 6)
    torch.library.opcheck(ops._softmax_backward.default, (x, y, -1, 1.0, False, False, False))
    torch.library.opcheck(
        ops._softmax_backward_.default, (x, y, -1, 1.0, False, True, True), test_utils="test_schema"
    )
    torch.library.opcheck(ops._softmax_.default, (x, -1, keep, 1.0, False, True), test_utils="test_schema")


# Edges


@logs
def test_special_values(log: bool) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor(
        [
            [nan, 0, 1],
            [inf, 0, 1],
            [-inf, 0, 1],
            [-inf, -inf, -inf],
            [3e38, -3e38, 0],
            [nan, nan, nan],
            [1e-40, 0, -0.0],
        ]
    )
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for y, want in (
            (ours(x.to(dtype), log=log), stock(x.to(dtype), log=log)),
            (ours(x.to(dtype).t().contiguous(), 0, log=log).t(), stock(x.to(dtype), log=log)),
            (ours(x.repeat(1, 30).to(dtype), log=log), stock(x.repeat(1, 30).to(dtype), log=log)),
        ):
            torch.testing.assert_close(y, want, equal_nan=True)
    long = torch.zeros(1, 70000)
    long[0, 60000] = nan
    assert ours(long, log=log).isnan().all()


def test_stock_forms() -> None:
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(M.softmax(x), M.softmax(x, 1))
    with pytest.warns(UserWarning, match="Implicit dimension"):
        M.log_softmax(x)
    with pytest.raises(TypeError, match="softmax: expected input to be a Tensor, got list"):
        M.softmax([1.0])  # type: ignore[arg-type]
    for layer in (memkit.nn.Softmax(), memkit.nn.LogSoftmax()):
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(compiled(x), layer(x))

    class Sub(Tensor):
        pass

    assert type(M.softmax(x.as_subclass(Sub), -1)) is Sub


def test_bad_input() -> None:
    x = torch.randn(4, 6)
    cases: tuple[tuple[Any, type[Exception], str], ...] = (
        (lambda: M.softmax(x, 2), IndexError, r"softmax: expected dim in \[-2, 1\]"),
        (lambda: M.log_softmax(x, -3), IndexError, "log_softmax: expected dim"),
        (lambda: M.softmax(x, 0, causal=True), ValueError, "softmax: expected, causal"),
        (lambda: M.softmax(x[0], 0, causal=True), ValueError, "softmax: expected, causal"),
        (lambda: M.softmax(x, -1, mask=x[:, :5] > 0), ValueError, "softmax: expected a mask that expands"),
        (lambda: M.softmax(x, -1, mask=x[None]), ValueError, "softmax: expected a mask that expands"),
        (lambda: M.softmax(x, -1, mask=x.long()), TypeError, "softmax: expected float32"),
        (
            lambda: M.softmax(x, -1, mask=x.to("meta")),
            RuntimeError,
            "softmax: expected a dense mask on the device",
        ),
        (lambda: M.softmax(x.long(), -1), TypeError, "softmax: expected float32"),
        (lambda: M.softmax(x, -1, "half"), TypeError, "softmax: expected a torch.dtype or None, got str"),
        (lambda: M.softmax(x, -1, torch.int64), TypeError, "softmax: expected float32"),
        (lambda: M.softmax(x.to_sparse(), -1), RuntimeError, "softmax: expected a dense"),
        (lambda: M.softmax(x, -1, inplace=2), ValueError, "softmax: expected inplace"),
    )
    before = x.clone()
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_modules(name: str) -> None:
    x = torch.randn(3, 4, 5)
    theirs, mine = getattr(nn, name)(dim=1), getattr(memkit.nn, name)(dim=1, inplace="auto")
    assert isinstance(mine, type(theirs))
    assert mine.state_dict() == theirs.state_dict()
    assert repr(mine) == repr(theirs).replace("dim=1", "dim=1, inplace='auto'")
    torch.testing.assert_close(mine(x.clone()), theirs(x))
    keep = torch.rand(5, 5) < 0.5
    theirs.__class__ = type(mine)
    theirs.dim = -1
    x = torch.randn(2, 5, 5)
    torch.testing.assert_close(
        theirs(x, mask=keep, causal=True), stock(x, mask=keep, causal=True, log=name == "LogSoftmax")
    )
