"""What memkit refuses, in words, before anything is written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from activation_cases import CASES, NEEDS_INPUT
from torch import Tensor

import memkit.functional as M
import memkit.nn
from memkit._reference import ACTIVATIONS

X = torch.randn(4, 8)
BIAS = torch.randn(8)
ops = torch.ops.memkit


def refuses(
    call: Callable[[Tensor], Any], context: Any, error: type[Exception], text: str, x: Tensor = X
) -> None:
    """Raises the error with the text (a regular expression for all of it), and leaves the input as it was."""
    x = x.clone()
    before, version = x.clone(), x._version
    with context(), pytest.raises(error) as caught:
        call(x)
    assert re.fullmatch(text, str(caught.value).splitlines()[0]), str(caught.value)
    assert torch.equal(x, before)
    assert x._version == version


def modes(test: Callable[..., None]) -> Callable[..., None]:
    """With a gradient, without, and where autograd's kernels do not run at all."""
    contexts = [torch.enable_grad, torch.no_grad, torch.inference_mode]
    return pytest.mark.parametrize("context", contexts, ids=lambda c: c.__name__)(test)


# -- tensors ---------------------------------------------------------------------------------------------------------------

DTYPE = "expected float32, float64, float16 or bfloat16, got"


@modes
@pytest.mark.parametrize("inplace", [False, True, "auto"])
@pytest.mark.parametrize("case", CASES)
def test_every_function_names_itself_and_the_dtype(case: str, inplace: Any, context: Any) -> None:
    name, params = CASES[case]
    if case in NEEDS_INPUT and inplace is True:
        pytest.skip("refused for another reason")
    shown = "gelu_tanh" if case == "gelu(tanh)" else name
    refuses(
        lambda x: getattr(M, name)(x, **params, inplace=inplace),
        context,
        TypeError,
        rf"{shown}: {DTYPE} torch\.int64 \[6\]",
        torch.arange(6),
    )


