"""transformers' models, with random weights."""

import copy

import pytest
import torch
from model_cases import apart, check_gradients, check_kept, make, names, step
from torch import nn
from torch.nn.utils import parametrize

from memkit import swap, unswap
from memkit.bench.zoo import LAYERS
from memkit.swap import types
from memkit.swap.library import Twin

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("repeatable")

MODELS = names("transformers", quick=("llama", "gpt2", "bert", "gemma3", "t5_gated"))


def by_path(report):
    return {row.path: row for row in report}


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    check_gradients(name)


@pytest.mark.parametrize("name", names("transformers", quick=("llama", "gpt2")))
def test_kept(name):
    check_kept(name)


def test_what_is_changed():
    rows = by_path(swap(make("llama").model))
    assert rows["model.layers.0.mlp"].saved == "gate, up"
    assert rows["model.layers.1.input_layernorm"].before == "LlamaRMSNorm"
    assert all(row.changed for row in rows.values()), rows


def test_the_report_counts_what_is_saved():
    subject = make("gpt2")
    report = swap(subject.model, sample=subject.sample)
    told = report.bytes_before - report.bytes_after
    assert told == pytest.approx(report.saved_before - report.saved_after, rel=0.01)


def test_another_version_is_left():
    """A forward that was changed is noticed by its values, and the report says so."""
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    class OtherRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) * 1.001

    class OtherMLP(LlamaMLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    model = make("llama").model
    layer = model.model.layers[0]
    layer.input_layernorm.__class__, layer.mlp.__class__ = OtherRMSNorm, OtherMLP
    rows = by_path(swap(model))
    for path in ("model.layers.0.mlp", "model.layers.0.input_layernorm"):
        assert not rows[path].changed
        assert "computes something else" in rows[path].reason
    assert rows["model.layers.1.mlp"].changed


def test_hooks_inside_an_mlp_run():
    subject = make("llama")
    mlp = subject.model.model.layers[0].mlp
    expected = step(copy.deepcopy(subject))
    swap(subject.model)
    seen = []
    mlp.down_proj.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    mlp.act_fn.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    torch.testing.assert_close(step(subject), expected, rtol=1e-4, atol=1e-6)
    assert len(seen) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_dtypes(name, dtype):
    subject = make(name)
    subject.model.to(dtype)
    expected, _ = step(copy.deepcopy(subject))
    report = swap(subject.model)
    assert all(row.changed for row in report), report
    loss, _ = step(subject)
    torch.testing.assert_close(loss, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)


def test_autocast():
    subject = make("llama")
    swap(subject.model, sample=subject.sample)
    stock = make("llama")
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = step(subject)
        expected, theirs = step(stock)
    _, exact = step(make("llama"))
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    assert apart(gradients, exact) <= 2 * apart(theirs, exact)


def test_parametrized_after_swap():
    """The twin computes with the parametrized weight, and unswap keeps the parametrization."""

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    subject = make("llama")
    norm = subject.model.model.norm
    swap(subject.model)
    parametrize.register_parametrization(norm, "weight", Doubled())
    loss, gradients = step(subject)
    unswap(subject.model)
    assert not any(isinstance(module, types.Changed) for module in subject.model.modules())
    assert parametrize.is_parametrized(norm)
    expected, theirs = step(subject)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert apart(gradients, theirs) < 1e-5


def test_lora():
    peft = pytest.importorskip("peft")
    subject = make("llama")
    swap(subject.model)
    config = peft.LoraConfig(target_modules=["q_proj", "gate_proj", "down_proj"], lora_dropout=0.0)
    subject.model = peft.get_peft_model(subject.model, config)
    for name, parameter in subject.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    loss, gradients = step(subject)
    assert sum("lora" in name for name in gradients) == len(gradients) == 3 * 2 * LAYERS
    assert any(isinstance(module, Twin) for module in subject.model.modules())
    unswap(subject.model)
    expected, theirs = step(subject)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert apart(gradients, theirs) < 1e-4


def test_a_thousand_modules():
    """In less than a second without a sample."""
    import time

    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=80, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    assert sum(1 for _ in model.modules()) >= 1000
    begin = time.process_time()
    report = swap(model)
    assert time.process_time() - begin < 1
    assert len(report.changed) == 80 * 3 + 2
