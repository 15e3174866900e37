"""A twin of torch.nn.MaxPool2d: same constructor, ``state_dict`` and ``repr``."""

from __future__ import annotations

from torch import Tensor, nn

from .. import functional as F


class MaxPool2d(nn.MaxPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.max_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.return_indices,
        )
