"""Views that negate (torch.Tensor.is_neg): the memory holds the opposite of their values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as T

import memkit
import memkit.functional as F

X, IMAGES = (
    torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((4, 8), (2, 4, 6, 6))
)

CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), lambda x: T.layer_norm(x, (8,)), X),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), lambda x: T.rms_norm(x, (8,)), X),
    "add_layer_norm": (
        lambda x: F.add_layer_norm(x, 2 * x, (8,))[0],
        lambda x: T.layer_norm(3 * x, (8,)),
        X,
    ),
    "group_norm": (lambda x: F.group_norm(x, 2), lambda x: T.group_norm(x, 2), IMAGES),
    "normalize": (lambda x: F.normalize(x, dim=-1), lambda x: T.normalize(x, dim=-1), X),
    "batch_norm_act": (
        lambda x: F.batch_norm_act(x, None, None, training=True, act="silu"),
        lambda x: T.silu(T.batch_norm(x, None, None, training=True)),
        IMAGES,
    ),
    "gelu": (F.gelu, T.gelu, X),
    "swiglu": (lambda x: F.swiglu(x, x + 1), lambda x: T.silu(x) * (x + 1), X),
    "softmax": (lambda x: F.softmax(x, -1), lambda x: T.softmax(x, -1), X),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), lambda x: T.max_pool2d(x, 2), IMAGES),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, torch.arange(4), reduction="none"),
        lambda x: T.cross_entropy(x, torch.arange(4), reduction="none"),
        X,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("negated", ["input", "gradient"])
def test_negated_views_count_as_their_values(name: str, negated: str) -> None:
    ours, stock, values = CASES[name]
    found = []
    for f in (ours, stock):
        x = (torch._neg_view(values) if negated == "input" else values.clone()).detach().requires_grad_()
        assert x.is_neg() == (negated == "input")
        out = f(x)
        grad = torch.cos(torch.arange(float(out.numel()))).view(out.shape)
        if negated == "gradient":
            grad = torch._neg_view(grad)
        found.append(
            (out.detach().resolve_neg(), *(g.resolve_neg() for g in torch.autograd.grad(out, x, grad)))
        )
    for mine, want in zip(*found, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_gradient_of_an_imaginary_part_is_stepped(name: str, in_backward: bool) -> None:
    found = []
    for optim in (memkit.optim, torch.optim):
        real, imaginary = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        optimizer = getattr(optim, name)([real, imaginary], lr=0.1)
        if in_backward and optim is memkit.optim:
            memkit.optim.step_in_backward(optimizer)
        x = torch.tensor([0.5, -1, 2]) * (1 + 0.5j)
        (x * torch.complex(real, imaginary).conj()).abs().square().sum().backward()
        if not (in_backward and optim is memkit.optim):
            assert imaginary.grad is not None
            assert imaginary.grad.is_neg()
            optimizer.step()
        found.append(torch.cat([real, imaginary]).detach())
    torch.testing.assert_close(*found)
