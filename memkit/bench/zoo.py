"""Models of transformers, timm, torchvision and diffusers with random weights, small, in the proportions of the real ones.

`ZOO[name]()` gives a model in training mode without dropout, what to call it with, and what to take from the output as the
loss. The libraries are imported when a model of theirs is made; `LIBRARY[name]` names them.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

WIDTH, LAYERS, HEADS, VOCABULARY = 256, 4, 8, 1024
TOKENS, BATCH = 128, 2


@dataclass
class Subject:
    model: nn.Module
    sample: dict[Any, Any] | tuple[Any, ...]
    """Keyword arguments, or positional ones."""

    def loss(self) -> Tensor:
        """Of one training step on the sample."""
        out = self.model(**self.sample) if isinstance(self.sample, dict) else self.model(*self.sample)
        if isinstance(out, Mapping) and out.get("loss") is not None:
            return out["loss"]  # type: ignore[no-any-return]
        out = output_of(out)
        outs = out if isinstance(out, tuple) else (out,)  # inception's auxiliary head comes second
        return torch.stack([cross_entropy(each) for each in outs]).sum()


def output_of(out: Any) -> Any:
    """Its first tensor, where a library's class holds what a model returns."""
    return (
        next(held for held in out.values() if isinstance(held, Tensor)) if isinstance(out, Mapping) else out
    )


Maker = Callable[..., Subject]
"""Takes `layers`: how many blocks, where a model's depth is no part of its name."""


_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm}  # of one dtype


class _Wide(TorchFunctionMode):
    """Libraries round to float32 in places, whatever they are given; here they do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        if func in _PRODUCTS and {x.dtype for x in args if isinstance(x, Tensor)} > {torch.float64}:
            args = tuple(x.double() if isinstance(x, Tensor) else x for x in args)
        return func(*args, **kwargs)


def exact_gradients(subject: Subject) -> dict[str, Tensor]:
    """Of a stock model, computed in float64 throughout."""
    wide = copy.deepcopy(subject)
    wide.model.double()
    if any(type(module).__name__.endswith("Experts") for module in wide.model.modules()):
        wide.model.set_experts_implementation("eager")  # type: ignore[operator]  # grouped products know no float64
    sample = wide.sample.items() if isinstance(wide.sample, dict) else enumerate(wide.sample)
    cast = {key: t.double() if t.is_floating_point() else t for key, t in sample}
    wide.sample = cast if isinstance(wide.sample, dict) else tuple(cast.values())
    with _Wide():
        return gradients(wide)


def gradients(subject: Subject, loss: Tensor | None = None) -> dict[str, Tensor]:
    """Of a step, or of its loss, by the parameters' names."""
    subject.model.zero_grad(set_to_none=True)
    torch.autograd.backward(subject.loss() if loss is None else loss)
    return {n: p.grad.clone() for n, p in subject.model.named_parameters() if p.grad is not None}


def distance(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Between tensors taken together, relative to the second ones."""
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True)]
    squares = sum((a - b).square().sum().item() for a, b in pairs)
    return float((squares / sum(b.square().sum().item() for _, b in pairs)) ** 0.5)


def cross_entropy(logits: Tensor) -> Tensor:
    flat = logits.flatten(0, -2)
    target = torch.arange(len(flat), device=flat.device) % flat.shape[-1]
    return nn.functional.cross_entropy(flat, target)


def _text(cls: str, config: str, **options: Any) -> Maker:
    def make(layers: int = LAYERS) -> Subject:
        transformers: Any = importlib.import_module("transformers")
        depth = {name: layers for name in ("num_hidden_layers", "num_layers", "n_layer") if name in options}
        model = getattr(transformers, cls)(getattr(transformers, config)(**options | depth))
        ids = torch.randint(2, VOCABULARY, (BATCH, TOKENS))
        return Subject(model.train(), {"input_ids": ids, "labels": ids})

    return make


_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_DECODER: dict[str, Any] = {
    **_COMMON,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 512,
}
_GROUPED: dict[str, Any] = {
    **_DECODER,
    "num_key_value_heads": HEADS // 2,
    "intermediate_size": 704,
    "use_cache": False,
}
_GEMMA: dict[str, Any] = {**_GROUPED, "head_dim": 32, "sliding_window": 64}
_ENCODER: dict[str, Any] = {
    **_DECODER,
    "intermediate_size": 4 * WIDTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_T5: dict[str, Any] = {
    **_COMMON,
    "d_model": WIDTH,
    "d_kv": 32,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


def _vit(layers: int = LAYERS) -> Subject:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        image_size=96,
        patch_size=8,
        num_labels=100,
    )
    labels = torch.arange(4) % 100
    model = transformers.ViTForImageClassification(config).train()
    return Subject(model, {"pixel_values": torch.randn(4, 3, 96, 96), "labels": labels})


def _whisper(layers: int = LAYERS) -> Subject:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.WhisperConfig(
        **_COMMON,
        d_model=WIDTH,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        num_mel_bins=80,
        max_source_positions=TOKENS,
        max_target_positions=TOKENS,
        dropout=0.0,
        decoder_start_token_id=1,
        use_cache=False,
    )
    features = torch.randn(BATCH, 80, 2 * TOKENS)
    labels = torch.randint(2, VOCABULARY, (BATCH, TOKENS))
    model = transformers.WhisperForConditionalGeneration(config).train()
    return Subject(model, {"input_features": features, "labels": labels})


def _timm(name: str, side: int, batch: int = 4, **options: Any) -> Maker:
    def make(layers: int = LAYERS) -> Subject:
        timm: Any = importlib.import_module("timm")
        depth = {"depth": layers} if "depth" in options else {}
        model = timm.create_model(name, num_classes=100, **options | depth)
        return Subject(model.train(), (torch.randn(batch, 3, side, side),))

    return make


def _torchvision(name: str, side: int, batch: int = 4, **options: Any) -> Maker:
    def make(layers: int = LAYERS) -> Subject:
        models: Any = importlib.import_module("torchvision.models")
        model = getattr(models, name)(weights=None, num_classes=100, **options)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return Subject(model.train(), (torch.randn(batch, 3, side, side),))

    return make


def _unet(layers: int = LAYERS) -> Subject:
    """In the proportions of Stable Diffusion's, with two of its four resolutions."""
    diffusers: Any = importlib.import_module("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(64, 128),
        layers_per_block=max(1, layers // 2),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=128,
        attention_head_dim=8,
    )
    return Subject(
        model.train(), (torch.randn(2, 4, 16, 16), torch.tensor([1, 500]), torch.randn(2, 16, 128))
    )


def _flux(layers: int = LAYERS) -> Subject:
    diffusers: Any = importlib.import_module("diffusers")
    model = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=layers // 2,
        num_single_layers=layers // 2,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=64,
        axes_dims_rope=(8, 12, 12),
    )
    side, words = 8, 32
    positions = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side)).float()
    sample = {
        "hidden_states": torch.randn(BATCH, side * side, 16),
        "encoder_hidden_states": torch.randn(BATCH, words, WIDTH),
        "pooled_projections": torch.randn(BATCH, 64),
        "timestep": torch.tensor([0.2, 0.7]),
        "img_ids": positions,
        "txt_ids": torch.zeros(words, 3),
    }
    return Subject(model.train(), sample)


