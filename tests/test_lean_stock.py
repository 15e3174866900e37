"""PyTorch's own operators inside lean(): what keeps all that it is of is made again, to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memkit

ROWS, WIDTH = 64, 512  # 32 Ki elements

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool2d": lambda x: F.avg_pool2d(torch.cat([x] * 4).view(4, 64, 16, 32), 2).view(ROWS, WIDTH),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "cos": torch.cos,
    "celu": lambda x: F.celu(x, 0.7),
    "elu": lambda x: F.elu(x, 1.3),
    "selu": F.selu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": lambda x: F.glu(torch.cat([x, x.roll(1)], -1)),
    "glu of a dimension": lambda x: F.glu(torch.cat([x, x.roll(1)], 0), 0),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.6),
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "mish": F.mish,
    "pow": lambda x: x**3,
    "prelu": lambda x: F.prelu(x, torch.full((x.shape[1],), 0.3, dtype=x.dtype)),
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": lambda x: F.softplus(x, 2.0, 1.5),
    "square": torch.square,
}

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / (b.square() + 1),
    "of a column": lambda a, b: a * b.mean(1, keepdim=True),
    "of a gate": lambda a, b: a * torch.sigmoid(b),
    "of two gates": lambda a, b: torch.tanh(a) * torch.sigmoid(b),
    "of activations": lambda a, b: F.silu(a) * b,
    "with itself": lambda a, b: a * a,
}


class Between(nn.Module):
    """A function between two layers."""

    def __init__(
        self, function: Callable[..., Tensor], layers: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.function = function
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers))
        self.after = nn.Linear(WIDTH, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(*(layer(x) for layer in self.before)).to(x.dtype))


class Once:
    """What a hook keeps and gives back a single time."""

    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = x.detach()

    def give(self) -> Tensor:
        assert self.x is not None
        x, self.x = self.x, None
        return x


class Counting(TorchDispatchMode):
    """Operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def given(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)


def run(model: nn.Module, x: Tensor, *, lean: bool) -> tuple[list[Tensor], int]:
    """Gradients, and bytes that are saved for backward."""
    model.zero_grad()
    x.grad = None
    out = []

    def forward() -> None:
        if lean:
            with memkit.lean():
                out.append(model(x))
        else:
            out.append(model(x))

    torch.manual_seed(3)
    saved = memkit.memory.measure(forward).saved
    out[0].square().mean().backward()
    return [out[0].detach(), x.grad, *(p.grad for p in model.parameters())], saved


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_made_again(name: str, dtype: torch.dtype) -> None:
    model, x = Between(FUNCTIONS[name], dtype=dtype), given(dtype)
    theirs, before = run(model, x, lean=False)
    ours, after = run(model, x, lean=True)
    assert_same(ours, theirs)
    assert before - after == ROWS * WIDTH * x.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_made_again(name: str, dtype: torch.dtype) -> None:
    model, x = Between(PRODUCTS[name], 2, dtype), given(dtype)
    theirs, before = run(model, x, lean=False)
    ours, after = run(model, x, lean=True)
    assert_same(ours, theirs)
    assert before - after >= ROWS * WIDTH * x.element_size()


def test_a_factor_that_nobody_keeps() -> None:
    """Of a mask and what it is applied to, a product keeps the mask alone."""
    mask = (torch.rand(ROWS, WIDTH) > 0.5).float()
    model, x = Between(lambda x: x * mask), given()
    theirs, before = run(model, x, lean=False)
    ours, after = run(model, x, lean=True)
    assert_same(ours, theirs)
    assert before == after

    again = Between(lambda x: memkit.functional.gelu(x, save="input") * mask)
    theirs, before = run(again, x, lean=False)
    ours, after = run(again, x, lean=True)
    assert_same(ours, theirs)
    assert before - after == 4 * ROWS * WIDTH


def test_small_ones_are_kept() -> None:
    model = Between(F.gelu)
    x = torch.randn(4, WIDTH, requires_grad=True)
    theirs, before = run(model, x, lean=False)
    ours, after = run(model, x, lean=True)
    assert_same(ours, theirs)
    assert before == after


