"""Softmax and log_softmax on a GPU, against the CPU's float64 truth."""

from __future__ import annotations

import pytest
import torch
from test_softmax import DTYPES, compare, inputs, logs, masks
from torch import Tensor

import memkit.functional as M
from memkit.memory import measure

pytestmark = pytest.mark.cuda


@logs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "far", "sharp"])
def test_rows(kind: str, dtype: torch.dtype, log: bool) -> None:
    """A warp a row, a block a row, rows that lie off 16 bytes, a thread a row."""
    for shape in ((33, 1), (70, 64), (9, 1003), (5, 5003), (3, 70000)):
        compare(inputs(kind, shape).to(dtype).cuda(), log=log)
    compare(inputs(kind, (3, 40, 50)).to(dtype).cuda(), dim=1, log=log)


@logs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks(dtype: torch.dtype, log: bool) -> None:
    for shape in ((2, 3, 9, 33), (2, 2, 40, 2050)):
        draws = [inputs("normal", shape).to(dtype).cuda() for _ in range(4)]
        for options in masks(shape, dtype).values():
            compare(
                *draws, log=log, **{k: v.cuda() if isinstance(v, Tensor) else v for k, v in options.items()}
            )


def test_in_place_takes_no_memory() -> None:
    x = torch.randn(64, 4096, device="cuda")
    assert measure(lambda: M.softmax(x, -1, inplace=True), device="cuda").peak == 0


def test_autocast() -> None:
    """The logarithm is float32, as in stock; softmax keeps a half dtype, which the next product takes as it is."""
    half = torch.randn(5, 70, device="cuda", dtype=torch.float16)
    with torch.autocast("cuda", torch.float16):
        y = M.log_softmax(half, -1, inplace="auto")
        assert y.dtype == torch.nn.functional.log_softmax(half, -1).dtype == torch.float32
        assert M.softmax(half, -1).dtype == torch.float16
        assert M.softmax(half.float(), -1).dtype == torch.float32
    torch.testing.assert_close(y, half.float().log_softmax(-1))
