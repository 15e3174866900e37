"""8-bit moments in torch operations, for state that changes its dtype when loaded. See csrc/formulas/optimizer.h."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

MIN_ELEMENTS = 4096
BLOCK_SIZES = (64, 128, 256)


def _flat(x: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return x.as_strided((x.numel(),), (1,))


def _levels(signed: bool, device: torch.device) -> Tensor:
    top, power = (127, 4) if signed else (255, 8)
    return (torch.arange(top + 1, dtype=torch.float64, device=device) / top) ** power


def quantize(x: Tensor, codes: Tensor, scales: Tensor, block: int) -> None:
    """Writes float32 x as codes (int8, or uint8 where x >= 0) and scales; x and codes have the same strides."""
    signed = codes.dtype is torch.int8
    flat = _flat(x)
    blocks = pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales.copy_(blocks.abs().amax(1))
    levels = _levels(signed, x.device)
    share = (
        blocks.abs().double() / scales.double().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    ).flatten()
    code = torch.searchsorted((levels[:-1] + levels[1:]) / 2, share.contiguous())
    if not signed:
        code = code.clamp_min((share > 0).to(code.dtype))
    _flat(codes).copy_((code * blocks.flatten().sign() if signed else code)[: len(flat)])


def dequantize(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """A float32 tensor of the codes' strides."""
    flat = _flat(codes)
    values = _levels(codes.dtype is torch.int8, codes.device)[flat.long().abs()] * flat.double().sign()
    out = torch.empty_like(codes, dtype=torch.float32)
    _flat(out).copy_(values * scales.double().repeat_interleave(block)[: len(flat)])
    return out
