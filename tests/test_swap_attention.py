"""Attention layers that take their function from a table, as transformers' do: query, key and value are all that is kept."""

import copy
import pickle

import pytest
import torch
from swap_cases import tangent_and_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from memkit import lean, swap, unswap
from memkit.memory import measure
from memkit.swap.library import attention as attention_module
from memkit.swap.library import written_attention
from memkit.swap.library.attend import Scores, attend
from memkit.swap.library.remembered import Remembered

pytestmark = pytest.mark.usefixtures("repeatable")

HEADS, KEYS, TOKENS, WIDTH = 4, 2, 24, 8


def written_out(
    module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, position_bias=None
):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(scores.softmax(-1), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def with_half(module, query, *args, **kwargs):
    out, weights = written_out(module, query, *args, **kwargs)
    return 0.5 * out, weights


def with_a_gain(module, *args, **kwargs):
    """Starts as if it were not there; its gradient shows that it is."""
    out, weights = written_out(module, *args, **kwargs)
    return module.gain * out, weights


def dropped(module, out, weights):
    return nn.functional.dropout(out, 0.3, module.training), weights


def sdpa_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, position_bias=None
):
    mask = position_bias if attention_mask is None else attention_mask
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


class Table(dict):
    def get_interface(self, name, default):
        return self.get(name, default)


ALL_ATTENTION_FUNCTIONS = Table(sdpa=sdpa_attention_forward, half=with_half, gain=with_a_gain)


def turned(x):
    """Stands for a rotary embedding."""
    return x * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


class Attention(nn.Module):
    is_causal = False

    def __init__(
        self,
        function="written out",
        dropout=0.0,
        packed=False,
        mask=False,
        bias=False,
        named=False,
        learned=False,
        **options,
    ):
        super().__init__()
        self.function, self.dropout, self.packed, self.options = function, dropout, packed, options
        self.named = named
        keys = HEADS if packed else KEYS
        self.sizes = [HEADS * WIDTH, keys * WIDTH, keys * WIDTH]
        if packed:
            self.qkv = nn.Linear(HEADS * WIDTH, sum(self.sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(HEADS * WIDTH, size) for size in self.sizes)
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS)) if bias else None
        low = torch.finfo(torch.float32).min
        causal = torch.zeros(TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), low)
        if learned:
            self.mask = nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS))
        else:
            self.register_buffer("mask", causal[None, None] if mask else None)

    def forward(self, x, attention_mask=None):
        parts = self.qkv(x).split(self.sizes, -1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in parts)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.function, written_out)
        given = dict(self.options) if self.bias is None else {**self.options, "position_bias": self.bias}
        mask = self.mask if attention_mask is None else attention_mask
        out, weights = function(
            self,
            turned(q),
            turned(k),
            v,
            *(() if self.named else (mask,)),
            scaling=WIDTH**-0.5,
            dropout=self.dropout if self.training else 0.0,
            **given,
            **({"attention_mask": mask} if self.named else {}),
        )
        return out.flatten(-2), weights


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = Attention(**options)

    def forward(self, x):
        return self.attention(x)[0]


LAYERS = {
    "plain": {},
    "masked": {"mask": True},
    "masked by name": {"mask": True, "named": True},
    "capped": {"softcap": 2.0, "mask": True},
    "biased": {"bias": True},
    "a learned mask": {"learned": True},
    "a learned mask by name": {"learned": True, "named": True},
    "dropout": {"dropout": 0.3, "mask": True},
    "another function": {"function": "half", "mask": True},
    "a parameter of its own": {"function": "gain"},
    "fused": {"function": "sdpa"},
    "fused, masked": {"function": "sdpa", "mask": True},
    "fused, a learned bias": {"function": "sdpa", "bias": True},
    "fused, a learned mask": {"function": "sdpa", "learned": True},
    "fused, dropout": {"function": "sdpa", "dropout": 0.3},
    "packed": {"function": "sdpa", "packed": True},
}
KEEP_WEIGHTS = (
    *("plain", "masked", "masked by name", "capped", "biased", "dropout"),
    *("a learned mask", "a learned mask by name"),
    *("fused, a learned bias", "fused, a learned mask", "fused, dropout"),
)
every = pytest.mark.parametrize("name", LAYERS)


