"""What PyTorch does otherwise up to 2.12."""

from __future__ import annotations

import torch
import torch.compiler

OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)

if OLD:  # whose compiler takes the function for true in all that it compiles

    def is_exporting() -> bool:
        return torch.compiler._is_exporting_flag

else:
    from torch.compiler import is_exporting

__all__ = ["OLD", "is_exporting"]
