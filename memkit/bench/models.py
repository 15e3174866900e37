"""The two networks that `memkit bench` trains: plain PyTorch, with nothing of memkit in them."""

# torch.nn calls return Any, and parts of torch are untyped.
# mypy: disable-error-code="no-any-return,no-untyped-call"

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal multi-head self-attention on stock scaled_dot_product_attention.

    Dropout acts on the residual branches and the embedding, not on the attention weights: on the CPU PyTorch
    has no fused attention with dropout, and the T x T matrices it would keep instead would drown all else.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.drop1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Decoder-only transformer with learned positions, pre-norm blocks and a head tied to the embedding."""

    def __init__(
        self, vocab: int, layers: int, width: int, heads: int, length: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def features(self, tokens: Tensor) -> Tensor:
        """What the head turns into logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        return self.norm(self.blocks(x))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


def conv_bn(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """ResNet's basic block with SiLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_bn(inputs, outputs, stride), nn.SiLU(), *conv_bn(outputs, outputs))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.shortcut(x) + self.body(x))


class CNN(nn.Module):
    """Small residual network for one-channel images."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Sequential(*conv_bn(1, width), nn.SiLU()),
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))