def make(name):
    return Model(**LAYERS[name]), torch.randn(2, TOKENS, HEADS * WIDTH)


def step(model, x):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    out = model(x)
    out.square().sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


@every
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(name, by_sample):
    model, x = make(name)
    stock = copy.deepcopy(model)
    ops = ["attention"] if "dropout" in name else "all"  # memkit's drops other elements
    report = swap(model, sample=x if by_sample else None, lean="call", ops=ops)
    assert [row.path for row in report.changed] == ["attention"], report
    for mode in (True, False):
        model.train(mode), stock.train(mode)
        torch.testing.assert_close(step(model, x), step(stock, x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*KEEP_WEIGHTS, "packed"])
def test_what_is_kept(name):
    """Query, key and value, and the result for the layer behind; of a fused kernel a number a row."""
    model, x = make(name)
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    before = measure(lambda: stock(x).square().sum(), device="cpu").saved
    after = measure(lambda: model(x).square().sum(), device="cpu").saved
    weights = 4 * 2 * HEADS * TOKENS * TOKENS
    query = 4 * x.numel()
    gain = 2 * query if name == "packed" else weights
    assert before - after >= 0.9 * gain, (before, after, gain)
    assert after <= 4.2 * query + 4 * 2 * HEADS * TOKENS


class HeadsFirst(nn.Module):
    """A layer of BART's kin."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4))
        self.is_causal = False

    def forward(self, x):
        q, k, v = (
            each(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2).contiguous()
            for each in (self.q, self.k, self.v)
        )
        function = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", written_out)
        return self.out(function(self, q, k, v, None, scaling=WIDTH**-0.5)[0].flatten(2))


def test_the_result_is_kept_once():
    model, x = HeadsFirst(), torch.randn(2, TOKENS, HEADS * WIDTH)
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(step(model, x), step(stock, x), rtol=1e-4, atol=1e-5)
    before, after = (measure(lambda each=each: each(x).sum(), device="cpu").saved for each in (stock, model))
    assert before - after == x.nbytes
    assert type(model.out) is nn.Linear


@every
def test_kept_by_copies_and_undone(name):
    model, x = make(name)
    names = {key: (type(m), set(vars(m))) for key, m in model.named_modules()}
    swap(model, lean="call")
    expected = step(model, x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied.attention) is type(model.attention)
        torch.testing.assert_close(step(copied, x), expected)
    unswap(model)
    assert {key: (type(m), set(vars(m))) for key, m in model.named_modules()} == names


@pytest.fixture
def written_out_as(monkeypatch):
    """Makes the function that layers write out another one, of which nothing is known."""

    def patch(function):
        monkeypatch.setattr(written_attention, "_same", Remembered())
        monkeypatch.setitem(globals(), "written_out", function)

    return patch


@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_dropout_that_a_function_takes_by_itself(first, written_out_as):
    """Neither taken for none, as the first call may say, nor drawn anew in backward."""
    model, x = make("plain")
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    plain = written_out
    written_out_as(lambda module, *args, **kwargs: dropped(module, *plain(module, *args, **kwargs)))
    model.train(first != "evaluation")
    step(model, x)
    torch.testing.assert_close(step(model.train(), x), step(stock, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_part", [False, True])
def test_evaluation_before_the_backward(by_part, written_out_as):
    """What is made again is what the forward made, dropout included."""
    model, x = make("plain")
    model.attention.part = nn.Dropout(0.3)
    plain = written_out

    def dropping(module, *args, **kwargs):
        out, weights = plain(module, *args, **kwargs)
        return (module.part(out), weights) if by_part else dropped(module, out, weights)

    written_out_as(dropping)
    stock = copy.deepcopy(model).train()
    swap(model.train(), ops=["attention"], lean="call")
    found = []
    for each in (stock, model):
        torch.manual_seed(0)
        out = each(x)
        found.append(torch.autograd.grad(out.square().sum(), list(each.eval().attention.v.parameters())))
        assert not any(module.training for module in each.modules())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", ["written out", "by name"])
def test_functions_that_take_the_mask_by_name_alone(function, written_out_as, monkeypatch):
    """One that stands in for what is written out, and one that is handed on."""
    plain = written_out

    def by_name(module, query, key, value, *, attention_mask, **kwargs):
        return plain(module, query, key, value, attention_mask, **kwargs)

    if function == "written out":
        written_out_as(by_name)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "by name", by_name)
    model, x = Model(function=function, mask=True, named=True), torch.randn(2, TOKENS, HEADS * WIDTH)
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(step(model, x), step(stock, x), rtol=1e-4, atol=1e-5)


def test_a_function_that_takes_little_else(written_out_as):
    """It is given what the layer gives it, when it is tried out too."""
    plain = written_out

    def of_few(module, query, key, value, attention_mask, scaling, dropout=0.0):
        return plain(module, query, key, value, attention_mask, scaling, dropout)

    written_out_as(of_few)
    model, x = make("masked")
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(step(model, x), step(stock, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in KEEP_WEIGHTS if "dropout" not in name])
def test_no_forward_is_run_again(name, monkeypatch):
    """A checkpoint would take longer."""
    model, x = make(name)
    swap(model, lean="call")
    calls = []
    monkeypatch.setattr(attention_module, "checkpointed", lambda *args, **kwargs: calls.append(args))
    step(model, x)
    assert not calls


def test_names_patched_later(written_out_as):
    model, x = make("plain")
    swap(model, lean="call")
    expected = 0.5 * model(x)
    plain = written_out
    written_out_as(lambda *args, **kwargs: (0.5 * plain(*args, **kwargs)[0], None))
    torch.testing.assert_close(model(x), expected)


def test_layers_that_start_from_zero(written_out_as):
    """Say nothing of the scores."""
    model, x = make("plain")
    plain = written_out
    written_out_as(lambda module, query, *rest, **kwargs: plain(module, 2 * query, *rest, **kwargs))
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    started = copy.deepcopy(model)
    with torch.no_grad():
        for each in (started.attention.q, started.attention.k):
            each.weight.zero_(), each.bias.zero_()
    step(started, x)
    torch.testing.assert_close(step(model, x), step(stock, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["keys for the whole batch", "a longer mask"])
def test_keys_and_masks_of_other_sizes(kind, written_out_as):
    """What the function expands or cuts."""
    model, x = make("plain")
    plain = written_out

    def cut(module, query, key, value, mask, **kwargs):
        return plain(module, query, key, value, mask[..., : key.shape[2]], **kwargs)

    if kind == "a longer mask":
        model.attention.mask = torch.randn(1, 1, TOKENS, TOKENS + 3)
        written_out_as(cut)
    else:
        for each in (model.attention.k, model.attention.v):
            each.register_forward_hook(lambda module, args, out: out[:1])
        written_out_as(plain)
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(step(model, x), step(stock, x), rtol=1e-4, atol=1e-5)


def test_inside_a_checkpoint(written_out_as):
    """What the first call tries out is none of the checkpoint's business."""
    model, x = make("capped")
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    written_out_as(written_out)
    x.requires_grad_()

    grads = []
    for each in (model, stock):
        checkpoint(each, x, use_reentrant=False).square().sum().backward()
        grads.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_weights_that_are_returned_have_their_gradient():
    model, x = make("capped")
    stock = copy.deepcopy(model)
    swap(model, lean=True)
    grads = []
    for each in (model, stock):
        with lean():
            out, weights = each.attention(x)
            (out.sum() + weights.square().sum()).backward()
        only = each.attention(x)[1].square().sum()
        only.backward()
        grads.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_a_layer_by_itself():
    attention, x = Attention(), torch.randn(2, TOKENS, HEADS * WIDTH)
    expected = attention(x)
    swap(attention, lean="call")
    torch.testing.assert_close(attention(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(attention(x), expected)


def test_outside_lean_it_is_stocks():
    model, x = make("plain")
    before = measure(lambda: model(x).sum(), device="cpu").saved
    swap(model, lean=True)
    assert measure(lambda: model(x).sum(), device="cpu").saved == before


def test_it_is_left_where_it_is_not_asked_for():
    for options in ({}, {"lean": "call", "ops": ["dropout"]}):
        model, _ = make("plain")
        assert not swap(model, **options).changed
    model, _ = make("plain")
    model.attention.forward = model.attention.forward
    assert not swap(model, lean="call").changed


def assert_same(found, theirs, leaves):
    """Result and weights; and gradients, of each by itself and of both."""
    torch.testing.assert_close(found, theirs)
    grads = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in theirs]
    for part in (slice(0, 2), slice(0, 1), slice(1, 2)):
        how = {"retain_graph": True, "allow_unused": True}
        a, b = (torch.autograd.grad(x[part], leaves, grads[part], **how) for x in (found, theirs))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "kind", ["nothing", "cap", "mask", "cap and mask", "bias", "bias and mask", "bias and masks"]
)
def test_attend(kind):
    """Heads share a key. Once and twice differentiated; and as written out, where a row sees nothing, too."""
    query, key, value = (
        torch.randn(2, heads, tokens, 3, dtype=torch.float64).requires_grad_()
        for heads, tokens in ((4, 3), (2, 5), (2, 5))
    )
    low = torch.finfo(torch.float64).min
    scores = Scores(0.4, 1.5 if "cap" in kind else None)
    visible = torch.rand(2 if "masks" in kind or "bias" not in kind else 1, 1, 3, 5) > 0.4
    visible[..., 2] = True
    bias = torch.randn(1, 4, 3, 5, dtype=torch.float64).requires_grad_() if "bias" in kind else None
    leaves = [x for x in (query, key, value, bias) if x is not None]

    def mask_of(visible):
        if "mask" not in kind:
            return None
        return (
            visible
            if bias is not None
            else torch.zeros_like(visible, dtype=torch.float64).masked_fill(~visible, low)
        )

    def ours(*_):
        return attend(query, key, value, mask_of(visible), bias, scores)

    assert torch.autograd.gradcheck(ours, leaves)
    assert torch.autograd.gradgradcheck(ours, leaves, fast_mode=True)
    visible[0, 0, 1] = False
    added = mask_of(visible)
    if bias is not None:
        added = bias if added is None else torch.where(added, bias, low)
    out, weights = written_out(nn.Module(), query, key, value, added, 0.4, softcap=scores.cap)
    assert_same(ours(), (out.transpose(1, 2), weights), leaves)


