"""linear_cross_entropy: values and gradients against float64 and stock, memory, autocast, tying, accumulation, compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from loss_cases import VARIANTS, arguments, assert_as_good, gradients, in_double, target_of
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import memkit.functional as M
import memkit.nn
from memkit._reference_loss import reference, stock, stock_linear
from memkit.memory import measure, timeline

pytestmark = pytest.mark.usefixtures("repeatable")
ops = torch.ops.memkit
N, D, C = 150, 24, 70


def tensors(dtype: torch.dtype, n: int = N, d: int = D, classes: int = C) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight, bias; bfloat16 holds them exactly."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(*size, generator=generator) for size in ((n, d), (classes, d), (classes,))]
    return tuple((x * 0.5).bfloat16().to(dtype) for x in made)  # type: ignore[return-value]


def ours(target: Tensor, **kwargs: Any) -> Any:
    return lambda x, w, b: M.linear_cross_entropy(x, w, target, linear_bias=b, **kwargs)


def theirs(target: Tensor, **kwargs: Any) -> Any:
    return lambda x, w, b: stock_linear(x, w, target, b, **kwargs)


@pytest.mark.parametrize("chunk", [None, 7, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64(variant: str, reduction: str, chunk: int | None) -> None:
    target, kwargs = arguments(variant, (N, C), torch.float64)
    kwargs["reduction"] = reduction
    inputs = tensors(torch.float64)
    grad = torch.randn((N,) if reduction == "none" else ()).double()
    mine = gradients(ours(target, **kwargs, chunk=chunk), *inputs, grad=grad)
    want = gradients(theirs(target, **kwargs), *inputs, grad=grad)
    for a, b in zip(mine, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["plain", "all", "soft"])
def test_as_exact_as_stock(variant: str, dtype: torch.dtype, reduction: str, chunk: int | None) -> None:
    """Also where a weight's gradient in two bytes adds up over 30 chunks, and where it does in 3."""
    target, kwargs = arguments(variant, (N, C), dtype)
    inputs = tensors(dtype)
    wide_target, wide = in_double(target, kwargs)
    mine = gradients(ours(target, **kwargs, reduction=reduction, chunk=chunk), *inputs)
    stocks = gradients(theirs(target, **kwargs, reduction=reduction), *inputs)
    want = gradients(theirs(wide_target, **wide, reduction=reduction), *(x.double() for x in inputs))
    for name, *three in zip(("loss", "input", "weight", "bias"), mine, stocks, want, strict=True):
        assert_as_good(*three, name=name)


def of_one_class(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.long)


def often_the_first(rows: int) -> Tensor:
    weights = 1 / torch.arange(1, 65).float()
    return torch.multinomial(weights, rows, True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("targets", [of_one_class, often_the_first])
def test_large_sums_of_rows_fit_float16(
    targets: Callable[[int], Tensor], bias: bool, reduction: str, autocast: bool
) -> None:
    """Their mean is of the size of the rows, their sum need not be."""
    rows = 4096
    made = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 16, generator=made) * 0.2 + 1
    x[:, 3] *= 4
    w, b = torch.randn(64, 16, generator=made) * 0.1, torch.randn(64, generator=made) * 0.1
    target = targets(rows)
    found = []
    kept = torch.float32 if autocast else torch.float16
    for dtype, loss in ((torch.float64, theirs), (kept, ours)):
        given = [v.half().to(dtype).requires_grad_() for v in (x, w, b)]
        with torch.autocast("cpu", torch.float16, enabled=autocast and loss is ours):
            value = loss(target, reduction=reduction)(*given[:2], given[2] if bias else None)
        found.append(torch.autograd.grad(value, given if bias else given[:2]))
    for exact, mine in zip(*found, strict=True):
        assert mine.isfinite().all()
        assert (mine - exact).norm() <= 5e-3 * exact.norm()


