"""The loss of a language model in lean(): of the last norm nothing is kept but the gradient that goes on from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from memkit import _C, lean, swap
from memkit import functional as F
from memkit.memory import measure

transformers = pytest.importorskip("transformers")

BATCH, TOKENS, WIDTH, CLASSES = 2, 24, 32, 100
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": CLASSES,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    "Gemma2": {"head_dim": 8},
    "Cohere": {"logit_scale": 0.25},  # multiplies what the norm gives
    "Phi": {"resid_pdrop": 0.0},
}


def models(name: str = "Llama", exact: bool = True) -> tuple[Any, Any]:
    """Swapped with lean="call", and the same swapped without lean, in which the norm is as it was."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **OPTIONS[name])
    made = getattr(transformers, f"{name}ForCausalLM")(config).train()
    other = copy.deepcopy(made)
    for each, inside in ((made, "call"), (other, False)):
        swap(each, sample=batch(), ops=["all", "linear_cross_entropy"], lean=inside, exact=exact)
    return made, other


def batch() -> dict[str, Any]:
    tokens = torch.randint(CLASSES, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def took(loss: Tensor) -> bool:
    """Whether what comes before the norm, and its parameters, are next in line of the loss itself."""
    return took_by(loss.grad_fn)


def took_by(node: Any) -> bool:
    return len(node.next_functions) > 3  # the hidden states, the weight, the bias


def check_equal(ours: Any, others: Any, factor: float = 1.0) -> None:
    for (name, a), b in zip(ours.named_parameters(), others.parameters(), strict=True):
        torch.testing.assert_close(
            a.grad, b.grad * factor, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", list(OPTIONS))
def test_gradients_are_those_of_the_norm(name: str) -> None:
    ours, other = models(name)
    loss, expected = ours(**batch()).loss, other(**batch()).loss
    assert took(loss)
    assert not took(expected)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    check_equal(ours, other)


@pytest.mark.parametrize("number", [1.0, 0.3, -8.0, 0.0])
def test_a_factor_arrives_in_backward(number: float) -> None:
    ours, other = models()
    (ours(**batch()).loss * number).backward()
    (other(**batch()).loss * number).backward()
    check_equal(ours, other)


def test_as_often_as_the_graph_is_kept() -> None:
    ours, other = models()
    loss = ours(**batch()).loss
    assert took(loss)
    for _ in range(3):
        loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    other(**batch()).loss.backward()
    check_equal(ours, other, 4.0)


def test_gradients_asked_for_one_by_one() -> None:
    ours, other = models()
    found = {}
    for made in (ours, other):
        wanted = [made.model.norm.weight, made.lm_head.weight, made.model.layers[0].mlp.up_proj.weight]
        found[made] = [torch.autograd.grad(made(**batch()).loss, w)[0] for w in wanted]
    for a, b in zip(found[ours], found[other], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("frozen", ["model.norm", "lm_head", "model.embed_tokens", "model.layers"])
def test_frozen_parts(frozen: str) -> None:
    ours, other = models()
    for made in (ours, other):
        made.get_submodule(frozen).requires_grad_(False)
        made(**batch()).loss.backward()
    for a, b in zip(ours.parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8)


def keeps_states(made: Any) -> Any:
    out = made(**batch(), output_hidden_states=True)
    return out.loss + out.hidden_states[-1].square().mean()


def hooked(register: str) -> Callable[[Any], Any]:
    """A hook on the norm, by which its result or its gradient gets out."""

    def run(made: Any) -> Any:
        handle = getattr(made.model.norm, register)(lambda *_: None)
        loss = made(**batch()).loss
        handle.remove()
        return loss

    return run


def listened(made: Any) -> Any:
    def listen(_module: Any, _inputs: Any, result: Tensor) -> None:
        result.register_hook(lambda grad: grad * 2)

    handle = made.model.norm.register_forward_hook(listen)
    loss = made(**batch()).loss
    handle.remove()
    return loss


def used_elsewhere(made: Any) -> Any:
    kept = []
    handle = made.model.norm.register_forward_hook(lambda _module, _inputs, result: kept.append(result))
    loss = made(**batch()).loss
    handle.remove()
    return loss + kept[0].square().mean()


def its_gradient_asked_for(made: Any) -> Any:
    def retain(_module: Any, _inputs: Any, result: Tensor) -> None:
        result.retain_grad()

    handle = made.model.norm.register_forward_hook(retain)
    loss = made(**batch()).loss
    handle.remove()
    return loss


def its_node_held(made: Any) -> Any:
    kept = []
    handle = made.model.norm.register_forward_hook(
        lambda _module, _inputs, result: kept.append(result.grad_fn)
    )
    loss = made(**batch()).loss
    handle.remove()
    loss.node = kept
    return loss


def looked_for_anomalies(made: Any) -> Any:
    with torch.autograd.detect_anomaly(check_nan=False):
        return made(**batch()).loss


def in_a_checkpoint(made: Any) -> Any:
    # Its hooks are entered within lean(), and would compute the whole model again for the norm.
    inner = made.model.forward
    made.model.forward = lambda **named: checkpoint(inner, **named, use_reentrant=False)
    loss = made(**batch()).loss
    made.model.forward = inner
    return loss


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "run",
    [
        keeps_states,
        hooked("register_full_backward_hook"),
        hooked("register_full_backward_pre_hook"),
        listened,
        used_elsewhere,
        its_gradient_asked_for,
        its_node_held,
        looked_for_anomalies,
        in_a_checkpoint,
    ],
)
def test_the_norm_stays_where_others_may_need_it(run: Callable[[Any], Any]) -> None:
    ours, other = models()
    found = run(ours)
    below = found if found.grad_fn.name().startswith("memkit") else None
    if below is not None:
        assert not took(below)
    else:
        assert not any(took_by(node) for node, _ in found.grad_fn.next_functions)
    found.backward()
    run(other).backward()
    check_equal(ours, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_bytes(dtype: torch.dtype) -> None:
    """float16 waits for the loss's scale, which its gradients need."""
    ours, other = models()
    for made in (ours, other):
        made.to(dtype)
        loss = made(**batch()).loss
        assert took(loss) == (made is ours and dtype == torch.bfloat16)
        (loss * 64).backward()
    for (name, a), b in zip(ours.named_parameters(), other.parameters(), strict=True):
        scale = float(b.grad.float().abs().max())
        error = float((a.grad.float() - b.grad.float()).abs().max())
        assert error <= 0.03 * scale, name


def test_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ours, other = models(exact=False)
    for made in (ours, other):
        with torch.autocast("cpu", torch.bfloat16):
            loss = made(**batch()).loss
        assert took(loss) == (made is ours)
        loss.backward()
    for (name, a), b in zip(ours.named_parameters(), other.parameters(), strict=True):
        assert float((a.grad - b.grad).abs().max()) <= 0.03 * float(b.grad.abs().max()), name


def test_beside_hooks_that_move_what_is_saved() -> None:
    ours, other = models()
    with save_on_cpu():
        loss = ours(**batch()).loss
    loss.backward()
    other(**batch()).loss.backward()
    check_equal(ours, other)


def test_whole_model_in_a_checkpoint() -> None:
    ours, other = models()
    for made in (ours, other):
        for reentrant in (False, True):
            anchor = torch.ones((), requires_grad=True)
            loss = checkpoint(
                lambda one, made=made: made(**batch()).loss * one, anchor, use_reentrant=reentrant
            )
            loss.backward()
    check_equal(ours, other)


def test_sums_over_several_batches() -> None:
    ours, other = models()
    for made in (ours, other):
        for _ in range(3):
            (made(**batch()).loss / 3).backward()
    check_equal(ours, other)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, x: Tensor, target: Tensor, *between: Any) -> Tensor:
        normed = F.layer_norm(x, (WIDTH,), self.weight, self.bias)
        for each in between:
            normed = each(normed)
        return F.linear_cross_entropy(normed, self.head, target)


def written_before(between: Any = (), rows: int = 40) -> tuple[Tensor, Tensor, Last]:
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    last = Last()
    return x.tanh(), x, last


@pytest.mark.parametrize(
    ("between", "does", "rows"),
    [
        ((lambda h: h[:17],), True, 17),
        ((lambda h: h.reshape(10, 4, WIDTH), lambda h: h[:, 1:], lambda h: h.reshape(-1, WIDTH)), False, 30),
        ((lambda h: h * 3.0, lambda h: h / 7), True, 40),
        ((lambda h: h.double().float(),), True, 40),
        ((lambda h: h * h.detach(),), True, 40),
        ((lambda h: h * h,), False, 40),
        ((lambda h: h.relu(),), False, 40),
        ((lambda h: h + 1,), False, 40),
        ((lambda h: h.flip(0),), False, 40),
    ],
)
def test_what_may_be_between(between: Any, does: bool, rows: int) -> None:
    found = []
    for asks in (True, False):
        hidden, x, last = written_before()
        with lean():
            loss = last(hidden, torch.arange(rows), *between)
            assert _C.take_place_of_norm(loss) == does if asks else True
            assert took(loss) == (does and asks)
        loss.backward()
        found.append([x.grad, *(p.grad for p in last.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_only_of_what_lean_keeps_and_while_the_result_is_gone() -> None:
    hidden, _, last = written_before()
    target = torch.arange(40)
    assert not _C.take_place_of_norm(last(hidden, target))  # not in lean()
    with lean():
        normed = F.layer_norm(hidden, (WIDTH,), last.weight, last.bias)
        loss = F.linear_cross_entropy(normed, last.head, target)
        assert not _C.take_place_of_norm(loss)
        again = normed.sum()
        del normed
        assert not _C.take_place_of_norm(loss)
        del again
        assert _C.take_place_of_norm(loss)
        assert not _C.take_place_of_norm(loss)
        assert not _C.take_place_of_norm(loss * 2)
        each = F.linear_cross_entropy(hidden, last.head, target, reduction="none")
        assert not _C.take_place_of_norm(each)
    assert not _C.take_place_of_norm(torch.ones(()))


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_on_the_node_is_called(register: str) -> None:
    hidden, _, last = written_before()
    calls: list[Any] = []
    with lean():
        normed = F.layer_norm(hidden, (WIDTH,), last.weight, last.bias)
        getattr(normed.grad_fn, register)(lambda *grads: calls.append(grads))
        loss = F.linear_cross_entropy(normed, last.head, torch.arange(40))
        del normed
        assert not _C.take_place_of_norm(loss)
    loss.backward()
    assert len(calls) == 1


def test_gradients_in_float16_wait_for_the_scale() -> None:
    hidden, _, last = written_before()
    last.half()
    with lean():
        normed = F.layer_norm(hidden.half(), (WIDTH,), last.weight, last.bias)
        assert normed.dtype == torch.float16
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.linear_cross_entropy(normed, last.head, torch.arange(40))
        del normed
        assert not _C.take_place_of_norm(loss)


def test_an_input_written_to_since_is_told_in_backward() -> None:
    hidden, _, last = written_before()
    with lean():
        loss = last(hidden, torch.arange(40))
        hidden.detach().add_(1)
        assert not _C.take_place_of_norm(loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_sum_with_a_residual() -> None:
    found = []
    for asks in (True, False):
        hidden, x, last = written_before()
        residual = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
        with lean():
            normed, _ = F.add_layer_norm(hidden, residual.sin(), (WIDTH,), last.weight, last.bias)
            loss = F.linear_cross_entropy(normed, last.head, torch.arange(40))
            del normed, _
            assert not asks or _C.take_place_of_norm(loss)
        loss.backward()
        found.append([x.grad, residual.grad, *(p.grad for p in last.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_the_norm_kept_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = models("OPT")

    def step() -> None:
        ours(**batch()).loss.backward()

    step()
    saved = measure(step).saved
    monkeypatch.setattr(_C, "take_place_of_norm", lambda _: False)
    # The norm's input and a statistic a row; kept instead are the gradients of its weight and bias.
    assert measure(step).saved - saved == 4 * (BATCH * TOKENS * (WIDTH + 1) - 2 * WIDTH)


def test_parameters_that_are_freed_until_backward() -> None:
    """As engines do that shard them."""
    found = []
    for asks in (True, False):
        hidden, x, last = written_before()
        with lean():
            loss = last(hidden, torch.arange(40))
            values, storage = last.weight.detach().clone(), last.weight.untyped_storage()
            if asks:
                storage.resize_(0)
                assert not _C.take_place_of_norm(loss)
                storage.resize_(values.nbytes)
                with torch.no_grad():
                    last.weight.data.copy_(values)
        loss.backward()
        found.append([x.grad, *(p.grad for p in last.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
