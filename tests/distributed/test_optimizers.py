"""memkit.optim on FSDP2 and tensor parallelism: PyTorch's steps, and checkpoints that other numbers of ranks can read."""

import pytest
from test_engines import lines

SCALES = "for optimizer.state.0.0.weight.exp_avg_scale"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_train(processes):
    (found,) = lines("optimizers.py", "train", processes=processes)
    sizes = found.pop("bytes")
    assert found.pop("8bit, error") < 0.05
    assert found.pop("bf16 state, error") < 0.05
    assert found.pop("bf16, error") < 0.1
    for name, distance in found.items():
        bound = 0 if "in backward" in name else 16  # units of the last place, as unsharded
        assert distance <= bound, name
    assert len(found) == 15
    for rank in sizes:
        assert rank["memkit"] == rank["stock"]
        assert rank["8bit"] <= 0.27 * rank["stock"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_save_and_resume(processes, tmp_path):
    (saved,) = lines("optimizers.py", "save", str(tmp_path))
    assert saved == {"float32": 0, "8bit rows": 0, "8bit": 0}
    (found,) = lines("optimizers.py", "resume", str(tmp_path), processes=processes)
    parts = {1: "[1, 1, 24]", 3: "[3, 1, 8]"}
    expected = f"Size mismatch between saved torch.Size([2, 1, 12]) and current: torch.Size({{}}) {SCALES}"
    if processes == 2:
        assert found.pop("8bit, fsdp2") == 0
    else:
        assert found.pop("8bit, fsdp2").endswith(expected.format(parts[processes]))
    assert found.pop("8bit, unsharded").endswith(expected.format("[24]"))
    assert "Size mismatch" in found.pop("8bit rows, unsharded")
    for case in ("8bit", "8bit rows"):
        assert "as they were saved, in 8 bits, got the codes as torch.float32" in found.pop(
            f"{case}, in float32"
        )
    assert found.pop("8bit, full") < (1e-9 if processes == 2 else 0.02)
    assert all(each == 0 for each in found.values()), found
    assert len(found) == 5
