"""timm's and torchvision's models, with random weights."""

import copy

import pytest
import torch
from model_cases import check_gradients, check_kept, make, names, step

from memkit import memory, swap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

TIMM = names("timm", quick=("timm mobilenetv3", "timm vit_tiny"))
TORCHVISION = names("torchvision", quick=("torchvision resnet18",))


@pytest.fixture(autouse=True)
def _library(request):
    pytest.importorskip(request.node.callspec.params["name"].split()[0])


@pytest.mark.parametrize("name", [*TIMM, *TORCHVISION])
def test_gradients(name):
    check_gradients(name, lean="call")


@pytest.mark.parametrize("name", [*names("timm", quick=("timm mobilenetv3",)), *TORCHVISION])
def test_kept(name):
    check_kept(name)


@pytest.mark.parametrize("name", ["torchvision resnet18", "timm mobilenetv3"])
def test_batch_norms_need_a_quarter_less(name):
    subject = make(name)
    before = measure(subject.loss, device="cpu").saved
    report = swap(subject.model, sample=subject.sample, lean="call")
    assert memory.measure(subject.loss, device="cpu").saved <= 0.75 * before, report


@pytest.mark.parametrize("name", ["torchvision resnet18", "timm mobilenetv3"])
def test_evaluation(name):
    """Running statistics are used, and hooks between a norm and its activation see what they saw."""
    subject = make(name)
    stock = copy.deepcopy(subject).model.eval()
    swap(subject.model, lean="call")
    model = subject.model.eval()
    torch.testing.assert_close(model(*subject.sample), stock(*subject.sample), rtol=1e-4, atol=1e-5)
    norm = next(m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))
    twin = next(m for m in stock.modules() if isinstance(m, torch.nn.BatchNorm2d))
    seen = []
    for module in (norm, twin):
        module.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    torch.testing.assert_close(model(*subject.sample), stock(*subject.sample), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["torchvision resnet18"])
def test_another_block_is_left(name):
    """One that ends without the activation has the same children."""
    from torchvision.models.resnet import BasicBlock

    class Linear(BasicBlock):
        def forward(self, x):
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return out + (x if self.downsample is None else self.downsample(x))

    subject = make(name)
    for module in subject.model.modules():
        if type(module) is BasicBlock:
            module.__class__ = Linear
    expected = step(copy.deepcopy(subject))[0]
    report = swap(subject.model)
    assert sum("computes something else" in row.reason for row in report) == 8, report
    torch.testing.assert_close(step(subject)[0], expected)


# The largest share of stock's bytes, and the fewest activations that take a bit.
ONE_BIT = {
    "torchvision squeezenet1_1": (0.35, 17),  # before torch.cat and max pooling
    "torchvision vgg11": (0.35, 7),  # before max pooling and dropout
    "torchvision resnet18": (0.85, 1),  # before max pooling
    "timm ghostnetv3_050": (0.97, 10),  # before torch.cat
    "timm repvgg_a0": (0.995, 1),  # before the mean over the picture
    "timm mobileone_s0": (0.999, 1),
}


@pytest.mark.parametrize("name", ONE_BIT)
def test_one_bit_where_nothing_keeps_the_output(name):
    library, model = name.split()
    torch.manual_seed(0)
    if library == "timm":
        model = pytest.importorskip("timm").create_model(model)
    else:
        model = getattr(pytest.importorskip("torchvision").models, model)()
    x = torch.randn(2, 3, 64, 64)
    report = swap(model, sample=x)
    share, fewest = ONE_BIT[name]
    assert sum(row.saved == "1 bit" for row in report) >= fewest, report
    assert report.saved_after <= share * report.saved_before, report
