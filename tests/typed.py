"""What type checkers see of memkit's names; `make lint` checks this file, nothing runs it."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import memkit

x = torch.ones(2, 3)
assert_type(memkit.swap(torch.nn.Linear(3, 3), sample=x, lean="call"), memkit.SwapReport)
assert_type(memkit.Pool("1MiB", grow=False).empty(2), torch.Tensor)
assert_type(memkit.memory.measure(lambda: None).peak, int)
assert_type(memkit.functional.gelu(x), torch.Tensor)
memkit.swap(torch.nn.Linear(3, 3), given=x)  # type: ignore[call-arg]
memkit.Pool("1MiB").nonsense()  # type: ignore[attr-defined]
memkit.functional.gelu(3)  # type: ignore[arg-type]
