"""Layers whose attention `attend` computes, as libraries write it out."""

import math

import torch
import torch.nn.functional as F
from attention_cases import HEADS, TOKENS, WIDTH, Attention

from memkit import swap
from memkit.swap.library import rerun

DEPTH = WIDTH // HEADS
CAUSAL = torch.ones(TOKENS, TOKENS).tril()


class WithMask(Attention):
    """As nanoGPT's layer has it."""

    def __init__(self, p=0.0):
        super().__init__(p)
        self.register_buffer("causal", CAUSAL.view(1, 1, TOKENS, TOKENS))

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.causal[:, :, :TOKENS, :TOKENS] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.dropout(att)
        return self.merged(att @ v)


class WithAFunction(WithMask):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        att = torch.matmul(q, k.mT).masked_fill_(self.causal == 0, -1e4).softmax(-1)
        att = F.dropout(att, self.dropout.p, self.training)
        return self.merged(torch.matmul(att, v))


class Hidden(WithMask):
    """Rows that see nothing: their weights are all alike, and no gradient comes to their scores."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        seen = self.causal.flip(-1)[..., 1:].bool()
        scores = q @ k[:, :, 1:].mT / 2
        scores = scores.masked_fill(~seen, -6e4)
        return self.merged(scores.softmax(-1) @ v[:, :, 1:])


class HiddenAndBiased(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        keys = torch.arange(TOKENS)[:, None] > torch.tensor([[0]])
        scores = 0.5 * (q @ k.mT)
        scores = scores + self.bias
        scores = torch.where(keys, scores, torch.tensor(-5.0, dtype=x.dtype))
        return self.merged(scores.softmax(dim=3) @ v)


class Added(WithMask):
    """As Meta's Llama has it."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        full = torch.full((TOKENS, TOKENS), float("-inf"), dtype=x.dtype)
        mask = torch.triu(full, diagonal=1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(DEPTH)
        scores = scores + mask
        scores += self.bias.detach()[:1, :1]
        scores = F.softmax(scores.to(x.dtype), dim=-1).type_as(q)
        return self.merged(torch.matmul(scores, v))


class Unused(Attention):
    """What nobody takes changes nothing; in place it does."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        other = scores * 3.0
        same = scores
        same *= 0.5
        other = scores + self.bias[:, :1]  # noqa: F841
        weights = scores.softmax(-1)
        return self.merged(weights @ v)


class ByEinsum(Attention):
    """With the tokens before the heads, as many tutorials have it."""

    def forward(self, x, mask=None):
        q, k, v = (y.view(*x.shape[:2], HEADS, DEPTH) for y in (self.q(x), self.k(x), self.v(x)))
        energy = torch.einsum("nqhd,nkhd->nhqk", [q, k]) if mask is not None else 0
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k)
        weights = torch.softmax(energy / (DEPTH ** (1 / 2)), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", weights, v)
        return self.out(out.reshape(*x.shape))


class WithoutHeads(Attention):
    def forward(self, x, mask=None):
        q, k, v = (y.flatten(0, 1) for y in self.projected(x))
        weights = torch.bmm(q, k.transpose(1, 2)) * DEPTH**-0.5
        weights = weights + self.bias[:1]
        weights = self.dropout(weights.softmax(dim=-1))
        return self.merged(torch.bmm(weights, v).view(x.shape[0], HEADS, TOKENS, DEPTH))


class Before(WithMask):
    """A layer before the product too, and nothing kept behind it."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.attend(q, k, v, self.dropout).sum((1, 3))

    def attend(self, q, k, v, layer):
        q = layer(q)
        scores = q @ k.mT
        weights = F.softmax(scores, dim=-1)
        return layer(weights) @ v


class GivesWeights(WithMask):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        weights = self.dropout(scores.softmax(-1))
        y = weights @ v
        return self.merged(y), weights.sum(-2).transpose(1, 2).repeat(1, 1, DEPTH)


TAKEN = [
    Attention,
    WithMask,
    WithAFunction,
    Hidden,
    HiddenAndBiased,
    Added,
    ByEinsum,
    WithoutHeads,
    GivesWeights,
]


def swapped(model, **how):
    swap(model, lean="call", **how)
    return model


def ways():
    return {worth for worth in rerun._worth.values() if worth}


def drawn(model, x, call=None):
    torch.manual_seed(4)
    out = (call or model)(x)
    return torch.cat(out) if isinstance(out, tuple) else out
