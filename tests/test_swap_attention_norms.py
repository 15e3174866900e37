"""Attention whose query and key are normed parts of one projection: the norms keep that memory, so the value stays in it."""

import pytest
import torch
from swap_cases import assert_as_stock
from test_swap_attention import ALL_ATTENTION_FUNCTIONS, turned, written_out
from torch import nn

from memkit import swap

pytestmark = pytest.mark.usefixtures("repeatable")

HEADS, WIDTH = 4, 8


class Attention(nn.Module):
    is_causal = False

    def __init__(self, normed):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.q_norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        self.k_norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()

    def forward(self, x):
        fused = self.qkv(x).unflatten(-1, (HEADS, 3, WIDTH))
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", written_out)
        return self.out(attend(self, turned(q), turned(k), v, None, scaling=WIDTH**-0.5)[0].flatten(-2))


@pytest.mark.parametrize("normed", [True, False])
def test_the_value_is_copied_where_that_frees_memory(normed):
    model, x = nn.Sequential(Attention(normed)).double(), torch.randn(2, 24, 32).double()
    swap(model, lean="call")
    copied = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.clone.default and args[0].shape == (2, HEADS, 24, WIDTH):
                copied.append(args[0].untyped_storage().nbytes())
            return func(*args, **(kwargs or {}))

    with Watch():
        model(x)
    assert (3 * x.nbytes in copied) == (not normed)
    assert_as_stock(model, x)
