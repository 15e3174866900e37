"""`lean()` and results that are mostly zeros: what has to be kept is kept as the other elements and a bit each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit import _C, swap
from memkit.memory import measure

WIDTH, ROWS = 1024, 256
BITS = WIDTH * ROWS // 8


def result(
    act: Callable[..., Tensor] = M.relu, dtype: torch.dtype = torch.float32, **options: object
) -> Tensor:
    """Of an activation, and with a graph."""
    return act(torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True) * 1, **options)


class Network(nn.Module):
    """A feed-forward network whose activation keeps its output, as the Linear behind it does."""

    def __init__(self, act: Callable[..., Tensor], dtype: torch.dtype, **options: object) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH, dtype=dtype), nn.Linear(WIDTH, 16, dtype=dtype)
        self.act, self.options = act, options

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x), **self.options))


def gradients(model: nn.Module, x: Tensor, lean: bool) -> tuple[list[Tensor], int]:
    def run() -> Tensor:
        if not lean:
            return model(x)
        with memkit.lean():
            return model(x)

    torch.manual_seed(1)
    measured = measure(run)
    slope = torch.linspace(-1, 1, measured.result.numel()).to(x.dtype).view_as(measured.result)
    found = torch.autograd.grad(measured.result, [x, *model.parameters()], slope)
    return [measured.result, *found], measured.saved


@pytest.mark.parametrize("shape", [(ROWS,), (4, ROWS // 4)], ids=["matrix", "batch"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("act", [M.relu, M.relu6, M.relu_squared])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_half_the_bytes_and_the_same_gradients(dtype, act, inplace, shape) -> None:
    model = Network(act, dtype, inplace=inplace)
    x = torch.randn(*shape, 16, dtype=dtype, requires_grad=True)
    expected, before = gradients(model, x, lean=False)
    found, after = gradients(model, x, lean=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    elements = ROWS * WIDTH * dtype.itemsize
    assert before == elements
    assert 0.45 * elements < after - BITS < 0.55 * elements


def test_dropout_adds_to_the_zeros() -> None:
    def dropped(x: Tensor) -> Tensor:
        return M.dropout(M.relu(x), 0.5)

    for act in (dropped, lambda x: M.act_dropout(x, "relu", 0.5)):
        model, x = Network(act, torch.float32), torch.randn(ROWS, 16, requires_grad=True)
        expected, before = gradients(model, x, lean=False)
        found, after = gradients(model, x, lean=True)
        assert all(map(torch.equal, found, expected))
        assert after < 0.8 * before
        assert after < 0.9 * ROWS * WIDTH * 4


def test_every_bit_comes_back() -> None:
    x = torch.zeros(ROWS, WIDTH)
    special = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45, -1.0, 3.4e38])
    x.view(-1)[torch.randperm(x.numel())[: 6 * 1000]] = special.repeat(1000)
    made = M.relu(x.requires_grad_() * 1)
    again = _C.unpack(_C.pack(made))
    assert again is not None
    assert again.data_ptr() != made.data_ptr()
    assert torch.equal(again.view(torch.int32), made.detach().view(torch.int32))


@pytest.mark.parametrize("negative_zero", [False, True])
def test_the_slope_at_special_values(negative_zero) -> None:
    x = torch.randn(ROWS, WIDTH)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0 if negative_zero else 0.0, -float("inf")])
    slopes = []
    for lean in (False, True):
        leaf = x.clone().requires_grad_()
        if lean:
            with memkit.lean():
                M.relu(leaf).sum().backward()
        else:
            torch.relu(leaf).sum().backward()
        slopes.append(leaf.grad)
    assert torch.equal(slopes[0], slopes[1])


def bytes_of(x: Tensor) -> int:
    """That autograd would keep of it, where memkit.lean() packs it."""
    parts = _C.nonzeros(x)
    return x.nbytes if parts is None else parts[1].nbytes + parts[2].nbytes


def test_what_does_not_pay_is_kept_as_it_is() -> None:
    assert bytes_of(result()) < 0.6 * ROWS * WIDTH * 4
    dense = M.relu(torch.rand(ROWS, WIDTH, requires_grad=True) + 0.1)
    few = M.relu(torch.randn(ROWS - 1, WIDTH, requires_grad=True))
    short = M.relu(torch.randn(2 * ROWS, WIDTH - 1, requires_grad=True))
    other = torch.relu(torch.randn(ROWS, WIDTH, requires_grad=True))
    strided = M.relu(torch.randn(ROWS, 2 * WIDTH, requires_grad=True)[:, ::2])
    assert strided.is_contiguous()  # and so is packed
    assert bytes_of(strided) < strided.nbytes
    for x in (dense, few, short, other, result(M.gelu), result().detach()):
        assert bytes_of(x) == x.nbytes


@pytest.mark.parametrize("zeros", [0.2, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_vectors_that_are_not_whole(dtype, zeros) -> None:
    x = torch.randn(257, 1025, dtype=dtype).abs() + 0.1
    x[torch.rand(x.shape) < zeros] = 0
    x[:, :1000:3][torch.rand(257, 334) < 0.01] = float("nan")
    y = M.relu(x.requires_grad_() * 1)
    parts = _C.nonzeros(y)
    assert (parts is None) == (zeros == 0.2)  # eight tenths, and bits, are too much
    if parts is not None:
        again = _C.spread(*parts)
        assert torch.equal(again.nan_to_num(7.0), y.nan_to_num(7.0))


def test_other_orders_of_memory_and_views() -> None:
    leaf = torch.randn(WIDTH, ROWS, requires_grad=True)
    columns = M.relu(leaf.t())
    assert not columns.is_contiguous()
    for x in (columns, result()[7:, 3:], result().view(8, -1, WIDTH).transpose(0, 1)):
        again = _C.unpack(_C.pack(x))
        assert again is not None
        assert torch.equal(again, x)
        assert again.stride() == x.stride()
    with memkit.lean():
        out = M.relu(leaf.t(), inplace=False).square().sum()
    out.backward()
    assert torch.equal(leaf.grad, 2 * leaf.detach().relu())


def test_all_who_keep_it_share_it() -> None:
    first, second = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def run() -> Tensor:
        with memkit.lean():
            h = result()
            return first(h) + second(h)

    assert measure(run).saved < 0.6 * ROWS * WIDTH * 4


def test_what_is_changed_afterwards_was_packed_before() -> None:
    """Stock raises here; the nonzero elements are a copy, of the time when they were needed."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    w, v = torch.randn(WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
    with memkit.lean():
        h = M.relu(x)
        first = h @ w
        h.mul_(2)
        second = h @ v
    (first + second).sum().backward()
    slope = (x.detach() > 0).float()
    torch.testing.assert_close(x.grad, slope * (w + 2 * v).detach())
    torch.testing.assert_close(w.grad, x.detach().relu().sum(0))
    torch.testing.assert_close(v.grad, 2 * x.detach().relu().sum(0))


