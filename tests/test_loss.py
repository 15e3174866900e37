"""cross_entropy: values and gradients against float64 and stock, shapes, edges, derivatives, errors, what is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_cases import (
    DTYPES,
    KINDS,
    VARIANTS,
    arguments,
    assert_as_good,
    gradients,
    logits,
    reference,
    stock,
    target_of,
)
from torch import Tensor, nn

import memkit.functional as M
import memkit.nn
from memkit.memory import measure, timeline

SHAPES = [(6, 1500), (40, 7), (3, 21, 5, 60), (2, 3, 1, 1), (11,), (4, 6, 0)]


def ours(target: Tensor, **kwargs: Any) -> Any:
    return lambda x: M.cross_entropy(x, target, **kwargs)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_against_float64(variant: str, dtype: torch.dtype, kind: str) -> None:
    for shape in ((24, 1100), (2, 37, 50)):
        x = logits(kind, shape).to(dtype)
        target, kwargs = arguments(variant, shape, dtype)
        for reduction in ("mean", "none"):
            kwargs["reduction"] = reduction
            grad = torch.randn((), dtype=torch.float64) if reduction == "mean" else None
            want = gradients(lambda x: reference(x, target, **kwargs), x.double(), grad=grad)  # noqa: B023
            theirs = gradients(lambda x: stock(x, target, **kwargs), x, grad=grad)  # noqa: B023
            mine = gradients(ours(target, **kwargs), x, grad=grad)
            for name, *three in zip(("loss", "gradient"), mine, theirs, want, strict=True):
                assert_as_good(*three, name=f"{shape} {reduction} {name}")


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes(variant: str, shape: tuple[int, ...], reduction: str) -> None:
    x = logits("normal", shape)
    target, kwargs = arguments(variant, shape, torch.float64)
    kwargs["reduction"] = reduction
    want = gradients(lambda x: reference(x, target, **kwargs), x)
    for got in (gradients(ours(target, **kwargs), x), gradients(ours(target, **kwargs, inplace="auto"), x)):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


def test_strides() -> None:
    """Channels last is walked as it lies; anything else is copied. The gradient has the input's shape and values."""
    x = logits("normal", (2, 5, 6, 7))
    for soft in (False, True):
        target = target_of(x.shape, soft)
        want = gradients(lambda x: reference(x, target), x)  # noqa: B023
        for lay in (
            lambda x: x.contiguous(memory_format=torch.channels_last),
            lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
            lambda x: torch.stack([x, x], -1)[..., 0],
        ):
            for inplace in (False, "auto"):
                h = lay(x.clone().requires_grad_())
                h.retain_grad()
                loss = M.cross_entropy(h, target, inplace=inplace)
                loss.backward()
                torch.testing.assert_close(loss, want[0])
                torch.testing.assert_close(h.grad, want[1])
    channels_last = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    (grad,) = torch.autograd.grad(M.cross_entropy(channels_last, target_of(x.shape)), channels_last)
    assert grad.stride() == channels_last.stride()


def test_index_dtypes_and_wide_probabilities() -> None:
    x, target = logits("normal", (5, 9)).float(), target_of((5, 9), ignored=0)
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(M.cross_entropy(x, target.to(dtype)), M.cross_entropy(x, target))
    soft = target_of((5, 9), True)
    torch.testing.assert_close(
        M.cross_entropy(x.bfloat16(), soft.float()).float(),
        reference(x.bfloat16(), soft).float(),
        rtol=8e-3,
        atol=0,
    )