def _encoder(layers: int = LAYERS) -> Subject:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return Subject(model.train(), (torch.randn(BATCH, TOKENS, WIDTH),))


ZOO: dict[str, Maker] = {
    "llama": _text("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "mistral": _text("MistralForCausalLM", "MistralConfig", **_GROUPED, sliding_window=64),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
    "qwen3": _text("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=32),
    "gemma2": _text("Gemma2ForCausalLM", "Gemma2Config", **_GEMMA),
    "gemma3": _text("Gemma3ForCausalLM", "Gemma3TextConfig", **_GEMMA),
    "phi3": _text("Phi3ForCausalLM", "Phi3Config", **_GROUPED),
    "mixtral": _text("MixtralForCausalLM", "MixtralConfig", **_GROUPED, num_local_experts=4),
    "gpt2": _text(
        "GPT2LMHeadModel",
        "GPT2Config",
        **_COMMON,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=512,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    ),
    "gpt_neox": _text(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", **_DECODER, intermediate_size=4 * WIDTH, use_cache=False
    ),
    "opt": _text(
        "OPTForCausalLM",
        "OPTConfig",
        **_DECODER,
        ffn_dim=4 * WIDTH,
        word_embed_proj_dim=WIDTH,
        dropout=0.0,
        use_cache=False,
    ),
    "bert": _text("BertForMaskedLM", "BertConfig", **_ENCODER),
    "roberta": _text("RobertaForMaskedLM", "RobertaConfig", **_ENCODER),
    "t5": _text("T5ForConditionalGeneration", "T5Config", **_T5, d_ff=4 * WIDTH),
    "t5_gated": _text(
        "T5ForConditionalGeneration", "T5Config", **_T5, d_ff=704, feed_forward_proj="gated-gelu"
    ),
    "vit": _vit,
    "whisper": _whisper,
    "timm resnet50": _timm("resnet50", 96),
    "timm efficientnet_b0": _timm("efficientnet_b0", 96),
    "timm convnext_atto": _timm("convnext_atto", 96),
    "timm vit_tiny": _timm("vit_tiny_patch16_224", 96, img_size=96, depth=LAYERS),
    "timm swin_tiny": _timm("swin_tiny_patch4_window7_224", 112, 2, img_size=112, drop_path_rate=0.0),
    "timm mobilenetv3": _timm("mobilenetv3_large_100", 96),
    "torchvision resnet18": _torchvision("resnet18", 96),
    "torchvision densenet121": _torchvision("densenet121", 64),
    "torchvision inception_v3": _torchvision("inception_v3", 96, aux_logits=False, init_weights=False),
    "diffusers unet": _unet,
    "diffusers flux": _flux,
    "nn.TransformerEncoder": _encoder,
}
"""Without dropout, as attention's own dropout takes PyTorch off its fused attention on the CPU."""

LIBRARY: dict[str, str | None] = {
    name: None if name.startswith("nn.") else name.split()[0] if " " in name else "transformers"
    for name in ZOO
}
