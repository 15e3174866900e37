"""Max pooling of pictures of 64 x 64, 16 channels each: ResNet's window of 3 with stride 2, and VGG's of 2."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional as F

import memkit.functional as M

from .op import Op, Size

CHANNELS, SIDE = 16, 64


def pictures(size: Size, channels_last: bool) -> list[Tensor]:
    side = min(SIDE, int((size.elements // CHANNELS) ** 0.5))
    if not channels_last:
        return [size.normal(-1, CHANNELS, side, side)]
    return [size.normal(-1, side, side, CHANNELS).permute(0, 3, 1, 2)]


def window(kernel: int, padding: int, channels_last: bool = False) -> Op:
    options = {"kernel_size": kernel, "stride": 2, "padding": padding}
    stock, ours = partial(F.max_pool2d, **options), partial(M.max_pool2d, **options)
    return Op(stock, ours, None, partial(pictures, channels_last=channels_last), least=CHANNELS * 4)


OPS = {
    "max pooling, 3": window(3, 1),
    "max pooling, 2": window(2, 0),
    "max pooling, 3, channels last": window(3, 1, True),
}
