"""`F.scaled_dot_product_attention` with dropout in a layer's own code: a seed is kept, and no weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memkit import lean, swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

P, TOKENS, HEADS, WIDTH = 0.25, 24, 4, 8
SHAPE = 2, HEADS, TOKENS, WIDTH


class Attends(nn.Module):
    """As nanoGPT's layer calls it."""

    def __init__(self, dropout=P, **how):
        super().__init__()
        self.dropout, self.how = dropout, how

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, **self.how
        )


class ByPosition(Attends):
    def forward(self, q, k, v, mask=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, self.dropout, False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (y.view(*x.shape[:2], 4, 8).transpose(1, 2) for y in self.to_qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=P if self.training else 0.0, is_causal=True)
        return self.out(F.gelu(y.transpose(1, 2).flatten(2)))


def swapped(model, **how):
    swap(model, **how)
    return model


def given(shape=SHAPE, keys=None, **kwargs):
    """Query, key and value."""
    of_keys = keys or shape
    kwargs = {"dtype": torch.float64, "requires_grad": True, **kwargs}
    return torch.randn(shape, **kwargs), torch.randn(of_keys, **kwargs), torch.randn(of_keys, **kwargs)


def drawn(model, *args):
    torch.manual_seed(3)
    return model(*args)


KEYS = 2, HEADS, TOKENS + 5, WIDTH
CASES = {
    "plain": (given, lambda: None, {}),
    "causal": (given, lambda: None, {"is_causal": True}),
    "more keys, causal": (lambda: given(keys=KEYS), lambda: None, {"is_causal": True}),
    "scaled": (given, lambda: None, {"scale": 0.1}),
    "by one": (given, lambda: None, {"scale": 1}),
    "said of pairs": (given, lambda: torch.rand(TOKENS, TOKENS) > 0.3, {}),
    "said of keys": (given, lambda: torch.rand(2, 1, 1, TOKENS) > 0.3, {}),
    "nothing seen": (given, lambda: torch.arange(TOKENS)[:, None].expand(TOKENS, TOKENS) > 2, {}),
    "added": (given, lambda: torch.randn(HEADS, TOKENS, TOKENS, dtype=torch.float64), {}),
    "learned": (given, lambda: torch.randn(1, HEADS, 1, TOKENS, dtype=torch.float64).requires_grad_(), {}),
    "groups": (lambda: given(keys=(2, 2, TOKENS, WIDTH)), lambda: None, {"enable_gqa": True}),
    "one head": (lambda: given(SHAPE[1:]), lambda: torch.rand(HEADS, 1, TOKENS) > 0.3, {}),
}
cases = pytest.mark.parametrize("case", CASES)


def case_of(name):
    tensors, mask, how = CASES[name]
    return *tensors(), mask(), how


@cases
def test_weights_are_dropped_each_by_itself(case):
    q, k, v, mask, how = case_of(case)
    model = swapped(Attends(**how))
    once = torch.eye(k.shape[-2], dtype=q.dtype).expand(*k.shape[:-1], -1)  # its result is the weights
    stock = F.scaled_dot_product_attention(q, k, once, mask, **how)
    weights = drawn(model, q, k, once, mask)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], (stock / (1 - P))[kept])
    share = kept.sum() / (stock != 0).sum()
    assert 1 - P - 0.06 < share < 1 - P + 0.06
    groups = q.shape[1] // k.shape[1] if q.dim() == 4 else 1
    value = v.repeat_interleave(groups, 1) if groups > 1 else v
    torch.testing.assert_close(drawn(model, q, k, v, mask), weights @ value)
    assert drawn(model, q, k, v, mask).is_contiguous()


@cases
def test_gradients(case):
    q, k, v, mask, how = case_of(case)
    model = swapped(Attends(**how))
    learned = [mask] if mask is not None and mask.requires_grad else []

    def call(q, k, v, *learned):
        return drawn(model, q, k, v, *(learned or [mask]))

    assert torch.autograd.gradcheck(call, (q, k, v, *learned), fast_mode=True)


def test_keeps_query_key_and_value():
    tensors = given((2, HEADS, 256, WIDTH), dtype=torch.float32)
    of_weights = 2 * HEADS * 256 * 256 * 4
    for kind in (Attends, ByPosition):
        model = kind()
        before = measure(lambda m=model: m(*tensors).sum()).saved
        report = swap(model, sample=tensors, lean=False)
        after = measure(lambda m=model: m(*tensors).sum()).saved
        assert before >= 2 * of_weights
        assert after < 0.1 * of_weights
        (row,) = report.rows
        assert (row.path, row.after, row.saved) == ("scaled_dot_product_attention", "memkit", "seed")


