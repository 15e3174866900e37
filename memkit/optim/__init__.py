"""Optimizers whose step is one call for all parameters, in place, with moments in as few as 8 bits.

``AdamW`` and ``SGD`` are ``torch.optim.Optimizer``s with the mathematics of their twins in ``torch.optim`` (``fused=True``)
and their arguments, but for ``foreach``, ``fused``, ``capturable`` and ``differentiable``: learning-rate schedulers,
``GradScaler``, closures, hooks and state dicts work as there. Beside those:

``state_dtype``
    Of the moments. ``None``: the parameter's, as in torch. ``torch.float32``, ``torch.bfloat16``. ``"8bit"``: 8 bits and a
    float32 scale for each ``block_size`` elements (64, 128 or 256), 2.03 bytes a parameter instead of 8 for AdamW;
    parameters of fewer than 4,096 elements keep theirs in float32. float64 parameters keep float64 always.
``stochastic_rounding``
    Whether bfloat16 parameters and moments are rounded up or down at random, right on average, so that changes smaller
    than half of a last place add up instead of being lost. Seeded from torch's generator of the device (one draw a step),
    which ``torch.manual_seed`` governs; nothing is drawn where nothing is bfloat16.
``pool``
    A :class:`memkit.Pool` to keep the state in.

Arithmetic is float32 (float64 for float64 parameters). The state of all parameters lies in one flat buffer for each
device and dtype, made at the first step; state dicts hold views of it, so save them with ``torch.save``, which writes a
buffer once. They load into ``torch.optim`` and back (8-bit moments into memkit alone); what is loaded is converted to
the ``state_dtype`` of the optimizer that loads it.

Parameters may be DTensors (FSDP2, tensor parallelism), sharded or replicated: each rank steps its part, gradients in other
placements are redistributed, and the state consists of DTensors of the parameters' placements (``step`` apart), which
``torch.distributed.checkpoint`` saves and reshards. 8-bit moments have blocks along a rank's part, and scales of shape
(parts along each dimension, blocks of a part), a row being a part where rows of whole blocks are all that is sharded. They
need parameters in C order and no dimension that two dimensions of the mesh split unevenly; others keep float32.

``step_in_backward`` takes each gradient as it arrives and frees it. ``torch.compile`` leaves ``step`` to eager mode.
"""

from ._adamw import AdamW
from ._in_backward import StepInBackward, step_in_backward
from ._sgd import SGD

__all__ = ["SGD", "AdamW", "StepInBackward", "step_in_backward"]
