"""transformers' models, with random weights."""

import copy

import pytest
import torch
from model_cases import apart, check_gradients, check_kept, make, names, step
from torch import nn
from torch.nn.utils import parametrize

from memkit import swap, unswap
from memkit.bench.zoo import LAYERS, Subject, exact_gradients
from memkit.memory import measure
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


def test_the_loss_of_a_class_that_names_none():
    """transformers takes its loss for causal language models then."""
    model = make("gpt2").model
    assert model.loss_type is None
    assert by_path(swap(model))["loss_function"].changed
    unswap(model)
    assert model.transformer.loss_type is None  # and computes no loss
    assert "loss_function" not in by_path(swap(model.transformer))


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
            return 2 * self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

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
    assert len(report.changed) == 80 * 4 + 2  # the last norm and the loss


def test_a_parameter_that_starts_without_effect():
    """Values at the start do not tell that a gain of 1 is there; its gradient does."""
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    class GainMLP(LlamaMLP):
        def forward(self, x):
            return self.gain * super().forward(x)

    class SquaredRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return self.weight * super().forward(x)

    subject = make("llama")
    layer = subject.model.model.layers[0]
    layer.mlp.__class__, layer.input_layernorm.__class__ = GainMLP, SquaredRMSNorm
    layer.mlp.gain = nn.Parameter(torch.ones(()), requires_grad=False)
    rows = by_path(swap(subject.model))
    assert not rows["model.layers.0.mlp"].changed
    assert not rows["model.layers.0.input_layernorm"].changed
    assert rows["model.layers.1.mlp"].changed
    assert not layer.mlp.gain.requires_grad


class Reversed(torch.Tensor):
    """A weight that brings its own linear, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            input, weight, bias = (*args, None)[:3]
            return nn.functional.linear(input, weight.as_subclass(torch.Tensor).flip(0), bias)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(("name", "path"), [("llama", "model.layers.0.mlp.down_proj"), ("vit", "")])
def test_a_weight_with_a_linear_of_its_own(name, path):
    subject = make(name)
    path = path or next(k for k, _ in subject.model.named_modules() if k.endswith("fc2"))
    layer = subject.model.get_submodule(path)
    swap(subject.model)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Reversed), requires_grad=False)
    loss, _ = step(subject)
    unswap(subject.model)
    torch.testing.assert_close(loss, step(subject)[0], rtol=1e-5, atol=0)


def test_an_adapter_around_a_layer_that_stays_float32():
    """T5 keeps `wo` in float32 and casts to it, whatever stands around it."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        @property
        def weight(self):
            return self.base.weight

        def forward(self, x):
            return self.base(x)

    subject = make("t5")
    mlp = subject.model.encoder.block[0].layer[1].DenseReluDense
    subject.model.bfloat16()
    swap(subject.model)
    assert isinstance(mlp, types.Changed)
    mlp.wo = Adapter(mlp.wo.float())
    x = torch.randn(2, 3, mlp.wi.in_features, dtype=torch.bfloat16)
    ours = mlp(x)
    unswap(subject.model)
    torch.testing.assert_close(ours, mlp(x))


def test_global_backward_hooks_run():
    subject = make("llama")
    stock = copy.deepcopy(subject)
    swap(subject.model)
    seen = {}
    for each in (subject, stock):
        names, calls = {m: k for k, m in each.model.named_modules()}, []
        handle = nn.modules.module.register_module_full_backward_hook(
            lambda module, *_, names=names, calls=calls: calls.append(names.get(module))
        )
        with handle:
            step(each)
        seen[each is stock] = sorted(calls)
    assert seen[True] == seen[False]


def test_logits_of_another_kind():
    """A tensor subclass's loss, as of distributed logits, and one without values, are stock's."""
    from memkit.swap.library.losses import causal_lm_loss

    class Sharded(torch.Tensor):
        pass

    logits, labels = torch.randn(2, 4, 5, dtype=torch.bfloat16), torch.randint(5, (2, 4))
    loss = causal_lm_loss(logits.as_subclass(Sharded), labels, 5)
    assert type(loss) is Sharded
    torch.testing.assert_close(loss.as_subclass(torch.Tensor), causal_lm_loss(logits, labels, 5))
    assert causal_lm_loss(logits.to("meta"), labels.to("meta"), 5).is_meta


def test_a_bert_layer_whose_part_was_replaced():
    subject = make("bert")
    swap(subject.model)
    layer = next(m for m in subject.model.modules() if hasattr(m, "feed_forward_chunk"))

    class Tripled(type(layer.intermediate)):
        def forward(self, x):
            return 3 * super().forward(x)

    layer.intermediate.__class__ = Tripled
    loss, _ = step(subject)
    unswap(subject.model)
    torch.testing.assert_close(loss, step(subject)[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("gpt_neox", 0.65),
        ("gemma2", 0.65),
        pytest.param("phi3", 0.65, marks=pytest.mark.slow),
        pytest.param("t5", 0.65, marks=pytest.mark.slow),
    ],
)
def test_attention_keeps_query_key_and_value(name, share):
    subject = make(name)
    before = measure(subject.loss, device="cpu").saved
    expected, theirs = step(copy.deepcopy(subject))
    swap(subject.model, sample=subject.sample, lean="call")
    assert measure(subject.loss, device="cpu").saved <= share * before
    loss, gradients = step(subject)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert apart(gradients, theirs) < 1e-4


def test_attention_with_dropout():
    """The weights that backward makes again are dropped as they were."""
    subject = make("gemma2")
    for module in subject.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    expected, theirs = step(copy.deepcopy(subject))
    swap(subject.model, sample=subject.sample, lean="call")
    loss, gradients = step(subject)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert apart(gradients, theirs) < 1e-4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mamba", {"state_size": 8, "time_step_rank": 4}),
        ("Mamba2", {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 8, "chunk_size": 16}),
    ],
)
def test_recurrences_keep_no_states(name, options):
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, use_cache=False, **options
    )
    ids = torch.randint(64, (2, 24))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    subject = Subject(model, {"input_ids": ids, "labels": ids})
    before = measure(subject.loss, device="cpu").saved
    exact = exact_gradients(subject)
    expected, theirs = step(copy.deepcopy(subject))
    swap(subject.model, sample=subject.sample, lean="call")
    assert measure(subject.loss, device="cpu").saved <= 0.5 * before
    loss, ours = step(subject)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert apart(ours, exact) <= 2 * apart(theirs, exact)


def test_tensors_of_its_own_go_to_no_default_device():
    """Losses and parts are compared on numbers that swap draws, by a generator of the CPU's."""
    subject = make("llama")
    with torch.device("meta"):
        rows = by_path(swap(subject.model, sample=subject.sample))
    assert rows["loss_function"].changed
    assert rows["model.layers.0.mlp"].saved == "gate, up"
