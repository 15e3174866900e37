"""Attention's dropout: a seed is kept, and the same is dropped in backward, under checkpoints, inside lean() and outside."""

import copy
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as stock
from test_swap_attention import HEADS, TOKENS, WIDTH, Model, assert_same, step, written_out, written_out_as
from torch import nn
from torch.utils.checkpoint import checkpoint

from memkit import lean, swap
from memkit.memory import measure
from memkit.swap.library.attend import Scores, attend, stock_dropout

__all__ = ["written_out_as"]  # a fixture

pytestmark = pytest.mark.usefixtures("repeatable")

MASKED = {"dropout": 0.3, "mask": True}
FUSED = {"dropout": 0.3, "function": "sdpa"}
P = 0.3


@pytest.mark.parametrize("kind", ["plain", "cap", "bias"])
def test_attend(kind):
    """As written out with the elements that were dropped, once and twice differentiated, of each result and of both."""
    query, key, value = (
        torch.randn(2, heads, tokens, 3, dtype=torch.float64).requires_grad_()
        for heads, tokens in ((4, 3), (2, 5), (2, 5))
    )
    bias = torch.randn(1, 4, 3, 5, dtype=torch.float64).requires_grad_() if kind == "bias" else None
    leaves = [x for x in (query, key, value, bias) if x is not None]
    scores = Scores(0.4, 1.5 if kind == "cap" else None, P)

    def ours(*_):
        torch.manual_seed(1)
        return attend(query, key, value, None, bias, scores)

    assert torch.autograd.gradcheck(ours, leaves)
    assert torch.autograd.gradgradcheck(ours, leaves, fast_mode=True)
    found = ours()
    weights = found[1]
    mask = (weights != 0).double() / (1 - P)
    assert 0 < int((mask == 0).sum()) < mask.numel() / 2
    all_weights = written_out(nn.Module(), query, key, value, bias, 0.4, softcap=scores.cap)[1]
    groups = value.repeat_interleave(2, 1)
    assert_same(found, ((all_weights * mask) @ groups, all_weights * mask), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attend_drops_as_many(dtype):
    query, key, value = (torch.randn(2, 4, 96, 16).to(dtype) for _ in range(3))
    out, weights = attend(query, key, value, None, None, Scores(0.25, None, 0.2))
    every = attend(query, key, value, None, None, Scores(0.25))[1]
    kept = (weights != 0) | (every == 0)
    assert abs(float(kept.float().mean()) - 0.8) < 0.01
    torch.testing.assert_close(weights[kept], (every / 0.8)[kept], rtol=2e-2, atol=1e-4)
    assert not torch.equal(weights, attend(query, key, value, None, None, Scores(0.25, None, 0.2))[1])
    torch.testing.assert_close(out, weights @ value, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [MASKED, FUSED], ids=["written out", "fused"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", [True, "call"])
def test_a_checkpoint_changes_nothing(options, reentrant, how):
    model, x = Model(**options), torch.randn(2, TOKENS, HEADS * WIDTH)
    swap(model, lean=how)

    def under(x):
        return checkpoint(model, x, use_reentrant=reentrant)

    def inside(x):
        with lean():
            return model(x)

    x.requires_grad_()
    found = []
    for call in (model, under, lambda x: checkpoint(inside, x, use_reentrant=reentrant)):
        model.zero_grad()
        torch.manual_seed(5)
        with lean() if how is True else nullcontext():
            out = call(x)
        out.square().sum().backward()
        found.append((out.detach(), [p.grad for p in model.parameters()]))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


@pytest.mark.parametrize("options", [MASKED, FUSED], ids=["written out", "fused"])
def test_a_sample_is_compared_with_stocks_draws(options):
    model, x = Model(**options), torch.randn(2, TOKENS, HEADS * WIDTH)
    plain = copy.deepcopy(model)
    report = swap(model, sample=x, lean="call")
    assert [row.path for row in report.changed] == ["attention"], report
    assert report.saved_after < report.saved_before
    with stock_dropout():
        torch.testing.assert_close(step(model, x), step(plain, x), rtol=1e-4, atol=1e-5)
    ours, theirs = (step(each, x)[0] for each in (model, plain))
    assert not torch.allclose(ours, theirs)
    model.eval(), plain.eval()
    torch.testing.assert_close(step(model, x), step(plain, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [MASKED, FUSED], ids=["written out", "fused"])
def test_on_average_it_is_what_it_is_without(options):
    model, x = Model(**options), torch.randn(2, TOKENS, HEADS * WIDTH)
    swap(model, lean="call")
    with torch.no_grad():
        several = torch.stack([model(x) for _ in range(600)])
        expected = model.eval()(x)
    error = several.std(0) / 600**0.5
    assert float(((several.mean(0) - expected) / error).abs().max()) < 6
    assert float(several.std(0).mean()) > 0.01


def test_outside_lean_it_keeps_no_weights_either():
    model, x = Model(**FUSED), torch.randn(2, TOKENS, HEADS * WIDTH)
    plain = copy.deepcopy(model)
    swap(model, lean=True)
    before, after = (measure(lambda each=each: each(x).sum(), device="cpu").saved for each in (plain, model))
    assert before - after >= 4 * 2 * HEADS * TOKENS * TOKENS


def of_scores(module, query, key, value, attention_mask, scaling, dropout=0.0):
    scores = stock.dropout(query @ key.mT * scaling, dropout, module.training)
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


def of_rows(module, query, key, value, attention_mask, scaling, dropout=0.0):
    weights = (query @ key.mT * scaling).softmax(-1)
    out = stock.dropout(weights @ value, dropout, module.training)
    return out.transpose(1, 2), weights


def unscaled(module, query, key, value, attention_mask, scaling, dropout=0.0):
    weights = (query @ key.mT * scaling).softmax(-1)
    if dropout and module.training:
        weights = weights * (torch.rand_like(weights) >= dropout)
    return (weights @ value).transpose(1, 2), weights


def without(module, query, key, value, attention_mask, scaling, dropout=0.0):
    weights = (query @ key.mT * scaling).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


def given_before(module, query, key, value, attention_mask, scaling, dropout=0.0):
    weights = (query @ key.mT * scaling).softmax(-1)
    return (stock.dropout(weights, dropout, module.training) @ value).transpose(1, 2), weights


def of_keys(module, query, key, value, attention_mask, scaling, dropout=0.0):
    weights = (query @ key.mT * scaling).softmax(-1)
    weights = weights * stock.dropout(torch.ones_like(weights[:, :, :1]), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def of_all_heads(module, query, key, value, attention_mask, scaling, dropout=0.0):
    weights = (query @ key.mT * scaling).softmax(-1)
    weights = weights * stock.dropout(torch.ones_like(weights[:, :1]), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def of_all_batches(module, query, key, value, attention_mask, scaling, dropout=0.0):
    weights = (query @ key.mT * scaling).softmax(-1)
    weights = weights * stock.dropout(torch.ones_like(weights[:1]), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def of_one_size(module, query, key, value, attention_mask, scaling, dropout=0.0):
    weights = (query @ key.mT * scaling + torch.ones(TOKENS, TOKENS)).softmax(-1)
    weights = stock.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


@pytest.mark.parametrize(
    "function",
    [
        *(of_scores, of_rows, unscaled, without),
        *(given_before, of_keys, of_all_heads, of_all_batches, of_one_size),
    ],
)
def test_functions_that_drop_something_else(function, written_out_as):
    def grouped(module, query, key, value, *args, **kwargs):
        return function(module, query, *(x.repeat_interleave(2, 1) for x in (key, value)), *args, **kwargs)

    written_out_as(grouped)
    model, x = Model(dropout=P), torch.randn(2, TOKENS, HEADS * WIDTH)
    plain = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(step(model, x), step(plain, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learned", [False, True])
def test_a_mask_that_is_computed(learned):
    """Whether it is learned shows in one of a checkpoint's two runs alone."""

    class Relative(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, P, batch_first=True)
            self.table = nn.Parameter(torch.randn(23), requires_grad=learned)

        def forward(self, x):
            at = torch.arange(12)
            mask = self.table[at[:, None] - at[None] + 11]
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    model = Relative().double()
    swap(model, lean=True)
    x = torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    found = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=True)):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        out = call(x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad, [p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*found)

    def seeded(x):
        torch.manual_seed(3)
        return model(x)

    assert torch.autograd.gradcheck(seeded, x, fast_mode=True)
    if learned:
        assert torch.autograd.gradcheck(
            lambda t: (
                torch.manual_seed(3),
                torch.func.functional_call(model, {"table": t}, (x.detach(),)),
            )[1],
            model.table.detach().clone().requires_grad_(),
            fast_mode=True,
        )


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_sample_that_is_all_padding(learned, create_graph):
    """Its tokens see nothing: zero, and their gradients, as in stock."""
    layer = nn.MultiheadAttention(16, 2, 1e-9, batch_first=True).double()
    plain = copy.deepcopy(layer)
    swap(layer, lean=True)
    padding = torch.zeros(3, 12, dtype=torch.float64)
    padding[1] = float("-inf")
    x = torch.randn(3, 12, 16, dtype=torch.float64, requires_grad=True)
    table = torch.randn(12, 12, dtype=torch.float64, requires_grad=learned)
    found = []
    for each in (layer, plain):
        out, _ = each(x, x, x, key_padding_mask=padding, attn_mask=table * 1.0, need_weights=False)
        leaves = [x, table] if learned else [x]
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=create_graph)
        found.append((out.detach(), [grad.detach() for grad in grads]))
    assert found[1][0].isfinite().all()
    torch.testing.assert_close(*found)


def test_shapes_of_masks_are_looked_at_by_themselves(written_out_as):
    """Of keys alone first, then of pairs; fused kernels take both."""
    written_out_as(written_out)
    model, x = Model(**FUSED), torch.randn(2, TOKENS, HEADS * WIDTH)
    swap(model, lean="call")
    keys = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    keys[..., -3:] = False
    for mask in (keys, keys.expand(2, 1, TOKENS, TOKENS).tril()):
        outs = []
        for how in (nullcontext, stock_dropout):
            torch.manual_seed(1)
            with how():
                outs.append(model.attention(x, mask)[0].detach())
        assert not torch.allclose(*outs)


@pytest.mark.parametrize("kind", ["causal", "multihead"])
def test_a_causal_mask_differentiated_twice(kind):
    if kind == "multihead":
        layer = nn.MultiheadAttention(16, 2, P, batch_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
        options = {"attn_mask": mask, "is_causal": True, "need_weights": False}
        x = torch.randn(2, TOKENS, 16, dtype=torch.float64, requires_grad=True)
    else:
        layer, options = Model(**FUSED), {}
        layer.attention.is_causal = True
        x = torch.randn(2, TOKENS, HEADS * WIDTH, dtype=torch.float64, requires_grad=True)
    layer.double()
    swap(layer, lean=True)

    def gradient(create_graph):
        torch.manual_seed(3)
        out = layer(x, x, x, **options)[0] if kind == "multihead" else layer(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=create_graph)
        return grad.detach()

    torch.testing.assert_close(gradient(True), gradient(False))


@pytest.mark.parametrize("options", [MASKED, FUSED], ids=["written out", "fused"])
@pytest.mark.parametrize("warm", [False, True])
def test_function_transforms_and_inference_mode(options, warm, written_out_as):
    written_out_as(written_out)
    models = [Model(**options), nn.MultiheadAttention(16, 2, P, batch_first=True)]
    inputs = [torch.randn(2, TOKENS, HEADS * WIDTH), torch.randn(2, TOKENS, 16)]
    for model, x in zip(models, inputs, strict=True):
        plain = copy.deepcopy(model)

        def of(each):
            return each if isinstance(each, Model) else lambda y: each(y, y, y, need_weights=False)[0]

        swap(model, lean=True)
        if warm:
            of(model)(x)
        grads = []
        for each in (model, plain):
            torch.manual_seed(1)
            grads.append(torch.func.grad(lambda x, each=each: of(each)(x).square().sum())(x))
        torch.testing.assert_close(*grads)
        torch.func.vmap(of(model), randomness="different")(x[:, None])
        with torch.inference_mode():
            assert of(model)(x).isfinite().all()


@pytest.mark.parametrize("first", ["padded", "plain"])
def test_what_is_drawn_does_not_depend_on_the_first_batch(first, written_out_as):
    written_out_as(written_out)
    model, x = Model(**MASKED), torch.randn(2, TOKENS, HEADS * WIDTH)
    swap(model, lean="call")
    low = torch.zeros(2, 1, TOKENS, TOKENS)
    low[:, :, 3] = float("-inf")
    model.attention(x, low if first == "padded" else None)
    with stock_dropout():
        theirs = step(model, x)[0]
    assert not torch.allclose(step(model, x)[0], theirs)


@pytest.mark.parametrize("ops", [["attention"], "all"])
def test_stocks_dropout_where_only_attention_is_asked_for(ops):
    for options in (MASKED, FUSED):
        model, x = Model(**options), torch.randn(2, TOKENS, HEADS * WIDTH)
        plain = copy.deepcopy(model)
        swap(model, lean="call", ops=ops)
        ours, theirs = step(model, x)[0], step(plain, x)[0]
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5) == (ops == ["attention"])


@pytest.mark.parametrize(("causal", "masked"), product([False, True], repeat=2))
def test_multihead_attention(causal, masked):
    """By its results without dropout: those of a value of ones are what is left of each row's weights."""
    layer = nn.MultiheadAttention(8, 2, P, batch_first=True)
    x = torch.randn(2, 12, 8)
    swap(layer, lean="call")
    with torch.no_grad():
        layer.in_proj_weight[16:].zero_()
        layer.in_proj_bias[16:] = 1
        layer.out_proj.weight.copy_(torch.eye(8))
        layer.out_proj.bias.zero_()
    mask = nn.Transformer.generate_square_subsequent_mask(12) if causal else None
    padding = torch.zeros(2, 12).masked_fill(torch.arange(12) > 9, float("-inf")) if masked else None
    out, _ = layer(x, x, x, attn_mask=mask, is_causal=causal, key_padding_mask=padding, need_weights=False)
    rows = out.detach()[..., ::4]  # one number a head
    assert rows.std() > 0.05
    if causal:  # the first row sees itself alone
        first = rows[:, 0] * (1 - P)
        assert bool(((first - 1).abs() < 1e-5).logical_or(first == 0).all())
    (grad,) = torch.autograd.grad(out.sum(), layer.in_proj_bias)
    torch.testing.assert_close(grad[16:].view(2, 4).sum(1), rows.sum((0, 1)) * 4)


def test_a_transformer_trains_as_many_times_the_same():
    """Draws are torch's random state's."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    x = torch.randn(2, 20, 16)
    report = swap(layer, sample=x, lean="call")
    assert any("attn" in row.path and row.after == "memkit" for row in report.rows), report
    first, again = step(layer, x), step(layer, x)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
