"""Alpha dropout, the forms that drop whole features, the modules, and what all of them refuse."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dropout_cases import mask, seeded
from torch import nn

import memkit
import memkit.functional as M


def test_alpha_dropout() -> None:
    x = F.selu(torch.randn(1 << 18))
    x = (x - x.mean()) / x.std()
    for p in (0.1, 0.5):
        y = seeded(lambda p=p: M.alpha_dropout(x, p, True))
        assert abs(y.mean()) < 0.02
        assert abs(y.std() - 1) < 0.02
        dropped = mask((1 << 18,), p, dtype=torch.float32) == 0
        a = (1.7580993408473766**2 * p + 1) ** -0.5 * (1 - p) ** -0.5
        torch.testing.assert_close(y[dropped], torch.full_like(y[dropped], a * 1.7580993408473766 * (p - 1)))
        torch.testing.assert_close(y[~dropped], x[~dropped] * a + a * 1.7580993408473766 * p)
    channels = M.feature_alpha_dropout(torch.randn(512, 64, 8), 0.3, True)
    assert abs(channels.mean()) < 0.02
    assert abs(channels.std() - 1) < 0.02
    constant = (channels == channels[..., :1]).all(-1).float().mean()
    assert abs(constant - 0.3) < 0.02


@pytest.mark.parametrize(
    ("name", "shape", "dims"),
    [
        ("dropout1d", (20, 30, 5), 2),
        ("dropout1d", (30, 5), 1),
        ("dropout2d", (20, 30, 2, 3), 2),
        ("dropout3d", (20, 30, 2, 2, 2), 2),
        ("dropout3d", (30, 2, 2, 2), 1),
        ("drop_path", (500, 2, 3), 1),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.filterwarnings("ignore:dropout")
def test_whole_features(name: str, shape: tuple[int, ...], dims: int, inplace: bool) -> None:
    x = torch.ones(shape, requires_grad=True)
    y = getattr(M, name)(x * 1, 0.4, inplace=inplace)
    flat = y.detach().flatten(dims)
    assert (flat == flat[..., :1]).all()
    values = set(flat.unique().tolist())
    assert values == {0.0, torch.tensor(1 / 0.6).item()}
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope, y.detach())
    wrong = x.flatten()[:6].view(6) if name.startswith("dropout") and name != "dropout3d" else x.sum()
    with pytest.raises(ValueError, match=f"{name}: expected an input of"):
        getattr(M, name)(wrong, 0.4)


@pytest.mark.parametrize("name", ["dropout2d", "dropout3d"])
@pytest.mark.parametrize("dims", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.filterwarnings("ignore:dropout")
def test_what_shares_a_mask_is_as_in_stock(name: str, dims: int, inplace: bool) -> None:
    """Which of the first dimensions each element of the result stands alone for, and which it shares."""
    ours, stock = getattr(M, name), getattr(F, name)
    x = torch.ones((24, 24, 3, 3, 3, 3)[:dims])
    for function in (ours, stock):
        y = function(x.clone(), 0.5, True, inplace)
        varies = [not (y == y.narrow(dim, 0, 1)).all() for dim in range(dims)]
        if function is ours:
            mine = varies
    assert varies == mine
    with (
        pytest.warns(UserWarning, match=f"{name}: expected an input")
        if (name, dims)
        not in (
            ("dropout2d", 4),
            ("dropout3d", 4),
            ("dropout3d", 5),
        )
        else nullcontext()
    ):
        ours(x, 0.5)


def test_drop_path_without_scaling() -> None:
    y = M.drop_path(torch.ones(300, 4), 0.5, scale_by_keep=False)
    assert set(y.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    "name", ["Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"]
)
def test_modules_are_their_twins(name: str) -> None:
    ours, stock = getattr(memkit.nn, name)(0.3), getattr(nn, name)(0.3)
    assert isinstance(ours, type(stock))
    assert (repr(ours), ours.state_dict()) == (repr(stock), {})
    x = torch.randn(16, 16, 4, 4, 4)[
        (slice(None),) * 2 + (0,) * {"Dropout1d": 2, "Dropout2d": 1}.get(name, 0)
    ]
    assert not torch.equal(ours(x), x)
    assert torch.equal(ours.eval()(x), x)
    with pytest.raises(ValueError, match="between 0 and 1"):
        getattr(memkit.nn, name)(1.5)


@pytest.mark.filterwarnings("ignore:dropout")
def test_arguments_of_other_types() -> None:
    x = torch.randn(4, 6)
    for function in (
        M.normalize,
        M.dropout1d,
        M.dropout2d,
        M.dropout3d,
        M.drop_path,
        M.feature_alpha_dropout,
    ):
        with pytest.raises(TypeError, match=f"{function.__name__}: expected input to be a Tensor, got list"):
            function([1.0])
        if function is not M.normalize:
            with pytest.raises(TypeError, match=f"{function.__name__}: expected p to be a number, got str"):
                function(x, "a")
    for module in (memkit.nn.DropPath, lambda p: memkit.nn.MLP(4, dropout=p)):
        with pytest.raises(TypeError, match=r"expected .* to be a number, got NoneType"):
            module(None)
    with pytest.raises(TypeError, match="dropout_linear: expected p to be a number, got str"):
        M.dropout_linear(x, torch.randn(2, 6), p="a")


def test_bad_input() -> None:
    x = torch.randn(4, 6)
    state = torch.get_rng_state()
    for args, kwargs, message in (
        ((0.5, 1), {}, "dropout: expected a bool, got int"),
        ((0.5, np.True_), {}, "dropout: expected a bool, got numpy.bool"),
        (("x",), {}, "dropout: expected a number, got str"),
        ((0.5,), {"generator": 42}, "dropout: expected a torch.Generator or None, got int"),
    ):
        with pytest.raises(TypeError, match=message):
            M.dropout(x, *args, **kwargs)
    with pytest.raises(ValueError, match="drop_path: expected inplace"):
        M.drop_path(x, 0.5, inplace="yes")
    for function in (M.dropout_add, lambda x, y, **kw: M.bias_dropout_add(x, x[0], y, **kw)):
        with pytest.raises(
            RuntimeError, match="dropout_add: expected, in place, a residual in memory of its own"
        ):
            function(x, x.view(4, 6), inplace=True)
    with pytest.raises(RuntimeError, match="dropout_add: expected a dense"):
        M.dropout_add(x, x.to_sparse())
    assert torch.equal(state, torch.get_rng_state())
    for p in (-0.1, 1.1, math.nan):
        for function in (M.dropout, M.dropout1d, M.drop_path, M.act_dropout):
            with pytest.raises(ValueError, match="expected a probability p in"):
                function(x, p=p)
    with pytest.raises(
        TypeError, match=r"dropout: expected float32, float64, float16 or bfloat16, got torch\.int64"
    ):
        M.dropout(torch.ones(3, dtype=torch.long))
    for function, shape in (
        (M.dropout1d, (2, 3)),
        (M.dropout2d, (2, 3, 4)),
        (M.dropout3d, (2, 3, 4, 5)),
        (M.drop_path, (2, 3)),
        (M.feature_alpha_dropout, (2, 3)),
    ):
        whole = torch.ones(shape, dtype=torch.long)
        for p in (0.5, 1.0):
            with pytest.raises(
                TypeError, match=rf"{function.__name__}: expected float32, .*, got torch\.int64 \[2"
            ):
                function(whole, p, True)
    with pytest.raises(ValueError, match="feature_alpha_dropout: expected inplace True, False or 'auto'"):
        M.feature_alpha_dropout(x, 0.5, True, "yes")
    with pytest.raises(
        TypeError, match=r"act_dropout: expected parameters \['negative_slope'\] for leaky_relu, got"
    ):
        M.act_dropout(x, "leaky_relu", slope=0.2)
    with pytest.raises(ValueError, match="dropout: expected inplace True, False or 'auto', got 1"):
        M.dropout(x, inplace=1)
    for function, shape in (
        (M.alpha_dropout, (4, 6)),
        (M.dropout2d, (2, 3, 4)),
        (M.drop_path, (4, 6)),
        (M.feature_alpha_dropout, (2, 3, 4)),
    ):
        with pytest.raises(ValueError, match=f"^{function.__name__}: expected inplace .*, got 1"):
            function(torch.ones(shape), 0.5, True, 1)
    with pytest.raises(ValueError, match=r"bias_dropout_add: expected a bias of shape \[6\]"):
        M.bias_dropout_add(x, torch.zeros(4), x)
    with pytest.raises(ValueError, match="activation: expected one of"):
        M.act_dropout(x, "swish")
    leaf = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf that requires grad"):
        M.dropout(leaf, inplace=True)
    with pytest.raises(RuntimeError, match="residual in memory of its own"):
        M.dropout_add(x, x, 0.5, inplace=True)
    before = x.clone()
    ops = torch.ops.memkit
    for seed, drop, message in (
        (torch.tensor(1.0), [0.5, 2.0, 0.0, 0.0], "expected as seed one int64"),
        (torch.tensor([1, 2]), [0.5, 2.0, 0.0, 0.0], "expected as seed one int64"),
        (torch.tensor(1), [0.5], "beside a seed, got 1 numbers"),
        (torch.tensor(1), [1.5, 2.0, 0.0, 0.0], r"expected a probability in \[0, 1\], got 1.5"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            ops._activation_(x, None, -1, "identity", [], "auto", None, seed, drop)
    with pytest.raises(ValueError, match="expected no activation beside a residual"):
        ops._activation(x, None, -1, "relu", [], "auto", x)
    assert torch.equal(x, before)
