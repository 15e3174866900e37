"""Rotary embeddings of attention layers that call a function by the name that transformers' modules have for it."""

import copy
import pickle
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memkit import lean, swap, unswap
from memkit.swap.library import rotary

pytestmark = pytest.mark.usefixtures("repeatable")

BATCH, HEADS, KEYS, TOKENS, WIDTH = 2, 4, 2, 6, 8


def halves(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def as_llama(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def as_neox(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]

    def turn(x):
        return torch.cat((x[..., :width] * cos + halves(x[..., :width]) * sin, x[..., width:]), -1)

    return turn(q), turn(k)


def as_cohere(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + neighbours(q) * sin, k * cos + neighbours(k) * sin


def as_glm(q, k, cos, sin, unsqueeze_dim=1):
    columns = cos.shape[-1] // 2
    cos, sin = (x[..., :columns].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for x in (cos, sin))
    return q * cos + neighbours(q) * sin, k * cos + neighbours(k) * sin


def as_gpt_oss(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return turn(q), turn(k)


def backwards(q, k, cos, sin, unsqueeze_dim=1):
    return as_llama(q, k, cos, -sin, unsqueeze_dim)


def of_q_alone(q, k, cos, sin, unsqueeze_dim=1):
    return as_llama(q, k, cos, sin, unsqueeze_dim)[0], k


def without_a_gradient(q, k, cos, sin, unsqueeze_dim=1):
    return as_llama(q.detach(), k, cos, sin, unsqueeze_dim)


def attention(function, heads_at=1, **called):
    """A class whose module knows that function under the library's name."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(16, HEADS * WIDTH), nn.Linear(16, KEYS * WIDTH)

        def forward(self, x, cos, sin):
            q = self.q(x).view(*x.shape[:2], HEADS, WIDTH)
            k = self.k(x).view(*x.shape[:2], KEYS, WIDTH)
            if heads_at == 1:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            return apply_rotary_pos_emb(q, k, cos, sin, **called)  # noqa: F821

    forward = Attention.forward
    known = {**globals(), "apply_rotary_pos_emb": function}
    Attention.forward = FunctionType(forward.__code__, known, "forward", None, forward.__closure__)
    return Attention()


def tables(columns=WIDTH, rows=1, dtype=torch.float32):
    angles = torch.rand(rows, TOKENS, columns // 2)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def values(module, x, cos, sin):
    leaf = x.detach().requires_grad_()
    out = module(leaf, cos, sin)
    weights = [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype) for y in out]
    return [*out, *torch.autograd.grad(out, [leaf, *module.parameters()], weights)]


@pytest.fixture
def turned(monkeypatch):
    """Calls that memkit's operator served."""
    found, real = [], rotary.Way.turn

    def turn(self, q, *rest, **named):
        found.append((self, q.shape))
        return real(self, q, *rest, **named)

    monkeypatch.setattr(rotary.Way, "turn", turn)
    rotary._ways.clear()
    yield lambda: [
        way for way, shape in found if shape[-1] == WIDTH and shape[0] == BATCH and TOKENS in shape
    ]
    rotary._ways.clear()


WAYS = {
    as_llama: (WIDTH, rotary.Way(False, "elements")),
    as_neox: (WIDTH // 4, rotary.Way(False, "elements")),
    as_cohere: (WIDTH, rotary.Way(True, "elements")),
    as_glm: (WIDTH, rotary.Way(True, "first half")),
    as_gpt_oss: (WIDTH // 2, rotary.Way(False, "pairs")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, BATCH])
@pytest.mark.parametrize("heads_at", [1, 2])
@pytest.mark.parametrize("function", WAYS)
def test_turned_by_memkit(function, heads_at, rows, dtype, turned):
    columns, way = WAYS[function]
    named = {} if heads_at == 1 else {"unsqueeze_dim": 2}
    module = attention(function, heads_at, **named).to(dtype)
    x, given = torch.randn(BATCH, TOKENS, 16, dtype=dtype), tables(columns, rows, dtype)
    expected = values(module, x, *given)
    report = swap(module, ops=["apply_rotary"])
    assert [(row.path, row.after, row.reason) for row in report.rows] == [
        ("apply_rotary_pos_emb", "memkit", "")
    ]
    found = values(module, x, *given)
    assert [each[:2] for each in turned()] == [way[:2]]
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert a.stride() == b.stride()
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm() + tolerance
    unswap(module)
    assert values(module, x, *given)[0].equal(expected[0])
    assert len(turned()) == 1


@pytest.mark.parametrize("function", [backwards, of_q_alone, without_a_gradient])
def test_another_function(function, turned):
    module = attention(function)
    (row,) = swap(module, ops=["apply_rotary"]).rows
    assert row.after == "unchanged"
    assert row.reason == "apply_rotary_pos_emb computes something else than memkit's apply_rotary"
    assert type(module) is type(module).mro()[0]
    assert not hasattr(type(module), "_stock")


def test_asked_for(turned):
    module = attention(as_llama)
    assert not swap(module, ops=["silu"]).rows
    assert not hasattr(type(module), "_stock")
    with pytest.raises(ValueError, match="apply_rotary"):
        swap(module, ops=["apply_rotary_pos_emb"])


GIVEN = {
    "tables in another dtype": lambda cos, sin: (cos.double(), sin.double()),
    "tables to be trained": lambda cos, sin: (cos.requires_grad_(), sin),
    "tables for one position": lambda cos, sin: (cos[:, :1], sin[:, :1]),
    "tables without a batch": lambda cos, sin: (cos[0, :1], sin[0, :1]),
}


@pytest.mark.parametrize("given", GIVEN)
def test_left_to_stock(given, turned):
    module, x = attention(as_llama), torch.randn(BATCH, TOKENS, 16)
    cos, sin = GIVEN[given](*tables())
    expected = module(x, cos, sin)
    swap(module, ops=["apply_rotary"])
    for a, b in zip(module(x, cos, sin), expected, strict=True):
        assert a.equal(b)
        assert a.dtype == b.dtype
    assert not turned()


def test_stocks_error(turned):
    module, x = attention(as_llama), torch.randn(BATCH, TOKENS, 16)
    cos, sin = tables()
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            module(x, cos[:, :4], sin[:, :4])
        messages.append(str(error.value))
        swap(module, ops=["apply_rotary"])
    assert messages[0] == messages[1]


def test_other_arguments(turned):
    def function(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return as_llama(q, k, cos, sin, unsqueeze_dim) if position_ids is None else (q, k)

    module, x = attention(function, position_ids=torch.arange(TOKENS)), torch.randn(BATCH, TOKENS, 16)
    expected = module(x, *tables())
    assert all(row.changed for row in swap(module, ops=["apply_rotary"]).rows)
    assert all(a.equal(b) for a, b in zip(module(x, *tables()), expected, strict=True))
    assert not turned()


def test_forward_mode(turned):
    module, x = attention(as_llama), torch.randn(BATCH, TOKENS, 16)
    cos, sin = tables()
    swap(module, ops=["apply_rotary"])
    _, tangents = torch.func.jvp(lambda t: module(t, cos, sin), (x,), (x,))
    unswap(module)
    _, expected = torch.func.jvp(lambda t: module(t, cos, sin), (x,), (x,))
    for a, b in zip(tangents, expected, strict=True):
        assert torch.allclose(a, b)
    assert not turned()


def test_transforms():
    module, x = attention(as_llama), torch.randn(3, BATCH, TOKENS, 16)
    cos, sin = tables()

    def gradient(t):
        return torch.func.grad(lambda u: sum((y * y).sum() * y.sum() for y in module(u, cos, sin)))(t)

    expected = torch.func.vmap(gradient)(x)
    swap(module, ops=["apply_rotary"])
    assert torch.allclose(torch.func.vmap(gradient)(x), expected, rtol=1e-4, atol=1e-4)


def test_compiled(monkeypatch):
    monkeypatch.setitem(
        globals(), "apply_rotary_pos_emb", as_llama
    )  # torch 2.11 asks the module of that name
    module, x = attention(as_llama), torch.randn(BATCH, TOKENS, 16)
    cos, sin = tables()
    swap(module, ops=["apply_rotary"])
    expected = module(x, cos, sin)
    torch.compiler.reset()
    found = torch.compile(module, backend="eager", fullgraph=True)(x, cos, sin)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_checkpointed(turned):
    module, x = attention(as_llama), torch.randn(BATCH, TOKENS, 16, requires_grad=True)
    cos, sin = tables()
    swap(module, ops=["apply_rotary"])
    (expected,) = torch.autograd.grad(module(x, cos, sin)[0].square().sum(), x)
    out = checkpoint(module, x, cos, sin, use_reentrant=False)[0]
    (found,) = torch.autograd.grad(out.square().sum(), x)
    assert found.equal(expected)
    assert len(turned()) == 3


def language_model(**options):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=32,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("how", [False, True, "call"])
def test_a_language_model(how, turned):
    model, tokens = language_model(), torch.randint(50, (2, 12))
    stock = copy.deepcopy(model)
    report = swap(model, sample={"input_ids": tokens, "labels": tokens, "use_cache": False}, lean=how)
    layers = [row for row in report.changed if row.before == "apply_rotary_pos_emb"]
    assert [row.path for row in layers] == [
        f"model.layers.{i}.self_attn.apply_rotary_pos_emb" for i in range(2)
    ]
    with lean():
        found = model(input_ids=tokens, labels=tokens).loss
        found.backward()
    expected = stock(input_ids=tokens, labels=tokens).loss
    expected.backward()
    assert torch.allclose(found, expected)
    for a, b in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5)


def test_generation():
    model, tokens = language_model().eval(), torch.randint(50, (1, 5))
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False)
    swap(model)
    assert model.generate(tokens, max_new_tokens=6, do_sample=False).equal(expected)


def test_copies(turned):
    model, tokens = language_model(), torch.randint(50, (BATCH, TOKENS))
    swap(model, ops=["apply_rotary"])
    expected = model(tokens).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = len(turned())
        assert other(tokens).logits.equal(expected)
        assert len(turned()) == before + 2
        unswap(other)
        assert torch.allclose(other(tokens).logits, expected, atol=1e-5)
        assert len(turned()) == before + 2


def test_called_without_keys(turned):
    def function(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        q_out = q * cos + halves(q) * sin
        return q_out if k is None else (q_out, k * cos + halves(k) * sin)

    class Indexer(nn.Module):
        def forward(self, q, cos, sin):
            return apply_rotary_pos_emb(q, cos=cos, sin=sin)  # noqa: F821

    forward = Indexer.forward
    Indexer.forward = FunctionType(
        forward.__code__, {**globals(), "apply_rotary_pos_emb": function}, "forward"
    )
    module, q, given = Indexer(), torch.randn(BATCH, HEADS, TOKENS, WIDTH), tables()
    expected = module(q, *given)
    (row,) = swap(module, ops=["apply_rotary"]).rows
    assert row.changed  # its function is known, its calls are not
    assert module(q, *given).equal(expected)
    (row,) = swap(module, sample=(q, *given), ops=["apply_rotary"]).rows
    assert row.reason == "not called on the sample, or with tables that memkit does not take"
    assert not turned()


def in_a_gradient(module, x, cos, sin):
    torch.func.grad(lambda t: module(t, cos, sin)[0].sum())(x)


def in_a_batch(module, x, cos, sin):
    torch.func.vmap(lambda t: module(t, cos, sin)[0])(x[None])


def without_hooks(module, x, cos, sin):
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        module(x, cos, sin)


def in_inference_mode(module, x, cos, sin):
    with torch.inference_mode():
        module(x, cos, sin)


@pytest.mark.parametrize("first", [in_a_gradient, in_a_batch, without_hooks, in_inference_mode])
def test_the_first_call_may_be_anywhere(first, turned):
    """Whether memkit serves is found out when that can be, and for good only then."""
    module = attention(as_llama).double()
    x, (cos, sin) = torch.randn(BATCH, TOKENS, 16).double(), tables(dtype=torch.float64)
    swap(module, ops=["apply_rotary"])
    rotary._ways.clear()
    first(module, x, cos, sin)
    before = len(turned())
    module(x, cos, sin)
    assert len(turned()) == before + 1


def test_swapped_in_inference_mode(turned):
    module = attention(as_llama)
    with torch.inference_mode():
        assert swap(module, ops=["apply_rotary"]).changed


def test_no_memory_says_nothing_of_a_function(turned, monkeypatch):
    module, x, given = attention(as_llama), torch.randn(BATCH, TOKENS, 16), tables()
    swap(module, ops=["apply_rotary"])
    rotary._ways.clear()

    def numbers(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as context:
        context.setattr(rotary, "numbers", numbers)
        module(x, *given)
    assert not turned()
    module(x, *given)
    assert len(turned()) == 1


def test_what_a_user_puts_there_is_called(turned):
    module, x, seen = attention(as_llama), torch.randn(BATCH, TOKENS, 16), []
    swap(module, ops=["apply_rotary"])
    stock = type(module)._stock
    known = stock.forward.__globals__
    library = known["apply_rotary_pos_emb"]

    class Recorder:
        __hash__ = None

        def __call__(self, q, k, cos, sin):
            seen.append(k.shape)
            return library(q, k, cos, sin)

    elsewhere = {"__name__": "somewhere", "seen": seen, "library": library}
    exec("def patch(q, k, cos, sin):\n  seen.append(k.shape)\n  return library(q, k, cos, sin)", elsewhere)
    for patch in (Recorder(), elsewhere["patch"]):
        seen.clear()
        known["apply_rotary_pos_emb"] = patch
        module(x, *tables())
        assert seen == [(BATCH, KEYS, TOKENS, WIDTH)]
        unswap(module)
        (row,) = swap(module, ops=["apply_rotary"]).rows
        assert not row.changed
        known["apply_rotary_pos_emb"] = library
        assert swap(module, ops=["apply_rotary"]).changed
    assert not turned()


COUNT = 0


def test_a_forward_that_counts(turned):
    class Counts(nn.Module):
        def forward(self, q, k, cos, sin):
            global COUNT
            COUNT += 1
            return apply_rotary_pos_emb(q, k, cos, sin)  # noqa: F821

    known = {**globals(), "apply_rotary_pos_emb": as_llama}
    Counts.forward = FunctionType(Counts.forward.__code__, known, "forward")
    assert not swap(Counts(), ops=["apply_rotary"]).changed


def test_a_forward_that_is_replaced(turned):
    module = attention(as_llama)
    module.forward = module.forward
    (row,) = swap(module, ops=["apply_rotary"]).rows
    assert row.reason == "its forward is replaced"


def test_tables_in_float32_beside_half_precision(turned):
    """As OLMo has them: computed in float32, and rounded at the end."""

    def as_olmo(q, k, cos, sin, unsqueeze_dim=1):
        kind = q.dtype
        q, k = as_llama(q, k, cos, sin, unsqueeze_dim)
        return q.to(kind), k.to(kind)

    x, given = torch.randn(BATCH, TOKENS, 16, dtype=torch.bfloat16), tables()
    for function, calls in ((as_olmo, 1), (as_llama, 1)):  # the second gives float32: not memkit's
        module = attention(function).bfloat16()
        expected = values(module, x, *given)
        swap(module, ops=["apply_rotary"])
        found = values(module, x, *given)
        assert len(turned()) == calls
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert (a - b).norm() <= 2e-2 * b.norm()