def test_large_weights_of_classes_and_layers_fit_float16() -> None:
    x, w, _ = tensors(torch.float64, 200, 16, 8)
    target = target_of((200, 8))
    for factor, class_weight in ((1.0, 3000.0), (4096.0, 1.0)):
        weight = torch.full((8,), class_weight)
        found = []
        for dtype, loss in ((torch.float64, theirs), (torch.float16, ours)):
            given = [v.half().to(dtype).requires_grad_() for v in (x / factor, w * factor)]
            value = loss(target, weight=weight.to(dtype))(*given, None)
            found.append(torch.autograd.grad(value, given))
        for exact, mine in zip(*found, strict=True):
            assert mine.isfinite().all()
            assert (mine - exact).norm() <= 5e-3 * exact.norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("size", [70.0, 2000.0])
def test_a_large_feature_fits_float16(size: float, autocast: bool) -> None:
    x, w, _ = tensors(torch.float64, 512, 16, 8)
    x[:, 2], w[:, 2] = size, 0.0
    target = of_one_class(512)
    found = []
    for dtype, loss in ((torch.float64, theirs), (torch.float32 if autocast else torch.float16, ours)):
        given = [v.half().to(dtype).requires_grad_() for v in (x, w)]
        with torch.autocast("cpu", torch.float16, enabled=autocast and loss is ours):
            value = loss(target)(*given, None)
        found.append(torch.autograd.grad(value, given))
    for exact, mine in zip(*found, strict=True):
        assert mine.isfinite().all()
        assert (mine - exact).norm() <= 5e-3 * exact.norm()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_rows_gradients_are_zero(dtype: torch.dtype, reduction: str) -> None:
    given = [v.requires_grad_() for v in tensors(dtype, 0, 6, 9)]
    ours(of_one_class(0), reduction=reduction)(*given).sum().backward()
    for each in given:
        assert torch.equal(each.grad, torch.zeros_like(each))


def test_small_weights_of_classes_in_float16() -> None:
    x, w, _ = tensors(torch.float64, 200, 16, 8)
    target, weight = target_of((200, 8)), torch.full((8,), 1e-6)
    found = []
    for dtype, loss in ((torch.float64, theirs), (torch.float16, ours)):
        given = [v.half().to(dtype).requires_grad_() for v in (x, w)]
        value = loss(target, weight=weight.half().to(dtype))(*given, None)
        found.append(torch.autograd.grad(value, given))
    for exact, mine in zip(*found, strict=True):
        assert (mine - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_without_a_row_that_counts_gradients_are_zero(dtype: torch.dtype, autocast: bool) -> None:
    kept = torch.float32 if autocast else dtype
    given = [v.to(kept).requires_grad_() for v in tensors(torch.float32, 20, 6, 9)]
    target = torch.full((20,), -100)
    with torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float32):
        loss = M.linear_cross_entropy(given[0], given[1], target, linear_bias=given[2])
    assert loss.isnan()
    (loss * 1024).backward()
    for each in given:
        assert torch.equal(each.grad, torch.zeros_like(each))


def test_small_gradients_survive_float16() -> None:
    """A loss scale arrives in backward only; the softmax of many classes over many rows is subnormal without it."""
    n, classes, scale = 2048, 512, 2.0**14
    x, w, _ = tensors(torch.float16, n, 16, classes)
    target = target_of((n, classes))
    mine = gradients(lambda x, w: M.linear_cross_entropy(x, w, target).float() * scale, x, w)
    want = gradients(lambda x, w: stock_linear(x, w, target) * scale, x.double(), w.double())
    for a, b in zip(mine[1:], want[1:], strict=True):
        assert (a.double() - b).abs().max() <= 4e-3 * b.abs().max()


