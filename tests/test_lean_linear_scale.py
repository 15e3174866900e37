"""What a linear layer made, times few numbers: `lean()` keeps nothing for their gradient that the layer does not keep."""

import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit import _C
from memkit.memory import measure
from memkit.swap.library.scaled import linear_scale

pytestmark = pytest.mark.usefixtures("repeatable")

BATCH, TOKENS, INNER, FEATURES = 4, 64, 96, 128
VIEWS = {
    "for features": ((FEATURES,), lambda y: y),
    "for samples": ((BATCH, 1, FEATURES), lambda y: y),
    "one a sample": ((BATCH, 1, 1), lambda y: y),
    "one": ((), lambda y: y),
    "rows": ((FEATURES,), lambda y: y.flatten(0, 1)),
    "channels first": ((FEATURES, 1, 1), lambda y: y.view(BATCH, 8, 8, FEATURES).permute(0, 3, 1, 2)),
    "turned": ((BATCH, FEATURES, 1), lambda y: y.mT),
    "with dimensions of one": ((1, BATCH, 1, 1, FEATURES), lambda y: y.unsqueeze(0).unsqueeze(2)),
}
LAYERS = ["linear", "without bias", "act_linear", "glu_linear"]
CONVS = ["conv2d", "conv2d without bias", "channels last", "conv1d", "act_conv2d"]
views = pytest.mark.parametrize("view", VIEWS)
layers = pytest.mark.parametrize("layer", LAYERS)


def lean_if(ours: bool):
    return memkit.lean() if ours else torch.enable_grad()


def product(ours: bool, first: Tensor, second: Tensor) -> Tensor:
    if not ours:
        return first * second
    out = _C.linear_scale(first, second)
    assert out is not None
    return out


class Case:
    def __init__(self, view: str = "for features", layer: str = "linear", dtype=torch.float64, device="cpu"):
        def made(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

        shape, self.view = VIEWS[view]
        self.x = made(BATCH, TOKENS, 2 * INNER if layer == "glu_linear" else INNER)
        self.weight, self.scale, self.layer = made(FEATURES, INNER), made(*shape), layer
        self.bias = None if layer == "without bias" else made(FEATURES)
        self.leaves = [t for t in (self.x, self.weight, self.bias, self.scale) if t is not None]

    def result(self) -> Tensor:
        if self.layer == "act_linear":
            return M.act_linear(self.x, self.weight, self.bias, act="gelu")
        if self.layer == "glu_linear":
            return M.glu_linear(self.x, None, self.weight, self.bias)
        return F.linear(self.x.sin(), self.weight, self.bias)

    def scaled(self, ours: bool) -> Tensor:
        with lean_if(ours):
            return product(ours, self.scale, self.view(self.result()))

    def results(self, ours: bool) -> list[Tensor]:
        out = self.scaled(ours)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), self.leaves)]


class Images(Case):
    def __init__(self, layer: str = "conv2d", dtype=torch.float64, device="cpu"):
        def made(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

        self.layer, self.view = layer, lambda y: y
        sizes = (300,) if layer == "conv1d" else (20, 18)
        self.x, self.weight = made(BATCH, 8, *sizes), made(96, 8, *[1] * len(sizes))
        if layer == "channels last":
            self.x = self.x.detach().to(memory_format=torch.channels_last).requires_grad_()
        self.bias = None if "without" in layer else made(96)
        self.scale = made(1, 96, *[1] * len(sizes)) if layer == "conv2d" else made(96, *[1] * len(sizes))
        self.leaves = [t for t in (self.x, self.weight, self.bias, self.scale) if t is not None]

    def result(self) -> Tensor:
        if self.layer == "act_conv2d":
            return M.act_conv2d(self.x, self.weight, self.bias)
        if self.layer == "conv1d":
            return F.conv1d(self.x.sin(), self.weight, self.bias)
        return F.conv2d(self.x.sin(), self.weight, self.bias)


def case_of(layer: str, view: str = "for features") -> Case:
    return Images(layer) if layer in CONVS else Case(view, layer)


def close(ours, theirs, **how) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **how)


