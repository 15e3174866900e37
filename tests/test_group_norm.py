"""Group norm: as exact as stock's in each layout, which the result has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_cases import KINDS, LOW, assert_as_good_as_stock, inputs, normal, uniform
from torch import Tensor, nn

import memkit
import memkit.functional as M
from memkit._reference_norm import run
from memkit.memory import measure

LAYOUTS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
SHAPES: list[tuple[tuple[int, ...], int]] = [
    ((5, 12, 20, 21), 3),
    ((5, 12, 20, 21), 12),
    ((6, 8, 300), 1),
    ((40, 32), 4),
    ((37, 16, 321), 4),  # several blocks of several groups
    ((1, 8, 5000), 1),  # fewer groups than threads
    ((1, 2048, 1, 1), 32),  # of one sample, planes of one element
    ((1, 64, 70, 50), 8),  # one sample for all threads
    ((33, 32, 5, 3), 8),
    ((2, 6, 4, 5, 7), 2),
    ((3, 24, 1, 9), 1),
]


def fits(layout: str, shape: tuple[int, ...]) -> bool:
    return layout == "contiguous" or len(shape) == (5 if layout.endswith("3d") else 4)


def parameters(channels: int, dtype: torch.dtype) -> list[Tensor]:
    """Weights of both signs, small ones among them."""
    return [uniform((channels,), dtype, 1, -1.5, 1.5), normal((channels,), dtype, 2)]


def of(function: Callable[..., Any], groups: int) -> Callable[..., Any]:
    return lambda x, *p: function(x, groups, *p)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_as_exact_as_stock(dtype: torch.dtype, kind: str, layout: str) -> None:
    for shape, groups in SHAPES:
        if not fits(layout, shape):
            continue
        form = LAYOUTS[layout]
        tensors = [inputs(kind, shape, dtype).contiguous(memory_format=form), *parameters(shape[1], dtype)]
        for grad_form in {form, torch.contiguous_format}:
            grads = [normal(shape, dtype, 5).contiguous(memory_format=grad_form)]
            want = run(of(F.group_norm, groups), tensors, grads, torch.float64)
            mine = run(of(M.group_norm, groups), tensors, grads)
            theirs = run(of(F.group_norm, groups), tensors, grads)
            assert_as_good_as_stock("y input weight bias", mine, theirs, want)
            assert mine[0].stride() == theirs[0].stride()
            assert mine[1].is_contiguous(memory_format=form)


@pytest.mark.parametrize("layout", ["channels_last", "channels_last_3d"])
def test_float64_and_derivatives(layout: str) -> None:
    shape = (3, 6, 2, 3, 2)[: 5 if layout.endswith("3d") else 4]
    x = normal(shape, torch.float64, 0).contiguous(memory_format=LAYOUTS[layout]).requires_grad_()
    weight, bias = (t.requires_grad_() for t in parameters(6, torch.float64))
    torch.testing.assert_close(
        M.group_norm(x, 3, weight, bias), F.group_norm(x, 3, weight, bias), rtol=1e-12, atol=1e-12
    )
    assert torch.autograd.gradcheck(of(M.group_norm, 3), (x, weight, bias), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(of(M.group_norm, 3), (x, weight, bias))
    arguments = (x.detach().float().requires_grad_(), 3, None, None, 1e-5, torch.bfloat16)
    torch.library.opcheck(torch.ops.memkit._group_norm.default, arguments)


def test_parts_of_images_lie_as_stocks() -> None:
    image = torch.randn(2, 32, 7, 6).contiguous(memory_format=torch.channels_last)
    for x in (image.chunk(2, 1)[1], image[:, :, 1:-1], image.expand(2, 32, 7, 6)[:1], image[..., ::2]):
        mine, theirs = M.group_norm(x, 4), F.group_norm(x, 4)
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs)
        if x.stride(1) == 1 and x.shape[-1] == 6:
            rows = M.layer_norm(x, (x.shape[1],), dim=1)
            assert rows.stride() == theirs.stride()
            torch.testing.assert_close(rows, F.layer_norm(x.movedim(1, -1), (x.shape[1],)).movedim(-1, 1))


def test_swapped_and_of_channels_last_it_is_stocks_where_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.GroupNorm(4, 32))
    assert memkit.swap(model).changed
    image = torch.randn(2, 32, 5, 6)
    calls: list[Tensor] = []
    monkeypatch.setattr(type(model[0]), "_memkit", lambda _, x: calls.append(x) or x)
    with torch.no_grad():
        model(image.contiguous(memory_format=torch.channels_last))
        assert not calls
        model(image)
        assert len(calls) == 1
    model(image.contiguous(memory_format=torch.channels_last))
    assert len(calls) == 2


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_nothing_and_not_a_number(layout: str) -> None:
    form = LAYOUTS[layout]
    for shape in ((0, 6, 3, 2), (2, 6, 0, 2)):
        x = torch.randn(shape).contiguous(memory_format=form).requires_grad_()
        weight = torch.ones(6, requires_grad=True)
        M.group_norm(x, 3, weight).sum().backward()
        assert x.grad is not None
        assert torch.equal(weight.grad, torch.zeros(6))
    x = torch.randn(2, 6, 5, 4).contiguous(memory_format=form)
    x[1, 3, 2, 1] = float("nan")
    bad = M.group_norm(x, 3).isnan()
    assert bad[1, 2:4].all()
    assert bad.sum() == 2 * 5 * 4


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_compiled_and_kept(layout: str) -> None:
    torch._dynamo.reset()
    form = LAYOUTS[layout]
    x = torch.randn(2, 32, 8, 8).contiguous(memory_format=form).requires_grad_()
    weight, bias = (t.requires_grad_() for t in parameters(32, torch.float32))
    compiled = torch.compile(lambda *t: M.group_norm(t[0], 4, *t[1:]), backend="aot_eager", fullgraph=True)
    outs = [f(x, weight, bias) for f in (compiled, of(M.group_norm, 4))]
    assert outs[0].stride() == outs[1].stride() == x.stride()
    found = [torch.autograd.grad(out.square().sum(), [x, weight, bias]) for out in outs]
    torch.testing.assert_close(found[0], found[1])
    kept = measure(lambda: M.group_norm(x * 1, 4, weight, bias)).saved
    assert kept == x.nbytes + 2 * 2 * 4 * 8
    conv = nn.Conv2d(32, 8, 1)

    def in_lean(x: Tensor) -> Tensor:
        with memkit.lean():
            return conv(M.group_norm(x, 4, weight, bias))

    assert measure(lambda: in_lean(x * 1)).saved == kept
    out = in_lean(x)
    want = torch.autograd.grad(conv(F.group_norm(x, 4, weight, bias)).square().sum(), [x, weight, bias])
    got = torch.autograd.grad(out.square().sum(), [x, weight, bias])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
