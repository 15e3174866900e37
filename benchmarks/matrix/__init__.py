"""The columns of bench_matrix.py: what people run models in, by name."""

from .alone import ALONE
from .engines import ENGINES
from .step import InapplicableError, Result, Run

COLUMNS: dict[str, Run] = ALONE | ENGINES

__all__ = ["ALONE", "COLUMNS", "ENGINES", "InapplicableError", "Result", "Run"]
