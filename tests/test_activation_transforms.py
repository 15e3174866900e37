"""Activations under autograd's higher derivatives, function transforms, hooks, tracers and compilers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_cases import BRANCHES, CASES, MONOTONE, generator, keep, modes, ours, reference, stock
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import memkit.functional as M
import memkit.nn
from memkit.functional._activation import TWO_SLOPES

ops = torch.ops.memkit
# Away from kinks and minima, on all branches.
X = torch.tensor([[-7.3, -4.1, -2.2, -1.8, -1.6], [-0.4, 0.3, 0.8, 1.7, 6.7]], dtype=torch.float64)
V = torch.randn(X.shape, generator=generator(1), dtype=torch.float64)

case_modes = pytest.mark.parametrize(
    ("case", "mode"), [(case, mode) for case in CASES for mode in modes(case)], ids=str
)
# One function whose slope comes from the output alone, one that needs bits beside it, one to which bits are enough.
FEW = {"tanh": (M.tanh, torch.tanh), "gelu": (M.gelu, F.gelu), "relu6": (M.relu6, F.relu6)}
few = pytest.mark.parametrize("name", FEW)
few_modes = pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in FEW for mode in modes(name)], ids=str
)


def call(name: str, mode: str) -> Callable[[Tensor], Tensor]:
    function = FEW[name][0]
    if "inplace" in mode:
        return lambda x: function(x * 1, **keep(mode))
    return lambda x: function(x, **keep(mode))


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


# -- derivatives -----------------------------------------------------------------------------------------------------------


@case_modes
def test_gradcheck(case: str, mode: str) -> None:
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(ours(case, mode), x, check_forward_ad=True, check_batched_grad=True)


@case_modes
def test_derivative_of_the_derivative(case: str, mode: str) -> None:
    x = X.clone().requires_grad_()
    if mode != "input" and case in BRANCHES:
        name = "gelu_tanh" if case == "gelu(tanh)" else CASES[case][0]
        text = f"^{name}: expected save='input' for a derivative of the gradient, got save='output', whose input is gone"
        with pytest.raises(RuntimeError, match=f"{text}; in a swapped model .*lean='call'"):
            torch.autograd.grad(ours(case, mode)(x).sum(), x, create_graph=True)
        return
    assert torch.autograd.gradgradcheck(ours(case, mode), x)
    (mine,) = torch.autograd.grad(ours(case, mode)(x), x, V, create_graph=True)
    truth = (
        reference(case) if case == "hardsigmoid" else stock(case)
    )  # of which stock's has no second derivative
    (theirs,) = torch.autograd.grad(truth(x), x, V, create_graph=True)
    close(mine, theirs)
    close(torch.autograd.grad(mine.square().sum(), x), torch.autograd.grad(theirs.square().sum(), x))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(("act", "save"), [("tanh", "input"), ("tanh", "output"), ("leaky_relu", "bit")])
def test_bias_derivatives(act: str, save: str, dim: int) -> None:
    bias = torch.randn(X.size(dim), generator=generator(2), dtype=torch.float64).requires_grad_()
    x = X.clone().requires_grad_()

    def f(x: Tensor, b: Tensor) -> Tensor:
        return M.bias_act(x, b, act, dim=dim, save=save)

    assert torch.autograd.gradcheck(f, (x, bias), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, (x, bias))


def test_a_penalty_on_the_gradient() -> None:
    """As in WGAN-GP, through a network."""

    def penalty(act: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        first, last = nn.Linear(5, 7).double(), nn.Linear(7, 1).double()
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(last(act(first(x))).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return first.weight.grad

    close(penalty(M.silu), penalty(F.silu))
    close(penalty(lambda h: M.tanh(h, inplace=True)), penalty(torch.tanh))


def test_retained_graph_and_gradients_for_part_of_the_inputs() -> None:
    x, bias = X.clone().requires_grad_(), torch.randn(5, dtype=torch.float64)
    for save in ("input", "output"):
        y = M.bias_act(x, bias, save=save)
        (first,) = torch.autograd.grad(y, x, V, retain_graph=True)
        (second,) = torch.autograd.grad(y, x, V)
        assert torch.equal(first, second)
        fixed, moving = X.clone(), bias.clone().requires_grad_()
        (got,) = torch.autograd.grad(M.bias_act(fixed, moving, save=save), moving, V)
        (want,) = torch.autograd.grad(F.gelu(fixed + moving), moving, V)
        close(got, want)


# -- function transforms ---------------------------------------------------------------------------------------------------


@case_modes
def test_vmap_grad_and_jvp(case: str, mode: str) -> None:
    f, want = ours(case, mode), stock(case)
    close(vmap(f)(X), want(X))
    close(vmap(f, in_dims=1, out_dims=1)(X), want(X))
    close(grad(lambda x: f(x).sum())(X), grad(lambda x: want(x).sum())(X))
    close(vmap(grad(lambda x: f(x).sum()))(X), grad(lambda x: want(x).sum())(X))
    close(grad(lambda x: vmap(f)(x).sum())(X), grad(lambda x: want(x).sum())(X))
    close(jvp(f, (X,), (V,)), jvp(want, (X,), (V,)))
    with dual_level():
        close(tuple(unpack_dual(f(make_dual(X, V)))), tuple(unpack_dual(want(make_dual(X, V)))))


@few_modes
def test_other_transforms(name: str, mode: str) -> None:
    f, want = call(name, mode), FEW[name][1]
    close(hessian(lambda x: f(x).sum())(X[0]), hessian(lambda x: want(x).sum())(X[0]))
    for jacobian in (jacrev, jacfwd):
        close(jacobian(f)(X[0]), jacobian(want)(X[0]))
    close(vjp(f, X)[1](V), vjp(want, X)[1](V))
    close(functionalize(f)(X), want(X))
    close(torch.func.linearize(f, X)[1](V), jvp(want, (X,), (V,))[1])
    for strategy in ("reverse-mode", "forward-mode"):
        got = torch.autograd.functional.jacobian(f, X[0], vectorize=True, strategy=strategy)
        close(got, torch.autograd.functional.jacobian(want, X[0]))
    x = X.clone().requires_grad_()
    rows = torch.stack([V, 2 * V, -V])
    (got,) = torch.autograd.grad(f(x), x, rows, is_grads_batched=True)
    (slope,) = torch.autograd.grad(want(x).sum(), x)
    close(got, rows * slope)


@few_modes
def test_batched_gradients_in_another_memory_order(name: str, mode: str) -> None:
    """Bits and their gradients follow the memory of the output."""
    f, want = call(name, mode), FEW[name][1]
    x = X.t().contiguous().t().requires_grad_()
    rows = torch.stack([V, 2 * V, -V])
    (got,) = torch.autograd.grad(f(x), x, rows, is_grads_batched=True)
    (slope,) = torch.autograd.grad(want(x).sum(), x)
    close(got, rows * slope)


@few
def test_vmap_in_place_writes_the_input(name: str) -> None:
    function, want = FEW[name]
    x = X.clone()
    close(vmap(lambda row: function(row, inplace=True))(x), want(X))
    close(x, want(X))


def test_vmap_over_bias() -> None:
    bias = torch.randn(2, 5, dtype=torch.float64)
    close(vmap(M.bias_act)(X, bias), F.gelu(X + bias))
    close(vmap(lambda b: M.bias_act(X[0], b))(bias), F.gelu(X[0] + bias))
    close(vmap(lambda x, b: M.bias_act(x * 1, b, inplace=True))(X, bias), F.gelu(X + bias))
    images = torch.randn(2, 3, 5, 4, 4, dtype=torch.float64)
    got = vmap(lambda x, b: M.bias_act(x, b, dim=1))(images, bias)
    close(got, F.gelu(images + bias[:, None, :, None, None]))


def test_functional_call_and_per_sample_gradients() -> None:
    torch.manual_seed(0)
    stock_net = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 1)).double()
    net = copy.deepcopy(stock_net)
    net[1] = memkit.nn.GELU(inplace=True)
    assert net.state_dict().keys() == stock_net.state_dict().keys()
    parameters = dict(stock_net.named_parameters())

    def loss(parameters: dict[str, Tensor], net: nn.Module, x: Tensor) -> Tensor:
        return functional_call(net, parameters, (x,)).square().sum()

    got = vmap(grad(loss), (None, None, 0))(parameters, net, X)
    want = vmap(grad(loss), (None, None, 0))(parameters, stock_net, X)
    close(got, want)


# -- modes, subclasses, devices --------------------------------------------------------------------------------------------


class Marked(Tensor):
    pass


@few_modes
def test_subclasses(name: str, mode: str) -> None:
    x = X.clone().as_subclass(Marked)
    out = call(name, mode)(x)
    assert type(out) is Marked
    close(out.as_subclass(Tensor), FEW[name][1](X))
    leaf = nn.Parameter(X.clone())
    close(call(name, mode)(leaf), FEW[name][1](X))


def test_modes_see_the_operators() -> None:
    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = X.clone().requires_grad_()
    with Record():
        M.gelu(x * 1, inplace=True).sum().backward()
    assert "memkit._activation_with_bits_.default" in seen
    assert any(name.startswith("memkit._activation_backward") for name in seen)


@few
def test_inference_mode(name: str) -> None:
    function, want = FEW[name]
    with torch.inference_mode():
        close(function(X), want(X))
        x = X.clone()
        assert function(x, inplace=True) is x
        close(x, want(X))
        close(M.bias_act(X, X[0], name), want(X + X[0]))


@few_modes
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_meta_and_fake_tensors(name: str, mode: str, layout: torch.memory_format) -> None:
    real = torch.randn(2, 3, 4, 5).contiguous(memory_format=layout)
    assert (meta := call(name, mode)(real.to("meta"))).is_meta
    assert meta.shape == real.shape
    assert meta.stride() == real.stride()
    with FakeTensorMode() as fake:
        x = fake.from_tensor(real).requires_grad_()
        out = call(name, mode)(x * 1)
        assert out.stride() == real.stride()
        out.sum().backward()
        assert x.grad.shape == real.shape


@few_modes
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx(name: str, mode: str, tracing: str) -> None:
    def f(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(call(name, mode)(x), x, x.detach())[0]

    traced = make_fx(f, tracing_mode=tracing)(X)
    y = torch.randn(2, 5, dtype=torch.float64)
    close(traced(y), f(y))


def test_symbolic_trace() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bias = nn.Linear(5, 5).double(), nn.Parameter(torch.randn(5).double())
            self.gelu, self.relu = memkit.nn.GELU(inplace=True), memkit.nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return M.bias_act(
                self.relu(self.gelu(self.linear(x))), self.bias, "elu", alpha=0.5, save="output"
            )

    net = Net()
    traced = torch.fx.symbolic_trace(net)
    assert sum("memkit" in str(node.target) for node in traced.graph.nodes) == 3
    close(traced(X), net(X))
    traced(X).sum().backward()
    got, net.linear.weight.grad = net.linear.weight.grad, None
    net(X).sum().backward()
    close(got, net.linear.weight.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace() -> None:
    net = nn.Sequential(nn.Linear(5, 5).double(), memkit.nn.GELU(inplace=True), memkit.nn.Softplus())
    close(torch.jit.trace(net, X)(V), net(V))


def test_autocast() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        h = layer(x)
        assert h.dtype == torch.bfloat16
        for function, want in FEW.values():
            assert function(h).dtype == torch.bfloat16
            torch.testing.assert_close(function(h), want(h), rtol=2e-2, atol=1e-2)
            assert function(x).dtype == torch.float32
        bias = torch.randn(16, requires_grad=True)
        for call in (M.bias_act, ops.bias_act, lambda h, b: ops.bias_act_(h.clone(), b)):
            out = call(h, bias)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, F.gelu(h + bias.bfloat16()), rtol=2e-2, atol=2e-2)
            (slope,) = torch.autograd.grad(out.float().sum(), bias)
            assert slope.dtype == torch.float32
    with pytest.raises(TypeError, match="expected input and bias of one dtype"):
        M.bias_act(h, bias)


# -- opcheck ---------------------------------------------------------------------------------------------------------------

OPCHECKED = ["relu", "gelu", "leaky_relu", "softplus", "hardswish"]
PRIVATE = ("_activation", "_activation_", "_activation_with_bits", "_activation_with_bits_")


@pytest.mark.parametrize("name", OPCHECKED)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(name: str, requires_grad: bool) -> None:
    x = torch.randn(3, 5, requires_grad=requires_grad)
    saves = ("input", "output", *(["bit"] if name in TWO_SLOPES else []))
    for save in saves if requires_grad else ("auto",):
        torch.library.opcheck(getattr(ops, name).default, (x,), {"save": save})
    torch.library.opcheck(getattr(ops, name + "_").default, (x.detach() * 1,))


@pytest.mark.parametrize("name", OPCHECKED)
def test_registered_in_place_under_compile(name: str) -> None:
    """opcheck asks for the gradient of the overwritten tensor itself; what a model needs is the one before it."""
    overwrite = getattr(ops, name + "_")
    grads = []
    for run in (overwrite, torch.compile(lambda x: overwrite(x * 2), fullgraph=True, backend="aot_eager")):
        x = torch.linspace(-4, 4, 15).view(3, 5).requires_grad_()
        (run(x * 2) if run is overwrite else run(x)).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("inplace", [False, True])
def test_opcheck_bias_act(inplace: bool) -> None:
    x, bias = torch.randn(2, 3, 4, 5, requires_grad=True), torch.randn(3, requires_grad=True)
    x = x.contiguous(memory_format=torch.channels_last)
    op = ops.bias_act_ if inplace else ops.bias_act
    if inplace:  # the gradient of the overwritten tensor itself is nobody's: see test_registered_in_place_under_compile
        x = x.detach()
    torch.library.opcheck(op.default, (x, bias), {"dim": 1})
    torch.library.opcheck(op.default, (x * 1, bias, "elu"), {"dim": 1, "params": [0.5]})


@pytest.mark.parametrize("name", PRIVATE)
def test_opcheck_of_the_parts(name: str) -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for act in ("gelu", "hardsigmoid"):
        arguments = (x, None, -1, act, []) + (() if "bits" in name else ("auto",))
        torch.library.opcheck(getattr(ops, name).default, arguments)


@pytest.mark.parametrize("name", ["_activation_backward", "_activation_backward_"])
def test_opcheck_of_the_backward(name: str) -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    y, bits = ops._activation_with_bits(x, None, -1, "gelu", [])
    op = getattr(ops, name).default
    torch.library.opcheck(op, (torch.randn_like(x), y, None, -1, bits, "gelu", [], True))
    torch.library.opcheck(op, (torch.randn_like(x), x, torch.randn(3), 1, None, "gelu", [], False))
    torch.library.opcheck(op, (torch.randn_like(x), None, None, -1, bits, "leaky_relu", [0.1], False))


def test_every_operator_is_registered_with_its_twin_in_place() -> None:
    for case in MONOTONE + BRANCHES:
        name = CASES[case][0]
        assert getattr(ops, name).default._schema.arguments[0].alias_info is None
        assert getattr(ops, name + "_").default._schema.arguments[0].alias_info.is_write