def test_ignored_rows_and_none_left() -> None:
    x = logits("normal", (4, 8))
    x[1] = torch.nan
    target = torch.tensor([3, 5, 0, 7])
    loss, grad = gradients(ours(target, ignore_index=5), x)
    assert loss.isfinite()
    assert torch.equal(grad[1], torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(loss, F.cross_entropy(x[[0, 2, 3]], target[[0, 2, 3]]))
    columns = x.clone().T.reshape(1, 8, 4)
    loss, grad = gradients(ours(target[None], ignore_index=5), columns)
    assert loss.isfinite()
    assert torch.equal(grad[0, :, 1], torch.zeros(8, dtype=torch.float64))
    nothing = torch.full((4,), -100)
    loss, grad = gradients(ours(nothing), x)
    assert loss.isnan()
    assert torch.equal(grad, torch.zeros_like(x))
    assert M.cross_entropy(x, nothing, reduction="sum") == 0
    assert M.cross_entropy(x[:0], target[:0]).isnan()
    assert M.cross_entropy(x[:0], target[:0], reduction="none").shape == (0,)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_show(value: float) -> None:
    for shape in ((2, 1030), (1, 4, 2)):
        x = logits("normal", shape)
        x[0, 2] = value
        loss, grad = gradients(ours(target_of(shape, ignored=0), reduction="none"), x)
        assert loss.reshape(-1)[0].isnan()
        assert grad[0].isnan().any()


def test_legacy_reduction() -> None:
    x, target = logits("normal", (5, 9)), target_of((5, 9))
    with pytest.warns(UserWarning, match="size_average"):
        assert torch.equal(
            M.cross_entropy(x, target, size_average=False), M.cross_entropy(x, target, reduction="sum")
        )


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant: str) -> None:
    for shape in ((3, 5), (2, 4, 3)):
        target, kwargs = arguments(variant, shape, torch.float64)
        for reduction in ("mean", "none"):
            x = logits("normal", shape).requires_grad_()
            function = ours(target, **kwargs, reduction=reduction)
            torch.autograd.gradcheck(function, x)
            torch.autograd.gradgradcheck(function, x)


def test_second_derivative_of_detached_logits() -> None:
    x = logits("normal", (4, 6))
    found = []
    for inplace in (False, "auto"):
        leaf = x.clone().requires_grad_()
        target = target_of(x.shape)
        (grad,) = torch.autograd.grad(
            M.cross_entropy(leaf * 2, target, inplace=inplace), leaf, create_graph=True
        )
        found.append(torch.autograd.grad(grad.square().sum(), leaf)[0])
    torch.testing.assert_close(found[0], found[1])
    assert found[0].abs().max() > 0


def test_gradients_of_targets_and_weights() -> None:
    x, soft = logits("normal", (4, 6)), target_of((4, 6), True)
    weight = torch.rand(6).double()

    def both(function: Any) -> Any:
        return gradients(lambda x, t, w: function(x, t, w, label_smoothing=0.1), x, soft, weight)

    for a, b in zip(both(M.cross_entropy), both(F.cross_entropy), strict=True):
        torch.testing.assert_close(a, b)


# -- memory and in place ------------------------------------------------------------------------------------------------

N, C = 64, 4096


