"""swap with "linear_cross_entropy": language models whose loss is taken without their logits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import memkit
from memkit import swap, unswap
from memkit.memory import measure
from memkit.swap.library.losses import Logits

transformers = pytest.importorskip("transformers")

OPS = ["all", "linear_cross_entropy"]
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 501,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Gemma2": {"head_dim": 8},  # with a softcap
    "Granite": {"logits_scaling": 3.0},
    "Cohere": {"logit_scale": 0.25},
    "Phi": {},  # with a bias
    "Llava": {},  # a language model within one that sees
}


def model(name: str = "Llama", **options: Any) -> Any:
    torch.manual_seed(0)
    if name == "Llava":
        seen = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**seen, image_size=16, patch_size=8),
            text_config=transformers.LlamaConfig(**SHAPE),
            image_token_index=500,
        )
    else:
        config = getattr(transformers, f"{name}Config")(**SHAPE, **MODELS[name], **options)
    kinds = {"GPT2": "GPT2LMHeadModel", "Llava": "LlavaForConditionalGeneration"}
    kind = kinds.get(name, f"{name}ForCausalLM")
    made = getattr(transformers, kind)(config).train()
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return made


def batch() -> dict[str, Any]:
    tokens = torch.randint(500, (4, 24), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def gradients(made: Any) -> list[Any]:
    made.zero_grad()
    out = made(**batch())
    out.loss.backward()
    return [out.loss, *(p.grad.clone() for p in made.parameters() if p.grad is not None)]


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("name", list(MODELS))
def test_is_stock_without_logits(name: str, lean: Any) -> None:
    stock = model(name)
    ours = copy.deepcopy(stock)
    report = swap(ours, sample=batch(), ops=OPS, lean=lean)
    (row,) = [row for row in report if row.path == "logits"]
    assert (row.after, row.reason) == ("none in training", "")
    for a, b in zip(gradients(ours), gradients(stock), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    losses = [made(**batch(), num_items_in_batch=7).loss for made in (ours, stock)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    out = ours(**batch())
    assert "logits" not in out
    assert out.logits is None
    assert len(ours(**batch(), return_dict=False)) == len(stock(**batch(), return_dict=False)) - 1
    for part in (ours, stock):
        part.eval()
    torch.testing.assert_close(ours(**batch()).logits, stock(**batch()).logits)
    unswap(ours)
    assert [type(part) for part in ours.modules()] == [type(part) for part in stock.modules()]


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast: bool) -> None:
    stock = model() if autocast else model().bfloat16()
    ours = copy.deepcopy(stock)
    with torch.autocast("cpu", enabled=autocast):
        swap(ours, sample=batch(), ops=OPS)
        found = [part(**batch()).loss for part in (ours, stock)]
        assert "logits" not in ours(**batch())
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_logits_are_never_whole() -> None:
    whole = 4 * 24 * 501 * 4
    made = model()
    swap(made, sample=batch(), lean="call")
    before = measure(lambda: gradients(made))
    report = swap(made, sample=batch(), ops=OPS, lean="call")
    gradients(made)
    after = measure(lambda: gradients(made))
    assert after.peak < before.peak - whole
    assert after.saved < before.saved - whole / 2
    assert report.saved_after < report.saved_before - whole


class Coded(torch.Tensor):
    """Of which nobody but PyTorch's operators knows how to compute."""

    coded: torch.Tensor

    @staticmethod
    def __new__(cls, coded: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, coded.shape, dtype=coded.dtype)
        made.coded = coded
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "memkit" in str(func):
            raise NotImplementedError(f"{func} of coded weights")
        if func is torch.ops.aten.detach.default:
            return cls(args[0].coded)
        args, kwargs = tree_map_only(cls, lambda x: x.coded, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_a_head_whose_weight_was_coded_since() -> None:
    stock = model()
    ours = copy.deepcopy(stock)
    swap(ours, sample=batch(), ops=OPS)
    for part in (ours, stock):
        coded = Coded(part.lm_head.weight.detach())
        part.lm_head.weight = torch.nn.Parameter(coded, requires_grad=False)
    for a, b in zip(gradients(ours), gradients(stock), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert ours(**batch()).logits is not None


def test_a_head_whose_weight_is_given_for_the_call() -> None:
    ours = model()
    swap(ours, sample=batch(), ops=OPS)
    weights = {name: p.detach().requires_grad_() for name, p in ours.named_parameters()}
    out = torch.func.functional_call(ours, weights, kwargs=batch())
    assert out.logits is None
    torch.testing.assert_close(out.loss, ours(**batch()).loss)


def test_calls_that_return_logits() -> None:
    ours, stock = model(), model()
    swap(ours, sample=batch(), ops=OPS)
    tokens = batch()["input_ids"]
    torch.testing.assert_close(ours(tokens).logits, stock(tokens).logits)
    with torch.no_grad():
        assert ours(**batch()).logits is not None
    hook = ours.lm_head.register_forward_hook(lambda *given: None)
    assert ours(**batch()).logits is not None
    hook.remove()
    expected = torch.compile(stock, backend="eager")(**batch())
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(ours, backend="eager")(**batch()).logits, expected.logits)


def test_copies_and_adapters() -> None:
    ours = model()
    swap(ours, sample=batch(), ops=OPS)
    expected = gradients(ours)
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert "logits" not in made(**batch())
        torch.testing.assert_close(gradients(made), expected)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(ours, peft.LoraConfig(target_modules=["q_proj", "lm_head"]))
    assert adapted(**batch()).logits is not None  # the adapter's


def test_not_chosen() -> None:
    made = model()
    assert "logits" not in [row.path for row in swap(made, sample=batch())]
    assert made(**batch()).logits is not None
    (row,) = [row for row in swap(made, ops=OPS) if row.path == "logits"]
    assert row.reason == "not proven: pass sample="
    for sample in ({"input_ids": batch()["input_ids"]}, batch()):
        (row,) = [row for row in swap(made, sample=sample, ops=OPS) if row.path == "logits"]
        assert row.reason == (
            "on the sample, no step of training with labels" if "labels" not in sample else ""
        )
    made.eval()
    (row,) = [row for row in swap(made, sample=batch(), ops=OPS) if row.path == "logits"]
    assert (row.after, row.reason) == ("unchanged", "on the sample, no step of training with labels")
    with pytest.raises(
        ValueError, match=r"expected ops 'all' or a collection of relu, .*linear_cross_entropy; got 'x'"
    ):
        swap(made, ops=["x"])


def test_a_forward_that_looks_at_the_logits_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    loss = type(made).loss_function

    def looking(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        held = vars(self).get("_loss_function")
        return held(logits[..., :501], *args, **kwargs) if held else loss.fget(self)(logits, *args, **kwargs)

    monkeypatch.setattr(
        type(made),
        "loss_function",
        property(lambda self: lambda *args, **kwargs: looking(self, *args, **kwargs)),
    )
    report = swap(made, sample=batch(), ops=OPS)
    assert not [row for row in report.changed if row.path == "logits"]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[0],
        lambda x: x + 1,
        lambda x: x * torch.ones(1),
        lambda x: x / torch.ones(1),
        lambda x: x.shape,
        lambda x: x.argmax(-1),
        lambda x: torch.relu(x),
        lambda x: torch.tanh(torch.tanh(x)),
    ],
)
def test_what_stands_for_logits_is_no_tensor(use: Any) -> None:
    head = nn.Linear(4, 8)
    with pytest.raises((AttributeError, TypeError)):
        use(Logits(head, torch.randn(3, 4)))