@pytest.mark.parametrize(
    "turn",
    [
        lambda s: s[:, None].expand(-1, TOKENS, -1),
        lambda s: s[:1].expand(BATCH, -1)[:, None],
        lambda s: s.mT.contiguous().mT[:, None],
        lambda s: s[:1, None].expand(BATCH, 1, -1),
    ],
)
def test_numbers_of_other_layouts(turn) -> None:
    case = Case()
    numbers = torch.randn(BATCH, FEATURES, dtype=torch.float64, requires_grad=True)
    found = []
    for ours in (True, False):
        with lean_if(ours):
            y = case.result()
            scaled = _C.linear_scale(turn(numbers), y) if ours else None
            scaled = turn(numbers) * y if scaled is None else scaled
        found.append(torch.autograd.grad(scaled.sum(), [*case.leaves[:3], numbers]))
    close(*found)


@views
@layers
def test_as_stock(view: str, layer: str, device: torch.device) -> None:
    case = Case(view, layer, device=device)
    close(case.results(True), case.results(False))


@pytest.mark.parametrize("layer", CONVS)
def test_convolutions(layer: str, device: torch.device) -> None:
    case = Images(layer, device=device)
    ours = case.results(True)
    close(ours, case.results(False))
    assert ours[0].stride() == case.results(False)[0].stride()


@views
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_stock(view: str, dtype: torch.dtype, device: torch.device) -> None:
    """Over several draws: where one number is all that there is, its error is a matter of luck."""
    mine, others = torch.zeros(5), torch.zeros(5)
    for seed in range(16):
        torch.manual_seed(seed)
        case = Case(view, dtype=dtype, device=device)
        ours, theirs = case.results(True), case.results(False)
        for leaf in case.leaves:
            leaf.data = leaf.data.double()
        for i, exact in enumerate(case.results(False)):
            mine[i] += ((ours[i] - exact).norm() / exact.norm()).square().cpu()
            others[i] += ((theirs[i] - exact).norm() / exact.norm()).square().cpu()
    assert (mine <= 2**2 * others).all()


@dataclass
class Hard:
    """Rows of an input and of a gradient that have means; some may be large and have no gradient."""

    groups: int = 1
    rows: int = 4096
    mean: float = 0.5
    offset: float = 0.5
    centres: bool = True
    dtype: torch.dtype = torch.float32
    of_scale: torch.dtype = torch.float32
    large: float = 1.0
    factor: float = 2.0


HARD = {
    "a bias that centres": Hard(),
    "a bias that centres much": Hard(offset=1.0, factor=2.5),  # as csrc/torch/linear_scale.h says
    "in many rows": Hard(rows=32768),
    "in half precision": Hard(dtype=torch.bfloat16, of_scale=torch.bfloat16),
    "of float32 under autocast": Hard(dtype=torch.bfloat16),
    "without means": Hard(mean=0.0, offset=0.0, centres=False, dtype=torch.bfloat16),
    "many groups": Hard(128, 64, 0.2, centres=False),
    "many groups in half precision": Hard(
        128, 64, 0.2, centres=False, dtype=torch.bfloat16, of_scale=torch.bfloat16
    ),
    "large rows without gradient": Hard(offset=0.0, centres=False, large=1e3),
    "the same in half precision": Hard(
        offset=0.0, centres=False, large=1e3, dtype=torch.bfloat16, of_scale=torch.bfloat16
    ),
}


@pytest.mark.parametrize("hard", HARD)
def test_as_exact_where_sums_cancel(hard: str, device: torch.device) -> None:
    case = HARD[hard]
    groups = case.groups if device.type == "cpu" else min(case.groups, 4)  # as many as each takes
    mine, others = torch.zeros(4), torch.zeros(4)
    for seed in range(6):
        torch.manual_seed(seed)
        x, weight = torch.randn(groups, case.rows, 32) + case.offset, torch.randn(96, 32) / 6
        bias = -weight @ x.mean((0, 1)) if case.centres else torch.randn(96) / 10
        scale = 1 + torch.randn(groups, 1, 96) / 10
        upstream = (torch.randn(groups, case.rows, 96) + case.mean).to(case.of_scale)
        if case.large > 1:
            x[:, :4] *= case.large
            upstream[:, :4] = 0

        def gradients(
            ours: bool, wide: bool, leaves=(x, weight, bias, scale), upstream=upstream
        ) -> list[Tensor]:
            dtypes = [case.dtype] * 3 + [case.of_scale]
            leaves = [t.to(device, dtype) for t, dtype in zip(leaves, dtypes, strict=True)]
            leaves = [(t.double() if wide else t).detach().requires_grad_() for t in leaves]
            with lean_if(ours):
                z = product(ours, F.linear(*leaves[:3]), leaves[3])
            return [g.double().cpu() for g in torch.autograd.grad(z, leaves, upstream.to(z))]

        found = (gradients(True, False), gradients(False, False), gradients(False, True))
        for i, (ours, theirs, exact) in enumerate(zip(*found, strict=True)):
            mine[i] += ((ours - exact).norm() / exact.norm()).square()
            others[i] += ((theirs - exact).norm() / exact.norm()).square()
    assert (mine <= case.factor**2 * others).all(), (mine / others).sqrt()


