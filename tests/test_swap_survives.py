"""What a swapped model was, it is still: its looks, its optimizers, copies and hooks, and the way back."""

import copy
import io
import pickle

import pytest
import torch
from swap_cases import (
    DOUBLE,
    Block,
    D,
    assert_as_stock,
    batch,
    mlp,
    only,
    plain,
    step,
)
from swap_library_layers import MLP, ConvMLP, GatedMLP
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from memkit import swap, unswap
from memkit.swap import types

pytestmark = pytest.mark.usefixtures("repeatable")


def test_model_looks_as_before():
    model = mlp(nn.GELU())
    before = repr(model), list(model.state_dict()), list(model.parameters()), list(model.buffers())
    swap(model)
    after = repr(model), list(model.state_dict()), list(model.parameters()), list(model.buffers())
    assert after[:2] == before[:2]
    assert all(a is b for a, b in zip(after[2], before[2], strict=True))
    model.load_state_dict(mlp(nn.GELU()).state_dict(), strict=True)


def test_optimizer_built_before():
    model, twin = mlp(nn.GELU()), mlp(nn.GELU())
    twin.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.Adam(m.parameters(), 0.1) for m in (model, twin))
    swap(model)
    for optimizer, m in ((ours, model), (theirs, twin)):
        step(m, torch.linspace(-1, 1, 4 * D, **DOUBLE).view(4, D))
        optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_work_and_can_be_unswapped(how, by_sample, calls):
    model = nn.Sequential(
        mlp(nn.LeakyReLU(0.3)),
        nn.TransformerEncoderLayer(D, 2, D, activation=torch.relu, batch_first=True, **DOUBLE),
    )
    model[0][1].inplace = False
    before = copy.deepcopy(model)
    swap(model, sample=batch(2, 3, D) if by_sample else None)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    calls.clear()
    assert_as_stock(other, batch(2, 3, D))
    assert [op for op, _ in calls] == ["leaky_relu", "relu"]
    unswap(other)
    assert type(other[0][1]) is nn.LeakyReLU
    assert vars(other[0][1]) == vars(before[0][1])
    assert other[1].activation is torch.relu
    assert isinstance(model[0][1], types.Swapped)


def test_hooks_survive(calls):
    model = mlp(nn.GELU())
    fired = []
    model[1].register_full_backward_hook(lambda *_: fired.append("backward"))
    model[1].register_forward_hook(lambda m, i, o: fired.append("forward"))
    assert "hooks" in only(swap(model)).reason
    assert only(swap(model, sample=batch())).changed
    fired.clear()
    assert_as_stock(model, batch())
    assert fired == ["forward", "backward"] * 2
    assert calls[-1] == ("gelu", False)  # a full backward hook hands in a view


@pytest.mark.parametrize("by_sample", [False, True])
def test_hooks_added_later(by_sample, calls):
    """A hook that keeps, reads or changes a tensor sees what it sees in stock."""
    model, kept, sums = mlp(nn.GELU()), [], []
    x = batch()
    expected = model[0](x).detach()

    def installed(module, hook):
        calls.clear()
        handle = module.register_forward_hook(hook)
        assert_as_stock(model, x)
        handle.remove()
        return [overwritten for _, overwritten in calls]

    assert only(swap(model, sample=x if by_sample else None)).changed
    assert installed(model[2], lambda m, i, o: None) == [True]
    assert installed(model[0], lambda m, i, o: kept.append(o)) == [False]
    assert kept[0].detach().equal(expected)
    assert installed(model[0], lambda m, i, o: kept.append(o.detach())) == [False]
    assert kept[-1].equal(expected)
    assert installed(model[1], lambda m, i, o: sums.append(i[0].sum().item())) == []
    assert sums[0] == sums[1]
    assert installed(model[1], lambda m, i, o: o.mul_(2)) == []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: None)
    assert_as_stock(model, x)
    handle.remove()
    assert_as_stock(model, x)
    assert calls == [("gelu", True)]


def test_swapping_again_and_back():
    model = nn.Sequential(Block(plain, nn.GELU()), nn.GELU(), nn.Linear(D, D)).double()
    before = [type(m) for m in model.modules()]
    assert len(swap(model).changed) == 1
    assert len(swap(model, sample=batch()).changed) == 2
    assert len(swap(model).changed) == 1
    swap(model, ops=["relu"])
    assert [type(m) for m in model.modules()] == before
    unswap(model)
    assert [type(m) for m in model.modules()] == before


def test_a_forward_wrapped_after_the_swap_keeps_working():
    """As hook libraries do."""
    model, x = mlp(nn.GELU()), batch()
    expected = model(x)
    swap(model)
    act = model[1]
    inner = act.forward
    act.forward = lambda input: inner(input)
    unswap(model)
    torch.testing.assert_close(model(x), expected)
    swap(model)
    torch.testing.assert_close(model(x), expected)
    del act.forward
    unswap(model)
    assert type(act) is nn.GELU


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("kind", [MLP, GatedMLP])
def test_weights_parametrized_afterwards_are_made_once_a_call(kind, lean):
    model, x = kind().double(), torch.randn(2, 3, D, dtype=torch.double)
    assert swap(model, sample=x, lean=lean).changed
    linears = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    for _, layer in linears:
        register_parametrization(layer, "weight", Counted(), unsafe=True)
    made = [layer.parametrizations.weight[0] for _, layer in linears]
    for each in made:
        each.calls = 0
    model(x).sum().backward()
    assert [each.calls for each in made] == [1] * len(made)


def test_parametrizations_whose_tensors_an_engine_took():
    model, x = MLP().double(), torch.randn(2, 3, D, dtype=torch.double)
    swap(model, sample=x)
    weight_norm(model.fc1)
    expected, parts = model(x), model.fc1.parametrizations.weight
    for name, each in [*parts._parameters.items()]:
        del parts._parameters[name]
        setattr(parts, name, each.detach())
    torch.testing.assert_close(model(x), expected)


def test_traced_with_gradients():
    """torch.jit.trace runs it again without them, to compare."""
    model, x = ConvMLP(), torch.randn(2, 2, 5, 5)
    assert swap(model, sample=x).changed
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))
