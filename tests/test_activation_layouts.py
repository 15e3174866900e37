"""Sizes, memory layouts, threads: an element's result depends on nothing but its value."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from activation_cases import generator, keep, modes
from torch import Tensor

import memkit.functional as M
from memkit._reference import value_and_gradient

# One function whose slope comes from the output alone, one that needs bits beside it, and one to which bits are enough.
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "tanh": (M.tanh, torch.tanh),
    "silu": (M.silu, F.silu),
    "relu6": (M.relu6, F.relu6),
}
DTYPES = [torch.float32, torch.bfloat16]
FUNCTION_MODES = [(name, mode) for name in FUNCTIONS for mode in modes(name)]
function_modes = pytest.mark.parametrize(("name", "mode"), FUNCTION_MODES)


def close(got: Tensor, want: Tensor) -> None:
    rtol, atol = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}[want.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """On both sides of silu's minimum but not near it, where rounding the output costs the slope much."""
    random = torch.rand(2, *shape, generator=generator(math.prod(shape)))
    return ((0.8 + random[0]) * torch.where(random[1] < 0.5, -1, 1)).to(dtype)


def run(name: str, mode: str, x: Tensor, grad: Tensor | None = None, layout: Callable = lambda x: x) -> None:
    """Value and gradient against stock, with the layout made inside the graph and kept by the function."""
    function, stock = FUNCTIONS[name]

    def ours(leaf: Tensor) -> Tensor:
        h = layout(leaf * 2)
        out = function(h, **keep(mode))
        assert out is h or "inplace" not in mode
        return out

    value, slope = value_and_gradient(ours, x, grad)
    want_value, want_slope = value_and_gradient(lambda leaf: stock(layout(leaf * 2)), x, grad)
    close(value, want_value)
    close(slope, want_slope)


SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 32_767, 32_769, 100_003]


@function_modes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(name: str, mode: str, dtype: torch.dtype, size: int) -> None:
    run(name, mode, values(size, dtype=dtype), values(size, dtype=dtype))


@function_modes
@pytest.mark.parametrize("shape", [(), (1,), (0, 5), (3, 0), (2, 3, 4, 5, 6), (1, 1, 1), (7, 1, 3)], ids=str)
def test_shapes(name: str, mode: str, shape: tuple[int, ...]) -> None:
    x = values(*shape)
    run(name, mode, x, values(*shape))
    assert FUNCTIONS[name][0](x).shape == shape


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "every second": lambda x: x[:, ::2],
    "every second, of the last": lambda x: x[..., ::2],
    "a part": lambda x: x[1:3, 2:, :, 1:4],
    "one channel": lambda x: x[:, 1],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "channels_last, a part": lambda x: x.contiguous(memory_format=torch.channels_last)[:, 1:4],
    "channels_last_3d": lambda x: x.unsqueeze(2).contiguous(memory_format=torch.channels_last_3d),
    "flipped": lambda x: x.flip(1),
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "as_strided": lambda x: torch.as_strided(x, (5, 7), (50, 3), 11),
    "unaligned": lambda x: x.flatten()[1:],
    "unaligned, odd end": lambda x: x.flatten()[3:1000],
    "singleton strides": lambda x: torch.as_strided(x, (4, 1, 30), (30, 7, 1)),
}


@function_modes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(name: str, mode: str, dtype: torch.dtype, layout: str) -> None:
    run(name, mode, values(4, 6, 10, 11, dtype=dtype), layout=LAYOUTS[layout])


@pytest.mark.parametrize(("name", "mode"), [case for case in FUNCTION_MODES if "inplace" not in case[1]])
def test_expanded_out_of_place(name: str, mode: str) -> None:
    run(name, mode, values(3, 1, 5), layout=lambda x: x.expand(3, 4, 5))
    run(name, mode, values(1), layout=lambda x: x.expand(70))


@function_modes
def test_in_place_on_a_part_leaves_the_rest_alone(name: str, mode: str) -> None:
    for part in (lambda x: x[::2, 1:], lambda x: x[:, ::3], lambda x: x.t()[2:5], lambda x: x[4]):
        x = values(9, 31)
        before = x.clone()
        outside = torch.ones_like(x, dtype=torch.bool)
        part(outside).fill_(False)
        FUNCTIONS[name][0](part(x), inplace=True)
        assert torch.equal(x[outside], before[outside])
        close(part(x), FUNCTIONS[name][1](part(before)))


@pytest.mark.parametrize("layout", ["transposed", "permuted", "channels_last", "channels_last_3d"])
def test_a_dense_layout_is_kept(layout: str) -> None:
    x = LAYOUTS[layout](values(4, 6, 10, 11))
    for mode in ("input", "output"):
        leaf = x.detach().requires_grad_()
        out = M.gelu(leaf, save=mode)
        assert out.stride() == F.gelu(x).stride() == x.stride()
        out.backward(torch.ones_like(x))
        assert leaf.grad.stride() == x.stride()


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded from sum": lambda g: g.flatten()[0].expand(g.shape),
    "expanded rows": lambda g: g[:, :1].expand(g.shape),
    "transposed": lambda g: g.transpose(2, 3).contiguous().transpose(2, 3),
    "channels_last": lambda g: g.contiguous(memory_format=torch.channels_last),
    "contiguous": lambda g: g.contiguous(),
    "every second": lambda g: g.repeat_interleave(2, 3)[..., ::2],
    "unaligned": lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape),
}