def test_attend_differentiated_twice_where_one_is_made_from_the_other():
    """Each is taken by itself: the way from one to the other is autograd's."""
    scores, found = Scores(0.4), []
    for attention in (
        lambda *qkv: attend(*qkv, None, None, scores)[0],
        lambda query, key, value: torch.matmul((torch.matmul(query, key.mT) * 0.4).softmax(-1), value),
    ):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(1, 2, 4, 3).requires_grad_()
        key = x.sin()
        (grad,) = torch.autograd.grad(attention(key.cos(), key, key).square().sum(), x, create_graph=True)
        found.append((grad, *torch.autograd.grad(grad.square().sum(), x)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("what", ["bias", "gain"])
def test_a_change_before_backward_is_refused(what, written_out_as):
    """Of what the function is given by name, or takes from its module: it would be called again with another value."""
    plain = written_out

    def gained(module, *args, **kwargs):
        out, weights = plain(module, *args, **kwargs)
        return module.gain * out, weights

    if what == "gain":
        written_out_as(gained)
    model, x = Model(bias=True, dropout=0.3), torch.randn(2, TOKENS, HEADS * WIDTH)
    swap(model, ops=["attention"], lean="call")
    out = model(x)
    with torch.no_grad():
        getattr(model.attention, what).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_forward_mode():
    """And backward, when what was made there has no tangents any more."""
    model, x = make("plain")
    stock = copy.deepcopy(model)
    swap(model, ops=["attention"], lean="call")
    torch.testing.assert_close(tangent_and_gradients(model, x), tangent_and_gradients(stock, x))
