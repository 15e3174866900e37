"""Layers as model libraries write them."""

import inspect

import torch
from swap_cases import D
from torch import nn


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class BloomGelu(nn.Module):
    """With a constant of eight digits."""

    def forward(self, x):
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class MLP(nn.Module):
    def __init__(self, act=None, width=3 * D):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, width), act or nn.GELU(), nn.Linear(width, D)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class ConvMLP(MLP):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(2, D, 1), nn.Conv2d(D, 2, 1)


class GatedMLP(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)
        self.down_proj, self.act_fn = nn.Linear(3 * D, D), act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GatedLlama4(GatedMLP):
    def __init__(self):
        super().__init__()
        self.activation_fn = self.act_fn
        del self.act_fn

    def forward(self, x):
        return self.down_proj(self.activation_fn(self.gate_proj(x)) * self.up_proj(x))


class BatchedExperts(nn.Module):
    """As in Llama 4."""

    def __init__(self, act=None, experts=2):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, D, 6 * D))
        self.down_proj = nn.Parameter(torch.randn(experts, 3 * D, D))
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        gate_up = torch.bmm(x.view(len(self.down_proj), -1, D), self.gate_up_proj)
        gate, up = gate_up.chunk(2, -1)
        return torch.bmm(up * self.act_fn(gate), self.down_proj).view(-1, D)


class T5MLP(nn.Module):
    def __init__(self, p=0.25):
        super().__init__()
        self.wi, self.wo, self.act, self.dropout = nn.Linear(D, D), nn.Linear(D, D), nn.ReLU(), nn.Dropout(p)

    def forward(self, x):
        return self.wo(self.dropout(self.act(self.wi(x))))


class BasicConv2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, D, 3), nn.BatchNorm2d(D)

    def forward(self, x):
        return torch.relu_(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, D, 1), nn.BatchNorm2d(D)
        self.conv2, self.bn2 = nn.Conv2d(D, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.relu, self.downsample = nn.ReLU(inplace=True), None

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class DenseLayer(nn.Module):
    """As in torchvision's DenseNet: given one tensor or several."""

    memory_efficient = False
    drop_rate = 0.0

    def __init__(self):
        super().__init__()
        self.norm1, self.relu1, self.conv1 = nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Conv2d(2, D, 1)
        self.norm2, self.relu2 = nn.BatchNorm2d(D), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(D, 2, 3, padding=1)

    def bn_function(self, given):
        return self.conv1(self.relu1(self.norm1(torch.cat(given, 1))))

    def forward(self, given):
        x = self.bn_function([given] if isinstance(given, torch.Tensor) else given)
        return self.conv2(self.relu2(self.norm2(x)))


class BertPart(nn.Module):
    """Of BERT's two, the first has an activation, the second a residual."""

    def __init__(self, width, out, act=None):
        super().__init__()
        self.dense = nn.Linear(width, out)
        if act:
            self.intermediate_act_fn = act
        else:
            self.dropout, self.LayerNorm = nn.Dropout(0.0), nn.LayerNorm(out)

    def forward(self, x, residual=None):
        x = self.dense(x)
        return self.intermediate_act_fn(x) if residual is None else self.LayerNorm(self.dropout(x) + residual)


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate, self.output = BertPart(D, 3 * D, nn.GELU()), BertPart(3 * D, D)

    def feed_forward_chunk(self, x):
        return self.output(self.intermediate(x), x)

    def forward(self, x):
        assert len(inspect.signature(self.feed_forward_chunk).parameters) == 1  # as transformers does
        return self.feed_forward_chunk(x)