def gradients(model, x, call=None):
    model.zero_grad()
    torch.manual_seed(2)
    (call or model)(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_inside_lean_and_checkpoints_are_those_outside(reentrant):
    model = swapped(Layer().double())
    x = torch.randn(2, TOKENS, 32, dtype=torch.float64, requires_grad=True)

    def again(x):
        return checkpoint(model, x, use_reentrant=reentrant)

    def inside(x, call=model):
        with lean():
            return call(x)

    wanted = gradients(model, x)
    for call in (inside, again, lambda x: inside(x, again)):
        for ours, theirs in zip(gradients(model, x, call), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        without = drawn(model, x)
    torch.testing.assert_close(drawn(model, x), without)


def test_report_says_where_nothing_is_dropped():
    tensors = given(dtype=torch.float32)
    (row,) = swap(Attends(0.0), sample=tensors).rows
    assert (row.after, row.saved) == ("unchanged", "mask")

    class Without(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert not swap(Without(), sample=tensors).rows


FEW = 2, HEADS, WIDTH - 1, WIDTH
STOCKS = {
    "no dropout": lambda: (Attends(0.0), given(), None),
    "in evaluation": lambda: (Attends().eval(), given(), None),
    "few keys": lambda: (Attends(), given(keys=FEW), None),
    "one token": lambda: (Attends(), given((HEADS, 1, WIDTH)), None),
    "five dimensions": lambda: (Attends(), given((2, *SHAPE)), None),
    "two dimensions": lambda: (Attends(), given(SHAPE[2:]), None),
    "nothing": lambda: (Attends(), given((0, *SHAPE[1:])), None),
}


@pytest.mark.parametrize("case", STOCKS)
def test_what_memkit_does_not_take_is_stocks(case):
    stock, tensors, mask = STOCKS[case]()
    model = swapped(copy.deepcopy(stock))
    torch.testing.assert_close(drawn(model, *tensors, mask), drawn(stock, *tensors, mask), rtol=0, atol=0)
    unswap(model)
    assert type(model) is Attends


WRONG = {
    "dropout": lambda: (Attends(1.5), given(), None),
    "mask and causal": lambda: (Attends(is_causal=True), given(), torch.ones(TOKENS, TOKENS).bool()),
    "mask's shape": lambda: (Attends(), given(), torch.ones(TOKENS, TOKENS + 1).bool()),
    "mask's dtype": lambda: (Attends(), given(), torch.ones(TOKENS, TOKENS).half()),
    "heads": lambda: (Attends(), given(keys=(2, 3, TOKENS, WIDTH)), None),
    "groups": lambda: (Attends(enable_gqa=True), given(keys=(2, 3, TOKENS, WIDTH)), None),
    "width": lambda: (Attends(), given(keys=(2, HEADS, TOKENS, 7)), None),
}


class TooMany(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, None, P, False, 0.5)


def test_what_stock_takes_by_name_alone():
    model = TooMany()
    with pytest.raises(TypeError):
        model(*given())
    with pytest.raises(TypeError):
        swapped(model)(*given())


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_raises_as_stock(case):
    stock, tensors, mask = WRONG[case]()
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        stock(*tensors, mask)
    with pytest.raises(theirs.type) as ours:
        swapped(copy.deepcopy(stock))(*tensors, mask)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 4])
def test_error_in_every_dtype(dtype, size):
    """Against what PyTorch's function computes, of the same weights: with no more than a few dropped."""
    p, shape = 1e-9, (2, HEADS, 128, 32)
    rounded = [(x * size).detach().to(dtype) for x in given(shape)[:2]] + [given(shape)[2].detach().to(dtype)]
    results = []
    for call, type_ in ((Attends(0.0), torch.float64), (swapped(Attends(p)), dtype), (Attends(p), dtype)):
        leaves = [x.to(type_).requires_grad_() for x in rounded]
        out = drawn(call, *leaves)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(type_)).sum().backward()
        results.append([out.detach().double(), *(x.grad.double() for x in leaves)])
    exact, ours, theirs = results
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


def test_scores_beyond_half_precisions_range():
    tensors = [300 * x.detach().half() for x in given()]
    assert swapped(Attends())(*tensors).isfinite().all()


def test_result_may_be_written_to():
    for tensors in (given(), given(SHAPE[1:])):
        model = swapped(Attends())
        out = drawn(model, *tensors)
        twice = out.detach() * 2
        out *= 2
        out.transpose(-1, -2)[..., 0, :].mul_(1)
        torch.testing.assert_close(out.detach(), twice)
        out.sum().backward()


def test_several_gradients_at_once():
    model, tensors = swapped(Attends()), given()
    out = drawn(model, *tensors)
    several = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, tensors, several, is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(several):
        for ours, wanted in zip(
            batched, torch.autograd.grad(out, tensors, one, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(ours[i], wanted)


def test_gradient_of_a_gradient_through_a_checkpoint():
    model, found = swapped(Layer().double()), []
    x = torch.randn(2, TOKENS, 32, dtype=torch.float64, requires_grad=True)
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        torch.manual_seed(1)
        (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_autocast_is_stocks_under_a_checkpoint():
    model, stock = swapped(Attends(), lean="call"), Attends()
    tensors = given((2, HEADS, 256, WIDTH), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(drawn(model, *tensors), drawn(stock, *tensors), rtol=0, atol=0)
        saved = [measure(lambda m=m: m(*tensors).sum()).saved for m in (model, stock)]
    assert saved[0] < 0.2 * saved[1]