def test_in_lean() -> None:
    ours, stock = model(), model()
    swap(ours, sample=batch(), ops=OPS, lean=True)
    with memkit.lean():
        found = gradients(ours)
    for a, b in zip(found, gradients(stock), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_models_inside_of_what_shows_their_attributes() -> None:
    peft = pytest.importorskip("peft")
    stock = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    ours = copy.deepcopy(stock)
    report = swap(ours, sample=batch(), ops=OPS)
    assert [row.path for row in report if "logits" in row.path] == ["base_model.model.logits"]
    for a, b in zip(gradients(ours), gradients(stock), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert ours(**batch()).logits is None


class Pair(nn.Module):
    """Two models with one last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = model(), model()
        self.two.lm_head = self.one.lm_head

    def forward(self, **given: Any) -> Any:
        return self.one(**given).loss + self.two(**given).loss


def test_two_models_with_one_last_layer() -> None:
    ours = Pair()
    expected = ours(**batch())
    assert len([row for row in swap(ours, sample=batch(), ops=OPS).changed if "logits" in row.path]) == 2
    torch.testing.assert_close(ours(**batch()), expected)
    assert ours.two(**batch()).logits is None


def test_a_short_sample_does_not_undo_the_rest() -> None:
    short = {name: each[:1, :3] for name, each in batch().items()}
    changed = [len(swap(model(), sample=short, ops=ops).changed) for ops in ("all", OPS)]
    assert changed[1] == changed[0] + 1


def test_another_loss_set_afterwards_gets_the_logits() -> None:
    ours, stock = model(), model()
    swap(ours, sample=batch(), ops=OPS)
    for made in (ours, stock):
        made.loss_function = lambda logits, labels, **more: logits[..., 0].square().mean()
    torch.testing.assert_close(ours(**batch()).loss, stock(**batch()).loss)
    assert ours(**batch()).logits is not None


def test_calls_on_the_way_get_logits() -> None:
    ours, seen = model(), []
    swap(ours, sample=batch(), ops=OPS)

    def look(module: Any, given: Any, hidden: Any) -> None:
        if len(seen) < 2:
            seen.append(ours.lm_head(hidden[0] if isinstance(hidden, tuple) else hidden))
            seen.append(ours(batch()["input_ids"]).logits)

    ours.model.layers[0].register_forward_hook(look)
    assert ours(**batch()).logits is None
    assert all(isinstance(each, torch.Tensor) for each in seen)


def test_last_layers_that_are_left() -> None:
    made = model()
    made.lm_head.forward = made.lm_head.forward
    (row,) = [row for row in swap(made, sample=batch(), ops=OPS) if row.path == "logits"]
    assert (row.after, row.reason) == ("unchanged", "a forward is replaced")
    made = model()
    made.lm_head = nn.Sequential(made.lm_head)
    (row,) = [row for row in swap(made, sample=batch(), ops=OPS) if row.path == "logits"]
    assert (row.after, row.reason) == (
        "unchanged",
        "its last layer is no Linear with more outputs than inputs",
    )
    assert made(**batch()).logits is not None