@pytest.mark.parametrize("layer", ["linear", "conv2d"])
def test_numbers_that_are_not_finite_spread_no_further(layer: str) -> None:
    case = case_of(layer)
    for leaf in (case.x, case.weight, case.bias, case.scale):
        for value in (torch.nan, torch.inf, 0.0):
            with torch.no_grad():
                before = leaf.clone()
                leaf.flatten()[3] = value
            for ours, theirs in zip(case.results(True), case.results(False), strict=True):
                assert torch.equal(ours.isfinite(), theirs.isfinite())
            with torch.no_grad():
                leaf.copy_(before)
    with torch.no_grad():
        case.x.zero_()
    close(case.results(True), case.results(False))


def test_a_threads_first_node() -> None:
    """Whose number is 0."""
    x, weight = torch.randn(256, 96, requires_grad=True), torch.randn(96, 96, requires_grad=True)
    found = []

    def work() -> None:
        y = torch.mm(x, weight)
        with memkit.lean():
            found.append(_C.linear_scale(y, torch.ones(96, requires_grad=True)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]


def test_to_ask_copies_nothing() -> None:
    x, weight = torch.randn(64, 96, 96, requires_grad=True), torch.randn(96, 96, requires_grad=True)
    numbers = torch.randn(1, 96, 96, requires_grad=True)

    def ask() -> None:
        assert _C.linear_scale(y, numbers) is None

    with memkit.lean():
        y = F.linear(x, weight)
        assert measure(ask).peak == 0


@pytest.mark.parametrize("layer", LAYERS + CONVS)
def test_derivatives_of_derivatives(layer: str) -> None:
    case = case_of(layer, "for samples")
    found = []
    for ours in (True, False):
        grads = torch.autograd.grad(case.scaled(ours).sin().sum(), case.leaves, create_graph=True)
        found.append([*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), case.leaves)])
    close(*found)


def test_what_is_kept() -> None:
    case = Case()

    def step(ours: bool):
        with memkit.lean():
            return case.scaled(ours)

    stock, ours = (measure(lambda ours=ours: step(ours)).saved for ours in (False, True))
    assert stock - ours == 8 * BATCH * TOKENS * FEATURES - 8 * FEATURES  # of whose sums


@pytest.mark.parametrize(
    "wanted", [["scale"], ["x"], ["weight"], ["bias"], ["x", "scale"], ["bias", "scale"]]
)
@pytest.mark.parametrize("layer", ["linear", "act_linear", "conv2d", "act_conv2d"])
def test_some_gradients(wanted: list[str], layer: str) -> None:
    case = case_of(layer)
    leaves = [getattr(case, name) for name in wanted]
    close(*(torch.autograd.grad(case.scaled(ours).sin().sum(), leaves) for ours in (True, False)))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "alive"])
@pytest.mark.parametrize("layer", ["linear", "without bias", "act_linear", "conv2d", "act_conv2d"])
def test_others_use_the_result(layer: str, when: str, keep: bool) -> None:
    """Which may ask for its gradient before the product does, or after."""
    case = case_of(layer)

    def gradients(ours: bool) -> list[Tensor]:
        with lean_if(ours):
            y = case.result()
            scaled = product(ours, y, case.scale)
        loss = scaled.sin().sum()
        if when != "alive":
            deep = loss if when == "before" else y.cos().sum()
            for _ in range(5):
                deep = deep * 1.5
            loss = deep + (y.cos().sum() if when == "before" else loss)
        found = list(torch.autograd.grad(loss, case.leaves, retain_graph=keep))
        return found + (list(torch.autograd.grad(loss, case.leaves)) if keep else [])

    close(gradients(True), gradients(False))


