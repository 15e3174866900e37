"""What the tests of model libraries share: the stock model's step in float64, and comparisons with it."""

import copy
import io
import pickle

import pytest
import torch

from memkit import swap, unswap
from memkit.bench.zoo import LIBRARY, ZOO, distance, exact_gradients, gradients
from memkit.swap import types


def names(library, quick=()):
    """Parameters of a test: the library's models, all but `quick` marked slow."""
    found = [name for name, needed in LIBRARY.items() if needed == library]
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in found]


def make(name, seed=0):
    torch.manual_seed(seed)
    return ZOO[name]()


def step(subject):
    """Loss and gradients of one call."""
    torch.manual_seed(1)
    loss = subject.loss()
    return loss.detach(), gradients(subject, loss)


def apart(ours, theirs):
    assert ours.keys() == theirs.keys()
    return distance(ours.values(), theirs.values())


def check_gradients(name, **options):
    """Within twice stock's error against float64, and nothing else changed."""
    ratios = []
    for seed in range(3):
        subject = make(name, seed)
        exact = exact_gradients(subject)
        stock = copy.deepcopy(subject)
        theirs = gradients(stock)
        report = swap(subject.model, sample=None if seed else subject.sample, **options)
        ours = gradients(subject)
        assert report.changed, report
        assert seed or report.saved_after < report.saved_before, report
        for (key, buffer), expected in zip(subject.model.named_buffers(), stock.model.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected, rtol=1e-5, atol=1e-5, msg=key)
        torch.testing.assert_close(subject.loss(), stock.loss(), rtol=1e-4, atol=1e-6)
        ratios.append(apart(ours, exact) / apart(theirs, exact))
        if ratios[-1] <= 2:  # else a value on the other side of a kink, which is not there with every seed
            return
    pytest.fail(f"gradients' errors over stock's: {ratios}")


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