def made(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """A leaf, from which each call makes its logits, and a target."""
    return logits("normal", (N, C)).to(dtype).requires_grad_(), torch.ones((), dtype=dtype), target_of((N, C))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_bytes(dtype: torch.dtype) -> None:
    """The logits and two floats a row; stock's keeps as much as its softmax takes."""
    leaf, one, target = made(dtype)
    size = N * C * dtype.itemsize
    small = N * 8 + 64
    loss = measure(lambda: M.cross_entropy(leaf + one, target))
    assert size < loss.saved <= size + small
    assert loss.peak <= size + 4 * small  # logits alone: stock has its softmax beside them
    assert measure(lambda: F.cross_entropy(leaf + one, target)).peak >= 2 * size


@pytest.mark.parametrize("inplace", [False, "auto", True])
def test_peak_of_a_step(inplace: Any) -> None:
    leaf, one, target = made()
    leaf.grad = torch.zeros_like(leaf)
    size, small = N * C * 4, N * 64

    def step() -> None:
        M.cross_entropy(leaf + one, target, inplace=inplace).backward()

    step()  # once, for what is allocated but once
    peak = max(alive for _, alive in timeline(step, device="cpu"))  # measure's hooks hold what is saved
    assert peak <= (2 if inplace is False else 1) * size + small
    assert peak >= size


def test_inplace_gives_the_same_gradient() -> None:
    leaf, one, target = made()
    want = gradients(lambda x: M.cross_entropy(x, target) * 3, leaf)[1]
    for inplace in ("auto", True):
        leaf.grad = None
        h = leaf + one
        address = h.data_ptr()
        seen: list[int] = []
        h.register_hook(lambda g, seen=seen: seen.append(g.data_ptr()))
        loss = M.cross_entropy(h, target, inplace=inplace) * 3
        del h
        loss.backward()
        assert seen == [address]
        assert torch.equal(leaf.grad, want)


def test_auto_leaves_logits_that_are_referred_to() -> None:
    leaf, one, target = made()
    h = leaf + one
    kept = h.detach().clone()
    alias = h.view(-1)  # another tensor over the memory
    for hold in ("h", "alias", "numpy"):
        if hold == "alias":
            h = alias.view(N, C)
        array = h.detach().numpy() if hold == "numpy" else None
        loss = M.cross_entropy(h if hold == "h" else h * 1, target, inplace="auto")
        loss.backward(retain_graph=hold == "h")
        assert torch.equal(h, kept)
        assert array is None or (torch.from_numpy(array) == kept).all()


def test_auto_with_another_reader() -> None:
    """Two losses of one result: the first to run backward leaves the memory to the other."""
    leaf, one, target = made()
    for order in (0, 1):
        leaf.grad = None
        h = leaf + one
        losses = [M.cross_entropy(h, target, inplace="auto"), h.square().mean()]
        del h
        for loss in losses if order == 0 else losses[::-1]:
            loss.backward(retain_graph=True)
        total = M.cross_entropy(leaf, target) + leaf.square().mean()
        torch.testing.assert_close(leaf.grad, torch.autograd.grad(total, leaf)[0])


def test_retained_graphs() -> None:
    leaf, one, target = made()
    want = gradients(lambda x: M.cross_entropy(x, target), leaf)[1]
    for inplace in ("auto", True):
        loss = M.cross_entropy(leaf + one, target, inplace=inplace)
        for keep in (True, True, False):
            (grad,) = torch.autograd.grad(loss, leaf, retain_graph=keep)
            assert torch.equal(grad, want)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_inplace_refused() -> None:
    leaf, one, target = made()
    with pytest.raises(RuntimeError, match="a leaf that requires grad"):
        M.cross_entropy(leaf, target, inplace=True)
    with pytest.raises(RuntimeError, match=r"SigmoidBackward.*which keeps it"):
        M.cross_entropy(leaf.sigmoid(), target, inplace=True)
    h = leaf + one
    other = h.square().mean()
    with pytest.raises(RuntimeError, match="an operation saved for its backward"):
        M.cross_entropy(h, target, inplace=True)
    other.backward()
    with pytest.raises(ValueError, match="expected inplace True, False or 'auto', got 'yes'"):
        M.cross_entropy(h, target, inplace="yes")  # type: ignore[arg-type]
    assert M.cross_entropy(leaf.detach(), target, inplace=True).isfinite()  # nothing to write


def test_inplace_never_corrupts_silently() -> None:
    leaf, one, target = made()
    h = leaf + one
    loss = M.cross_entropy(h, target, inplace=True)
    later = h.square().mean()  # keeps the logits
    loss.backward(retain_graph=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()
    h = leaf + one
    for inplace in (False, "auto", True):
        loss = M.cross_entropy(h, target, inplace=inplace)
        with torch.no_grad():
            h += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        h = leaf + one


def test_saved_tensor_hooks() -> None:
    leaf, one, target = made()
    want = gradients(lambda x: M.cross_entropy(x, target), leaf)[1]
    for inplace in (False, "auto", True):
        leaf.grad = None
        with torch.autograd.graph.save_on_cpu():
            loss = M.cross_entropy(leaf + one, target, inplace=inplace)
        loss.backward()
        assert torch.equal(leaf.grad, want)
        leaf.grad = None
        for reentrant in (False, True):
            leaf.grad = None
            torch.utils.checkpoint.checkpoint(
                lambda x: M.cross_entropy(x * 1, target, inplace=inplace),  # noqa: B023
                leaf,
                use_reentrant=reentrant,
            ).backward()
            torch.testing.assert_close(leaf.grad, want)


# -- errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (IndexError, r"class indices in \[0, 9\) or ignore_index -100, got 9", {"target": torch.tensor([0, 9])}),
        (IndexError, "got -1", {"target": torch.tensor([-1, 0])}),
        (ValueError, r"class indices of shape \[2\] for logits of \[2, 9\], got \[3\]", {"target": torch.zeros(3).long()}),
        (ValueError, "probabilities of shape", {"target": torch.zeros(2)}),
        (TypeError, "a target of class indices", {"target": torch.zeros(2).bool()}),
        (TypeError, "expected float32", {"input": torch.zeros(2, 9).long()}),
        (ValueError, "got \\[\\]", {"input": torch.zeros(())}),
        (ValueError, "at least 1 class", {"input": torch.zeros(2, 0)}),
        (ValueError, r"class weights of shape \[9\], got \[8\]", {"weight": torch.zeros(8)}),
        (TypeError, "class weights of a floating-point dtype", {"weight": torch.zeros(9).long()}),
        (ValueError, "label_smoothing between 0 and 1, got 2", {"label_smoothing": 2.0}),
        (ValueError, "reduction 'none', 'mean' or 'sum', got 'min'", {"reduction": "min"}),
        (ValueError, "softcap None or above 0, got -1", {"softcap": -1.0}),
        (ValueError, "no ignore_index beside probabilities", {"target": torch.zeros(2, 9), "ignore_index": 1}),
        (TypeError, "a tensor argument to be a Tensor, got int", {"target": 3}),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    given = {"input": torch.zeros(2, 9), "target": torch.tensor([0, 1])} | change
    with pytest.raises(error, match=f"cross_entropy: .*{message}"):
        M.cross_entropy(**given)


# -- modules --------------------------------------------------------------------------------------------------------------


def test_module() -> None:
    weight = torch.rand(C)
    twin = nn.CrossEntropyLoss(weight, ignore_index=3, label_smoothing=0.1)
    mine = memkit.nn.CrossEntropyLoss(weight, ignore_index=3, label_smoothing=0.1, inplace="auto")
    assert mine.state_dict().keys() == twin.state_dict().keys()
    x, target = logits("normal", (N, C)).float(), target_of((N, C), ignored=0)
    torch.testing.assert_close(mine(x, target), twin(x, target))
    twin.__class__ = memkit.nn.CrossEntropyLoss
    assert torch.equal(mine(x, target), twin(x, target))
    capped = memkit.nn.CrossEntropyLoss(z_loss=0.1, softcap=2.0)
    torch.testing.assert_close(capped(x, target), stock(x, target, z_loss=0.1, softcap=2.0))


def test_meta_tensors_give_shapes() -> None:
    """Which autocast knows nothing of."""
    logits, weight = (torch.randn(8, 6, device="meta", requires_grad=True) for _ in range(2))
    target = torch.zeros(8, dtype=torch.long, device="meta")
    for loss in (M.cross_entropy(logits, target), M.linear_cross_entropy(logits, weight, target)):
        assert (loss.device.type, loss.dtype, loss.shape) == ("meta", torch.float32, ())
        loss.backward()
    assert logits.grad is not None