@modes
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int32, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_other_dtypes(dtype: torch.dtype, context: Any) -> None:
    x = torch.ones(2, 3).to(dtype)
    for function in (M.relu, M.gelu):
        for inplace in (False, True):
            with context(), pytest.raises(TypeError, match=rf"^[a-z]+: {DTYPE} {dtype} \[2, 3\]$"):
                function(x, inplace=inplace)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(3).to_sparse(), "silu: expected a dense (strided) tensor, got layout Sparse"),
        (
            lambda: torch.eye(3).to_sparse_csr(),
            "silu: expected a dense (strided) tensor, got layout SparseCsr",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "silu: expected a dense tensor, got a nested tensor",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "silu: expected a dense tensor, got a nested tensor",
        ),
    ],
    ids=["sparse", "sparse_csr", "nested", "nested, jagged"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_layouts(make: Callable[[], Tensor], text: str) -> None:
    for call in (M.silu, lambda x: M.silu(x, inplace=True), lambda x: M.silu(x, inplace="auto"), ops.silu):
        with pytest.raises(RuntimeError, match="^" + re.escape(text)):
            call(make())
        with torch.inference_mode(), pytest.raises(RuntimeError):  # PyTorch itself finds no kernel
            call(make())


@modes
@pytest.mark.parametrize("thing", [None, 3.0, [1.0, 2.0], "x"], ids=str)
def test_not_a_tensor(thing: Any, context: Any) -> None:
    kind = type(thing).__name__
    with context():
        with pytest.raises(TypeError, match=f"^mish: expected input to be a Tensor, got {kind}$"):
            M.mish(thing)
        with pytest.raises(TypeError, match=f"^relu: expected input to be a Tensor, got {kind}$"):
            M.bias_act(thing, BIAS, "relu")
        with pytest.raises(TypeError, match=f"^(bias_act|relu): expected bias to be a Tensor, got {kind}$"):
            M.bias_act(X, thing, "relu")


@modes
def test_memory_that_holds_several_elements_in_one_place(context: Any) -> None:
    row = torch.randn(5)
    window = torch.randn(8)
    for base, x, strides in (
        (row, row.expand(3, 5), r"\[0, 1\]"),
        (window, torch.as_strided(window, (3, 4), (2, 1)), r"\[2, 1\]"),
    ):
        before = base.clone()
        text = (
            r"gelu: expected, in place, a tensor that nothing else needs, got torch\.float32 \[3, \d\], expanded or "
            rf"self-overlapping memory \(strides {strides}\); use inplace=False or inplace='auto', or pass a clone"
        )
        for call in (
            lambda x: M.gelu(x, inplace=True),
            ops.gelu_,
            lambda x: M.bias_act(x, torch.zeros(x.size(-1)), inplace=True),
            lambda x: ops._activation_with_bits_(x, None, -1, "gelu", []),
        ):
            with context(), pytest.raises(RuntimeError, match=text):
                call(x)
            assert torch.equal(base, before)


# -- arguments -------------------------------------------------------------------------------------------------------------

ONE_SLOPE = (
    r"expected parameters with one slope for each output \(negative_slope >= 0, alpha >= 0, beta > 0, threshold >= 20\) "
    r"where the gradient comes from the output, got \({}\); use save='input' out of place"
)


@modes
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: M.gelu(x, "erf"), "gelu: expected approximate 'none' or 'tanh', got 'erf'"),
        (lambda x: M.gelu(x, None), "gelu: expected approximate 'none' or 'tanh', got None"),
        (
            lambda x: ops.gelu(x, approximate="erf"),
            "gelu: expected approximate 'none' or 'tanh', got 'erf'",
        ),
        (lambda x: M.tanh(x, save="both"), "tanh: expected save 'auto', 'input' or 'output', got 'both'"),
        (lambda x: M.tanh(x, save="bit"), "tanh: expected save 'auto', 'input' or 'output', got 'bit'"),
        (
            lambda x: M.relu(x, save="both"),
            "relu: expected save 'auto', 'input', 'output' or 'bit', got 'both'",
        ),
        (lambda x: ops.tanh(x, save="both"), "tanh: expected save 'auto', 'input' or 'output', got 'both'"),
        (
            lambda x: M.tanh(x, inplace=True, save=""),
            "tanh: expected save 'auto', 'input' or 'output', got ''",
        ),
        (lambda x: M.tanh(x, inplace="yes"), "tanh: expected inplace True, False or 'auto', got 'yes'"),
        (lambda x: M.tanh(x, inplace=1), "tanh: expected inplace True, False or 'auto', got 1"),
        (lambda x: M.tanh(x, inplace=None), "tanh: expected inplace True, False or 'auto', got None"),
        (
            lambda x: M.tanh(x, inplace=True, save="input"),
            "tanh: expected save 'auto' or 'output' in place, got 'input', which is overwritten",
        ),
        (
            lambda x: ops.tanh_(x, save="input"),
            "tanh: expected save 'auto' or 'output' in place, got 'input', which is overwritten",
        ),
        (
            lambda x: M.leaky_relu(x, -0.1, inplace=True),
            "leaky_relu: " + ONE_SLOPE.format("-0.1, 0, 0"),
        ),
        (lambda x: M.leaky_relu(x, -0.1, save="output"), "leaky_relu: " + ONE_SLOPE.format("-0.1, 0, 0")),
        (
            lambda x: M.leaky_relu(x, float("nan"), inplace=True),
            "leaky_relu: " + ONE_SLOPE.format("nan, 0, 0"),
        ),
        (lambda x: M.elu(x, -0.1, inplace=True), "elu: " + ONE_SLOPE.format("-0.1, 1, 1")),
        (lambda x: M.celu(x, -2.0, inplace=True), "celu: " + ONE_SLOPE.format("-2, 1, -0.5")),
        (lambda x: M.softplus(x, -1.0, inplace=True), "softplus: " + ONE_SLOPE.format("-1, 20, 0")),
        (lambda x: M.softplus(x, 2.0, 3.0, inplace=True), "softplus: " + ONE_SLOPE.format("2, 3, 0")),
        (lambda x: M.softplus(x, 2.0, 3.0, save="output"), "softplus: " + ONE_SLOPE.format("2, 3, 0")),
        (lambda x: M.celu(x, 0.0), "celu: expected alpha other than 0, got 0"),
        (lambda x: M.softplus(x, 0.0), "softplus: expected beta other than 0, got 0"),
        (lambda x: M.hardtanh(x, 2.0, 1.0), "hardtanh: expected min_val <= max_val, got 2 and 1"),
        (
            lambda x: M.hardtanh(x, inplace=True, max_val=-2),
            "hardtanh: expected min_val <= max_val, got -1 and -2",
        ),
        (lambda x: M.bias_act(x, BIAS, "swish"), "activation: expected one of .*silu.*, got 'swish'"),
        (lambda x: ops._activation(x, None, -1, "elu", [], "auto"), "elu: expected 1 parameters, got 0"),
        (lambda x: ops.bias_act(x, BIAS, "relu", params=[1.0]), "relu: expected 0 parameters, got 1"),
    ],
)
def test_arguments(call: Callable[[Tensor], Any], text: str, context: Any) -> None:
    refuses(call, context, ValueError, text)