@pytest.mark.parametrize("lean", [True, False])
def test_the_slope_is_of_the_result_before_others_changed_it(lean) -> None:
    x, w = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH)
    if lean:
        with memkit.lean():
            h = M.relu(x)
    else:
        h = M.relu(x)
    with torch.no_grad():
        h.mul_(0)
    with memkit.lean():
        out = h @ w.requires_grad_()
    if lean:
        slope = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        torch.testing.assert_close(slope, (x > 0) * w)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            out.sum().backward(retain_graph=True)


@pytest.mark.parametrize("act", [M.relu, M.gelu])  # packed, and made again
@pytest.mark.parametrize("view", ["complex", "negative", "imaginary"])
def test_views_of_other_elements(act, view) -> None:
    def parts(h: Tensor) -> Tensor:
        return torch.view_as_complex(h.view(ROWS, -1, 2))

    views = {
        "complex": parts,
        "negative": torch._neg_view,  # type: ignore[attr-defined]
        "imaginary": lambda h: parts(h).conj().imag,
    }
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    found = []
    for lean in (False, True):
        weight = torch.ones_like(views[view](x)).requires_grad_()
        if lean:
            with memkit.lean():
                out = views[view](act(x, save="auto")) * weight
        else:
            out = views[view](act(x, save="auto")) * weight
        found.append(torch.autograd.grad(out.abs().sum(), [x, weight]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("around", ["save_on_cpu", "checkpoint", "hooks"])
def test_beside_other_hooks(around) -> None:
    model, x = Network(M.relu, torch.float32), torch.randn(ROWS, 16, requires_grad=True)
    expected, _ = gradients(model, x, lean=False)
    shapes = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tensor.shape)
        return tensor.clone()

    def run() -> Tensor:
        with memkit.lean():
            return model(x)

    if around == "checkpoint":
        out = checkpoint(run, use_reentrant=False)
    else:
        with save_on_cpu() if around == "save_on_cpu" else saved_tensors_hooks(pack, lambda t: t):
            out = run()
        assert (ROWS, WIDTH) not in shapes
    slope = torch.linspace(-1, 1, out.numel()).view_as(out)
    for again in (True, False):
        found = torch.autograd.grad(out, [x, *model.parameters()], slope, retain_graph=again)
        assert all(map(torch.equal, found, expected[1:]))


def beside(unpack: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """A weight and a result, with hooks around that give this back."""
    weight = torch.randn(WIDTH, 1, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, unpack), memkit.lean():
        return weight, result() @ weight


def test_hooks_that_give_back_something_else() -> None:
    _, out = beside(lambda t: t[:-1] if t.dim() == 1 else t)
    with pytest.raises(RuntimeError, match=r"lean: expected back .* got torch.float32 \["):
        out.sum().backward()


def test_hooks_that_give_back_other_bits() -> None:
    """With them, elements would be read from beyond the memory."""
    for change in (lambda t: t.fill_(-1), lambda t: t.roll(1)):
        _, out = beside(lambda t, change=change: change(t.clone()) if t.dtype == torch.int64 else t)
        with pytest.raises(RuntimeError, match=r"the bits of \d+ elements, got others"):
            out.sum().backward()


def test_hooks_that_give_back_another_order_of_memory() -> None:
    weight, out = beside(lambda t: t.repeat_interleave(2)[::2] if t.dim() == 1 else t)
    out.backward(out.detach())
    torch.testing.assert_close(weight.grad.mul(weight).sum(), out.square().sum())


def test_a_checkpoint_that_draws_other_dropout() -> None:
    """What it computes again has not as many zeros."""
    model, x = Network(M.relu, torch.float32), torch.randn(ROWS, 16, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with memkit.lean():
            return model(M.dropout(x, 0.2))

    checkpoint(run, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert x.grad is not None


def test_a_second_derivative() -> None:
    model, x = (
        Network(M.relu_squared, torch.float64),
        torch.randn(ROWS, 16, dtype=torch.float64, requires_grad=True),
    )

    def second(lean: bool) -> Tensor:
        if lean:
            with memkit.lean():
                out = model(x)
        else:
            out = model(x)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(True), second(False))


def test_memory_goes_with_the_graph() -> None:
    model, x = Network(M.relu, torch.float32), torch.randn(ROWS, 16)

    def step() -> None:
        with memkit.lean():
            model(x).sum().backward()

    step()
    assert measure(step).live <= 0


def test_swapped() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(64, 4, WIDTH, 0.0, batch_first=True)

    x = torch.randn(8, ROWS // 8, 64)
    plain, lean = model(), model()
    swap(plain, sample=x)
    report = swap(lean, sample=x, lean="call")
    assert all(row.changed for row in report.rows), report
    kept = [measure(lambda m=m: m(x)).saved for m in (plain, lean)]
    assert kept[1] < 0.8 * kept[0]
    for m in (plain, lean):
        m(x).square().sum().backward()
    for ours, theirs in zip(lean.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