@pytest.mark.parametrize("layer", ["linear", "act_linear", "conv2d", "act_conv2d"])
@pytest.mark.parametrize("how", ["hook", "retain", "asked", "asked with others", "view asked", "node"])
def test_its_own_gradient(layer: str, how: str) -> None:
    case = case_of(layer, "channels first")

    def seen(ours: bool) -> list[Tensor]:
        with lean_if(ours):
            y = case.result()
            turned = case.view(y)
            scaled = product(ours, turned, case.scale)
        found: list[Tensor] = []
        if how == "hook":
            y.register_hook(lambda grad: found.append(grad) or 2 * grad)
        elif how == "node":
            y.grad_fn.register_prehook(lambda grads: found.extend(grads))
        elif how == "retain":
            y.retain_grad()
        loss = scaled.sin().sum()
        if "asked" in how:
            asked = [turned if "view" in how else y, *(case.leaves if "others" in how else [])]
            return list(torch.autograd.grad(loss, asked))
        found += torch.autograd.grad(loss, case.leaves) if how != "retain" else []
        if how == "retain":
            loss.backward(inputs=[y, case.scale])
            found += [y.grad, case.scale.grad]
            case.scale.grad = None
        return found

    ours, theirs = seen(True), seen(False)
    assert len(ours) == len(theirs) > 0
    close(ours, theirs)


def test_backward_twice_raises() -> None:
    for layer in LAYERS + CONVS:
        loss = case_of(layer).scaled(True).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("layer", LAYERS + CONVS)
def test_backward_frees_what_the_layer_kept(layer: str) -> None:
    case = case_of(layer)
    grads = sum(leaf.nbytes for leaf in case.leaves)
    given = case.x.nbytes  # which the graph alone holds, and so does what is made of it
    case.x = case.x * 1.0
    loss = case.scaled(True).sin().sum()
    case.x = None
    assert measure(lambda: loss.backward()).live <= grads - given


def test_what_it_is_not_for() -> None:
    outside = Case().result()
    with memkit.lean():
        _check_what_it_is_not_for(outside)


def _check_what_it_is_not_for(outside: Tensor) -> None:
    case = Case()
    assert _C.linear_scale(case.result(), case.scale) is not None
    y = case.result()
    frozen = case.scale.detach()
    small = F.linear(case.x[:1, :4], case.weight, case.bias)
    written = case.result()
    with torch.no_grad():
        written.mul_(2)
    hooked = case.result()
    hooked.register_hook(lambda grad: None)
    refused = {
        "made outside lean()": (outside, case.scale),
        "with hooks": (hooked, case.scale),
        "a scale without gradient": (y, frozen),
        "a result without": (y.detach(), case.scale),
        "another operator's": (y.sin(), case.scale),
        "part of it": (y[:, 1:], case.scale),
        "every second row": (y[:, ::2], case.scale),
        "a sum": (y + 1, case.scale),
        "few bytes": (small, case.scale),
        "one for each token": (y, torch.ones_like(y).requires_grad_()),
        "written to": (written, case.scale),
        "numbers of another device": (y, torch.ones(FEATURES, device="meta", requires_grad=True)),
        "of another size": (y, torch.ones(2, BATCH, TOKENS, FEATURES, requires_grad=True)),
        "wider numbers": (case.result().float(), case.scale),
        "wide ones of float32": (
            F.linear(torch.randn(512, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)),
            torch.ones(96, dtype=torch.float64, requires_grad=True),
        ),
        "few features": (
            F.linear(torch.randn(2048, 96, requires_grad=True), torch.randn(64, 96, requires_grad=True)),
            torch.ones(64, requires_grad=True),
        ),
        "many groups": (
            F.linear(torch.randn(256, 64, 8, requires_grad=True), torch.randn(96, 8, requires_grad=True)),
            torch.ones(256, 1, 96, requires_grad=True),
        ),
        "complex ones": (y, torch.ones(FEATURES, dtype=torch.complex128, requires_grad=True)),
        "frozen weights": (F.linear(case.x, case.weight.detach(), case.bias), case.scale),
        "a frozen bias": (F.linear(case.x, case.weight, case.bias.detach()), case.scale),
        "a bias that is computed": (F.linear(case.x, case.weight, case.bias * 2), case.scale),
        "an input without gradient": (F.linear(case.x.detach(), case.weight, case.bias), case.scale),
        "a sum with another factor": (
            torch.addmm(case.bias, case.x.flatten(0, 1), case.weight.T, beta=2),
            case.scale,
        ),
        "a view of images": (Images().result().flatten(2), torch.ones(96, 1, requires_grad=True)),
        "numbers for a sample's images": (Images().result(), torch.ones(BATCH, 96, 1, 1, requires_grad=True)),
        "numbers for pixels": (Images().result(), torch.ones(20, 18, requires_grad=True)),
        "a kernel of more pixels": (
            F.conv2d(Images().x, torch.randn(96, 8, 3, 3, requires_grad=True, dtype=torch.float64)),
            Images().scale,
        ),
        "a stride": (F.conv2d(Images().x, Images().weight, stride=2), Images().scale),
        "groups": (
            F.conv2d(Images().x, torch.randn(96, 4, 1, 1, requires_grad=True, dtype=torch.float64), groups=2),
            Images().scale,
        ),
        "a transposed convolution": (
            F.conv_transpose2d(Images().x, torch.randn(8, 96, 3, 3, requires_grad=True, dtype=torch.float64)),
            Images().scale,
        ),
        "few rows a group": (
            F.linear(torch.randn(512, 512, requires_grad=True), torch.randn(96, 512, requires_grad=True)),
            torch.randn(512, 1, requires_grad=True),
        ),
        "float16": (
            F.linear(
                torch.randn(512, 64, dtype=torch.float16, requires_grad=True),
                torch.randn(128, 64, dtype=torch.float16, requires_grad=True),
            ),
            torch.ones(128, dtype=torch.float16, requires_grad=True),
        ),
    }
    for name, (first, second) in refused.items():
        assert _C.linear_scale(first, second) is None, name
    with torch.no_grad():
        assert _C.linear_scale(y, case.scale) is None
    with torch.inference_mode():
        assert _C.linear_scale(y, case.scale) is None


