"""Under torch.set_default_device, and `with torch.device(...)`: nothing changes but where constructors put tensors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from swap_cases import D, TinyRMSNorm
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memkit import functional as M
from memkit import swap, unswap
from memkit.memory import measure

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: M.gelu(x * 1, inplace=True),
    "rms_norm": lambda x: M.rms_norm(x * 1, x.shape[-1:], inplace="auto"),
    "softmax": lambda x: M.softmax(x * 1, -1, inplace="auto"),
}


class Listener(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_in_place_is_in_place(name: str, device: torch.device) -> None:
    """Behind it is a mode that looks at constructors alone. Another is shown the calls, and what is in place copies."""
    x = torch.randn(64, 64, device=device)
    alone = measure(CALLS[name], x)
    with torch.device(device):
        beside = measure(CALLS[name], x)
        with Listener():
            shown = measure(CALLS[name], x)
    assert (beside.peak, beside.allocations) == (alone.peak, alone.allocations)
    assert shown.allocations > alone.allocations
    torch.testing.assert_close(beside.result, alone.result, rtol=0, atol=0)


def test_swap_looks_where_the_model_is(device: torch.device) -> None:
    """What it tries, it tries on tensors of its own: on the model's device, or on the CPU, wherever others go."""
    act = nn.Hardtanh(0.1, 0.9)
    made = (nn.Linear(D, D), TinyRMSNorm(), nn.Linear(D, D), act, nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    model = nn.Sequential(*made).to(device)
    x = torch.randn(4, D, device=device)
    want = str(swap(model, sample=x, lean="call"))
    unswap(model)
    with torch.device("meta"):
        assert str(swap(model, sample=x, lean="call")) == want


@pytest.mark.cuda
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_keep_on_a_gpu_what_they_keep_on_the_cpu(offset: float) -> None:
    """Where weights are measured beside the program: swap waits for that once, and what a call makes of its parameter
    (1 + weight) is known by that."""
    model = nn.Sequential(nn.Linear(D, D), TinyRMSNorm(offset), nn.Linear(D, D))
    x = torch.randn(4, D)
    reports, saved = [], []
    for device in ("cpu", "cuda"):
        there, sample = copy.deepcopy(model).to(device), x.to(device)
        reports.append(str(swap(there, sample=sample)))
        saved.append(measure(there, sample).saved)
    assert reports[0] == reports[1]
    assert saved[0] == saved[1]
