"""The hooks by which `lean()` keeps tensors: functions in C++, one call for each tensor that autograd saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import memkit
import memkit.functional as M
from memkit import _C
from memkit._lean import is_lean


def top() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def test_what_has_to_be_kept_is_the_same_memory_without_its_graph() -> None:
    x = torch.randn(3, requires_grad=True) * 2
    assert _C.recipe(x) is None
    kept = _C.unpack(_C.pack(x))
    assert kept is not None
    assert kept.data_ptr() == x.data_ptr()
    assert kept.grad_fn is None
    with torch.no_grad():
        x.add_(1)
    assert kept._version == x._version == 1


def test_a_recipe_gives_a_tensor_anew() -> None:
    x = M.gelu(torch.randn(3, requires_grad=True), save="input")
    for pack in (_C.pack, _C.recipe):
        again = _C.unpack(pack(x))
        assert again is not None
        assert torch.equal(again, x)
        assert again.data_ptr() != x.data_ptr()


def test_a_tensor_changed_after_it_was_packed_raises() -> None:
    x = torch.ones(2, 3)
    packed = _C.pack(x)
    x.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace.*torch.float32 \[2, 3\] at version 0, got version 1"
    ):
        _C.unpack(packed)


def test_what_is_not_a_tensor_or_not_packed_here() -> None:
    for name, function in (("pack", _C.pack), ("recipe", _C.recipe)):
        with pytest.raises(TypeError, match=f"{name}: expected a Tensor, got int"):
            function(1)  # type: ignore[arg-type]
    for foreign in (None, 1, torch.ones(2), torch.utils.dlpack.to_dlpack(torch.ones(2))):
        assert _C.unpack(foreign) is None


def test_subclasses_are_kept_by_their_own_detach() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, requires_grad=True) * 2
        kept = _C.unpack(_C.pack(x))
    assert type(kept) is type(x)


def test_a_subclass_of_python_alone_comes_back_as_one() -> None:
    class Named(torch.Tensor):
        pass

    x = torch.ones(3).as_subclass(Named)
    kept = _C.unpack(_C.pack(x))
    assert type(kept) is Named
    assert kept.data_ptr() == x.data_ptr()
    x.add_(1)
    assert kept._version == x._version


def test_lean_inside_lean_adds_nothing() -> None:
    assert not is_lean()
    with memkit.lean():
        outer = top()
        with memkit.lean():
            assert top() == outer
            assert is_lean()
        assert top() == outer
        assert is_lean()
        with save_on_cpu():
            assert not is_lean()
            with memkit.lean():
                assert is_lean()
                assert top() != outer
    assert top() is None
    assert not is_lean()


def test_an_exit_alone_is_told() -> None:
    with pytest.raises(RuntimeError, match="lean: expected to be entered before it is left"):
        memkit.lean().__exit__(None, None, None)


def test_hooks_around_it_get_what_is_kept() -> None:
    given, back = [], []

    def pack(x: torch.Tensor) -> object:
        given.append(x.shape)
        return x.detach()

    def unpack(x: torch.Tensor) -> torch.Tensor:
        back.append(x.shape)
        return x

    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    with saved_tensors_hooks(pack, unpack), memkit.lean():
        out = M.gelu(x, save="input") @ weight
    out.sum().backward()
    assert given == [x.shape, weight.shape]  # not the product's first factor, which gelu made
    assert sorted(back) == sorted(given)


def test_sparse_tensors_are_kept_where_memory_is_measured() -> None:
    indices = torch.tensor([[0, 1, 2], [2, 0, 1]])
    adjacency = torch.sparse_coo_tensor(indices, torch.randn(3), (3, 3), check_invariants=True)
    x = torch.randn(3, 4, requires_grad=True)
    stock = torch.autograd.grad(torch.sparse.mm(adjacency, x).square().sum(), x)

    def call() -> tuple[torch.Tensor, ...]:
        with memkit.lean():
            return torch.autograd.grad(torch.sparse.mm(adjacency, x).square().sum(), x)

    torch.testing.assert_close(memkit.memory.measure(call).result, stock)


def test_a_leaf_is_not_swapped_for_another_meanwhile() -> None:
    weight, other = torch.ones(3, requires_grad=True), torch.full((3,), 5.0, requires_grad=True)
    x = torch.ones(3, requires_grad=True)
    with memkit.lean():
        y = x * weight
    with pytest.raises(RuntimeError, match="use_count"):
        torch.utils.swap_tensors(weight, other)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_none_in_function_transforms() -> None:
    """In which PyTorch allows none."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        with memkit.lean():
            assert not is_lean()
            return M.gelu(x, save="input").square().sum()

    x = torch.randn(3, 4)
    expected = torch.func.grad(lambda x: M.gelu(x, save="input").square().sum())(x)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), expected)


NORM_WEIGHT = torch.linspace(0.5, 1.5, 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda h: M.gelu(h, save="input"),
        lambda h: M.silu(h, save="input"),
        lambda h: M.layer_norm(h, (8,), NORM_WEIGHT, save="input"),
    ],
    ids=["gelu", "silu", "layer_norm"],
)
@pytest.mark.parametrize("how", ["looked at", "used by another backward"])
def test_a_change_after_the_result_was_made_again_raises(make: Any, how: str) -> None:
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with memkit.lean():
        h = x * 1
        out = make(h) @ weight
    if how == "looked at":
        assert out.grad_fn._saved_self.shape == (8, 8)  # type: ignore[union-attr]
    else:
        torch.autograd.grad(out.sum(), weight, retain_graph=True)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        torch.autograd.grad(out.sum(), x)