@modes
@pytest.mark.parametrize("inplace", [False, True, "auto"])
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda x, i: M.bias_act(x, torch.randn(4), inplace=i),
            ValueError,
            r"gelu: expected a bias of shape \[8\] for dim -1 of input \[4, 8\], got \[4\]",
        ),
        (
            lambda x, i: M.bias_act(x, torch.randn(1, 8), inplace=i),
            ValueError,
            r"gelu: expected a bias of shape \[8\] for dim -1 of input \[4, 8\], got \[1, 8\]",
        ),
        (
            lambda x, i: M.bias_act(x, torch.tensor(1.0), "relu", inplace=i),
            ValueError,
            r"relu: expected a bias of shape \[8\] for dim -1 of input \[4, 8\], got \[\]",
        ),
        (
            lambda x, i: M.bias_act(x, BIAS, dim=2, inplace=i),
            IndexError,
            r"gelu: expected dim in \[-2, 1\], got 2",
        ),
        (
            lambda x, i: M.bias_act(x, BIAS, dim=-3, inplace=i),
            IndexError,
            r"gelu: expected dim in \[-2, 1\], got -3",
        ),
        (
            lambda x, i: M.bias_act(x, BIAS.double(), inplace=i),
            TypeError,
            r"gelu: expected input and bias of one dtype, got torch\.float32 \[4, 8\] and torch\.float64 \[8\]",
        ),
        (
            lambda x, i: M.bias_act(x, torch.arange(8), inplace=i),
            TypeError,
            rf"gelu: {DTYPE} torch\.int64 \[8\]",
        ),
        (
            lambda x, i: M.bias_act(x, torch.empty(8, device="meta"), inplace=i),
            RuntimeError,
            "gelu: expected input and bias on one device, got cpu and meta",
        ),
        (
            lambda x, i: M.bias_act(x, BIAS, "relu", negative_slope=0.1, inplace=i),
            TypeError,
            r"bias_act: expected parameters \[\] for relu, got \['negative_slope'\]",
        ),
        (
            lambda x, i: M.bias_act(x, BIAS, "softplus", alpha=1.0, inplace=i),
            TypeError,
            r"bias_act: expected parameters \['beta', 'threshold'\] for softplus, got \['alpha'\]",
        ),
    ],
)
def test_bias(
    call: Callable[[Tensor, Any], Any], error: type[Exception], text: str, inplace: Any, context: Any
) -> None:
    refuses(lambda x: call(x, inplace), context, error, text)


@modes
def test_bias_beside_a_scalar(context: Any) -> None:
    text = "gelu: expected an input with at least 1 dimension beside a bias, got 0"
    refuses(lambda x: M.bias_act(x, torch.randn(1)), context, RuntimeError, text, torch.tensor(1.0))


def test_parameters_that_are_no_numbers() -> None:
    for value in ("a", None, [1.0]):
        with pytest.raises(TypeError, match=rf"^leaky_relu: expected a number, got {type(value).__name__}\b"):
            M.leaky_relu(X, value)
    with pytest.raises(TypeError, match=r"^gelu: expected a str, got int"):
        M.gelu(X, save=3)  # type: ignore[arg-type]


# -- below autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"bits": None},
            "expected bits where no tensor is saved, or the output of a function with a minimum",
        ),
        (
            {"bits": torch.zeros(3, dtype=torch.uint8)},
            "expected 4 contiguous bytes of bits on cpu, got .* on cpu",
        ),
        ({"bits": torch.zeros(4)}, "expected 4 contiguous bytes of bits on cpu, got torch.float32 .* on cpu"),
        (
            {"bits": torch.zeros(8, dtype=torch.uint8)[::2]},
            "expected 4 contiguous bytes of bits on cpu, got .*",
        ),
        (
            {"op": "relu"},
            "expected bits only where no tensor is saved, or the output of a function with a minimum",
        ),
        ({"saved": None}, "expected a saved tensor, got none"),
        ({"saved": None, "op": "relu", "bias": torch.zeros(8)}, "expected a saved tensor, got none"),
        ({"saved": None, "op": "relu", "bits": None}, "expected bits where no tensor is saved, .*"),
        (
            {"saved": None, "op": "relu", "bits": torch.zeros(3, dtype=torch.uint8)},
            "expected 4 contiguous bytes of bits on cpu, got .* on cpu",
        ),
        (
            {"saved": X.double()},
            r"expected a saved tensor like the gradient, .*, got torch.float64 \[4, 8\] on cpu",
        ),
        (
            {"saved": X[:3]},
            r"expected a saved tensor like the gradient, .*, got torch.float32 \[3, 8\] on cpu",
        ),
        ({"saved": X.to("meta")}, "expected a saved tensor like the gradient, .* on cpu, got .* on meta"),
    ],
)
def test_backward_reads_no_foreign_memory(change: dict[str, Any], text: str) -> None:
    """Saved-tensor hooks may hand back anything."""
    arguments = {
        "grad": X.clone(),
        "saved": X,
        "bias": None,
        "dim": -1,
        "bits": torch.zeros(4, dtype=torch.uint8),
        "op": "gelu",
        "params": [],
        "from_output": True,
    } | change
    for backward in (ops._activation_backward, ops._activation_backward_):
        with pytest.raises(RuntimeError, match=f"^(gelu|relu): {text}"):
            backward(**arguments)
    assert torch.equal(arguments["grad"], X)


