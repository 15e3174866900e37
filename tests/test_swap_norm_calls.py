"""A norm and the activation behind it in the code of layers: inside `lean()` they run as one, whose result is made again."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from swap_cases import assert_as_stock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit import swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

WIDTH, SIZE, BATCH = 8, 16, 4
NODE = "memkit::batch_norm_act"


class Block(nn.Module):
    """Two convolutions with a norm and an activation in between."""

    slope = 0.3

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.bn1 = norm(WIDTH)
        self.bns = nn.ModuleList([norm(WIDTH)])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return self.conv2(out)


class InTwoLines(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        if self.training is not None:
            out = self.bn1(out)
            out = torch.relu(out)
        return self.conv2(out)


class ByAModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        return self.conv2(out)


class InALoop(Block):
    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate([self.conv1]):
            bn = self.bns[i]
            x = F.leaky_relu(bn(conv(x)), 0.2, inplace=True)
        return self.conv2(x)


class ByItsPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(F.elu(self.bns[0](self.conv1(x)), alpha=self.slope))


class Smooth(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        out = self.bn1(out)
        out = F.silu(out, inplace=True)
        return self.conv2(out)


class Returned(nn.Module):
    """Torchvision's and many others' unit."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)
        self.second = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.norm(x)
        return F.relu(x, True)


class Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit, self.last = Returned(), nn.Conv2d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unit(x))


FUSED = [Block, InTwoLines, ByAModule, InALoop, ByItsPlace, Smooth, Units]
kinds = pytest.mark.parametrize("kind", FUSED)


def images(dtype: torch.dtype = torch.float64, **kwargs) -> Tensor:
    return torch.randn(BATCH, WIDTH, SIZE, SIZE, dtype=dtype, requires_grad=True, **kwargs)


def names_of(out: Tensor) -> list[str]:
    """Of the nodes that led to it."""
    seen, ahead, found = set(), [out.grad_fn], []
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.append(node.name())
            ahead += [before for before, _ in node.next_functions]
    return found


def is_fused(model: nn.Module, x: Tensor) -> bool:
    """Whether norm and activation are one node, and no other activation is there."""
    with memkit.lean():
        names = names_of(model(x))
    acts = [name for name in names if any(act in name.lower() for act in ("relu", "elu", "silu"))]
    return any(name.startswith(NODE) for name in names) and not acts


@kinds
@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_as_stock(kind: type[nn.Module], by_sample: bool, training: bool) -> None:
    model, x = kind().double().train(training), images()
    report = swap(model, sample=(x,) if by_sample else None, lean="call")
    path = "unit" if kind is Units else ""
    assert [row.after for row in report.changed if row.path == path] == ["in lean()"], report
    assert is_fused(model, x)
    assert_as_stock(model, x)
    unswap(model)
    assert type(model) is kind


@kinds
def test_running_statistics_as_stock(kind: type[nn.Module]) -> None:
    model = kind().double()
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    for _ in range(3):
        x = images()
        model(x), stock(x)
    for (name, ours), theirs in zip(model.state_dict().items(), stock.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@kinds
def test_keeps_the_norms_input_alone(kind: type[nn.Module]) -> None:
    model = kind()
    x = images(torch.float32).detach()
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    kept, before = (measure(lambda m=m: m(x).sum().backward()).saved for m in (model, stock))
    size = x.numel() * 4
    assert size <= kept < 1.1 * size  # and statistics
    assert before > 1.9 * size


def test_stock_outside_of_lean() -> None:
    model = Block().double()
    swap(model)
    assert not any(name.startswith(NODE) for name in names_of(model(images())))
    assert_as_stock(model, images())


def test_hooks_that_keep_a_result_see_it_overwritten() -> None:
    model = InALoop(lambda n: nn.GroupNorm(2, n))
    swap(model, lean="call")
    seen = []
    model.bns[0].register_forward_hook(lambda module, args, out: seen.append(out))
    model(images(torch.float32))
    assert seen[0].min() >= -0.2 * seen[0].max() * 4
    assert (seen[0] < 0).any()
    normed = model.bns[0](model.conv1(images(torch.float32)))
    assert normed.min() < 2 * seen[0].min()


@pytest.mark.parametrize("place", ["norm", "act"])
def test_hooks_see_what_they_see(place: str) -> None:
    model = ByAModule()
    swap(model, lean="call")
    seen = []
    layer = model.bn1 if place == "norm" else model.relu
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    x = images(torch.float32)
    model(x)
    normed = F.batch_norm(model.conv1(x), None, None, model.bn1.weight, model.bn1.bias, True)
    torch.testing.assert_close(seen, [normed if place == "norm" else normed.relu()])
    handle.remove()
    assert is_fused(model, x)


@pytest.mark.parametrize("norm", [lambda n: nn.GroupNorm(2, n), lambda n: nn.InstanceNorm2d(n, affine=True)])
def test_other_norms_results_are_made_again(norm) -> None:
    model = Block(norm)
    stock, x = copy.deepcopy(model), images(torch.float32).detach()
    swap(model, lean="call")
    kept, before = (measure(lambda m=m: m(x).sum().backward()).saved for m in (model, stock))
    assert kept < 1.1 * x.numel() * 4 < 1.9 * x.numel() * 4 < before
    assert_as_stock(model.double(), images())


class Unlike(nn.Module):
    """What looks like a norm, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(x)))


def test_what_is_no_norm_stays() -> None:
    model = Unlike().double()
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    report = swap(model, sample=(x,), lean="call")
    (row,) = (row for row in report if row.path == "")
    assert row.after == "unchanged"
    assert "no norm" in row.reason
    assert_as_stock(model, x)


class Between(Block):
    """The norm's result is read by more than the activation."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x))
        normed = out
        out = F.relu(out, inplace=True)
        kept = self.bn1(out)
        other = F.relu(kept)
        return self.conv2(other + normed + kept)


class Seen(Block):
    """A function within reads the variable."""

    def forward(self, x: Tensor) -> Tensor:
        def relu(x: Tensor) -> Tensor:
            return F.relu(x) + out

        out = self.conv1(x)
        out = self.bn1(out)
        out = relu(out)
        return self.conv2(out)


class Itself(Block):
    """The activation is given what it takes the place of twice, or makes a condition of it."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x))
        out = F.leaky_relu(out, float(out.detach().abs().max()) / 9)
        lower = self.bns[0](out)[0]
        lower = self.bns[0](out)
        lower = F.leaky_relu(lower, lower.ndim)
        out = out + lower
        with torch.no_grad():
            norm = self.bns[0](out)
            norm = F.relu(norm, inplace=True)
        return self.conv2(out + norm)


class Slope(nn.Module):
    """Sets what its activation is given."""

    slope, act = 0.5, torch.tanh

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        self.slope, self.act = float(x.detach().std()), torch.sigmoid
        return self.inner(x)


class InOrder(Block):
    def __init__(self) -> None:
        super().__init__(Slope)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.bn1(x), self.bn1.slope)
        x = self.bns[0](x)
        x = self.bns[0].act(x)
        return self.conv2(x)


class Same(nn.Module):
    """Norms that give what they are given, or keep what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norms, self.gn = nn.Identity(), nn.Sequential(), Keeping()

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(x)
        out = F.relu(self.norm(h), inplace=True) + h
        h = F.silu(out)
        out = F.relu(self.norms(h), inplace=True) + h
        return F.relu(self.gn(out), inplace=True) + self.gn.last


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x)
        return self.last


