"""What the tests of model libraries share: the stock model's step in float64, and comparisons with it."""

import copy
import io
import pickle

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memkit import swap, unswap
from memkit.bench.zoo import LIBRARY, ZOO
from memkit.swap import types


def names(library, quick=()):
    """Parameters of a test: the library's models, all but `quick` marked slow."""
    found = [name for name, needed in LIBRARY.items() if needed == library]
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in found]


class Wide(TorchFunctionMode):
    """Libraries round to float32 in places, whatever they are given; here they do not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def make(name, seed=0):
    torch.manual_seed(seed)
    return ZOO[name]()


def step(subject):
    """Loss and gradients, and buffers after it."""
    torch.manual_seed(1)
    subject.model.zero_grad(set_to_none=True)
    loss = subject.loss()
    loss.backward()
    gradients = {k: p.grad.clone() for k, p in subject.model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def doubled(subject):
    wide = copy.deepcopy(subject)
    wide.model.double()
    cast = {
        dict: lambda sample: {k: _double(v) for k, v in sample.items()},
        tuple: lambda sample: tuple(map(_double, sample)),
    }
    wide.sample = cast[type(subject.sample)](subject.sample)
    return wide


def _double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def distance(ours, theirs):
    """Over all gradients together, and the largest of one alone relative to the largest gradient."""
    assert ours.keys() == theirs.keys()
    squares = sum((ours[k].double() - theirs[k].double()).square().sum() for k in theirs)
    return (squares / sum(theirs[k].double().square().sum() for k in theirs)).sqrt().item()


def check_gradients(name, **options):
    """Within twice stock's error against float64, and nothing else changed."""
    subject = make(name)
    with Wide():
        _, exact = step(doubled(subject))
    stock = copy.deepcopy(subject)
    loss, theirs = step(stock)
    report = swap(subject.model, sample=subject.sample, **options)
    swapped_loss, ours = step(subject)
    assert report.changed, report
    assert report.saved_after < report.saved_before, report
    torch.testing.assert_close(swapped_loss, loss, rtol=1e-5, atol=1e-6)
    assert distance(ours, exact) <= 2 * distance(theirs, exact) + 1e-7
    for (key, buffer), expected in zip(subject.model.named_buffers(), stock.model.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-5, atol=1e-6, msg=key)
    return report


def check_kept(name):
    """Checkpoints go both ways, copies and pickles are swapped too, and unswap gives back what there was."""
    subject = make(name)
    model = subject.model
    before = {module: (type(module), set(vars(module))) for module in model.modules()}
    parameters = dict(model.named_parameters())
    checkpoint = copy.deepcopy(model.state_dict())
    swap(model)
    assert any(isinstance(module, types.Changed) for module in model.modules())
    assert all(model.get_parameter(k) is p for k, p in parameters.items())
    assert model.state_dict().keys() == checkpoint.keys()
    model.load_state_dict(checkpoint, strict=True)
    make(name, seed=1).model.load_state_dict(model.state_dict(), strict=True)
    expected = step(subject)
    for copied in (copy.deepcopy(subject), pickle.loads(pickle.dumps(subject)), _through_file(subject)):
        assert [type(m) for m in copied.model.modules()] == [type(m) for m in model.modules()]
        copied.model.load_state_dict(checkpoint)
        loss, gradients = step(copied)
        torch.testing.assert_close((loss, gradients), expected, rtol=1e-5, atol=1e-7)
    unswap(model)
    assert {module: (type(module), set(vars(module))) for module in model.modules()} == before


def _through_file(subject):
    file = io.BytesIO()
    torch.save(subject, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
