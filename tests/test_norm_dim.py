"""Norms over a dimension before the last, as over the channels of images: exact, in any layout, under transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_cases import (
    DTYPES,
    KINDS,
    LOW,
    assert_as_good_as_stock,
    inputs,
    normal,
    ops,
    saves,
    weights,
)
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit._reference_norm import STOCK, run
from memkit.memory import measure

C = 6
SHAPES = [(2, 64, 16, 16), (3, 5, 7), (1, 300, 7, 5), (2, 40, 3, 33, 2), (2, 1100, 9, 3), (5, 3, 1, 2)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
devices = pytest.mark.parametrize("device", DEVICES)


def eps_of(op: str) -> float:
    return 1e-6 if op == "rms_norm" else 1e-5


def ours(op: str, dim: int = 1, **keep: Any) -> Callable[..., Tensor]:
    function = getattr(M, op)
    return lambda x, *p: function(x, (x.shape[dim],), *p, eps=eps_of(op), dim=dim, **keep)


def stock(op: str, dim: int = 1) -> Callable[..., Tensor]:
    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        rows = x.movedim(dim, -1)
        return STOCK[op](rows, (x.shape[dim],), *parameters, eps_of(op)).movedim(-1, dim)

    return norm


def names(op: str) -> str:
    return "y input weight bias"[: 14 if op == "rms_norm" else None]


@devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@saves
@ops
def test_as_exact_as_stock(op: str, save: str, dtype: torch.dtype, kind: str, device: str) -> None:
    for shape in SHAPES:
        if shape[1] < 8 and op == "rms_norm" and save == "output":
            continue  # not exact, nor chosen
        tensors = [inputs(kind, shape, dtype), *weights(op, shape[1], dtype)]
        grads = [normal(shape, dtype, 3).to(device)]
        tensors = [t.to(device) for t in tensors]
        mine = run(ours(op, save=save), tensors, grads)
        if dtype == torch.float64:
            tolerance = 1e-6 if kind == "large mean" else 1e-9
            for a, b in zip(mine, run(stock(op), tensors, grads), strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            continue
        want, theirs = run(stock(op), tensors, grads, torch.float64), run(stock(op), tensors, grads)
        assert_as_good_as_stock(names(op), mine, theirs, want, units=1)


@devices
@saves
@ops
def test_layouts(op: str, save: str, device: str) -> None:
    """The result lies as images do: contiguous, or channels_last where they are."""
    image = normal((2, 24, 5, 7), torch.float32, 0).to(device)
    parameters = [t.to(device) for t in weights(op, 24, torch.float32)]
    upstream = normal((2, 24, 5, 7), torch.float32, 3).to(device)
    want = run(stock(op), [image, *parameters], [upstream])
    last = torch.channels_last
    given = {
        "contiguous": image,
        "channels_last": image.contiguous(memory_format=last),
        "transposed": image.transpose(2, 3).contiguous().transpose(2, 3),
        "of every other row": image.repeat_interleave(2, 2)[:, :, ::2],
    }
    for name, x in given.items():
        for grad_format in (torch.contiguous_format, last):
            leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
            out = ours(op, save=save)(*leaves)
            format = last if name == "channels_last" else torch.contiguous_format
            assert out.is_contiguous(memory_format=format), name
            out.backward(upstream.contiguous(memory_format=grad_format))
            for a, b in zip([out, *[t.grad for t in leaves]], want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    expanded = torch.ones((), device=device).expand(2, 24, 5, 7)
    for a, b in zip(
        run(ours(op, save=save), [image, *parameters], [expanded]),
        run(stock(op), [image, *parameters], [expanded]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@devices
@ops
def test_any_dimension(op: str, device: str) -> None:
    x = normal((8, 9, 10, 11), torch.float32, 0).to(device)
    for dim in range(-4, 4):
        parameters = [t.to(device) for t in weights(op, x.shape[dim], torch.float32)]
        torch.testing.assert_close(
            ours(op, dim)(x, *parameters), stock(op, dim)(x, *parameters), rtol=1e-4, atol=1e-5
        )
    both = getattr(M, op)(x, (9, 10), eps=1e-5, dim=2)
    want = getattr(M, op)(x.movedim(-1, 0), (9, 10), eps=1e-5).movedim(0, -1)
    torch.testing.assert_close(both, want)
    assert both.is_contiguous()


@devices
@ops
def test_nothing_and_not_a_number(op: str, device: str) -> None:
    for shape in ((0, C, 3, 2), (2, C, 0, 2), (2, 0, 3, 2)):
        x = torch.randn(shape, device=device, requires_grad=True)
        parameters = [torch.ones(shape[1], device=device, requires_grad=True)]
        out = getattr(M, op)(x, (shape[1],), *parameters, dim=1)
        out.sum().backward()
        assert out.shape == x.grad.shape == x.shape
        assert torch.equal(parameters[0].grad, torch.zeros(shape[1], device=device))
    x = torch.randn(2, C, 5, 4, device=device)
    x[0, 3, 2, 1], x[1, 2, 0, 0] = float("nan"), float("inf")
    out = getattr(M, op)(x, (C,), dim=1)
    bad = torch.zeros(2, 5, 4, dtype=torch.bool)
    bad[0, 2, 1] = True
    assert out[0].isnan().any(0).cpu().equal(bad[0])
    assert out[1, :, 0, 0].isnan().any()
    assert out[1, :, 1:].isfinite().all()


@saves
@ops
def test_many_rows_on_two_threads(op: str, save: str) -> None:
    """The gradients of the weights are sums over rows of all threads."""
    tensors = [normal((3, 16, 70, 90), torch.float32, 0), *weights(op, 16, torch.float32)]
    grads = [normal((3, 16, 70, 90), torch.float32, 3, mean=1)]
    want = run(stock(op), tensors, grads, torch.float64)
    theirs = run(stock(op), tensors, grads)
    assert_as_good_as_stock(names(op), run(ours(op, save=save), tensors, grads), theirs, want)


@devices
@ops
def test_what_is_kept(op: str, device: str) -> None:
    """The input as it is, or the output, and a number or two for each place."""
    x = torch.randn(2, 32, 8, 8, device=device, requires_grad=True)
    weight = torch.ones(32, device=device, requires_grad=True)
    for layout in (torch.contiguous_format, torch.channels_last):
        for save, numbers in (("input", 2 if op == "layer_norm" else 1), ("output", 1)):
            outs: list[Tensor] = []
            function = ours(op, save=save)

            def call(
                f: Callable[..., Tensor] = function, outs: list[Tensor] = outs, to: Any = layout
            ) -> None:
                outs.append(f((x * 1).contiguous(memory_format=to), weight))

            assert measure(call).saved == x.nbytes + numbers * 2 * 8 * 8 * 4
            (out,) = outs
            assert M.norm_saves(out if out._base is None else out._base) == save


@devices
@ops
def test_in_lean_the_result_is_made_again(op: str, device: str) -> None:
    conv = torch.nn.Conv2d(32, 32, 3, device=device)
    parameters = [torch.rand(32, device=device, requires_grad=True)]
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 32, 8, 8, device=device).contiguous(memory_format=layout).requires_grad_()

        def plain(x: Tensor) -> Tensor:
            return conv(ours(op, save="input")(x * 1, *parameters))

        def in_lean(x: Tensor) -> Tensor:
            with memkit.lean():
                return plain(x)

        found = [torch.autograd.grad(f(x).square().sum(), [x, *parameters]) for f in (plain, in_lean)]
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        numbers = 2 if op == "layer_norm" else 1
        assert measure(lambda x=x: in_lean(x)).saved == x.nbytes + numbers * 2 * 8 * 8 * 4


@ops
def test_derivatives(op: str) -> None:
    x = normal((2, C, 3, 2), torch.float64, 0).requires_grad_()
    parameters = [t.requires_grad_() for t in weights(op, C, torch.float64)]
    function = ours(op, save="input")
    assert torch.autograd.gradcheck(
        function, (x, *parameters), check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(function, (x, *parameters))
    assert torch.autograd.gradcheck(ours(op), (x, *parameters))
    assert torch.autograd.gradgradcheck(ours(op, save="output"), (x, *parameters))
    batched = torch.stack([normal((2, C, 3, 2), torch.float64, seed) for seed in (3, 4)])
    for save in ("input", "output"):
        out = ours(op, save=save)(x, *parameters)
        (got,) = torch.autograd.grad(out, x, batched, is_grads_batched=True)
        out = stock(op)(x, *parameters)
        want = torch.stack([torch.autograd.grad(out, x, g, retain_graph=True)[0] for g in batched])
        torch.testing.assert_close(got, want)


@ops
def test_transforms(op: str) -> None:
    x, tangent = normal((4, C, 3, 2), torch.float64, 0), normal((4, C, 3, 2), torch.float64, 1)
    parameters = weights(op, C, torch.float64)
    mine, theirs = (lambda x, f=f: f(x, *parameters) for f in (ours(op), stock(op)))
    torch.testing.assert_close(jvp(mine, (x,), (tangent,)), jvp(theirs, (x,), (tangent,)))
    many = torch.stack([x, x.cos()])
    torch.testing.assert_close(vmap(mine)(many), vmap(theirs)(many))
    square = lambda f: lambda x: f(x).square().sum()  # noqa: E731
    torch.testing.assert_close(vmap(grad(square(mine)))(many), vmap(grad(square(theirs)))(many))


@ops
def test_opcheck(op: str) -> None:
    x = normal((2, C, 3, 2), torch.float32, 0).requires_grad_()
    weight, *bias = (t.requires_grad_() for t in weights(op, C, torch.float32))
    for dtype, save in ((torch.float32, "input"), (torch.float32, "output"), (torch.bfloat16, "auto")):
        arguments = (x, 1, 2, weight, *(bias or [None]), 1e-5, op == "layer_norm", dtype, save)
        torch.library.opcheck(torch.ops.memkit._row_norm.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
@ops
def test_compiled(op: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    function = ours(op)
    compiled = torch.compile(lambda *t: function(*t), backend="aot_eager", dynamic=dynamic, fullgraph=True)
    parameters = [t.requires_grad_() for t in weights(op, C, torch.float32)]
    for batch in (2, 5):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = normal((batch, C, 4, 3), torch.float32, 0).contiguous(memory_format=layout).requires_grad_()
            outs = [f(x, *parameters) for f in (compiled, function)]
            assert outs[0].stride() == outs[1].stride()
            found = [torch.autograd.grad(out.square().sum(), [x, *parameters]) for out in outs]
            torch.testing.assert_close(outs[0], outs[1])
            torch.testing.assert_close(found[0], found[1])
    torch._dynamo.reset()


@devices
@pytest.mark.parametrize("dtype", LOW[1:], ids=str)
@ops
def test_autocast_and_checkpoints(op: str, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(2, C, 4, 3, device=device, requires_grad=True)
    parameters = [t.to(device).requires_grad_() for t in weights(op, C, torch.float32)]
    with torch.autocast(device, dtype):
        out = ours(op)(x, *parameters)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), stock(op)(x, *parameters), rtol=2e-2, atol=2e-2)
    want = torch.autograd.grad(ours(op)(x, *parameters).square().sum(), [x, *parameters])
    out = checkpoint(ours(op), x, *parameters, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), [x, *parameters]), want)


@ops
def test_in_place(op: str) -> None:
    parameters = weights(op, C, torch.float32)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = normal((2, C, 4, 3), torch.float32, 0).contiguous(memory_format=layout)
        want = stock(op)(x, *parameters)
        out = ours(op, inplace=True)(x, *parameters)
        assert out is x
        torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-5)


@ops
@pytest.mark.parametrize("denominator", ["root", "deviation"])
def test_what_is_overwritten_is_not_kept(op: str, denominator: str) -> None:
    for dim, layout in (
        (1, torch.contiguous_format),
        (1, torch.channels_last),
        (-1, torch.contiguous_format),
    ):
        x = normal((2, C, 4, C), torch.float32, 0).contiguous(memory_format=layout)
        before = x.clone()
        with pytest.raises(
            ValueError, match=f"^{op}: expected save 'auto' or 'output' in place, got 'input'"
        ):
            ours(op, dim, denominator=denominator, inplace=True, save="input")(x)
        assert torch.equal(x, before)


@ops
def test_in_place_the_gradient_is_exact_or_refused(op: str) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = normal((2, 2 * C, 4, 3), torch.float32, 0).contiguous(memory_format=layout).requires_grad_()
        made = x * 1
        with pytest.raises(ValueError, match=f"^{op}: expected, in place, weights"):
            ours(op, inplace=True)(made, torch.full((2 * C,), 1e-38))
        torch.testing.assert_close(made, x, rtol=0, atol=0)


@ops
def test_what_another_operator_has_saved_is_not_overwritten(op: str) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = normal((2, 2 * C, 4, 3), torch.float32, 0).contiguous(memory_format=layout).requires_grad_()
        made = x * 1
        square = made.pow(2)
        with pytest.raises(
            RuntimeError, match=f"^{op}: expected, in place, a tensor that nothing else needs"
        ):
            ours(op, inplace=True)(made)
        torch.testing.assert_close(torch.autograd.grad(square.sum(), x)[0], 2 * x)


@ops
@pytest.mark.parametrize("inplace", [True, "auto"])
@pytest.mark.parametrize("denominator", ["root", "deviation"])
def test_gradients_in_place(op: str, inplace: bool | str, denominator: str) -> None:
    weight = weights(op, 2 * C, torch.float32)[
        :1
    ]  # without a bias, which a deviation's output cannot be followed back from
    for layout in (torch.contiguous_format, torch.channels_last):
        x = normal((2, 2 * C, 4, 3), torch.float32, 0).contiguous(memory_format=layout).requires_grad_()
        want = ours(op, denominator=denominator)(x, *weight)
        made = x * 1
        out = ours(op, denominator=denominator, inplace=inplace)(made, *weight)
        assert (out is made) == (inplace is True)
        if inplace == "auto":
            torch.testing.assert_close(made, x, rtol=0, atol=0)
        torch.testing.assert_close(out, want)
        g = torch.randn_like(want)
        torch.testing.assert_close(
            torch.autograd.grad(out, x, g), torch.autograd.grad(want, x, g), rtol=1e-4, atol=1e-5
        )


@ops
def test_what_is_refused(op: str) -> None:
    function = getattr(M, op)
    x = torch.randn(2, C, 4, 3)
    for dim in (-5, 4):
        with pytest.raises(ValueError, match=rf"^{op}: expected dim in \[-4, 3\], got {dim}"):
            function(x, (C,), dim=dim)
    with pytest.raises(
        ValueError, match=rf"^{op}: expected an input whose dimensions up to 1 are \[4\], got "
    ):
        function(x, (4,), dim=1)
    with pytest.raises(ValueError, match=rf"^{op}: expected an input whose dimensions up to 0 are"):
        function(x, (2, C), dim=0)
    with pytest.raises(ValueError, match=rf"^{op}: expected a weight of shape"):
        function(x, (C,), torch.ones(C, 1, 1), dim=1)
    with pytest.raises(TypeError, match=op):
        function(x.long(), (C,), dim=1)
    with pytest.raises(ValueError, match=f"^{op}: expected a normalized_shape of 1 to"):
        torch.ops.memkit._row_norm(x, 1, 4, None, None, 1e-5, op == "layer_norm", x.dtype, "auto")
