"""The big models that bench_steps.py trains, and how each variant trains them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit
from memkit.bench.models import GPT
from memkit.bench.train import COMPILE_OPTIONS

LEARNING_RATE = 1e-4

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, and what all its variants share."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]  # of that many rows, on the device
    size: int  # rows whose steps are compared
    grain: int  # the largest batch is a multiple of it
    features: Callable[[nn.Module, Tensor], Tensor] | None = None  # what the head turns into logits
    head: str = ""
    sample: Callable[[Tensor], Any] = lambda inputs: inputs
    autocast: bool = False

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return (
            model.get_submodule(self.head)(self.features(model, inputs)) if self.features else model(inputs)
        )


def tokens(vocabulary: int, length: int, device: str) -> Callable[[int], Batch]:
    def batch(rows: int) -> Batch:
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.randint(vocabulary, (rows, length + 1), device=device, generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return batch


def gpt(args: argparse.Namespace) -> Case:
    """That of memkit.bench, with 338 million parameters."""
    vocabulary, layers, width, heads, length = (
        (400, 2, 64, 2, 32) if args.tiny else (32768, 24, 1024, 16, 2048)
    )
    return Case(
        build=lambda: GPT(vocabulary, layers, width, heads, length, args.dropout).bfloat16(),
        batch=tokens(vocabulary, length, args.device),
        size=2 if args.tiny else 4,
        grain=1,
        features=lambda model, inputs: model.features(inputs),
        head="head",
    )


def llama(args: argparse.Namespace) -> Case:
    """transformers' LlamaForCausalLM with 697 million parameters."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    width, inner, layers, heads, vocabulary = (
        (64, 160, 2, 4, 400) if args.tiny else (2048, 5632, 12, 16, 32000)
    )
    length = 32 if args.tiny else args.sequence
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Case(
        build=lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        batch=tokens(vocabulary, length, args.device),
        size=2,
        grain=1,
        features=lambda model, inputs: model.model(input_ids=inputs, use_cache=False).last_hidden_state,
        head="lm_head",
        sample=lambda inputs: {"input_ids": inputs, "use_cache": False},
    )


def resnet50(args: argparse.Namespace) -> Case:
    """torchvision's, channels last, under autocast."""
    from torchvision.models.resnet import Bottleneck, ResNet

    side, layers, classes = (32, [1, 1, 1, 1], 10) if args.tiny else (224, [3, 4, 6, 3], 1000)

    def batch(rows: int) -> Batch:
        generator = torch.Generator(args.device).manual_seed(0)
        images = torch.randn(rows, 3, side, side, device=args.device, generator=generator)
        targets = torch.randint(classes, (rows,), device=args.device, generator=generator)
        return images.contiguous(memory_format=torch.channels_last), targets

    return Case(
        build=lambda: ResNet(Bottleneck, layers, classes).to(memory_format=torch.channels_last),
        batch=batch,
        size=4 if args.tiny else 64,
        grain=2 if args.tiny else 16,
        autocast=True,
    )


MODELS: dict[str, Callable[[argparse.Namespace], Case]] = {"gpt": gpt, "llama": llama, "resnet50": resnet50}


class Trainer:
    """A variant of a model with its optimizer."""

    def __init__(self, case: Case, variant: str, device: str) -> None:
        self.case, self.device, self.steps = case, device, 0
        torch.manual_seed(0)
        with torch.device(device):
            self.model = case.build().train()
        self.swapped: memkit.SwapReport | None = None
        self.loss_of = self._loss
        self.in_backward = variant == "memkit+optimizer"
        if variant == "compile":
            torch.compiler.reset()
            self.loss_of = torch.compile(self._loss, options=COMPILE_OPTIONS)
        elif variant == "liger":
            self.loss_of = with_liger(case, self.model)
        elif variant != "eager":
            with self._autocast():
                sample = case.sample(case.batch(case.size)[0])
                self.swapped = memkit.swap(self.model, sample=sample, lean=True)
            self.loss_of = self._memkit_loss
        make: Any = memkit.optim.AdamW if self.in_backward else torch.optim.AdamW
        fused = {} if self.in_backward else {"fused": True}
        self.optimizer = make(self.model.parameters(), lr=LEARNING_RATE, **fused)
        if self.in_backward:
            self.handle = memkit.optim.step_in_backward(self.optimizer)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.case.autocast)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.case.logits(self.model, inputs).flatten(0, -2).float(), targets.flatten())

    def _memkit_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with memkit.lean():
            if self.case.features is None:
                return self._loss(inputs, targets)
            hidden = self.case.features(self.model, inputs).flatten(0, -2)
            weight = self.model.get_submodule(self.case.head).weight
            return memkit.functional.linear_cross_entropy(hidden, weight, targets.flatten())

    def step(self, batch: Batch) -> Tensor:
        """One whole training step; it starts and ends without gradients in memory."""
        torch.manual_seed(self.steps)
        self.steps += 1
        with self._autocast():
            loss = self.loss_of(*batch)
        loss.backward()
        if not self.in_backward:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def held(self) -> int:
        """Bytes of weights, buffers and optimizer state."""
        state = [t for each in self.optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
        tensors = [*self.model.parameters(), *self.model.buffers(), *state]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


@contextmanager
def with_names(module: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    """Gives names of a module these values, and puts back what they were."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def with_liger(case: Case, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Puts Liger-Kernel's layers into the model; its loss.

    What Liger-Kernel changes in transformers' module is put back, for the other variants, and its rotary embedding
    is there during its own forward alone.
    """
    from liger_kernel.transformers import (
        LigerFusedLinearCrossEntropyLoss,
        LigerLayerNorm,
        apply_liger_kernel_to_llama,
    )

    rotary = ExitStack
    if isinstance(model, GPT):
        for parent in list(model.modules()):
            for name, norm in list(parent.named_children()):
                if isinstance(norm, nn.LayerNorm):
                    layer = LigerLayerNorm(norm.normalized_shape[0], eps=norm.eps, bias=True)
                    layer.weight, layer.bias = norm.weight, norm.bias
                    setattr(parent, name, layer)
    else:
        from transformers.models.llama import modeling_llama

        names = ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb")
        with with_names(modeling_llama, {name: getattr(modeling_llama, name) for name in names}):
            apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=model)
            applied = {names[-1]: getattr(modeling_llama, names[-1])}

        def rotary() -> Any:
            return with_names(modeling_llama, applied)

    criterion = LigerFusedLinearCrossEntropyLoss()

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with rotary():
            hidden = case.features(model, inputs).flatten(0, -2)
        return criterion(model.get_submodule(case.head).weight, hidden, targets.flatten())

    return loss
