"""What `lean()` makes again, on every device: gradients as stock's, fewer bytes, and the draws of a device are repeated."""

import copy
from functools import partial

import pytest
import test_swap_modulated as modulated
import test_swap_projections as projections
import test_swap_regions as regions
import test_swap_scaled as scaled
import test_swap_sequences as sequences
import torch
import torch.nn.functional as F
from attention_cases import HEADS, TOKENS, WIDTH, Attention, small
from test_lean_concatenations import WIDTH as DENSE_WIDTH
from test_lean_concatenations import Branches, Dense
from torch import Tensor, nn

import memkit
import memkit.functional as M
from memkit import swap
from memkit.memory import measure

__all__ = ["small"]  # a fixture
pytestmark = pytest.mark.usefixtures("repeatable")


class Padded(nn.Module):
    def __init__(self, mode: str):
        super().__init__()
        self.mode, self.conv = mode, nn.Conv1d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(M.gelu(x, save="input"), (1, 3), mode=self.mode))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


FORMS = (*projections.GATED, *projections.PLAIN)
CASES = {
    **{f"attention {kind.__name__}": (kind, (2, TOKENS, WIDTH)) for kind in regions.KINDS},
    **{f"modulated {kind.__name__}": (kind, (2, 24, 32), (2, 32)) for kind in modulated.KINDS},
    **{
        f"scaled {kind.__name__}": (
            kind,
            (scaled.BATCH, scaled.TOKENS, scaled.WIDTH),
            (scaled.BATCH, scaled.WIDTH),
        )
        for kind in scaled.KINDS
    },
    **{form.__name__: (partial(projections.network, form), (3, 5, projections.D)) for form in FORMS},
    **{
        f"padded {mode}": (partial(Padded, mode), (4, 8, 50)) for mode in ("constant", "reflect", "replicate")
    },
    "sequence": (partial(sequences.network, p=0.0), (64, 32)),
    "multihead": (Attends, (2, TOKENS, WIDTH)),
    "transformer": (
        partial(nn.TransformerEncoderLayer, 32, 4, 64, 0.0, "gelu", batch_first=True),
        (2, 9, 32),
    ),
    "dense": (Dense, (64, DENSE_WIDTH)),
    "branches": (Branches, (64, DENSE_WIDTH)),
}


def gradients(model: nn.Module, given: list[Tensor], seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    given = [x.clone().requires_grad_() for x in given]
    out = model(*given)
    out = torch.cat(out) if isinstance(out, tuple) else out
    leaves = [*given, *model.parameters()]
    grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)),
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_stock(device: torch.device, case: str, dtype: torch.dtype) -> None:
    make, *shapes = CASES[case]
    stock = make().to(device, dtype)
    given = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    model = copy.deepcopy(stock)
    swap(model, lean="call")
    truth = gradients(copy.deepcopy(stock).double(), [x.double() for x in given])
    with memkit.lean():
        found = gradients(model, given)
    for ours, theirs, true in zip(found, gradients(stock, given), truth, strict=True):
        allowed = 2 * (theirs - true).abs().max() + 4 * torch.finfo(dtype).eps * true.abs().max()
        assert (ours - true).abs().max() <= allowed


@pytest.mark.parametrize("case", [case for case in CASES if case != "multihead"])
def test_keeps_less(device: torch.device, case: str) -> None:
    """Multihead attention without its weights keeps what stock's fused kernel does. Whether a tensor that is concatenated
    again is the one of before is for its numbers to say, which a GPU is not waited for."""
    make, *shapes = CASES[case]
    stock = make().to(device)
    given = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    model = copy.deepcopy(stock)
    swap(model, lean="call")

    def ours() -> Tensor:
        with memkit.lean():
            return model(*(x * 1.0 for x in given))

    before = measure(lambda: stock(*(x * 1.0 for x in given)), device=device).saved
    after = measure(ours, device=device).saved
    assert after == before if (case, device.type) == ("dense", "cuda") else after < before


@pytest.mark.parametrize("kind", regions.KINDS)
def test_draws_of_the_device_are_repeated(device: torch.device, kind: type[Attention]) -> None:
    stock = kind(p=0.5).to(device)
    model = copy.deepcopy(stock)
    swap(model, ops=["attention"], lean="call")
    x = torch.randn(2, TOKENS, WIDTH, device=device)
    found = []
    for each in (stock, model):
        out = gradients(each, [x])
        found.append([*out, torch.rand(3, device=device), torch.rand(3)])
    rtol, atol = (1e-5, 1e-4) if kind in regions.BY_ATTEND else (0, 0)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_captured_in_a_graph(case: str) -> None:
    """A training step, replayed with other numbers."""
    make, *shapes = CASES[case]
    stock = make().cuda()
    model = copy.deepcopy(stock)
    swap(model, lean="call")
    given = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]

    def step() -> Tensor:
        with memkit.lean():
            out = model(*given)
        out = torch.cat(out) if isinstance(out, tuple) else out
        out.sin().sum().backward()
        return out

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        for leaf in (*given, *model.parameters()):
            leaf.grad = None
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    with torch.no_grad():
        for x in given:
            x.copy_(torch.randn_like(x))
    graph.replay()
    want = gradients(stock, given)
    found = [out.detach(), *(x.grad for x in (*given, *model.parameters()))]
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(
            torch.zeros_like(theirs) if ours is None else ours, theirs, rtol=1e-4, atol=1e-4
        )