@pytest.mark.parametrize("save", ["input", "output"])
def test_a_gradient_in_another_order_takes_the_inputs(save: str) -> None:
    """As nobody else sees that gradient, its memory could serve; what comes before would have to sort it once more."""
    x = torch.randn(2, 8, 5, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    before, found, factor = x * 1, [], torch.randn(2, 8, 5, 3)
    before.register_hook(lambda grad: found.append(grad))
    (M.silu(before, save=save).contiguous() * factor).sum().backward()
    (grad,) = found
    assert grad.stride() == x.stride()
    other = x.detach().requires_grad_()
    F.silu(other).backward(factor)
    torch.testing.assert_close(grad, other.grad)


@function_modes
@pytest.mark.parametrize("layout", ["as it is", "channels_last", "transposed"])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradient_layouts(name: str, mode: str, layout: str, gradient: str) -> None:
    shape = (6, 6, 10, 11)
    run(name, mode, values(*shape), GRADIENTS[gradient](values(*shape)), LAYOUTS.get(layout, lambda x: x))


@function_modes
def test_the_gradient_of_a_sum(name: str, mode: str) -> None:
    function, stock = FUNCTIONS[name]
    x = values(33, 65).requires_grad_()
    out = function(x * 2, **keep(mode))
    (got,) = torch.autograd.grad(out.sum(), x)
    (want,) = torch.autograd.grad(stock(x * 2).sum(), x)
    close(got, want)


@function_modes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(name: str, mode: str, dtype: torch.dtype) -> None:
    """Enough for two shares of ATen's grain size, and an odd end."""
    function = FUNCTIONS[name][0]
    x, grad = values(300_007, dtype=dtype), values(300_007, dtype=dtype)

    def both() -> tuple[Tensor, Tensor]:
        return value_and_gradient(lambda leaf: function(leaf * 1, **keep(mode)), x, grad)

    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(both())
    finally:
        torch.set_num_threads(threads)
    for value, slope in results[1:]:
        assert torch.equal(value, results[0][0])
        assert torch.equal(slope, results[0][1])


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_written_outside(offset: int, dtype: torch.dtype) -> None:
    """Guards on both sides of value, bits and gradient, at every alignment."""
    for n in (1, 5, 8, 13, 1024, 1031):
        memory = torch.full((n + 32,), 7.0, dtype=dtype)
        x = memory[16 + offset : 16 + offset + n]
        x.copy_(values(n))
        want = F.silu(x)
        M.silu(x, inplace=True)
        close(x, want)
        assert (memory[: 16 + offset] == 7).all()
        assert (memory[16 + offset + n :] == 7).all()


def _available_memory() -> int:
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) << 10


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """In place with bits, then the gradient in place: 4.3 GB each and 0.3 GB of bits."""
    n = 2**31 + 9
    if _available_memory() < 14 << 30:
        pytest.skip("needs 14 GB of free memory")
    pattern = values(2**20 + 1, dtype=torch.bfloat16)
    want = pattern.clone()  # the same for a tensor of ordinary size: what differs is the indexing
    few = torch.ops.memkit._activation_with_bits_(want, None, -1, "hardswish", [])
    slope = torch.ones_like(want)
    torch.ops.memkit._activation_backward_(slope, want, None, -1, few, "hardswish", [], True)
    close(want, F.hardswish(pattern))
    x = torch.empty(n, dtype=torch.bfloat16)
    for first in range(0, n, pattern.numel()):
        piece = x[first : first + pattern.numel()]
        piece.copy_(pattern[: piece.numel()])
    bits = torch.ops.memkit._activation_with_bits_(x, None, -1, "hardswish", [])
    assert bits.numel() == 2**28 + 2
    places = [0, 2**31 - 2**20, n - n % pattern.numel() - pattern.numel(), n - n % pattern.numel()]
    for first in (place - place % pattern.numel() for place in places):
        assert torch.equal(x[first : first + pattern.numel()], want[: n - first])
    grad = torch.ones(n, dtype=torch.bfloat16)
    torch.ops.memkit._activation_backward_(grad, x, None, -1, bits, "hardswish", [], True)
    for first in (place - place % pattern.numel() for place in places):
        assert torch.equal(grad[first : first + pattern.numel()], slope[: n - first])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_long_tanh_is_like_a_short_one(dtype: torch.dtype, inplace: bool) -> None:
    short = torch.tensor([0.0, -0.0, 0.3, -2.0, 30.0, math.inf, -math.inf, math.nan], dtype=dtype)
    leaf = short.repeat(64, 16).t().requires_grad_()
    x = leaf.clone()
    y = M.tanh(x, inplace=inplace)
    assert y._version == int(inplace)
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, torch.tanh(leaf), equal_nan=True)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(leaf.grad, 1 - y.detach() ** 2, equal_nan=True)
