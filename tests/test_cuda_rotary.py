"""Rotary embeddings on a GPU, against the CPU's float64 truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memkit.functional as M
import memkit.nn
from memkit._reference_rotary import stock, tables

pytestmark = pytest.mark.cuda
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_heads(dtype: torch.dtype, interleaved: bool, inplace: bool) -> None:
    """Slices of a packed projection, aligned to 16 bytes and not, by words and by single pairs."""
    torch.manual_seed(0)
    for width, rotary, spare in ((128, 128, 0), (80, 32, 0), (36, 10, 0), (64, 64, 1)):
        base = torch.randn(3, 65, 12, width + spare, dtype=dtype, device="cuda")
        q, k = (t[..., spare:].transpose(1, 2) for t in (base[:, :, :6], base[:, :, 6:8]))
        cos, sin = (t.cuda() for t in tables(100, rotary, interleaved=interleaved))
        ids = torch.randint(100, (3, 65), device="cuda")
        options: dict[str, Any] = {"interleaved": interleaved}
        want = [stock(x.double(), cos, sin, ids, **options) for x in (q, k)]
        theirs = [stock(x, cos.to(dtype), sin.to(dtype), ids, **options) for x in (q, k)]
        got = M.apply_rotary(q, k, cos.to(dtype), sin.to(dtype), ids, **options, inplace=inplace)
        for mine, usual, truth in zip(got, theirs, want, strict=True):
            floor = torch.finfo(dtype).eps * truth.abs().max()
            assert (mine - truth).abs().max() <= 2 * (usual - truth).abs().max() + floor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_words_of_angles(dtype: torch.dtype) -> None:
    """Tables with a column for each element and for each pair, aligned and not; there and back."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 17, 80, dtype=dtype, device="cuda").requires_grad_() for heads in (6, 2))
    grads = [torch.randn_like(x) for x in (q, k)]
    cos, sin = (t.to(dtype).cuda() for t in tables(20, 64))
    want = [stock(x.double(), cos.double(), sin.double()) for x in (q, k)]
    want += torch.autograd.grad(want, (q, k), [g.double() for g in grads])
    for columns, off in ((64, 0), (32, 0), (64, 1), (32, 1)):
        own = [
            torch.cat([t.new_zeros(off), t[:, :columns].flatten()])[off:].view(20, columns)
            for t in (cos, sin)
        ]
        got = list(M.apply_rotary(q, k, *own, rotary_dim=64))
        got += torch.autograd.grad(got, (q, k), grads)
        for mine, truth in zip(got, want, strict=True):
            torch.testing.assert_close(mine, truth.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients(layout: str) -> None:
    rope = memkit.nn.RotaryEmbedding(32, 16, layout=layout, device="cuda")
    q, k = (torch.randn(2, 9, 9, 48, device="cuda", requires_grad=True) for _ in range(2))
    cos, sin = (t.float().cuda() for t in tables(16, 32))
    grads = [torch.randn_like(q), torch.randn_like(k)]
    mine = torch.autograd.grad(rope(q, k), (q, k), grads)
    theirs = torch.autograd.grad([stock(x, cos, sin, layout=layout) for x in (q, k)], (q, k), grads)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    long = torch.randn(1, 40, 40, 48, device="cuda")
    assert rope(long).shape == long.shape
    assert rope.cos.is_cuda
