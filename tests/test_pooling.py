"""Max pooling: where each maximum was found is all that is kept."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch
from swap_cases import assert_as_stock, only, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkit.nn as mnn
from memkit import functional as F
from memkit import swap, unswap
from memkit.memory import measure
from memkit.swap import layers

pytestmark = pytest.mark.usefixtures("repeatable")

POOLS = {
    "3, 2, 1": lambda: nn.MaxPool2d(3, 2, 1),
    "2": lambda: nn.MaxPool2d(2),
    "one": lambda: nn.MaxPool2d(1),
    "overlapping": lambda: nn.MaxPool2d(3, 1),
    "ceil": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "dilated": lambda: nn.MaxPool2d(3, 2, 1, dilation=2),
    "two sizes": lambda: nn.MaxPool2d((2, 3), (1, 2), (1, 0), (2, 1)),
}
pools = pytest.mark.parametrize("name", POOLS)


def ours(pool):
    return mnn.MaxPool2d(pool.kernel_size, pool.stride, pool.padding, pool.dilation, ceil_mode=pool.ceil_mode)


SHAPES = [(2, 3, 9, 11), (3, 8, 7), (1, 1, 5, 5), (0, 2, 7, 9), (2, 2, 40, 300)]


def values(shape, dtype=torch.float64, kind="normal"):
    x = torch.randn(shape).to(dtype)
    if kind == "ties":
        x = x.round().clamp(-1, 1)
    if kind == "infinite":
        x[..., ::3, :] = -torch.inf
        x[..., :2] = torch.inf
        x[..., -3:] = -torch.inf
    if kind == "nan":
        x[..., ::4, 1] = torch.nan
    return x


@pools
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "ties", "infinite", "nan"])
def test_values_and_gradients_to_the_bit(name, shape, dtype, kind):
    pool = POOLS[name]()
    found = []
    x = values(shape, dtype, kind)
    for f in (pool, ours(pool)):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        weight = torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype)
        if dtype in (torch.float16, torch.bfloat16):  # stock adds up in the dtype itself: sums that it holds
            weight = weight.mul(4).round()
        found.append((y.detach(), *torch.autograd.grad(y, leaf, weight)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "layout", ["channels_last", "part of channels_last", "one channel", "transposed", "every second"]
)
def test_layouts(layout):
    x = values((2, 1 if layout == "one channel" else 6, 10, 8))
    if "channels_last" in layout:
        x = x.to(memory_format=torch.channels_last)
    x = x[:, :3] if layout == "part of channels_last" else x
    x = x.transpose(2, 3) if layout == "transposed" else x[:, ::2] if layout == "every second" else x
    pool, found = nn.MaxPool2d(3, 2, 1), []
    for f in (pool, ours(pool)):
        leaf = x.detach().requires_grad_()
        y = f(leaf)
        (gradient,) = torch.autograd.grad(y, leaf, torch.linspace(-1, 1, y.numel()).view(y.shape).double())
        found.append((y, gradient))
    (a, b), (c, d) = found
    torch.testing.assert_close((c, d), (a, b), rtol=0, atol=0)
    assert (a.stride(), b.stride()) == (c.stride(), d.stride())


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("side", [16, 17])
def test_places_in_a_large_window(side, layout, hooks):
    """Past 256 elements in four bytes. Backward twice: what was saved is not written over."""
    pool, saved = nn.MaxPool2d(side, 5, 8), []
    x = values((2, 3, 40, 300), torch.float32).to(memory_format=layout)
    leaf, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    around = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.dtype) or x, lambda x: x)
    with around if hooks else contextlib.nullcontext():
        y = ours(pool)(leaf)
    assert not hooks or saved == [torch.uint8 if side == 16 else torch.int32]
    for out in (y, pool(theirs)):
        loss = out.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(leaf.grad, theirs.grad)


@pytest.mark.parametrize("shape", [(2, 3, 9, 1), (2, 3, 1, 9)])
def test_windows_that_step_over_all_there_is(shape):
    """They have no maximum, and so no place: stock's -inf."""
    pool, x = nn.MaxPool2d(2, 1, 1, dilation=2), values(shape).requires_grad_()
    y = ours(pool)(x)
    assert torch.equal(y, pool(x))
    assert y.isneginf().any()
    assert "memkit" not in y.grad_fn.name()
    with pytest.raises(ValueError, match=r"max_pool2d: expected .* windows with a result, got"):
        torch.ops.memkit._max_pool2d(x, [2], [1], [1], [2], False)