# -- modules ---------------------------------------------------------------------------------------------------------------


def _positional(function: Any) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [each.name for each in inspect.signature(function).parameters.values() if each.kind in kinds]


def test_functions_take_by_position_what_their_twins_take() -> None:
    """But for what is of PyTorch's own making: `_stacklevel` of softmax, `out` of normalize."""
    apart = {"softmax", "log_softmax", "normalize"}
    twins = {name: getattr(torch.nn.functional, name, None) for name in M.__all__ if name not in apart}
    known = {name: twin for name, twin in twins.items() if isinstance(twin, FunctionType)}
    del known["max_pool2d"]  # which PyTorch dispatches by *args
    assert len(known) > 15
    for name, twin in known.items():
        assert _positional(getattr(M, name)) == _positional(twin), name
    x = torch.randn(8)
    for given in (
        *(M.relu, M.relu6, M.selu, M.silu, M.mish, M.hardswish, M.hardsigmoid),
        *(partial(M.leaky_relu, negative_slope=0.1), partial(M.hardtanh, min_val=-2.0, max_val=2.0)),
    ):
        function, parameters = getattr(given, "func", given), getattr(given, "keywords", {}).values()
        h = x * 2
        want = function(h, *parameters)
        assert function(h, *parameters, True) is h
        assert torch.equal(h, want)


def test_modules_take_what_their_twins_take_and_no_more() -> None:
    for module in (memkit.nn.Tanh, memkit.nn.Sigmoid):
        with pytest.raises(TypeError):
            module(True)
    with pytest.raises(TypeError):
        memkit.nn.ReLU(True, "output")
    with pytest.raises(ValueError, match="approximate"):
        memkit.nn.GELU("erf")(X)
    for name, activation in ACTIVATIONS.items():
        if activation.module is not None:
            twin = activation.module.__name__
            with pytest.raises(ValueError, match=f"^{twin}: expected save .*'neither'"):
                getattr(memkit.nn, twin)(save="neither")
            module = getattr(memkit.nn, twin)()
            module.save = "neither"
            with pytest.raises(ValueError, match=f"^{name}: expected save .*'neither'"):
                module(X)


KEEPERS: dict[str, Callable[[Tensor], Tensor]] = {
    "std": lambda x: x.std(0),
    "hypot": lambda x: torch.hypot(x, torch.ones(())),
    "cdist": lambda x: torch.cdist(x, torch.ones(2, 4)),
    "sgn": torch.sgn,
    "solve": lambda x: torch.linalg.solve(x + 9 * torch.eye(4), torch.ones(4, 4)),
    "det": torch.linalg.det,
    "max": lambda x: x.max(),
    "median": lambda x: x.median(),
    "power of a number": lambda x: torch.pow(2.0, x),
    "scatter_reduce": lambda x: torch.ones(4, 4).scatter_reduce(
        0, torch.zeros(4, 4, dtype=torch.long), x, "prod"
    ),
    "erfcx": torch.special.erfcx,
}


@pytest.mark.parametrize("name", KEEPERS)
def test_results_that_their_operator_keeps_are_not_overwritten(name: str) -> None:
    x = torch.rand(4, 4).add_(0.5).requires_grad_()
    y = KEEPERS[name](x)
    before = y.detach().clone()
    with pytest.raises(RuntimeError, match="gelu: expected, in place, a tensor that nothing else needs"):
        M.gelu(y, inplace=True)
    assert torch.equal(y, before)
