"""Fused operators with the names and arguments of ``torch.nn.functional``, one module a family.

Two arguments by keyword choose the memory: ``inplace`` (False: a new tensor; True: the input is overwritten, or an error
where that would corrupt something; "auto": overwritten where no graph and no other tensor needs it, which sees no later
read by your own code, as in ``gelu(h, inplace="auto") + h``; where the twin has it, by position too) and ``save``, what
backward computes the gradient from ("input", "output", "auto", for some "bit").

What each family keeps for backward, when it works in place and how exact it is stands in the family's own docstring:
``help(memkit.functional.gelu.__module__)`` shows it.
"""

from . import _activation, _channel_norm, _consumer, _dropout, _glu, _loss, _norm, _pooling, _rotary, _softmax
from ._activation import *  # noqa: F403
from ._activation import Inplace as Inplace
from ._activation import Save as Save
from ._channel_norm import *  # noqa: F403
from ._consumer import *  # noqa: F403
from ._dropout import *  # noqa: F403
from ._glu import *  # noqa: F403
from ._loss import *  # noqa: F403
from ._norm import *  # noqa: F403
from ._pooling import *  # noqa: F403
from ._rotary import *  # noqa: F403
from ._softmax import *  # noqa: F403

__all__ = [
    *_activation.__all__,
    *_channel_norm.__all__,
    *_consumer.__all__,
    *_dropout.__all__,
    *_glu.__all__,
    *_loss.__all__,
    *_norm.__all__,
    *_pooling.__all__,
    *_rotary.__all__,
    *_softmax.__all__,
]
