"""Tools that measure memory: what a call peaks at, keeps, and saves for backward."""

from .measure import Measurement, measure, timeline

__all__ = ["Measurement", "measure", "timeline"]
