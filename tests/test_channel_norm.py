"""Batch norm with an activation, and group norm: exactness, what is kept, running statistics, layouts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_cases import KINDS, LOW, assert_as_good_as_stock, inputs, normal, uniform
from torch import Tensor, nn

import memkit.functional as M
import memkit.nn
from memkit._reference_norm import STOCK, run
from memkit.memory import measure

ACTS: dict[str | None, dict[str, Any]] = {
    None: {},
    "relu": {},
    "leaky_relu": {"negative_slope": 0.2},
    "silu": {},
    "gelu": {},
    "hardswish": {},
    "elu": {"alpha": 0.7},
}


def parameters(channels: int, dtype: torch.dtype) -> list[Tensor]:
    """Weights of both signs, small ones among them."""
    weight = uniform((channels,), dtype, 1, -1.5, 1.5)
    return [weight, normal((channels,), dtype, 2)]


def batch_norm(
    function: Callable[..., Any], act: str | None, training: bool = True, running: tuple[Tensor, ...] = ()
) -> Callable[..., Any]:
    """In training without running statistics, else by those given, in the input's dtype."""

    def call(x: Tensor, *p: Tensor) -> Any:
        mean, variance = (t.to(x.dtype) for t in running) if running else (None, None)
        return function(x, mean, variance, *p, training, 0.1, 1e-5, act=act, **ACTS.get(act, {}))

    return call


SHAPES = {
    "planes": (9, 6, 31, 33),
    "columns": (400, 24),
    "sequence": (9, 16, 77),
    "small planes": (33, 509, 2, 2),  # rows that threads share unevenly
    "few small planes": (2, 65, 3, 3),
}


