"""Twins of torch.nn's dropout modules, and stochastic depth.

Subclasses of their twins, as the activations are: same constructor, ``state_dict`` and ``repr``. ``inplace`` may be
"auto" too.
"""

from __future__ import annotations

from torch import Tensor, nn

from .. import functional as F
from ..functional._shared import check_number


class Dropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, self.training, self.inplace)


class Dropout1d(nn.Dropout1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout1d(input, self.p, self.training, self.inplace)


class Dropout2d(nn.Dropout2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout2d(input, self.p, self.training, self.inplace)


class Dropout3d(nn.Dropout3d):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout3d(input, self.p, self.training, self.inplace)


class AlphaDropout(nn.AlphaDropout):
    def forward(self, input: Tensor) -> Tensor:
        return F.alpha_dropout(input, self.p, self.training, self.inplace)


class FeatureAlphaDropout(nn.FeatureAlphaDropout):
    def forward(self, input: Tensor) -> Tensor:
        return F.feature_alpha_dropout(input, self.p, self.training, self.inplace)


class DropPath(nn.Module):
    """Stochastic depth with the constructor of timm's: drops whole samples with probability ``drop_prob`` while training."""

    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True) -> None:
        super().__init__()
        check_number("DropPath", "drop_prob", drop_prob)
        if not 0 <= drop_prob <= 1:
            raise ValueError(f"DropPath: expected a probability drop_prob in [0, 1], got {drop_prob}")
        self.drop_prob = drop_prob
        self.scale_by_keep = scale_by_keep

    def forward(self, input: Tensor) -> Tensor:
        return F.drop_path(input, self.drop_prob, self.training, scale_by_keep=self.scale_by_keep)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:g}"
