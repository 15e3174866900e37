"""The norms under higher derivatives, function transforms, compilers, hooks and checkpointing."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_cases import generator, normal
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
import memkit.nn
from memkit._reference_norm import STOCK
from memkit.memory import measure

f64 = torch.float64
C = 6
WEIGHT, BIAS = normal((C,), f64, 1, mean=1, scale=0.2), normal((C,), f64, 2, scale=0.2)
ROW = normal((5, C), f64, 0)
IMAGE = normal((4, C, 3, 2), f64, 0)

# name -> input, parameters, call(function, input, *parameters)
CASES: dict[str, tuple[Tensor, tuple[Tensor, ...], Callable[..., Any]]] = {
    "layer_norm": (ROW, (WEIGHT, BIAS), lambda f, x, *p: f(x, (C,), *p)),
    "rms_norm": (ROW, (WEIGHT,), lambda f, x, *p: f(x, (C,), *p, 1e-6)),
    "add_layer_norm": (ROW, (WEIGHT, BIAS), lambda f, x, *p: f(x, x.sin(), (C,), *p)),
    "add_rms_norm": (ROW, (WEIGHT,), lambda f, x, *p: f(x, x.sin(), (C,), *p, 1e-6)),
    "group_norm": (IMAGE, (WEIGHT, BIAS), lambda f, x, *p: f(x, 3, *p)),
    "batch_norm_act": (IMAGE, (WEIGHT, BIAS), lambda f, x, *p: f(x, None, None, *p, True, act="silu")),
}
cases = pytest.mark.parametrize("name", CASES)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
ROWS = ("layer_norm", "rms_norm")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(name: str) -> tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]:
    x, parameters, call = CASES[name]
    leaves = [t.clone().requires_grad_() for t in (x, *parameters)]
    return (lambda *t: call(getattr(M, name), *t)), (lambda *t: call(STOCK[name], *t)), leaves


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)


@cases
def test_gradcheck(name: str) -> None:
    ours, _, leaves = pair(name)
    assert torch.autograd.gradcheck(ours, leaves, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("name", ROWS)
def test_gradcheck_from_the_input(name: str) -> None:
    x, parameters, call = CASES[name]
    leaves = [t.clone().requires_grad_() for t in (x, *parameters)]
    function = getattr(M, name)
    assert torch.autograd.gradcheck(
        lambda *t: call(lambda *a: function(*a, save="input"), *t), leaves, check_batched_grad=True
    )


@cases
def test_derivative_of_the_derivative(name: str) -> None:
    x, parameters, call = CASES[name]
    leaves = [t.clone().requires_grad_() for t in (x, *parameters)]
    saves = [{}] if name in ("group_norm", "batch_norm_act") else [{"save": "input"}, {"save": "output"}]
    for keep in saves:
        function = functools.partial(getattr(M, name), **keep)
        assert torch.autograd.gradgradcheck(functools.partial(call, function), leaves)


@pytest.mark.parametrize("name", [*ROWS, "add_layer_norm", "add_rms_norm"])
def test_derivative_of_the_derivative_without_the_input(name: str) -> None:
    """Also to what was overwritten, and to a leaf, whose gradients add up."""
    _, stock, (x, *parameters) = pair(name)
    call = CASES[name][2]

    def second(function: Callable[..., Any], of_copy: bool) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = function(leaf * 1 if of_copy else leaf, *parameters)
        out = out[0] + out[1].cos() if isinstance(out, tuple) else out
        first = torch.autograd.grad(out.sin().sum(), [leaf, *parameters], create_graph=True)
        sum(g.square().sum() for g in first).backward()
        found = [leaf.grad, *(p.grad for p in parameters)]
        for parameter in parameters:
            parameter.grad = None
        return found

    saved = lambda *t: call(functools.partial(getattr(M, name), save="output"), *t)  # noqa: E731
    close(second(saved, False), second(stock, False))
    if "layer_norm" in name:  # rows so short are refused of rms_norm
        overwritten = lambda *t: call(functools.partial(getattr(M, name), inplace=True), *t)  # noqa: E731
        close(second(overwritten, True), second(stock, True))


@pytest.mark.parametrize(
    "stock", [nn.LayerNorm((8, 8)), nn.GroupNorm(2, 8)], ids=["layer_norm", "group_norm"]
)
def test_a_gradient_penalty_keeps_no_more_than_stock(stock: nn.Module) -> None:
    ours = copy.deepcopy(stock)
    memkit.swap(ours)
    x = torch.randn(16, 8, 8, 8, requires_grad=True)

    def penalty(norm: nn.Module) -> None:
        (first,) = torch.autograd.grad(norm(x).sin().sum(), x, create_graph=True)
        first.square().sum().backward()

    assert type(ours) is not type(stock)
    assert measure(lambda: penalty(ours)).saved <= measure(lambda: penalty(stock)).saved + 1024


@cases
def test_function_transforms(name: str) -> None:
    ours, stock, (x, *parameters) = pair(name)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    values = [t.detach() for t in (x, *parameters)]
    tangents = tuple(normal(tuple(t.shape), f64, 5 + i) for i, t in enumerate(values))
    close(jvp(ours, tuple(values), tangents), jvp(stock, tuple(values), tangents))
    loss = lambda f: lambda *t: first(f(*t)).square().sum()  # noqa: E731
    close(grad(loss(ours))(*values), grad(loss(stock))(*values))
    close(
        grad(lambda x: grad(loss(ours))(x, *values[1:]).square().sum())(values[0]),
        grad(lambda x: grad(loss(stock))(x, *values[1:]).square().sum())(values[0]),
    )
    batch = torch.stack([values[0], values[0].cos()])
    close(vmap(lambda x: ours(x, *values[1:]))(batch), vmap(lambda x: stock(x, *values[1:]))(batch))
    per_sample = vmap(grad(lambda x: loss(ours)(x, *values[1:])))
    close(per_sample(batch), vmap(grad(lambda x: loss(stock)(x, *values[1:])))(batch))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
@cases
def test_compiled(name: str, dynamic: bool, backend: str) -> None:
    ours, stock, leaves = pair(name)
    compiled = torch.compile(lambda *t: ours(*t), backend=backend, dynamic=dynamic, fullgraph=True)
    first = lambda out: out[0] * out[1] if isinstance(out, tuple) else out  # noqa: E731
    for x in (leaves[0], torch.cat([leaves[0], leaves[0] * 2]).detach().requires_grad_()):
        for f in (compiled, stock):
            out = first(f(x, *leaves[1:]))
            found = (out.detach(), *torch.autograd.grad(out.square().sum(), [x, *leaves[1:]]))
            if f is compiled:
                mine = found
        close(mine, found)
        with torch.no_grad():
            close(compiled(x, *leaves[1:]), stock(x, *leaves[1:]))


@pytest.mark.parametrize("name", ROWS)
def test_compiled_in_place_writes_the_input(name: str) -> None:
    x, parameters, call = CASES[name]
    function = getattr(M, name)
    compiled = torch.compile(
        lambda h: call(lambda *a: function(*a, inplace=True), h, *parameters) + 1,
        backend="aot_eager",
        fullgraph=True,
    )
    h = x.clone()
    out = compiled(h)
    close(h, call(STOCK[name], x, *parameters))
    close(out, h + 1)


def test_compiled_under_autocast_gives_the_autocast_dtype() -> None:
    net = torch.nn.Sequential(memkit.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    x = normal((3, 8), torch.float32, 0)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            normed = net[0](x)
            return normed, net[1](normed)

    normed, out = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(out, step(x)[1], rtol=2e-2, atol=2e-2)


def test_compiled_batch_norm_trains_its_running_statistics() -> None:
    ours, twin = memkit.nn.BatchNorm2d(C, act="relu"), torch.nn.BatchNorm2d(C)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        x = normal((4, C, 3, 3), torch.float32, seed)
        torch.testing.assert_close(compiled(x), twin(x).relu())
    torch.testing.assert_close(ours.state_dict(), twin.state_dict())


OPERATORS = ["_row_norm", "_add_row_norm", "_group_norm", "_batch_norm_act"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator: str) -> None:
    x, image = (t.float().requires_grad_() for t in (ROW, IMAGE))
    w, b = (t.float().requires_grad_() for t in (WEIGHT, BIAS))
    last = image.detach().contiguous(memory_format=torch.channels_last)
    calls = {
        "_row_norm": [
            (x, 1, 0, w, b, 1e-5, True, torch.float32, "input"),
            (x, 1, 0, w, None, 1e-5, False, torch.bfloat16, "output"),
            (x, 2, 0, None, None, 1e-5, True, torch.float32, "auto"),
            (x, 1, 0, w, None, 1e-5, False, torch.bfloat16, "output", "norm"),
            (x, 1, 0, w, b, 1e-5, True, torch.float32, "input", "sample_deviation"),
        ],
        "_add_row_norm": [
            (x, x.detach() * 2, 1, w, b, 1e-5, True, torch.float32, save) for save in ("input", "output")
        ],
        "_group_norm": [(image, 3, w, b, 1e-5, torch.float32), (image, 2, None, None, 1e-5, torch.bfloat16)],
        "_batch_norm_act": [
            (image, w, b, None, None, 1e-5, "silu", [], torch.float32),
            (image, w, None, torch.zeros(C), torch.ones(C), 1e-5, "", [], torch.float32),
            (last, w, b, None, None, 1e-5, "relu", [], torch.float32),
        ],
    }
    for arguments in calls[operator]:
        torch.library.opcheck(getattr(torch.ops.memkit, operator).default, arguments)


@cases
def test_saved_tensor_hooks_and_checkpoints(name: str) -> None:
    ours, stock, leaves = pair(name)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    want = torch.autograd.grad(first(stock(*leaves)).square().sum(), leaves)
    with torch.autograd.graph.save_on_cpu():
        out = first(ours(*leaves))
    close(torch.autograd.grad(out.square().sum(), leaves), want)
    for reentrant in (False, True):
        out = first(checkpoint(lambda *t: ours(*(u * 1 for u in t)), *leaves, use_reentrant=reentrant))
        found = [t.grad for t in leaves]
        out.square().sum().backward()
        close([t.grad for t in leaves], list(want))
        for t in leaves:
            t.grad = None
        assert found == [None] * len(leaves)


@pytest.mark.parametrize("name", ROWS)
def test_traced_and_exported(name: str) -> None:
    module = {"layer_norm": memkit.nn.LayerNorm, "rms_norm": memkit.nn.RMSNorm}[name](8)
    x, y = normal((3, 8), torch.float32, 0), normal((3, 8), torch.float32, 1)
    exported = torch.export.export(module, (x,))
    torch.testing.assert_close(exported.module()(y), module(y))
    assert any("memkit" in str(node.target) for node in exported.graph.nodes)
    state = {k: v * 2 for k, v in module.state_dict().items()}
    torch.testing.assert_close(
        functional_call(module, state, (x,)), getattr(F, name)(x, (8,), *state.values(), eps=module.eps)
    )


@cases
def test_meta_tensors_give_shapes(name: str) -> None:
    """Which autocast knows nothing of."""
    x, parameters, call = CASES[name]
    tensors = [t.to("meta", torch.float32).requires_grad_() for t in (x, *parameters)]
    out = call(getattr(M, name), *tensors)
    out = out[0] if isinstance(out, tuple) else out
    assert (out.device, out.dtype, out.shape) == (tensors[0].device, torch.float32, x.shape)
    out.sum().backward()
    for each in tensors:
        assert each.grad is not None
        assert each.grad.shape == each.shape


def test_many_gradients_at_once() -> None:
    """is_grads_batched: the same kernel under vmap."""
    x = ROW.clone().requires_grad_()
    grads = torch.randn(3, *ROW.shape, generator=generator(7), dtype=f64)
    for save in ("input", "output"):
        out = M.layer_norm(x, (C,), WEIGHT, BIAS, save=save)
        (got,) = torch.autograd.grad(out, x, grads, is_grads_batched=True)
        out = F.layer_norm(x, (C,), WEIGHT, BIAS)
        close(got, torch.stack([torch.autograd.grad(out, x, g, retain_graph=True)[0] for g in grads]))


@pytest.mark.parametrize("save", ["input", "output"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "batch_norm_act"])
def test_a_third_derivative(name: str, save: str) -> None:
    """PyTorch's own layer norm has a wrong one, its batch norm none."""
    x, parameters, call = CASES[name]
    keep = {} if name == "batch_norm_act" else {"save": save}
    function = functools.partial(getattr(M, name), **keep)

    def second(*leaves: Tensor) -> Tensor:
        out = call(function, *leaves)
        (first,) = torch.autograd.grad(out.sin().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(first.sin().sum(), leaves[0], create_graph=True)[0]

    assert torch.autograd.gradcheck(second, [t.clone().requires_grad_() for t in (x, *parameters)])


@pytest.mark.parametrize("act", [M.relu, functools.partial(M.gelu, save="input")], ids=["relu", "gelu"])
@pytest.mark.parametrize("name", [*ROWS, "add_layer_norm"])
def test_a_gradient_penalty_in_lean(name: str, act: Callable[..., Tensor]) -> None:
    """Of what lean() makes again or packs, with its mean, in whose place stands an input without."""
    _, stock, (_, *parameters) = pair(name)
    call, x = CASES[name][2], normal((2**16, C), f64, 7) - 0.5

    def second(function: Callable[..., Any]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = function(act(leaf), *parameters)
        out = out[0] + out[1].cos() if isinstance(out, tuple) else out
        (first,) = torch.autograd.grad(out.sin().sum(), leaf, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [leaf, *parameters]))

    expected = second(stock)
    with memkit.lean():
        close(second(lambda *t: call(functools.partial(getattr(M, name), save="output"), *t)), expected)


@cases
def test_a_tangent_of_the_incoming_gradient(name: str) -> None:
    """Forward over reverse, of what comes behind the norm alone."""
    ours, stock, leaves = pair(name)
    out = ours(*leaves)
    shape = (out[0] if isinstance(out, tuple) else out).shape
    grad, tangent = normal(tuple(shape), f64, 8), normal(tuple(shape), f64, 9)

    def tangents(function: Callable[..., Any]) -> list[Tensor]:
        with forward_ad.dual_level():
            out = function(*leaves)
            out = out[0] if isinstance(out, tuple) else out
            dual = forward_ad.make_dual(grad, tangent)
            found = torch.autograd.grad(out, leaves, dual, create_graph=True)
            return [forward_ad.unpack_dual(each).tangent for each in found]

    close(tangents(ours), tangents(stock))


def test_a_gradient_does_not_hold_what_the_norm_was_given() -> None:
    x = normal((2, C, 3, 2), f64, 0).requires_grad_()
    weight = normal((C,), f64, 1).requires_grad_()
    given = x * 2
    seen = weakref.ref(given)
    factors = normal((2, C, 3, 2), f64, 2)  # of which the norm's own node does not run in the second backward
    (first,) = torch.autograd.grad((M.group_norm(given, 3, weight) * factors).sum(), x, create_graph=True)
    del given
    first.square().sum().backward()
    assert first.grad_fn is not None
    assert seen() is None