@pytest.mark.parametrize("layout", [*SHAPES, "channels last"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_batch_norm_as_exact_as_stock(dtype: torch.dtype, kind: str, layout: str) -> None:
    shape = SHAPES.get(layout, SHAPES["planes"])
    x = inputs(kind, shape, dtype)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    tensors, grads = [x, *parameters(shape[1], dtype)], [normal(shape, dtype, 5)]
    ours, stock = (batch_norm(f, None) for f in (M.batch_norm_act, STOCK["batch_norm_act"]))
    want = run(stock, tensors, grads, torch.float64)
    mine = run(ours, tensors, grads)
    assert mine[0].stride() == x.stride()
    assert_as_good_as_stock("y input weight bias", mine, run(stock, tensors, grads), want)


@pytest.mark.parametrize("shape", [(3, 64, 2), (29, 9, 108), (3, 6, 2500), (400, 24), (33, 8, 2, 2)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_large_mean_costs_nothing(norm: str, shape: tuple[int, ...]) -> None:
    """Every part's mean is kept in double: what its rounding to float loses is 60 times the bound."""
    x, grads = inputs("large mean", shape, torch.float32), [normal(shape, torch.float32, 5)]

    def ours(x: Tensor, *p: Tensor) -> Tensor:
        return (
            M.group_norm(x, 1, *p) if norm == "group" else M.batch_norm_act(x, None, None, *p, training=True)
        )

    def stock(x: Tensor, *p: Tensor) -> Tensor:
        return F.group_norm(x, 1, *p) if norm == "group" else F.batch_norm(x, None, None, *p, training=True)

    tensors = [x, *parameters(shape[1], torch.float32)]
    for mine, exact in zip(run(ours, tensors, grads), run(stock, tensors, grads, torch.float64), strict=True):
        assert (mine - exact).abs().max() <= 8 * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_activations_as_exact_as_stock(dtype: torch.dtype, act: str | None, training: bool) -> None:
    shape = (6, 40, 15, 17)  # many channels: the worst of few would be luck
    tensors = [normal(shape, dtype, 0), *parameters(shape[1], dtype)]
    grads = [normal(shape, dtype, 5)]
    running = () if training else (normal((40,), dtype, 3), uniform((40,), dtype, 4, 0.5, 2))
    ours, stock = (batch_norm(f, act, training, running) for f in (M.batch_norm_act, STOCK["batch_norm_act"]))
    want = run(stock, tensors, grads, torch.float64)
    # Where the activation has a kink, an input that rounds to its other side has the other slope: in both, but not in the
    # same elements. Those are left out of the worst case by the root mean square alone.
    mine, theirs = run(ours, tensors, grads), run(stock, tensors, grads)
    if act in ("relu", "leaky_relu", "hardswish"):
        kinks = (mine[1].double() - want[1]).abs() > 0.05 * want[1].abs().max()
        kinks |= (theirs[1].double() - want[1]).abs() > 0.05 * want[1].abs().max()
        assert kinks.double().mean() < 1e-2
        for found in (mine, theirs, want):
            found[1] = torch.where(kinks, 0, found[1])
    assert_as_good_as_stock("y input weight bias", mine, theirs, want)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_gradients_wanted_alone(norm: str) -> None:
    """Each set of gradients comes as it does among all, to the bit."""
    shape = (7, 12, 9, 5)
    x, (weight, bias) = inputs("normal", shape, torch.float32), parameters(12, torch.float32)
    grad = normal(shape, torch.float32, 5)

    def gradients(wanted: tuple[bool, ...]) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_(want) for t, want in zip((x, weight, bias), wanted, strict=True)]
        if norm == "group":
            y = M.group_norm(leaves[0], 3, *leaves[1:])
        else:
            y = M.batch_norm_act(leaves[0], None, None, *leaves[1:], True)
        y.backward(grad)
        return [leaf.grad for leaf in leaves]

    every = gradients((True, True, True))
    for wanted in itertools.product((True, False), repeat=3):
        if any(wanted):
            for own, full, want in zip(gradients(wanted), every, wanted, strict=True):
                assert (own is not None) == want
                assert own is None or (full is not None and torch.equal(own, full))


def test_layouts_and_missing_parameters() -> None:
    base = normal((4, 6, 5, 8), torch.float64, 0)
    makes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(2, 3),
        lambda x: x[:, :, ::2],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.contiguous(memory_format=torch.channels_last)[:, :, 1:],
        lambda x: x.unsqueeze(-1).contiguous(memory_format=torch.channels_last_3d),
        lambda x: x[:, :, :1, :1],
    ]
    for make in makes:
        for with_parameters in (False, True):
            tensors = [base, *(parameters(6, torch.float64) if with_parameters else [])]
            grads = [normal(tuple(make(base).shape), torch.float64, 3)]
            for f, g in ((M.group_norm, F.group_norm), (M.batch_norm_act, STOCK["batch_norm_act"])):

                def of(function: Callable[..., Any], group: bool, make: Any = make) -> Callable[..., Any]:
                    if group:
                        return lambda x, *p: function(make(x), 3, *p)
                    return lambda x, *p: function(make(x), None, None, *(p or (None, None)), True, act="silu")

                mine = run(of(f, f is M.group_norm), tensors, grads)
                want = run(of(g, f is M.group_norm), tensors, grads)
                for a, b in zip(mine, want, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_bytes_kept() -> None:
    """A conv's output before, the next conv's input after, and the statistics: nothing for the activation itself."""
    channels = 32
    net = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        memkit.nn.BatchNorm2d(channels, act="silu"),
        nn.Conv2d(channels, 4, 1),
    ).bfloat16()
    x = normal((2, 3, 32, 32), torch.bfloat16, 0)
    between = 2 * channels * 32 * 32 * 2
    # Beside the two tensors: mean and variance of each channel.
    assert measure(lambda: net(x)).saved == 2 * between + 2 * channels * 8
    stock = nn.Sequential(net[0], nn.BatchNorm2d(channels).bfloat16(), nn.SiLU(), net[2])
    assert measure(lambda: stock(x)).saved >= 3 * between
    group = nn.Sequential(net[0], memkit.nn.GroupNorm(4, channels).bfloat16(), net[2])
    assert measure(lambda: group(x)).saved == 2 * between + 2 * (2 * 4) * 8


def test_autocast() -> None:
    x = normal((4, 8, 5, 5), torch.float32, 0)
    with torch.autocast("cpu", torch.bfloat16):
        for out, want in (
            (M.group_norm(x, 2), F.group_norm(x, 2)),
            (
                M.batch_norm_act(x, None, None, training=True, act="relu"),
                F.batch_norm(x, None, None, training=True).relu(),
            ),
        ):
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, want.bfloat16())


# -- modules ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_norm_modules_train_as_their_twins(dims: int, track: bool, momentum: float | None) -> None:
    name = f"BatchNorm{dims}d"
    ours, twin = (
        getattr(module, name)(6, momentum=momentum, track_running_stats=track) for module in (memkit.nn, nn)
    )
    for seed in range(4):
        x = normal((5, 6, *([4] * dims if dims > 1 else [])), torch.float32, seed)
        if seed == 3:
            ours.eval(), twin.eval()
        grads = [normal(tuple(x.shape), torch.float32, 9)]
        for a, b in zip(run(ours, [x], grads), run(twin, [x], grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.state_dict(), twin.state_dict())


@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_batch_norm_modules_train_when_traced(momentum: float) -> None:
    norm = memkit.nn.BatchNorm2d(3, act="relu", momentum=momentum)
    traced = torch.jit.trace(copy.deepcopy(norm), normal((2, 3, 4, 4), torch.float32, 0), check_trace=False)
    traced.load_state_dict(norm.state_dict())
    for seed in range(3):
        x = normal((2, 3, 4, 4), torch.float32, seed)
        torch.testing.assert_close(traced(x), norm(x))
    torch.testing.assert_close(traced.state_dict(), norm.state_dict())


def test_a_transform_that_refuses_changes_nothing() -> None:
    norm, x = memkit.nn.BatchNorm2d(2), normal((2, 2, 3, 3), torch.float32, 0)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda p: torch.func.functional_call(norm, p, (x,)).sum())(
            dict(norm.named_parameters())
        )
    assert norm.num_batches_tracked == 0
    assert not norm.running_mean.any()


def test_state_that_training_changed_has_another_version() -> None:
    norm = memkit.nn.BatchNorm1d(3)
    before = {name: each._version for name, each in norm.named_buffers()}
    norm(normal((4, 3), torch.float32, 0))
    assert all(each._version > before[name] for name, each in norm.named_buffers())


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, *LOW], ids=str)
def test_running_statistics_move_in_their_own_dtype(
    dtype: torch.dtype, momentum: float, device: torch.device
) -> None:
    """Of few parts, of many and of columns, those that a kernel takes in different ways; with a gradient and without."""
    for shape, grad in (((3, 5, 40), True), ((40, 3, 7), False), ((700, 6), True)):
        x = (normal(shape, torch.float32, 0) + 3).to(device).requires_grad_(grad)
        mean = normal(shape[1:2], dtype, 1).to(device)
        variance = uniform(shape[1:2], dtype, 2, 0.5, 2).to(device)
        others = [each.clone() for each in (mean, variance)]
        y = M.batch_norm_act(x, mean, variance, training=True, momentum=momentum, act="relu")
        assert mean._version == variance._version == 1
        assert y.requires_grad == grad
        dims = [d for d in range(x.dim()) if d != 1]
        found = torch.var_mean(x.detach().double(), dims)
        for running, before, new in zip((mean, variance), others, found[::-1], strict=True):
            want = before.double() + momentum * (new - before.double())
            torch.testing.assert_close(running, want.to(dtype))
            assert momentum != 0 or torch.equal(running, before)
        y = M.batch_norm_act(x, mean, variance, act="relu")
        assert mean._version == variance._version == 1
        torch.testing.assert_close(y, F.batch_norm(x, mean.float(), variance.float()).relu())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_parameters_of_another_dtype(dtype: torch.dtype, kind: torch.dtype, device: torch.device) -> None:
    """Their gradients are of their own, rounded once."""
    shape = (5, 24, 6, 7)
    x, grad = (normal(shape, kind, seed).to(device) for seed in (0, 5))
    own = [each.to(device) for each in parameters(24, dtype)]
    for groups in (0, 2, 12):

        def call(x: Tensor, *p: Tensor, groups: int = groups) -> Tensor:
            return M.group_norm(x, groups, *p) if groups else M.batch_norm_act(x, None, None, *p, True)

        mine, wide = run(call, [x, *own], [grad]), run(call, [x, *(p.float() for p in own)], [grad])
        for a, b in zip(mine, wide, strict=True):
            torch.testing.assert_close(a.float(), b.to(a.dtype).float())
        assert [each.dtype for each in mine] == [kind, kind, dtype, dtype]