def test_views_of_results() -> None:
    model, x = Between(lambda x: F.gelu(x).view(WIDTH, ROWS).t().flip(0)), given()
    assert_same(run(model, x, lean=True)[0], run(model, x, lean=False)[0])
    heads = Between(lambda x: F.gelu(x.view(ROWS, 8, -1).transpose(0, 1)).transpose(0, 1).reshape(ROWS, -1))
    theirs, before = run(heads, x, lean=False)
    ours, after = run(heads, x, lean=True)
    assert_same(ours, theirs)
    assert after < before


def test_changed_in_place_afterwards() -> None:
    model, x = Between(lambda x: F.gelu(x).mul_(2)), given()
    assert_same(run(model, x, lean=True)[0], run(model, x, lean=False)[0])
    product = Between(lambda a, b: (a * b).add_(1), 2)
    assert_same(run(product, x, lean=True)[0], run(product, x, lean=False)[0])


def test_an_operand_changed_before_backward_raises() -> None:
    model, x = Between(lambda a, b: a * b, 2), given()
    a = x * 1
    with memkit.lean():
        out = model.after(a * model.before[0](x)).sum()
    with torch.no_grad():
        a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("kind", ["checkpoint", "hooks"])
@pytest.mark.parametrize("name", ["silu", "square", "glu"])
def test_made_under_hooks_that_give_once(name: str, kind: str) -> None:
    """What they took cannot be asked for by the node and by who makes its result again."""
    function = FUNCTIONS[name]
    model, x = Between(lambda x: x), given()

    def part(x: Tensor) -> Tensor:
        return function(model.before[0](x))

    def step(*, lean: bool) -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        with memkit.lean() if lean else torch.enable_grad():
            if kind == "checkpoint":
                between = checkpoint(part, x, use_reentrant=False)
            else:
                with saved_tensors_hooks(Once, Once.give):
                    between = part(x)
            out = model.after(between)
        out.square().mean().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert_same(step(lean=True), step(lean=False))


def test_nested_tensors() -> None:
    weight = torch.randn(8, WIDTH, requires_grad=True)

    def step(*, lean: bool) -> list[Tensor]:
        parts = [torch.ones(n, WIDTH, requires_grad=True) for n in (40, 64)]
        with memkit.lean() if lean else torch.enable_grad():
            nested = torch.nested.as_nested_tensor(parts, layout=torch.strided)
            out = F.linear(F.gelu(nested), weight)
        return [*torch.autograd.grad(out.to_padded_tensor(0.0).sum(), [*parts, weight])]

    assert_same(step(lean=True), step(lean=False))


def test_weights_that_are_made_of_weights_are_kept() -> None:
    """Other graphs may step them before this one asks, as the discriminator's in the generator's turn."""
    weight, sigma = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    x = given()
    with memkit.lean():
        out = (x @ (weight / sigma)).sum() + (x @ weight.clamp(-1, 1)).sum()
    (before,) = torch.autograd.grad(out, x, retain_graph=True)
    with torch.no_grad():
        weight.zero_()
    (after,) = torch.autograd.grad(out, x)
    assert torch.equal(before, after)


@pytest.mark.parametrize("view", ["t", "slice", "view"])
@pytest.mark.parametrize("own", [False, True])
def test_chains_with_views_between(view: str, own: bool) -> None:
    """They count as what they are of."""
    act = (
        (lambda x: memkit.functional.leaky_relu(x, 0.9, save="input"))
        if own
        else (lambda x: F.leaky_relu(x, 0.9))
    )
    views = {"t": lambda x: x.t(), "slice": lambda x: x[:, :], "view": lambda x: x.view(x.shape[::-1])}
    x = torch.randn(256, 256, requires_grad=True)
    with memkit.lean():
        out = x
        for _ in range(300):
            out = views[view](act(out))
    with Counting() as calls:
        out.sum().backward()
    assert calls.count < 300 * 8
    expected = x.detach().clone().requires_grad_()
    out = expected
    for _ in range(300):
        out = views[view](F.leaky_relu(out, 0.9))
    out.sum().backward()
    assert_same([x.grad], [expected.grad])


