"""The cases of sharding_cases.py that need processes: a mesh of two dimensions, and a compiler."""

import pytest
from sharding_cases import ON_FOUR
from test_engines import lines


@pytest.mark.slow
def test_sharded():
    (found,) = lines("sharded.py", processes=4)
    assert set(ON_FOUR) < set(found["passed"])
    assert sum("compiled" in name for name in found["passed"]) >= 9