def test_shapes() -> None:
    x, w, b = tensors(torch.float64)
    target = target_of((N, C))
    want = reference(F.linear(x, w, b), target, reduction="none")
    for shape in ((3, 50), (5, 1, 30), (N,)):
        got = M.linear_cross_entropy(
            x.view(*shape, D), w, target.view(shape), linear_bias=b, reduction="none"
        )
        torch.testing.assert_close(got, want.view(shape))
    one = M.linear_cross_entropy(x[0], w, target[0].clamp_min(0), linear_bias=b)
    torch.testing.assert_close(one, F.cross_entropy(F.linear(x[0], w, b), target[0].clamp_min(0)))
    soft = target_of((N, C), True)
    torch.testing.assert_close(
        M.linear_cross_entropy(x.view(3, 50, D), w, soft.view(3, 50, C)),
        F.cross_entropy(F.linear(x, w), soft),
    )
    transposed = [v.t().contiguous().t().requires_grad_() for v in (x, w)]
    M.linear_cross_entropy(transposed[0], transposed[1], target).backward()
    for got, expected in zip(
        transposed, gradients(lambda x, w: stock_linear(x, w, target), x, w)[1:], strict=True
    ):
        torch.testing.assert_close(got.grad, expected)


def test_many_dimensions() -> None:
    x, w, bias = torch.randn(6, 5), torch.randn(7, 2, 3, 5), torch.randn(7, 2, 3)
    target = torch.randint(7, (6, 2, 3))
    found = M.linear_cross_entropy(x, w, target, linear_bias=bias)
    logits = (x @ w.flatten(0, -2).mT).unflatten(-1, w.shape[:-1]) + bias
    torch.testing.assert_close(found, F.cross_entropy(logits, target))
    if hasattr(F, "linear_cross_entropy"):
        torch.testing.assert_close(found, F.linear_cross_entropy(x, w, target, linear_bias=bias))


def test_no_rows_and_none_counted() -> None:
    x, w, b = tensors(torch.float32)
    empty = gradients(ours(torch.empty(0, dtype=torch.long)), x[:0], w, b)
    assert empty[0].isnan()
    assert [g.count_nonzero() for g in empty[1:]] == [0, 0, 0]
    nothing = gradients(ours(torch.full((N,), -100)), x, w, b)
    assert nothing[0].isnan()
    assert [g.count_nonzero() for g in nothing[1:]] == [0, 0, 0]


def test_gradients_that_nobody_wants() -> None:
    x, w, b = tensors(torch.float64)
    target = target_of((N, C))
    want = gradients(theirs(target), x, w, b)
    for reduction in ("mean", "none"):
        for chosen in range(1, 8):
            leaves = [v.clone().requires_grad_(bool(chosen >> i & 1)) for i, v in enumerate((x, w, b))]
            loss = ours(target, reduction=reduction)(*leaves)
            if reduction == "none":
                loss = loss.sum() / (target != -100).sum()
            loss.backward()
            for i, leaf in enumerate(leaves):
                if chosen >> i & 1:
                    torch.testing.assert_close(leaf.grad, want[1 + i])
                else:
                    assert leaf.grad is None
    with torch.no_grad():
        torch.testing.assert_close(ours(target)(x, w, b), want[0])