def test_modules_are_their_twins() -> None:
    pairs = [
        (memkit.nn.LayerNorm((3, 4), 1e-6, bias=False), nn.LayerNorm((3, 4), 1e-6, bias=False)),
        (memkit.nn.RMSNorm(4, elementwise_affine=False), nn.RMSNorm(4, elementwise_affine=False)),
        (memkit.nn.GroupNorm(2, 4, affine=False), nn.GroupNorm(2, 4, affine=False)),
        (
            memkit.nn.BatchNorm2d(4, 1e-3, 0.2, dtype=torch.float64),
            nn.BatchNorm2d(4, 1e-3, 0.2, dtype=torch.float64),
        ),
    ]
    for ours, twin in pairs:
        assert isinstance(ours, type(twin))
        assert list(ours.state_dict()) == list(twin.state_dict())
        assert repr(ours) == repr(twin)
        x = normal((5, 4, 3, 4), next(ours.parameters(), torch.zeros(1)).dtype, 0)
        torch.testing.assert_close(ours(x), twin(x), rtol=1e-5, atol=1e-5)
        twin.__class__ = type(ours)  # as memkit.swap does
        torch.testing.assert_close(twin(x), ours(x))
    norm = memkit.nn.BatchNorm1d(3, act="leaky_relu", negative_slope=0.2)
    assert repr(norm).endswith("act='leaky_relu', negative_slope=0.2)")
    assert memkit.nn.LayerNorm(3, inplace="auto", save="input").save == "input"