class Tried(Block):
    """What comes after an error sees the norm's result."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.bn1(x)
            x = F.leaky_relu(x, "no number")
        except TypeError:
            pass
        try:
            out = self.bns[0](x)
            return self.conv2(F.relu(out)) + self.normed
        finally:
            type(self).normed = out.detach()

    normed = 0.0


class Suppressed(Block):
    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(TypeError):
            x = self.bn1(x)
            x = F.leaky_relu(x, "no number")
        return self.conv2(x)


@pytest.mark.parametrize("kind", [Between, Seen, Itself, InOrder, Same, Tried, Suppressed])
def test_results_that_are_read_elsewhere(kind: type[nn.Module]) -> None:
    model, x = kind().double(), images()
    swap(model, lean="call")
    assert_as_stock(model, x)


class WithAll(Block):
    def __init__(self, act: str) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        activation = getattr(F, self.act)
        return self.conv2(activation(self.bn1(self.conv1(x))))


ACTS = (
    "relu leaky_relu elu selu celu sigmoid tanh softplus relu6 hardtanh hardsigmoid gelu silu mish hardswish"
)


@pytest.mark.parametrize("act", ACTS.split())
def test_every_activation(act: str) -> None:
    model, x = WithAll(act).double(), images()
    swap(model, lean="call")
    with memkit.lean():
        assert any(name.startswith(NODE) for name in names_of(model(x)))
    assert_as_stock(model, x)


class GivenMore(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(F.gelu(self.bn1(self.conv1(x)), approximate="tanh"))


class Wrongly(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.bn1(self.conv1(x)), 0.1, negative_slope=0.2)


def test_arguments_that_are_stocks() -> None:
    model = GivenMore().double()
    swap(model, lean="call")
    assert_as_stock(model, images())
    model = Wrongly().double()
    swap(model, lean="call")
    with pytest.raises(TypeError):
        model(images())


@kinds
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(kind: type[nn.Module], reentrant: bool) -> None:
    model, x = kind().double().eval(), images()
    swap(model, lean="call")
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        run(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
        x.grad = None
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(*found)


@kinds
def test_copied_pickled_and_compiled(kind: type[nn.Module]) -> None:
    torch._dynamo.reset()  # models share the code of their call
    model, x = kind(), images(torch.float32)
    swap(model, lean="call")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), model(x))
        assert is_fused(other, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    model = Block().to(dtype)
    stock, x = copy.deepcopy(model), images(dtype)
    swap(model, lean="call")
    assert is_fused(model, x)
    tolerance = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(model(x), stock(x), **tolerance)
    model, stock, x = model.float(), stock.float(), images(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), stock(x), **tolerance)
        assert model(x).dtype == stock(x).dtype


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.conv2 = nn.BatchNorm2d(WIDTH), nn.Conv2d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn1(x))


def test_autocasts_dtype_is_stocks() -> None:
    model, x = Direct(), images(torch.float32)
    swap(model, lean="call")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.float32


def test_an_empty_batch_counts_once() -> None:
    model = Direct()
    swap(model, lean="call")
    assert model(images(torch.float32)[:0]).shape == (0, WIDTH, SIZE, SIZE)
    assert model.bn1.num_batches_tracked == 1


def test_a_batch_that_stock_has_to_norm_counts_once() -> None:
    model = Direct()
    model.bn1.weight = nn.Parameter(torch.rand(WIDTH, 1))  # which stock views as [WIDTH]
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    x = images(torch.float32)
    torch.testing.assert_close(model(x), stock(x))
    assert model.bn1.num_batches_tracked == stock.bn1.num_batches_tracked == 1


def test_no_gradient_and_empty() -> None:
    model = Block().eval()
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    x = images(torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), stock(x))
    assert model(x[:0]).shape == stock(x[:0]).shape
