"""In place never corrupts: each way autograd can be hurt by an overwritten tensor ends in a right gradient or an error."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkit.functional as M
from memkit import Pool
from memkit.memory import measure

X = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W = torch.randn(6, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
# One function whose slope comes from the output alone, one that needs the bits.
ACTS = {"tanh": (M.tanh, torch.tanh), "gelu": (M.gelu, F.gelu)}
acts = pytest.mark.parametrize("act", ACTS)


def gradient(fn, x=X):
    x = x.clone().requires_grad_()
    (fn(x) * W).sum().backward()
    return x.grad


# -- producers ---------------------------------------------------------------------------------------------------------

torch.manual_seed(0)
LINEAR = nn.Linear(10, 10, dtype=torch.float64)
WEIGHT = torch.randn(10, 10, dtype=torch.float64)
KERNEL = torch.randn(6, 6, 3, dtype=torch.float64)
GAIN = torch.randn(6, 10, dtype=torch.float64)


class Relu(torch.autograd.Function):
    """Keeps its input, unlike PyTorch's operator of that name."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] > 0)


class Tanh(torch.autograd.Function):
    """Keeps its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)


SAFE = {
    "linear": LINEAR,
    "matmul": lambda x: x @ WEIGHT,
    "conv": lambda x: F.conv1d(x.unsqueeze(0), KERNEL, padding=1).squeeze(0),
    "add": lambda x: x + 1,
    "mul": lambda x: x * GAIN,
    "layer_norm": lambda x: F.layer_norm(x, (10,)),
    "rms_norm": lambda x: F.rms_norm(x, (10,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "dropout": lambda x: (torch.manual_seed(2), F.dropout(x, 0.5))[1],
    "gelu": F.gelu,
    "silu": F.silu,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "glu": lambda x: F.glu(torch.cat([x, x], -1), -1),
    "cat": lambda x: torch.cat([x[:3], x[3:]]),
    "memkit from the input": lambda x: M.silu(x, save="input"),
    "a function of Python's": Relu.apply,
}


@acts
@pytest.mark.parametrize("producer", SAFE)
def test_after_a_producer_that_does_not_keep_its_output(act, producer):
    ours, stock = ACTS[act]
    got = gradient(lambda x: ours(SAFE[producer](x), inplace=True))
    torch.testing.assert_close(got, gradient(lambda x: stock(SAFE[producer](x))), rtol=1e-6, atol=1e-7)


UNSAFE = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "sqrt": lambda x: torch.sqrt(x.abs() + 1),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "relu": F.relu,
    "relu_": lambda x: F.relu_(x * 1),
    "elu_": lambda x: F.elu(x * 1, inplace=True),
    "leaky_relu_": lambda x: F.leaky_relu(x * 1, inplace=True),
    "cumprod": lambda x: x.cumprod(-1),
    "memkit.tanh": M.tanh,
    "memkit.gelu in place": lambda x: M.gelu(x * 1, inplace=True),
    "memkit.silu from the output": lambda x: M.silu(x, save="output"),
}


@acts
@pytest.mark.parametrize("producer", UNSAFE)
def test_after_a_producer_that_keeps_its_output(act, producer):
    ours, stock = ACTS[act]
    with pytest.raises(
        RuntimeError, match=rf"^{act}: expected, in place, .*torch.float64 \[6, 10\].*Backward|_backward"
    ):
        gradient(lambda x: ours(UNSAFE[producer](x), inplace=True))
    got = gradient(lambda x: ours(UNSAFE[producer](x), inplace="auto"))
    torch.testing.assert_close(got, gradient(lambda x: stock(UNSAFE[producer](x))), rtol=1e-6, atol=1e-7)


@acts
def test_after_a_function_of_pythons_that_keeps_its_output(act):
    ours, stock = ACTS[act]
    with pytest.raises(RuntimeError, match=r"expected, in place|modified by an inplace operation"):
        gradient(lambda x: ours(Tanh.apply(x), inplace=True))
    got = gradient(lambda x: ours(Tanh.apply(x), inplace="auto"))
    torch.testing.assert_close(got, gradient(lambda x: stock(torch.tanh(x))), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("view", [lambda y: y.view(-1), lambda y: y.t(), lambda y: y[1:]])
def test_a_view_of_a_kept_output_is_refused_too(view):
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="keeps it for its backward"):
        M.gelu(view(torch.sigmoid(x)), inplace=True)


def test_attention_output_is_refused_or_raises_in_backward():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = F.scaled_dot_product_attention(q, q, q)
    with pytest.raises(RuntimeError):
        M.gelu(out, inplace=True).sum().backward()


# -- what else may hold the tensor ---------------------------------------------------------------------------------------


def test_leaf_and_view_of_leaf():
    leaf = X.clone().requires_grad_()
    before = leaf.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"^gelu: expected, in place.*a leaf that requires grad; use inplace=False"
    ):
        M.gelu(leaf, inplace=True)
    with pytest.raises(RuntimeError, match="a view of a leaf that requires grad"):
        M.gelu(leaf.view(-1), inplace=True)
    assert torch.equal(leaf.detach(), before)
    for x in (leaf, leaf.view(-1)):
        assert M.gelu(x, inplace="auto").data_ptr() != leaf.data_ptr()
    with torch.no_grad():
        assert M.gelu(leaf, inplace=True) is leaf
    torch.testing.assert_close(leaf.detach(), F.gelu(before))


@pytest.mark.parametrize("split", [lambda h: h.chunk(2, -1), lambda h: h.split(5, -1), lambda h: h.unbind(0)])
def test_one_of_several_views(split):
    h = X.clone().requires_grad_() * 1
    with pytest.raises(RuntimeError, match=r"silu: .*one of several views made by one call"):
        M.silu(split(h)[0], inplace=True)
    part = split(h)[0]
    assert M.silu(part, inplace="auto").data_ptr() != part.data_ptr()


@pytest.mark.parametrize(
    "view", [lambda h: h.view(-1), lambda h: h.t(), lambda h: h[1:4], lambda h: h[:, ::2]]
)
@acts
def test_a_plain_view_is_fine(act, view):
    ours, stock = ACTS[act]

    def through(fn, x):
        h = x * 2
        fn(view(h))
        return h  # the base sees what was done to its view

    def stock_on_view(v):
        v.copy_(stock(v.clone()))

    got = gradient(lambda x: through(lambda v: ours(v, inplace=True), x))
    torch.testing.assert_close(got, gradient(lambda x: through(stock_on_view, x)), rtol=1e-6, atol=1e-7)


def test_expanded_and_overlapping_memory():
    row = torch.randn(5)
    for x in (row.expand(3, 5), torch.as_strided(torch.randn(8), (3, 4), (2, 1))):
        before = x.clone()
        with pytest.raises(RuntimeError, match=r"relu: .*expanded or self-overlapping memory"):
            M.relu(x, inplace=True)
        assert torch.equal(x, before)
        assert torch.equal(M.relu(x, inplace="auto"), F.relu(before))
        assert torch.equal(x, before)


def test_a_bias_in_the_inputs_own_memory():
    x = torch.randn(4, 4)
    before = x.clone()
    with pytest.raises(RuntimeError, match="expected, in place, a bias in memory of its own"):
        M.bias_act(x, x[0], "relu", inplace=True)
    assert torch.equal(x, before)
    torch.testing.assert_close(M.bias_act(x, x[0], "relu"), F.relu(before + before[0]))


@acts
def test_an_input_another_operation_saved(act):
    ours, stock = ACTS[act]
    gain = torch.randn_like(X).requires_grad_()

    def forward(x, fn, **kwargs):
        h = x * 2
        product = h * gain  # keeps h for the gradient of gain
        return fn(h, **kwargs) + product

    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=rf"{act}: .*saved for its backward"):
        forward(x, ours, inplace=True)
    got = gradient(lambda x: forward(x, ours, inplace="auto"))
    torch.testing.assert_close(got, gradient(lambda x: forward(x, stock)), rtol=1e-6, atol=1e-7)


def test_a_later_saver_of_the_old_value_raises_in_backward():
    """Through torch.ops no reference count proves anything; the version counter still catches it."""
    gain = torch.randn_like(X).requires_grad_()
    h = X.clone().requires_grad_() * 2
    product = h * gain
    y = torch.ops.memkit.gelu_(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y + product).sum().backward()


def test_changing_an_output_saved_for_backward_raises():
    for keep, raises in (
        ({"inplace": True}, True),
        ({"save": "output"}, True),
        ({"save": "input"}, False),
    ):
        y = M.gelu(X.clone().requires_grad_() * 2, **keep)
        y += 1
        if raises:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()


def test_auto_keeps_memory_that_others_hold():
    h = X * 2
    assert M.gelu(h, inplace="auto") is h
    alias = (h := X * 2).view(-1)
    kept = alias.clone()
    M.gelu(h, inplace="auto")
    assert torch.equal(alias, kept)
    detached = (h := X * 2).detach()
    kept = detached.clone()
    M.gelu(h, inplace="auto")
    assert torch.equal(detached, kept)
    array = (h := X * 2).numpy()
    kept = array.copy()
    M.gelu(h, inplace="auto")
    assert (array == kept).all()
    view = (X * 2).view(-1)  # the base has no other holder: the view is as good as the base
    assert M.gelu(view, inplace="auto") is view


def in_use(pool, step):
    with pool.use():
        return step()


def in_replay(pool, step):
    with pool.replay(pool.record(step)) as replay:
        made = step()
    assert replay.served == replay.planned > 0
    return made


POOLED = {
    "empty": lambda pool: pool.empty(X.shape).copy_(X),
    "tagged": lambda pool: pool.full(X.shape, 0.5, tag="activations"),
    "strided": lambda pool: pool.new_like(X.t()).copy_(X.t()),
    "resized": lambda pool: pool.empty(1).resize_(1 << 15).fill_(1.0),
    "use": lambda pool: in_use(pool, lambda: X * 2),
    "replay": lambda pool: in_replay(pool, lambda: X * 2),
}


@pytest.mark.parametrize("made", POOLED)
def test_auto_overwrites_what_lies_in_a_pool(made):
    pool = Pool("8MiB")
    h = POOLED[made](pool)
    before = h.clone()
    assert M.gelu(h, inplace="auto") is h
    torch.testing.assert_close(h, F.gelu(before))
    alias = (h := POOLED[made](pool)).view(h.shape)
    assert M.gelu(h, inplace="auto") is not h
    torch.testing.assert_close(alias, before, rtol=0, atol=0)
    array = (h := POOLED[made](pool)).detach().numpy()
    assert M.gelu(h, inplace="auto") is not h
    assert (array == before.numpy()).all()


def test_auto_overwrites_what_a_profiler_saw_born_in_a_pool():
    pool = Pool("8MiB")
    with torch.profiler.profile(profile_memory=True):
        h = pool.full(X.shape, 0.5)
    assert M.gelu(h, inplace="auto") is h


def test_auto_is_out_of_place_where_the_output_is_not_enough():
    for call in (
        lambda h: M.gelu(h, inplace="auto", save="input"),
        lambda h: M.leaky_relu(h, -0.1, inplace="auto"),
    ):
        h = X * 2
        assert call(h) is not h
        assert torch.equal(h, X * 2)


def test_auto_overwrites_in_training_too():
    h = LINEAR(X)
    where = h.data_ptr()
    assert M.gelu(h, inplace="auto").data_ptr() == where


def test_inference_tensors():
    with torch.inference_mode():
        h = X * 2
        assert M.gelu(h, inplace=True) is h
    before = h.clone()
    with pytest.raises(RuntimeError, match="an inference tensor outside inference_mode"):
        M.gelu(h, inplace=True)
    assert torch.equal(h, before)


def test_overwriting_bumps_the_version():
    for context in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        h = X.clone()
        version = h._version
        with context:
            M.gelu(h, inplace=True)
        assert h._version == version + 1
    view = (h := X.clone())[1:]
    M.relu(view, inplace=True)
    assert h._version == 1


# -- checkpointing -------------------------------------------------------------------------------------------------------


@acts
@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpointed_block(act, reentrant):
    ours, stock = ACTS[act]
    got = gradient(
        lambda x: checkpoint(lambda h: ours(LINEAR(h), inplace=True), x * 2, use_reentrant=reentrant)
    )
    torch.testing.assert_close(got, gradient(lambda x: stock(LINEAR(x * 2))), rtol=1e-6, atol=1e-7)


@acts
@pytest.mark.parametrize("reentrant", [True, False])
def test_first_in_a_checkpointed_block(act, reentrant):
    ours, stock = ACTS[act]
    with pytest.raises(
        RuntimeError, match="a leaf that requires grad" if reentrant else "saved for its backward"
    ):
        gradient(
            lambda x: checkpoint(lambda h: LINEAR(ours(h, inplace=True)), x * 2, use_reentrant=reentrant)
        )
    got = gradient(
        lambda x: checkpoint(lambda h: LINEAR(ours(h, inplace="auto")), x * 2, use_reentrant=reentrant)
    )
    torch.testing.assert_close(got, gradient(lambda x: LINEAR(stock(x * 2))), rtol=1e-6, atol=1e-7)


# -- backward -------------------------------------------------------------------------------------------------------------


@acts
def test_a_second_backward_raises_and_a_retained_one_does_not(act):
    ours, _ = ACTS[act]
    y = ours(X.clone().requires_grad_() * 2, inplace=True).sum()
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@acts
def test_incoming_gradients_others_hold_are_left_alone(act):
    ours, stock = ACTS[act]
    for keep in ({"inplace": True}, {"save": "input"}, {"save": "output"}):
        given = W.clone()
        h = X.clone().requires_grad_() * 2
        ours(h, **keep).backward(given)
        assert torch.equal(given, W)

        def two_consumers(x, fn, **keep):
            h = x * 2
            y = fn(h, **keep)
            other = stock(x)
            return y + other  # both receive the same gradient tensor

        got = gradient(lambda x, keep=keep: two_consumers(x, ours, **keep))
        torch.testing.assert_close(got, gradient(lambda x: two_consumers(x, stock)), rtol=1e-6, atol=1e-7)

        x = X.clone().requires_grad_()
        y = ours(x * 2, **keep)
        z = y * 3
        z.retain_grad()
        y.retain_grad()
        (z * W).sum().backward()
        torch.testing.assert_close(z.grad, W)
        torch.testing.assert_close(y.grad, 3 * W)


def test_the_incoming_gradients_memory_is_reused():
    def allocations(fn, **keep):
        x = torch.randn(1000, requires_grad=True)
        out = (fn(x * 2, **keep) * 3).sum()
        return measure(out.backward).allocations

    stock = allocations(F.gelu)
    for keep in ({"inplace": True}, {"save": "input"}, {"save": "output"}):
        assert allocations(M.gelu, **keep) == stock - 1


@pytest.mark.parametrize("name", ["relu", "relu6", "hardtanh", "hardsigmoid", "hardswish"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_where_a_function_is_flat_no_gradient_passes(name, value):
    """Overflowing gradients of mixed precision stop where stock stops them."""
    x = torch.tensor([-50.0, -4.0, 0.5, 2.0])
    want = x.clone().requires_grad_()
    getattr(F, name)(want * 1).backward(torch.full_like(x, value))
    for keep in ({"inplace": True}, {"save": "input"}, {"save": "output"}):
        got = x.clone().requires_grad_()
        getattr(M, name)(got * 1, **keep).backward(torch.full_like(x, value))
        torch.testing.assert_close(got.grad, want.grad, equal_nan=True)


@pytest.mark.parametrize("layer", [2, 3])
def test_backward_reuses_a_gradient_that_is_a_view(layer):
    """Linear's backward hands back a view of what it computed, where there are more than two dimensions."""
    up, down = nn.Linear(8, 64), nn.Linear(64, 8)
    x = torch.randn(*(16,) * (layer - 1), 8)
    h = M.gelu(up(x), save="input")
    loss = down(h).sum()
    n = h.nbytes
    measured = measure(lambda: loss.backward())
    weights = sum(p.grad.nbytes for p in (*up.parameters(), *down.parameters()))
    assert measured.peak < weights + 2 * n  # the gradient of h, and nothing else of its size
