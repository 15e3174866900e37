"""A swapped model on the distributed engines: the stock model's losses, in less memory on every rank."""

import importlib.util
import json
from pathlib import Path

import pytest
from torchrun import torchrun

HERE = Path(__file__).resolve().parent
NEEDS = {"deepspeed_zero1": "deepspeed", "deepspeed_zero3": "deepspeed", "fairscale_oss": "fairscale"}
ENGINES = (
    "ddp",
    "fsdp2",
    "fsdp2_bf16_offload",
    "tensor_parallel",
    "activation_on_dtensors",
    "sequence_parallel",
    "pipeline",
    "checkpoint",
    *NEEDS,
)
TOLERANCE = {"fsdp2_bf16_offload": 2e-3}  # bfloat16: one unit in the last place of these losses is 3e-2


def lines(script, *args, processes=2):
    """The JSON lines that a script of this folder prints."""
    out = torchrun(HERE / script, *args, processes=processes)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_engine(engine):
    if engine in NEEDS and importlib.util.find_spec(NEEDS[engine]) is None:
        pytest.skip(f"needs {NEEDS[engine]}")
    (found,) = lines("engines.py", engine)
    stock = found["stock"]
    assert stock["losses"][0] != stock["losses"][-1]  # it trains
    for kind in found.keys() - {"engine", "stock"}:
        swapped = found[kind]
        assert swapped["losses"] == pytest.approx(stock["losses"], rel=TOLERANCE.get(engine, 1e-6)), kind
        for ours, theirs in zip(swapped["peaks"], stock["peaks"], strict=True):
            assert theirs - ours > 50_000, kind  # bytes; DeepSpeed's own buffers take two thousand MB