# -- errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "make"),
    [
        (ValueError, "at least 2 dimensions", lambda x: M.group_norm(x[0, 0], 1)),
        (ValueError, "channels that num_groups divides, got 6 and 4", lambda x: M.group_norm(x, 4)),
        (ValueError, "num_groups of at least 1, got 0", lambda x: M.group_norm(x, 0)),
        (TypeError, "num_groups to be an int, got str", lambda x: M.group_norm(x, "2")),
        (TypeError, "num_groups to be an int, got float", lambda x: M.group_norm(x, 2.0)),
        (ValueError, r"a weight of shape \[6\], got \[5\]", lambda x: M.group_norm(x, 2, torch.ones(5))),
        (TypeError, "float16 or bfloat16", lambda x: M.batch_norm_act(x.int(), None, None, training=True)),
        (ValueError, "running_mean and running_var", lambda x: M.batch_norm_act(x, None, None)),
        (
            ValueError,
            "both running_mean and running_var or neither, got one",
            lambda x: M.batch_norm_act(x, torch.zeros(x.shape[1]), None, training=True),
        ),
        (ValueError, "6 means and variances", lambda x: M.batch_norm_act(x, torch.ones(5), torch.ones(5))),
        (
            ValueError,
            "more than 1 value per channel",
            lambda x: M.batch_norm_act(x[:1, :, 0], None, None, training=True),
        ),
        (
            ValueError,
            r"an eps above 0 when training, got 0\.0",
            lambda x: M.batch_norm_act(x, None, None, training=True, eps=0.0),
        ),
        (
            ValueError,
            r"an eps of at least 0, got -0\.1",
            lambda x: M.batch_norm_act(x, torch.zeros(6), torch.ones(6), eps=-0.1),
        ),
        (
            TypeError,
            "eps to be a number, got NoneType",
            lambda x: M.batch_norm_act(x, None, None, training=True, eps=None),
        ),
        (TypeError, "a str, got int", lambda x: memkit.nn.BatchNorm2d(6, act=3)),
        (ValueError, "one of gelu", lambda x: memkit.nn.BatchNorm2d(6, act="relux")),
        (TypeError, "parameters", lambda x: memkit.nn.BatchNorm2d(6, act="elu", alpa=1.0)),
        (TypeError, "with act=, got epsilon alone", lambda x: memkit.nn.BatchNorm2d(6, epsilon=1e-3)),
        (TypeError, "parameters", lambda x: M.batch_norm_act(x, None, None, training=True, act="relu", a=1)),
        (ValueError, "", lambda x: M.batch_norm_act(x, None, None, training=True, act="what")),
        (RuntimeError, "one device", lambda x: M.group_norm(x, 2, torch.ones(6, device="meta"))),
    ],
)
def test_errors_say_what_was_expected(
    error: type[Exception], text: str, make: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(error, match=f"expected .*{text}"):
        make(normal((4, 6, 3), torch.float32, 0))


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(5), torch.ones(6, 1), torch.ones(6, dtype=torch.long), torch.ones(6, device="meta")],
)
def test_running_statistics_that_do_not_fit_leave_the_others_alone(wrong: Tensor) -> None:
    x, right = normal((4, 6, 3, 3), torch.float32, 0), torch.zeros(6)
    weight = torch.randn(2, 6, 1, 1)
    for call in (
        lambda mean, variance: M.batch_norm_act(x, mean, variance, training=True),
        lambda mean, variance: M.norm_act_conv2d(
            x, weight, running_mean=mean, running_var=variance, training=True
        ),
    ):
        for pair in ((right, wrong), (wrong, right)):
            with pytest.raises(
                ValueError, match=r"_(act|conv2d): expected running statistics of 6 .* on cpu, got "
            ):
                call(*pair)
        assert right.count_nonzero() == 0


@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_input_that_is_not_finite_in_evaluation(dtype: torch.dtype, layout: str, act: str | None) -> None:
    """Its gradient is finite: with given statistics x has no part in it."""
    shape = SHAPES[layout]
    running = (normal(shape[1:2], torch.float32, 3), uniform(shape[1:2], torch.float32, 4, 0.5, 2))
    x = normal(shape, dtype, 0)
    for i, value in enumerate((torch.inf, -torch.inf, torch.nan)):
        x.view(-1)[i::7] = value
    grad, found = normal(shape, dtype, 5), []
    for function in (M.batch_norm_act, STOCK["batch_norm_act"]):
        call = batch_norm(function, act, False, running)
        given = x.clone().requires_grad_()
        found.append(torch.autograd.grad(call(given, *parameters(shape[1], dtype)), given, grad)[0])
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[0], found[1], rtol=0.02 if dtype.itemsize == 2 else 1e-5, atol=1e-2)


