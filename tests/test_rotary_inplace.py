"""Rotary embeddings on views of every layout, in place, and where that is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rotary_cases import B, D, G, H, S, heads, styles
from torch import Tensor

import memkit.functional as M
from memkit._reference_rotary import stock, tables


def views(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """q and k as [B, heads, S, D] views of what is returned first."""
    if kind == "transposed":
        base = torch.randn(B, S, H + G, D)
        return base, base[:, :, :H].transpose(1, 2), base[:, :, H:].transpose(1, 2)
    if kind == "packed":
        base = torch.randn(B, S, 3, H, D)
        return base, base[:, :, 0].transpose(1, 2), base[:, :, 1].transpose(1, 2)
    if kind == "a head each":  # GPT-NeoX
        base = torch.randn(B, S, H, 3 * D)
        return base, base[..., :D].transpose(1, 2), base[..., D : 2 * D].transpose(1, 2)
    if kind == "flat":
        base = torch.randn(B, S, (H + 2 * G) * D)
        q, k, _ = base.split((H * D, G * D, G * D), -1)
        return base, q.view(B, S, H, D).transpose(1, 2), k.view(B, S, G, D).transpose(1, 2)
    if kind == "batch inside":
        base = torch.randn(S, H + G, B, D)
        return base, base[:, :H].permute(2, 1, 0, 3), base[:, H:].permute(2, 1, 0, 3)
    assert kind == "no rows"
    base = torch.randn(2, B, H, D, S)
    return base, base[0].transpose(2, 3), base[1].transpose(2, 3)


KINDS = ("transposed", "packed", "a head each", "flat", "batch inside", "no rows")


@styles
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind: str, interleaved: bool) -> None:
    cos, sin = (t.float() for t in tables(S, 16, interleaved=interleaved))
    base, q, k = views(kind)
    wanted = [stock(x, cos, sin, interleaved=interleaved) for x in (q, k)]
    for mine, want in zip(M.apply_rotary(q, k, cos, sin, interleaved=interleaved), wanted, strict=True):
        torch.testing.assert_close(mine, want)
    untouched = base.clone()
    for x in (q, k):
        untouched.as_strided(x.shape, x.stride(), x.storage_offset()).zero_()
    got = M.apply_rotary(q, k, cos, sin, interleaved=interleaved, inplace=True)
    for mine, x, want in zip(got, (q, k), wanted, strict=True):
        assert mine is x
        torch.testing.assert_close(mine, want)
        base.as_strided(x.shape, x.stride(), x.storage_offset()).zero_()
    assert torch.equal(base, untouched)  # nothing beside q and k


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_on_views_under_autograd(kind: str) -> None:
    cos, sin = (t.float() for t in tables(S, 16))
    torch.manual_seed(1)
    base, *_ = views(kind)
    torch.manual_seed(1)

    def slope(inplace: bool) -> Tensor:
        leaf = base.clone().requires_grad_()
        h = leaf * 2
        _, *like = views(kind)
        q, k = (h.as_strided(x.shape, x.stride(), x.storage_offset()) for x in like)
        q, k = M.apply_rotary(q, k, cos, sin, inplace=inplace)
        return torch.autograd.grad((q.sin() * 2).sum() + k.square().sum(), leaf)[0]

    torch.testing.assert_close(slope(True), slope(False))


def test_q_and_k_that_overlap_are_refused() -> None:
    cos, sin = (t.float() for t in tables(S, D))
    x = torch.randn(B, S, H + G, D)
    overlapping = (
        (x.transpose(1, 2), x.transpose(1, 2)),
        (x[:, :, :H].transpose(1, 2), x[:, :, H - 1 :].transpose(1, 2)),
        (x[:, :, ::2].transpose(1, 2), x[:, :, :3].transpose(1, 2)),
    )
    before = x.clone()
    for q, k in overlapping:
        with pytest.raises(RuntimeError, match="apply_rotary: expected, in place, q and k in memory apart"):
            M.apply_rotary(q, k, cos, sin, inplace=True)
    with pytest.raises(
        RuntimeError, match="apply_rotary: expected, in place, tables and position_ids in memory of"
    ):
        M.apply_rotary(x.transpose(1, 2), None, x[0, :, 0], x[0, :, 1], inplace=True)
    assert torch.equal(x, before)


def test_in_place_refused() -> None:
    cos, sin = (t.float() for t in tables(S, D))
    leaf = heads(H, "bhsd").requires_grad_()
    cases = (
        (leaf, "a leaf that requires grad"),
        (leaf.sigmoid(), "the output of SigmoidBackward"),
        (leaf.detach()[:, :1].expand(B, H, S, D), "expanded"),
        ((leaf * 1).chunk(2, 1)[0], "one of several views"),
    )
    for x, why in cases:
        with pytest.raises(RuntimeError, match=f"apply_rotary: expected, in place, .*{why}"):
            M.apply_rotary(x, None, cos, sin, inplace=True)
    h = leaf * 1
    kept = h.square()
    with pytest.raises(RuntimeError, match="saved for its backward"):
        M.apply_rotary(h, None, cos, sin, inplace=True)
    kept.sum().backward()


def test_auto() -> None:
    """Overwrites what nobody else needs, both or none."""
    cos, sin = (t.float() for t in tables(S, D))
    leaf = heads(H, "bhsd").requires_grad_()
    wanted = stock(leaf, cos, sin)

    def place(make: Callable[[], Tensor], keep: bool = False) -> bool:
        x = make()
        kept = x if keep else None
        at = x.data_ptr()
        before = x.detach().clone()
        y = M.apply_rotary(x, None, cos, sin, inplace="auto")
        del x
        assert kept is None or y.data_ptr() == at or torch.equal(kept, before)
        return y.data_ptr() == at

    assert place(lambda: leaf * 1)
    assert not place(lambda: leaf)
    assert not place(lambda: leaf.sigmoid())
    q, k = leaf * 1, leaf * 1
    at = q.data_ptr(), k.data_ptr()
    got = M.apply_rotary(q, k, cos, sin, inplace="auto")
    assert (got[0].data_ptr(), got[1].data_ptr()) == at
    q, k = leaf * 1, leaf.sigmoid()
    before = k.detach().clone()
    got = M.apply_rotary(q, k, cos, sin, inplace="auto")
    assert got[0].data_ptr() != q.data_ptr()
    assert torch.equal(k, before)
    torch.testing.assert_close(got[0], wanted)
    a, b = (torch.autograd.grad(y.square().sum(), leaf)[0] for y in (got[0], wanted))
    torch.testing.assert_close(a, b)