def test_long_chains_take_no_longer() -> None:
    """What would take more than a few operators is kept, and to find that out too."""
    scales = [nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(200)]

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(scales)
            self.after = nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = F.leaky_relu(x * scale, 0.9) * scale
            return self.after(x)

    model, x = Chain(), given()

    def step(*, lean: bool) -> tuple[list[Tensor], int]:
        model.zero_grad()
        x.grad = None
        with memkit.lean() if lean else torch.enable_grad():
            out = model(x)
        with Counting() as calls:
            out.sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())], calls.count

    theirs, count = step(lean=False)
    ours, again = step(lean=True)
    assert_same(ours, theirs)
    assert count < again < 2.5 * count


def test_joined() -> None:
    """A concatenation of what is made again is as well, where a consumer has asked for that before."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(2 * WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            skip = F.silu(self.first(x))
            up = F.silu(self.down(skip))
            up_again = F.silu(self.down(up))
            return self.last(torch.cat([skip, up], -1)) + self.last(torch.cat([up_again, up], -1)).tanh()

    model, x = Skip(), given()
    theirs, before = run(model, x, lean=False)
    ours, after = run(model, x, lean=True)
    assert_same(ours, theirs)
    one = 4 * ROWS * WIDTH
    # Of x, three results of layers, and two concatenations, the last one's first part is known to nobody.
    assert before - after >= 4 * one


def test_a_part_that_was_changed_before_it_is_joined() -> None:
    class Changed(Between):
        def forward(self, x: Tensor) -> Tensor:
            part = F.silu(self.before[0](x))
            self.after(part)
            with torch.no_grad():
                part.mul_(3)
            return self.after(torch.cat([part, part.detach()], 0)).view(2, ROWS, -1).sum(0)

    model, x = Changed(F.silu), given()
    assert_same(run(model, x, lean=True)[0], run(model, x, lean=False)[0])


@pytest.mark.parametrize("name", ["gelu", "glu", "product"])
def test_higher_derivatives_and_backward_twice(name: str) -> None:
    function = FUNCTIONS.get(name) or PRODUCTS[name]
    model, x = Between(function, 2 if name in PRODUCTS else 1, torch.float64), given(torch.float64)

    def penalty(lean: bool) -> list[Tensor]:
        with memkit.lean() if lean else torch.enable_grad():
            out = model(x).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().backward(retain_graph=True)
        twice = torch.autograd.grad(out, [x, *model.parameters()])
        found = [x.grad, *twice, *(p.grad for p in model.parameters())]
        x.grad = None
        model.zero_grad()
        return found

    for one, other in zip(penalty(True), penalty(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_graph_that_was_freed_raises() -> None:
    model, x = Between(lambda a, b: a * b, 2), given()
    with memkit.lean():
        out = model(x)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints(inside: bool, reentrant: bool) -> None:
    """PyTorch's gives each saved tensor once, so inside it nothing of PyTorch's is made again."""
    model, x = Between(lambda a, b: F.silu(a) * b, 2), given()
    theirs, _ = run(model, x, lean=False)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            def lean(x: Tensor) -> Tensor:
                with memkit.lean():
                    return self.model(x)

            return checkpoint(lean if inside else self.model, x, use_reentrant=reentrant)

    assert_same(run(Checkpointed(), x, lean=not inside)[0], theirs)


@pytest.mark.parametrize("around", ["save_on_cpu", "own"])
def test_other_hooks_around(around: str) -> None:
    model, x = Between(lambda a, b: F.silu(a) * b, 2), given()
    theirs, _ = run(model, x, lean=False)

    hooks = save_on_cpu() if around == "save_on_cpu" else saved_tensors_hooks(Once, Once.give)
    model.zero_grad()
    x.grad = None
    with hooks, memkit.lean():
        out = model(x)
    out.square().mean().backward()
    assert_same([out.detach(), x.grad, *(p.grad for p in model.parameters())], theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    model, x = Between(lambda a, b: F.softplus(a) * F.silu(b) ** 2, 2), given()

    def step(lean: bool, backward_inside: bool) -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype):
            with memkit.lean() if lean else torch.enable_grad():
                out = model(x)
            if backward_inside:
                out.float().square().mean().backward()
        if not backward_inside:
            out.float().square().mean().backward()
        return [out.detach(), x.grad, *(p.grad for p in model.parameters())]

    for inside in (False, True):
        assert_same(step(True, inside), step(False, inside))


def test_complex_numbers_and_subclasses() -> None:
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.complex64, requires_grad=True)
    x = torch.randn(ROWS, WIDTH, dtype=torch.complex64, requires_grad=True)

    def step(lean: bool) -> tuple[Tensor, ...]:
        with memkit.lean() if lean else torch.enable_grad():
            out = ((x @ weight) * x.conj()) @ weight
        return torch.autograd.grad(out.abs().square().sum(), [x, weight])

    assert_same([*step(True)], [*step(False)])

    class Named(Tensor):
        pass

    def named(lean: bool) -> tuple[Tensor, ...]:
        leaf = (
            torch.arange(ROWS * WIDTH, dtype=torch.float32)
            .view(ROWS, WIDTH)
            .as_subclass(Named)
            .requires_grad_()
        )
        with memkit.lean() if lean else torch.enable_grad():
            out = (F.gelu(leaf) * leaf) @ weight.real.detach()
        return torch.autograd.grad(out.sum(), [leaf])

    assert_same([*named(True)], [*named(False)])


SOURCES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "gelu": (F.gelu, 1.0),
    "relu": (F.relu, 1.0),
    "relu in place": (lambda x: F.relu_(x * 1), 1.0),
    "memkit gelu": (lambda x: memkit.functional.gelu(x, save="input"), 1.0),
    "memkit relu": (memkit.functional.relu, 1.0),
    "softmax": (lambda x: x.softmax(-1), 1.0),
    "layer norm": (lambda x: memkit.functional.layer_norm(x, (WIDTH,), save="input"), 1.0),
    "view": (lambda x: F.gelu(x).view(WIDTH, ROWS).view(ROWS, WIDTH), 1.0),
    "of nobody": (lambda x: x + 1, 0.0),
}


@pytest.mark.parametrize("kind", ["dropout", "alpha_dropout"])
@pytest.mark.parametrize("name", SOURCES)
def test_dropout_of_what_is_kept_or_made_again(name: str, kind: str) -> None:
    source, tensors = SOURCES[name]
    drop = getattr(memkit.functional, kind)
    model, x = Between(lambda x: drop(source(x), 0.3, True)), given()
    theirs, before = run(model, x, lean=False)
    ours, after = run(model, x, lean=True)
    assert_same(ours, theirs)
    # Where the source can be made again, it takes no memory outside either: what is dropped from it is kept alone.
    assert before - after == tensors * 4 * ROWS * WIDTH


@pytest.mark.parametrize("distributed", [False, True])
def test_dropout_keeps_no_source_that_takes_memory(
    distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: distributed)
    scale = nn.Parameter(torch.rand(WIDTH))
    drop = memkit.functional.dropout
    small = torch.randn(16, WIDTH, requires_grad=True)
    for x, source in [(given(), lambda x: x * 2 * scale), (small, F.silu)]:

        def forward(x=x, source=source) -> Tensor:
            return drop(source(x), 0.3) + x

        def lean(forward=forward) -> Tensor:
            with memkit.lean():
                return forward()

        assert memkit.memory.measure(lean).saved <= memkit.memory.measure(forward).saved + 16


def test_dropout_of_what_is_changed_afterwards() -> None:
    def change(x: Tensor) -> Tensor:
        source = F.gelu(x)
        out = memkit.functional.dropout(source, 0.3)
        with torch.no_grad():
            source.zero_()
        return out

    model, x = Between(change), given()
    assert_same(run(model, x, lean=True)[0], run(model, x, lean=False)[0])