# -- memory -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_and_saved(dtype: torch.dtype) -> None:
    """Beside the gradients at most a twentieth of what the layer and the loss apart take; saved: the gradients alone."""
    n, d, classes = 1024, 64, 8192
    x, w, _ = tensors(dtype, n, d, classes)
    x.requires_grad_(), w.requires_grad_()
    target = target_of((n, classes))
    gradient_bytes = (x.numel() + w.numel()) * dtype.itemsize

    def peak(function: Any) -> int:
        x.grad = w.grad = None
        function(x, w, target).backward()
        x.grad = w.grad = None
        return max(alive for _, alive in timeline(lambda: function(x, w, target).backward(), device="cpu"))

    def scratch(product: Any) -> int:
        """What the product takes beside its result: little, but in two bytes, by instructions or without."""
        product()
        return max(alive for _, alive in timeline(product, device="cpu")) - product().nbytes

    chunk = torch.zeros(n // 8, classes, dtype=dtype)
    with torch.no_grad():
        products = (lambda: F.linear(x[: n // 8], w), lambda: chunk @ w, lambda: chunk.t() @ x[: n // 8])
        own = max(map(scratch, products))
    theirs = peak(lambda x, w, t: F.cross_entropy(F.linear(x, w), t))
    assert peak(M.linear_cross_entropy) - gradient_bytes <= 0.05 * theirs + own
    none = peak(lambda x, w, t: M.linear_cross_entropy(x, w, t, reduction="none").sum())
    assert none - gradient_bytes <= 0.05 * theirs + own
    saved = measure(lambda: M.linear_cross_entropy(x, w, target)).saved
    assert saved <= gradient_bytes + 64
    saved = measure(lambda: M.linear_cross_entropy(x, w, target, reduction="none")).saved
    assert saved <= 8 * n


def test_gradients_are_handed_over() -> None:
    """Scaled where they lie, and not at all by 1; copied only where the graph is kept."""
    x, w, b = tensors(torch.float32, 64, 32, 4096)
    target = target_of((64, 4096))
    leaves = [v.requires_grad_() for v in (x, w, b)]
    want = gradients(theirs(target), *leaves)[1:]
    for factor in (1, 3):
        for leaf in leaves:
            leaf.grad = None
        loss = ours(target)(*leaves) * factor
        grown = max(alive for _, alive in timeline(loss.backward, device="cpu"))
        assert grown < w.nbytes / 4
        for leaf, expected in zip(leaves, want, strict=True):
            torch.testing.assert_close(leaf.grad, expected * factor)
    loss = ours(target)(*leaves)
    for factor in (2, 3, 1):
        found = torch.autograd.grad(loss, leaves, torch.tensor(float(factor)), retain_graph=True)
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected * factor)
    found[1].zero_()  # someone else's by now, and no one's but theirs
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# -- how it is used ---------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, fused: bool, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(C, D)
        self.hidden = nn.Linear(D, D)
        head = nn.Linear(D, C, bias=False)
        if tied:
            head.weight = self.embedding.weight
        self.head = head
        self.fused = fused

    def forward(self, tokens: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
        h = torch.tanh(self.hidden(self.embedding(tokens)))
        if self.fused:
            return M.linear_cross_entropy(h, self.head.weight, target, **kwargs)
        return stock(self.head(h).flatten(0, -2), target.flatten(), **kwargs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_training(tied: bool, amp: bool) -> None:
    """Two backward passes that accumulate, with a tied weight and without, under autocast and not."""
    tokens, target = torch.randint(C, (2, 4, 30)), target_of((8, C, 30))
    found = []
    for fused in (True, False):
        model = Model(fused, tied)
        for i in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = model(tokens[i], target[4 * i : 4 * i + 4])
            assert loss.dtype == torch.float32
            (loss * 0.5).backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, mine in found[0].items():
        scale = found[1][name].abs().max().item()
        torch.testing.assert_close(mine, found[1][name], rtol=0, atol=scale * (2e-2 if amp else 2e-6))


def test_autocast_is_as_exact_as_stock() -> None:
    inputs, target = tensors(torch.float32, 512), target_of((512, C))

    def under(function: Any) -> Any:
        def call(*args: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return function(*args)

        return call

    want = gradients(theirs(target), *(x.double() for x in inputs))
    mine, stocks = (gradients(under(f(target)), *inputs) for f in (ours, theirs))
    for name, *three in zip(("loss", "input", "weight", "bias"), mine, stocks, want, strict=True):
        assert_as_good(*three, name=name)
    hidden = inputs[0].bfloat16().requires_grad_()  # as a layer before emits it
    under(ours(target))(hidden, *inputs[1:]).backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(hidden.grad.float(), mine[1], rtol=2e-2, atol=1e-5)


def test_autocast_of_cross_entropy() -> None:
    """Logits of the autocast dtype are read as they are; the loss is float32."""
    x, target = torch.randn(8, 90).bfloat16(), target_of((8, 90))
    with torch.autocast("cpu", torch.bfloat16):
        loss, grad = gradients(lambda x: M.cross_entropy(x, target), x)
        want = F.cross_entropy(x, target)
    assert (loss.dtype, grad.dtype, want.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(loss, want)


def test_second_derivative_raises() -> None:
    x, w, _ = (v.requires_grad_() for v in tensors(torch.float64))
    loss = M.linear_cross_entropy(x, w, target_of((N, C)))
    with pytest.raises(NotImplementedError, match=r"create_graph=True.*cross_entropy\(linear"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_checkpoint_and_hooks() -> None:
    x, w, b = tensors(torch.float64)
    target = target_of((N, C))
    for reduction in ("mean", "none"):
        want = gradients(ours(target, reduction=reduction), x, w, b)
        with torch.autograd.graph.save_on_cpu():
            found = [gradients(ours(target, reduction=reduction), x, w, b)]

        def checkpointed(*args: Tensor, reduction: str = reduction) -> Any:
            function = ours(target, reduction=reduction)
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

        found.append(gradients(checkpointed, x, w, b))
        for each in found:
            for got, expected in zip(each, want, strict=True):
                torch.testing.assert_close(got, expected)


def test_module() -> None:
    mine = memkit.nn.LinearCrossEntropyLoss(D, C, z_loss=0.1, softcap=5.0)
    twin = nn.Linear(D, C)
    assert mine.state_dict().keys() == twin.state_dict().keys()
    twin.load_state_dict(mine.state_dict())
    x, target = tensors(torch.float32)[0], target_of((N, C))
    torch.testing.assert_close(mine(x, target), stock(twin(x), target, z_loss=0.1, softcap=5.0))
    torch.testing.assert_close(M.cross_entropy(mine.logits(x), target, z_loss=0.1), mine(x, target))
    torch.manual_seed(0)
    first = memkit.nn.LinearCrossEntropyLoss(D, C, class_weight=torch.rand(C)).weight
    torch.manual_seed(0)
    torch.rand(C)
    assert torch.equal(first, nn.Linear(D, C).weight)
    embedding = nn.Embedding(C, D)
    tied = memkit.nn.LinearCrossEntropyLoss(D, C, bias=False, tied_weight=embedding.weight)
    assert tied.weight is embedding.weight
    assert list(tied.state_dict()) == ["weight"]
    with pytest.raises(ValueError, match=r"a tied_weight of \[3, 24\], got \[70, 24\]"):
        memkit.nn.LinearCrossEntropyLoss(D, 3, tied_weight=embedding.weight)
    assert "num_classes=70" in repr(mine)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, r"input of \[..., in_features\] and a weight", {"linear_weight": torch.zeros(C, 3)}),
        (TypeError, "of one dtype", {"linear_weight": torch.zeros(C, D).double()}),
        (ValueError, r"a bias of shape \[70\], got \[3\]", {"linear_bias": torch.zeros(3)}),
        (ValueError, r"class indices of shape \[4\] for logits of \[4, 70\]", {"target": torch.zeros(5).long()}),
        (ValueError, r"a target of shape \[2, 2\]", {"input": torch.zeros(2, 2, D)}),
        (IndexError, r"class indices in \[0, 70\)", {"target": torch.tensor([0, 1, 2, 70])}),
        (ValueError, "chunk None or above 0, got 0", {"chunk": 0}),
        (ValueError, "softcap None or above 0", {"softcap": 0.0}),
        (ValueError, "at least 1 class", {"linear_weight": torch.zeros(0, D)}),
        (ValueError, "reduction 'none'", {"reduction": ""}),
        (TypeError, "linear_weight to be a Tensor, got int", {"linear_weight": 3}),
        (TypeError, "target to be a Tensor, got list", {"target": [0, 1, 2, 3]}),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"input": torch.zeros(4, D), "linear_weight": torch.zeros(C, D)}
    given |= {"target": torch.zeros(4).long()} | change
    with pytest.raises(error, match=f"linear_cross_entropy: .*{message}"):
        M.linear_cross_entropy(**given)


# -- compilers, transforms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("which", ["cross_entropy", "linear"])
def test_compile(which: str, reduction: str) -> None:
    x, w, b = tensors(torch.float32)
    target = target_of((N, C))

    def step(x: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        if which == "linear":
            return M.linear_cross_entropy(
                x * 2, w, target, linear_bias=b, reduction=reduction, z_loss=0.1, label_smoothing=0.1
            )
        return M.cross_entropy(
            F.linear(x * 2, w, b), target, reduction=reduction, softcap=9.0, inplace="auto"
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (N, 31):
        want = gradients(lambda *v: step(*v, target[:n]), x[:n], w, b)  # noqa: B023
        found = gradients(lambda *v: compiled(*v, target[:n]), x[:n], w, b)  # noqa: B023
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected)


def test_compile_by_inductor() -> None:
    x, w, b = tensors(torch.float32)
    target = target_of((N, C))

    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return M.linear_cross_entropy(x * 2, w, target) + M.cross_entropy(F.linear(x, w, b), target) * 2

    found = gradients(torch.compile(step, fullgraph=True), x, w, b)
    for got, expected in zip(found, gradients(step, x, w, b), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_traced_graph_runs_with_what_requires_grad(reduction: str) -> None:
    given = tensors(torch.float32, 20, 6, 9)
    target = target_of((20, 9))

    def step(*leaves: Tensor) -> Any:
        return torch.autograd.grad(ours(target, reduction=reduction)(*leaves).sum(), leaves)

    leaves = [v.requires_grad_() for v in given]
    graph = make_fx(step)(*leaves)
    for got, expected in zip(graph(*leaves), step(*leaves), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction: str) -> None:
    x, w, b = (v.requires_grad_() for v in tensors(torch.float32, 20, 6, 9))
    for soft in (False, True):
        target = target_of((20, 9), soft, dtype=torch.float32)
        torch.library.opcheck(
            ops.linear_cross_entropy.default,
            (x, w, target),
            {"linear_bias": b, "reduction": reduction, "z_loss": 0.1, "chunk": 6},
        )
        torch.library.opcheck(
            ops.cross_entropy.default,
            (x, target_of((20, 6), soft, dtype=torch.float32)),
            {"reduction": reduction},
        )


def test_opcheck_of_the_parts() -> None:
    x, target = torch.randn(4, 5, 6), target_of((4, 5, 6))
    options = (1, -100, 0.1, 0.1, 3.0)
    torch.library.opcheck(ops._cross_entropy_forward.default, (x, target, None, *options, torch.float32))
    _, stats, total = ops._cross_entropy_forward(x, target, None, *options, torch.float32)
    for op in (ops._cross_entropy_backward, ops._cross_entropy_backward_):
        given = (x.clone(), torch.ones(()), target, None, stats, total, *options)
        torch.library.opcheck(op.default, given)
    h, w, b = tensors(torch.float32, 20, 6, 9)
    target = target_of((20, 9))
    matrices = (h, w, b, target, None)
    tail = (torch.float32, torch.float32, 0, [True, True, False])
    torch.library.opcheck(ops._linear_cross_entropy_forward.default, (*matrices, *options, *tail))
    stats = ops._linear_cross_entropy_forward(*matrices, 0, *options[1:], *tail)[1]
    torch.library.opcheck(
        ops._linear_cross_entropy_backward.default,
        (torch.ones(20), *matrices, stats, 0, *options[1:], torch.float32, 0, [True, True, True]),
    )


def test_gradients_asked_of_a_forward_without_reduction() -> None:
    """Those of the sum: the gradient is one number then, and not one a row to be read."""
    h, w, b = tensors(torch.float64, 20, 6, 9)
    target = target_of((20, 9))
    found = [
        ops._linear_cross_entropy_forward(
            h, w, b, target, None, reduction, -100, 0.0, 0.0, 0.0, *[torch.float64] * 2, 0, [True, True, True]
        )[3:]
        for reduction in (0, 2)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_gradient_of_another_number_of_rows() -> None:
    x, target = torch.randn(4, 5), target_of((4, 5))
    options = (0, -100, 0.0, 0.0, 0.0)
    _, stats, total = ops._cross_entropy_forward(x, target, None, *options, torch.float32)
    with pytest.raises(
        ValueError, match=r"cross_entropy: expected a gradient of shape \[\] or of 4 rows, got \[3\]"
    ):
        ops._cross_entropy_backward(x, torch.ones(3), target, None, stats, total, *options)


def test_transforms() -> None:
    x, w, b = tensors(torch.float64, 6)
    target = target_of((6, C), ignored=0)

    def fused(x: Tensor, target: Tensor) -> Tensor:
        return M.linear_cross_entropy(x, w, target, linear_bias=b, z_loss=0.1)

    def apart(x: Tensor, target: Tensor) -> Tensor:
        return M.cross_entropy(F.linear(x, w, b), target, z_loss=0.1)

    def want(x: Tensor, target: Tensor) -> Tensor:
        return stock_linear(x, w, target, b, z_loss=0.1)

    for function in (fused, apart):
        close = torch.testing.assert_close
        close(torch.func.vmap(function)(x, target), torch.func.vmap(want)(x, target))
        close(torch.func.grad(function)(x, target), torch.func.grad(want)(x, target))
        per_row = [torch.func.vmap(torch.func.grad(f))(x, target) for f in (function, want)]
        close(*per_row)
        tangents = [torch.func.jvp(lambda x, f=f: f(x, target), (x,), (x,))[1] for f in (function, want)]
        close(*tangents)


@pytest.mark.parametrize("budget", [0.5, 0.1])
def test_a_compiler_that_keeps_less_keeps_the_gradients(budget: float) -> None:
    """They are made in forward, at the cost of three matrix products."""
    torch.manual_seed(0)
    embedding, inner, head = (
        torch.randn(*shape, requires_grad=True) for shape in ((50, 64), (64, 64), (50, 64))
    )
    tokens, target = torch.randint(50, (256,)), torch.randint(50, (256,))

    def network(tokens: Tensor) -> Tensor:
        x = embedding[tokens]
        for _ in range(3):
            x = F.layer_norm(F.gelu(x @ inner), (64,))
        return M.linear_cross_entropy(x, head, target)

    with functorch.patch(activation_memory_budget=budget):
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager_decomp_partition")
        loss = compiled(tokens)
    parameters = embedding, inner, head
    with torch.profiler.profile() as profile:
        gradients = torch.autograd.grad(loss, parameters)
    calls = {event.key for event in profile.key_averages()}
    assert "aten::mm" in calls
    assert "memkit::_linear_cross_entropy_forward" not in calls
    torch.testing.assert_close(gradients, torch.autograd.grad(network(tokens), parameters))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", [(True, True), (False, True), (False, False)], ids=str)
def test_flops_are_counted(reduction: str, wanted: tuple[bool, bool]) -> None:
    """As many as the matrix products take: of the logits, which reduction="none" makes twice, and of each gradient."""
    counters = [FlopCounterMode(display=False), FlopCounterMode(display=False)]
    mine = FlopCounterMode(display=False, custom_mapping={ops._linear_cross_entropy: lambda *_, **__: 7})
    with torch.inference_mode(), mine:
        M.linear_cross_entropy(torch.randn(3, 32), torch.randn(50, 32), torch.randint(50, (3,)))
    assert mine.get_total_flops() == 7
    for op in [op for op in counters[0].flop_registry if "memkit" in str(op)]:
        del counters[0].flop_registry[op]  # one made before the first call
    for counter in counters:
        shapes = (2, 16, 32), (50, 32)
        input, weight = (torch.randn(s, requires_grad=w) for s, w in zip(shapes, wanted, strict=True))
        with counter:
            loss = M.linear_cross_entropy(input, weight, torch.randint(50, (2, 16)), reduction=reduction)
            if any(wanted):
                loss.sum().backward()
        again = reduction == "none" and any(wanted)
        assert counter.get_total_flops() == 2 * 32 * 32 * 50 * (1 + again + sum(wanted))
    with torch.inference_mode(), counters[0]:
        M.linear_cross_entropy(torch.randn(3, 32), torch.randn(50, 32), torch.randint(50, (3,)))
    assert counters[0].get_total_flops() == 2 * 3 * 32 * 50
