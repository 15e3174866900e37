"""lean() beside engines that free parameters between forward and backward."""

import pytest
from test_engines import lines


@pytest.mark.slow
def test_gradients_of_units_that_end_with_a_parameter():
    (worst,) = lines("lean.py")
    assert len(worst) == 12
    assert max(worst.values()) < 1e-5, worst