def test_nothing_to_normalise() -> None:
    for shape in ((0, 4, 3), (2, 4, 0)):
        x = torch.randn(shape).requires_grad_()
        out = M.group_norm(x, 2)
        out.sum().backward()
        assert out.shape == x.grad.shape == x.shape
        out = M.batch_norm_act(x, torch.zeros(4), torch.ones(4), act="relu")
        assert out.shape == x.shape


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (4, 3, 0)], ids=str)
def test_an_empty_batch_is_a_training_step_without_statistics(shape: tuple[int, ...]) -> None:
    for training_step in (F.batch_norm, M.batch_norm_act):
        x, weight = torch.zeros(shape, requires_grad=True), torch.ones(3, requires_grad=True)
        mean, variance = torch.zeros(3), torch.ones(3)
        y = training_step(x, mean, variance, weight, training=True)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
        assert torch.equal(weight.grad, torch.zeros(3))
        assert torch.equal(mean, torch.zeros(3))
        assert torch.equal(variance, torch.ones(3))


def test_an_empty_batch_before_a_convolution() -> None:
    x, kernel = torch.zeros(0, 3, 4, 4, requires_grad=True), torch.randn(5, 3, 3, 3, requires_grad=True)
    mean, variance = torch.zeros(3), torch.ones(3)
    y = M.norm_act_conv2d(
        x, kernel, padding=1, running_mean=mean, running_var=variance, training=True, act="relu"
    )
    y.sum().backward()
    assert y.shape == (0, 5, 4, 4)
    assert torch.equal(kernel.grad, torch.zeros_like(kernel))
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(variance, torch.ones(3))


def test_expanded_running_statistics_leave_the_others_alone() -> None:
    mean = torch.zeros(3)
    with pytest.raises(RuntimeError, match="batch_norm_act: expected running statistics to be written"):
        M.batch_norm_act(torch.randn(4, 3), mean, torch.ones(1).expand(3), training=True)
    assert torch.equal(mean, torch.zeros(3))


def test_changed_running_statistics_are_noticed() -> None:
    norm = memkit.nn.BatchNorm1d(3).eval()
    x = normal((4, 3), torch.float32, 0).requires_grad_()
    out = norm(x)
    norm.train()(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("act", [None, "relu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(3, 70, 24, 24), (2, 5, 200, 101), (4, 9, 2, 3), (6, 5), (2, 1, 3)], ids=str
)
@pytest.mark.parametrize("last", [False, True])
def test_both_passes_of_backward_in_one_are_the_two(
    shape: tuple[int, ...], dtype: torch.dtype, act: str | None, last: bool
) -> None:
    """But for the order of sums, whatever is worked on at a time; and a gradient that others hold stays as it is."""
    form = torch.channels_last if last and len(shape) == 4 else torch.contiguous_format
    x = torch.randn(shape, dtype=dtype).contiguous(memory_format=form).requires_grad_()
    weight, bias = (torch.randn(shape[1], dtype=dtype, requires_grad=True) for _ in range(2))
    grad = torch.randn(shape, dtype=dtype).contiguous(memory_format=form)
    before = grad.clone()
    out = M.batch_norm_act(x, None, None, weight, bias, training=True, act=act)
    got = torch.autograd.grad(out, [x, weight, bias], grad)
    assert torch.equal(grad, before)

    with torch.no_grad():
        ops = torch.ops.memkit
        mean, variance = ops._channel_moments(x, 0)
        how = (weight, bias, 1e-5, act or "", [])
        dz, dz_x_hat, c1, c2 = ops._channel_norm_sums(grad, x, 0, mean, variance, *how)
        dx = ops._channel_norm_backward(grad, x, 0, mean, variance, weight, bias, c1, c2, *how[2:])
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got[0], dx, rtol=4 * unit, atol=4 * unit * dx.abs().max().item())
    terms = grad.double().abs().transpose(0, 1).flatten(1).sum(1).max().item()  # of a channel's sums
    summed = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for ours, theirs in zip(got[1:], (dz_x_hat, dz), strict=True):
        torch.testing.assert_close(ours, theirs.to(dtype), rtol=unit, atol=4 * summed * terms)