@pytest.mark.parametrize("around", ["save_on_cpu", "checkpoint", "other hooks", "hooks inside"])
def test_hooks_and_checkpoints(around: str) -> None:
    case, calls = Case(), []

    def scaled(x: Tensor) -> Tensor:
        y = F.linear(x.sin(), case.weight, case.bias)
        out = linear_scale(case.scale, y)
        calls.append(out.grad_fn is not None and "linear_scale" in out.grad_fn.name())
        return out

    def run(x: Tensor) -> Tensor:
        with memkit.lean():
            return scaled(x)

    def inside(x: Tensor) -> Tensor:
        with memkit.lean(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return scaled(x)

    if around == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            out = run(case.x)
    elif around == "checkpoint":
        out = checkpoint(run, case.x, use_reentrant=False)
    elif around == "other hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            out = run(case.x)
    else:
        out = inside(case.x)
    found = torch.autograd.grad(out.sin().sum(), case.leaves)
    close(found, case.results(False)[1:])
    assert set(calls) == {around == "save_on_cpu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """The numbers stay float32, and so does the product."""
    case = Case("for samples", dtype=torch.float32)
    found = []
    for ours in (True, False):
        with lean_if(ours), torch.autocast("cpu", torch.bfloat16):
            y = F.linear(case.x.sin(), case.weight, case.bias)
            out = product(ours, y, case.scale)
        assert out.dtype == torch.float32
        found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), case.leaves)])
    for mine, other in zip(*found, strict=True):
        assert mine.dtype == other.dtype
        assert (mine - other).norm() <= 0.02 * other.norm()


def test_a_bias_that_changes_before_backward_raises() -> None:
    case = Case()
    out = case.scaled(True)
    with torch.no_grad():
        case.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_nan_and_zero() -> None:
    """A gate of zero, as adaptive ones begin with, lets no gradient through and gets its own."""
    case = Case()
    with torch.no_grad():
        case.scale[:5], case.scale[5] = 0, torch.nan
    close(case.results(True), case.results(False), equal_nan=True)


def test_gradcheck() -> None:
    case = Case("for samples")
    x, weight = case.x[:, :, :8].detach().requires_grad_(), torch.randn(FEATURES, 8, dtype=torch.float64)

    def call(x, weight, bias, scale):
        with memkit.lean():
            return product(True, F.linear(x, weight, bias), scale).flatten()[::997]

    leaves = (x[:, :, :].clone(), weight, case.bias, case.scale)
    assert torch.autograd.gradcheck(call, [t.detach().requires_grad_() for t in leaves], fast_mode=True)