@pytest.mark.parametrize("channels", [1, 3, 64, 130])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_error_against_float64(dtype, layout, channels, device):
    """At most twice stock's. Over several threads, too."""
    x = torch.randn(2, channels, 30, 41, device=device).to(dtype).to(memory_format=layout)
    weight = torch.randn(2, channels, 28, 20, device=device).to(dtype)
    found, stock = [], nn.MaxPool2d((3, 2), (1, 2))
    for f, as_dtype in ((stock, torch.float64), (stock, dtype), (ours(stock), dtype)):
        leaf = x.to(as_dtype).requires_grad_()
        y = f(leaf)
        found.append((y.detach(), *torch.autograd.grad(y, leaf, weight.to(as_dtype))))
    (y, gradient), theirs, mine = found
    assert torch.equal(mine[0].double(), y)
    assert (mine[1] - gradient).abs().max() <= 2 * (theirs[1] - gradient).abs().max()


def test_windows_beyond_all_pictures():
    """What is worked out for each of their places would be gigabytes, for a picture of 9."""
    x = values((1, 1, 3, 3)).requires_grad_()
    for side, name in ((1024, "memkit"), (1025, "MaxPool2D")):
        y = F.max_pool2d(x, side, 1, side // 2)
        assert name in y.grad_fn.name()
        assert torch.equal(y, torch.nn.functional.max_pool2d(x, side, 1, side // 2))


@pytest.mark.parametrize("arguments", [(2,), ((2, 2),), (3, 1)])
def test_quantized(arguments):
    """Stock gets the arguments as they came: its kernel for these knows no single numbers."""
    x = torch.quantize_per_tensor(values((2, 3, 8, 8), torch.float32), 0.1, 10, torch.quint8)
    found, expected = F.max_pool2d(x, *arguments), torch.nn.functional.max_pool2d(x, *arguments)
    assert torch.equal(found.int_repr(), expected.int_repr())


@pytest.mark.parametrize("places", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("side", [4, 5])
def test_places_that_are_not_the_pictures(side, places):
    """Saved-tensor hooks may return another tensor; backward would write out of bounds."""
    given = (torch.zeros(1, 2, side, side), torch.zeros(1, 2, side, side, dtype=places), [1, 2, 8, 8], False)
    if (side, places) == (4, torch.uint8):
        assert torch.ops.memkit._max_pool2d_backward(*given, [2], [], [0], [1], False).shape == (1, 2, 8, 8)
        return
    with pytest.raises(
        ValueError, match=r"max_pool2d: expected a gradient of \[1, 2, 4, 4\] and places .*, got"
    ):
        torch.ops.memkit._max_pool2d_backward(*given, [2], [], [0], [1], False)


def test_operators():
    """As compilers and modes see them."""
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    window = ([3, 2], [], [1, 0], [1, 2], True)
    torch.library.opcheck(torch.ops.memkit._max_pool2d.default, (x, *window))
    y, places = torch.ops.memkit._max_pool2d(x.detach(), *window)
    arguments = (torch.randn_like(y), places, list(x.shape), False, *window)
    torch.library.opcheck(torch.ops.memkit._max_pool2d_backward.default, arguments)
    assert torch.ops.memkit._max_pool2d(x.to("meta"), *window)[0].shape == y.shape
    with pytest.raises(ValueError, match=r"max_pool2d: expected .* windows with a result, got"):
        torch.ops.memkit._max_pool2d(x, [12], [], [0], [1], False)
    with pytest.raises(NotImplementedError, match="max_pool2d: expected no function transform"):
        torch.func.grad(lambda x: torch.ops.memkit._max_pool2d(x, *window)[0].sum())(x)


@pytest.mark.parametrize("act", [nn.Identity, nn.ReLU])
def test_peak_of_a_step(act):
    """Not above stock's, where another keeps the pool's input too: backward makes no second tensor of its size."""
    net, peaks = nn.Sequential(nn.Conv2d(3, 32, 3), act(), nn.MaxPool2d(2)).double(), []
    x = values((4, 3, 34, 34))
    for _ in range(2):
        step(net, x)
        peaks.append(measure(lambda: net(x).sum().backward(), device="cpu").peak)
        swap(net)
    assert peaks[1] <= peaks[0] + 1000


def test_higher_derivatives():
    x = torch.randperm(128, dtype=torch.float64).view(1, 2, 8, 8).requires_grad_()
    pool = mnn.MaxPool2d(3, 2, 1)
    assert torch.autograd.gradcheck(pool, x)
    assert torch.autograd.gradgradcheck(pool, x)


@pytest.mark.parametrize(
    "arguments",
    [
        *((2,), (3, 2), (3, (2, 1), 1), ((3,), [2]), ([3, 2], (), 1), (torch.Size([2, 2]), None, 0, 1, True)),
        *((np.int64(3), np.int64(2), np.int64(1)), (torch.tensor(3), torch.tensor(2))),
    ],
)
def test_arguments_as_stock_takes_them(arguments):
    x = values((2, 3, 9, 10)).requires_grad_()
    found = F.max_pool2d(x, *arguments)
    assert "memkit" in found.grad_fn.name()
    assert torch.equal(found, torch.nn.functional.max_pool2d(x, *arguments))


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((3, 3), (2,)),
        ((1, 2, 4, 4), (0,)),
        ((1, 2, 4, 4), (2, 0)),
        ((1, 2, 4, 4), (2, 2, 2)),
        ((1, 2, 2, 2), (5,)),
        *(
            ((1, 2, 4, 4), (size,))
            for size in ((2, 3, 2), (), (2.0, 2), 2.0, True, None, "2", torch.tensor([2, 2]))
        ),
        *(
            ((1, 2, 4, 4), (2, *rest))
            for rest in ((2.0,), (np.ones(2, int),), (2, ()), (2, (1, 0, 1)), (2, 0, (1, 2, 1)))
        ),
        ((1, 2, 4, 4), (2, 2, 0, 1, 1)),
        (None, (2,)),
    ],
)
def test_errors_are_those_of_stock(shape, arguments):
    x, said = None if shape is None else torch.randn(shape, requires_grad=True), []
    for f in (torch.nn.functional.max_pool2d, F.max_pool2d):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            f(x, *arguments)
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]


def model(act=None):
    """What was before the pool is not kept for its sake."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act or nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 4, 3)
    ).double()


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, lambda: nn.ReLU(inplace=True)])
def test_as_stock(by_sample, lean, act):
    net, x = model(act()), values((2, 3, 14, 14))
    types = [type(m) for m in net.modules()]
    report = swap(net, sample=x if by_sample else None, lean=lean)
    assert isinstance(net[3], layers.MaxPool2d), report
    assert_as_stock(net, x)
    assert_as_stock(net.eval(), x)
    copied = pickle.loads(pickle.dumps(net))
    torch.testing.assert_close(step(copied, x), step(net, x))
    unswap(net)
    assert [type(m) for m in net.modules()] == types


@pytest.mark.parametrize("lean", [False, "call"])
def test_kept(lean):
    """The norm's input, a byte a place, and what the pool gives: stock keeps the activation's result and eight."""
    net, x = model(), values((2, 3, 34, 34))
    report = swap(net, sample=x, lean=lean)
    kept = measure(lambda: net(x), device="cpu").saved
    full, pooled = 2 * 8 * 32 * 32, 2 * 8 * 16 * 16
    own = 8 * full + (1 + 8) * pooled
    assert own <= kept <= own + 1000, report
    row = next(row for row in report.rows if row.path == "3")
    assert (row.bytes_after, row.saved) == (pooled, "places")
    assert report.saved_before >= 16 * full + 16 * pooled


def test_alone():
    net = nn.Sequential(nn.MaxPool2d(2)).double()
    row = only(swap(net, sample=values((1, 2, 8, 8)).requires_grad_()))
    assert (row.before, row.after, row.bytes_after) == ("MaxPool2d", "memkit", 32)


def test_what_another_reads_is_still_kept():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.MaxPool2d(2)).double()
    report = swap(net)
    assert next(row for row in report.rows if row.before == "GELU").after == "unchanged"
    assert_as_stock(net, values((2, 3, 8, 8)))


@pytest.mark.parametrize("change", ["indices", "no_grad", "integers"])
def test_stays(change):
    pool = nn.MaxPool2d(2, return_indices=change == "indices")
    x = torch.arange(32.0).view(1, 2, 4, 4).requires_grad_(change != "integers")
    expected = pool(x)
    net = nn.Sequential(pool)
    swap(net)
    with torch.set_grad_enabled(change != "no_grad"):
        found = net(x)
        if change == "integers":
            assert net(x.int()).dtype == torch.int32
    torch.testing.assert_close(found, expected)
    found = found[0] if change == "indices" else found
    assert "memkit" not in (found.grad_fn.name() if found.grad_fn else "")


def test_transforms_and_compilers():
    net = nn.Sequential(nn.MaxPool2d(2)).double()
    expected = copy.deepcopy(net)
    swap(net)
    x = values((3, 2, 8, 8))
    f, g = (lambda x, m=m: m(x).square().sum() for m in (net, expected))
    torch.testing.assert_close(torch.func.grad(f)(x), torch.func.grad(g)(x))
    torch.testing.assert_close(torch.vmap(net)(x.requires_grad_()), torch.vmap(expected)(x))
    for a, b in zip(torch.func.jvp(net, (x,), (x,)), torch.func.jvp(expected, (x,), (x,)), strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), expected(x))
    torch.testing.assert_close(torch.jit.trace(net, x)(x), expected(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(mnn.MaxPool2d(2))(x), expected(x))
    torch.testing.assert_close(torch.export.export(net, (x.detach(),)).module()(x.detach()), expected(x))


def test_several_gradients_at_once():
    found, x = [], values((2, 2, 8, 8)).requires_grad_()
    for pool in (nn.MaxPool2d(2), mnn.MaxPool2d(2)):
        y = pool(x)
        gradients = torch.linspace(-1, 1, 3 * y.numel()).view(3, *y.shape).double()
        found.append(torch.autograd.grad(y, x, gradients, is_grads_batched=True))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Unpooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 3), nn.GELU()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x):
        return self.unpool(*self.pool(self.act(self.conv(x))))


@pytest.mark.parametrize("by_sample", [False, True])
def test_indices_that_the_model_uses(by_sample):
    net, x = Unpooled().double(), values((2, 3, 10, 10))
    report = swap(net, sample=x if by_sample else None, lean="call")
    row = next(row for row in report.rows if row.path == "pool")
    assert (row.after, row.reason) == ("unchanged", "it returns its indices")
    assert_as_stock(net, x)


def test_checkpoint_and_saved_tensor_hooks():
    net, x = model(), values((2, 3, 14, 14)).requires_grad_()
    swap(net)
    expected = step(net, x)
    torch.testing.assert_close(
        step(_Around(net, lambda f, x: checkpoint(f, x, use_reentrant=False)), x), expected
    )
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(step(net, x), expected)


class _Around(nn.Module):
    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x):
        return self.how(self.inner, x)
