"""What swap changes beside activations: norms, dropouts, and a batch norm with the activation behind it.

They work out of place and compute what stock computes, dropout but for which elements are dropped. So there is nothing to
prove, except where a norm keeps its output: that must not be changed in place afterwards. Their gain:

- dropouts keep a seed, no mask;
- layer norm and RMS norm keep one tensor, where possible the output that the next layer keeps anyway;
- a batch norm, the activation and the convolution behind it in an `nn.Sequential` keep the norm's input alone;
- max pooling keeps no input, which it would keep for its shape, and an eighth of stock's indices.

What memkit has no kernel for, and norms under autocast where `exact`, goes to the stock forward: memkit's norms give
autocast's dtype there, stock's float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

from .. import _C
from .. import functional as F
from .. import nn as memkit_nn
from .._hooks import has_global_hooks, has_hooks, shows_result
from .._lean import is_lean
from .._modes import is_tracing
from .._older import is_exporting
from .._sharding import is_dtensor
from ..functional import Save, norm_saves
from ..functional._activation import _PARAMETERS
from ..functional._norm import output_dtype
from ..nn.norm import batch_norm_of, norm_act_conv_of
from .recipes import CALLERS
from .types import FLOATS, Changed, Proof, Swapped


class Choice(NamedTuple):
    """What was chosen for one module. Plain values: copied and pickled with it."""

    save: Save = "input"
    hooked: bool = False
    """The choice holds with the forward hooks that the module has."""
    exact: bool = True


class Layer(Changed):
    _swap: Choice
    _op: str
    keeps: ClassVar[tuple[str, str]] = "mask", "seed"
    """Stock and swapped; of a dropout."""
    records_only: ClassVar[bool] = False
    """It brings something where autograd records, and nothing elsewhere."""

    def forward(self, input: Tensor) -> Tensor:
        if self.records_only and not torch.is_grad_enabled():
            return self._as_stock(input)
        if not serves(input, sharded=True) or self._stays(input):
            return self._as_stock(input)
        try:
            return self._memkit(input)
        except (RuntimeError, TypeError, ValueError) as error:
            if not str(error).startswith(f"{self._op}: expected"):  # how memkit refuses, before it writes
                raise
            return self._stock_forward(input)

    def _as_stock(self, input: Any) -> Tensor:
        """In a trace of torch.fx a node of its own, as torch.nn's modules are, whose forward may not be traced."""
        if type(input) is Proxy:
            tracer: Any = input.tracer
            return cast(Tensor, tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {}))
        return self._stock_forward(input)

    def _memkit(self, input: Tensor) -> Tensor:
        return cast(Tensor, super().forward(input))

    def _stays(self, input: Tensor) -> bool:
        return False

    @staticmethod
    def bytes_kept(module: Any, output: torch.Size) -> int:
        """Of a call with such a result; a dropout's seed."""
        return 8


class Norm(Layer):
    @property
    def save(self) -> Save:
        return "input" if not self._swap.hooked and shows_result(self) else self._swap.save

    def _stays(self, input: Tensor) -> bool:
        """Under autocast; and under a compiler, which makes the result again in backward where that costs nothing."""
        return is_dynamo_compiling() or (self._swap.exact and torch.is_autocast_enabled(input.device.type))

    @staticmethod
    def row_shape(module: Any, shape: Sequence[int]) -> tuple[int, ...]:
        """What it takes statistics over, of an input of that shape."""
        return row_shape(module, shape)

    def over_rows(self, input: Tensor) -> Tensor:
        """Of an input whose last dimensions are those of the statistics."""
        return self._memkit(input)


def serves(input: Tensor, sharded: bool = False) -> bool:
    """Whether memkit may have a kernel for it, and nothing but tensors is to be seen, or DTensors if `sharded`. What is
    exported or traced is PyTorch's operators, for those who have no memkit."""
    return (
        (type(input) is Tensor or type(input) is nn.Parameter or (sharded and is_dtensor(input)))
        and input.dtype in FLOATS
        and input.device.type in ("cpu", "cuda")
        and input.layout == torch.strided
        and not is_exporting()
        and not is_tracing()
    )


def keeps_output(twin: type[Norm], module: Any, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether save="auto" comes to the output, with these weights and inputs of that shape."""
    norm: Any = twin.__new__(twin)
    vars(norm).update(vars(module))
    norm._swap = Choice("auto", hooked=True, exact=False)
    device = next((p.device for p in module.parameters()), None)
    x = torch.zeros(1, *twin.row_shape(module, shape), dtype=dtype, device=device, requires_grad=True)
    with torch.enable_grad():
        if x.is_cuda:  # weights are measured beside the program: a call goes by the one before it
            for _ in range(2):
                norm.over_rows(x)
                torch.cuda.synchronize(x.device)
        return norm_saves(norm.over_rows(x)) == "output"


def row_shape(norm: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """The last dimensions that it is said to be of, or the last one."""
    return tuple(norm.normalized_shape if hasattr(norm, "normalized_shape") else shape[-1:])


class LayerNorm(Norm, memkit_nn.LayerNorm):  # type: ignore[override]
    _op = "layer_norm"


class RMSNorm(Norm, memkit_nn.RMSNorm):  # type: ignore[override]
    _op = "rms_norm"


class GroupNorm(Norm, memkit_nn.GroupNorm):
    _op = "group_norm"

    def _stays(self, input: Tensor) -> bool:
        return is_stocks(input) or super()._stays(input)


def is_stocks(image: Tensor) -> bool:
    """Of a group norm: channels last, of which stock's forward is faster, where nothing is kept."""
    return not torch.is_grad_enabled() and not image.is_contiguous()


class Pending:
    """What stands for a tensor that is not computed yet."""

    def drop(self, p: float) -> Any:
        """The same with memkit's dropout."""
        raise NotImplementedError


class Dropout(Layer, memkit_nn.Dropout):
    _op = "dropout"

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Pending):
            return cast(Tensor, input.drop(self.p if self.training else 0.0))
        idle = not (self.training and self.p) and 0 <= self.p <= 1  # stock says what is not
        if idle and type(input) is Tensor and not input.is_nested:
            return input
        return super().forward(input)


class Dropout1d(Layer, memkit_nn.Dropout1d):
    _op = "dropout1d"


class Dropout2d(Layer, memkit_nn.Dropout2d):
    _op = "dropout2d"


class Dropout3d(Layer, memkit_nn.Dropout3d):
    _op = "dropout3d"


class AlphaDropout(Layer, memkit_nn.AlphaDropout):
    _op = "alpha_dropout"


class FeatureAlphaDropout(Layer, memkit_nn.FeatureAlphaDropout):
    _op = "feature_alpha_dropout"


class MaxPool2d(Layer, memkit_nn.MaxPool2d):
    _op = "max_pool2d"
    keeps = "input, indices", "places"

    @staticmethod
    def bytes_kept(module: Any, output: torch.Size) -> int:
        sizes = module.kernel_size if isinstance(module.kernel_size, (tuple, list)) else (module.kernel_size,)
        return output.numel() * (1 if sizes[0] * sizes[-1] <= 256 else 4)


class BatchNorm(Layer):
    """Stands alone, so that all it brings is that memkit.lean() can rebuild its result."""

    _op = "batch_norm_act"
    records_only = True

    def _stays(self, input: Tensor) -> bool:
        return output_dtype(input) != input.dtype or not is_lean() or not has_statistics(self, input)


class BatchNorm1d(BatchNorm, memkit_nn.BatchNorm1d):
    pass


class BatchNorm2d(BatchNorm, memkit_nn.BatchNorm2d):
    pass


class BatchNorm3d(BatchNorm, memkit_nn.BatchNorm3d):
    pass


class InstanceNorm(Layer):
    """A group norm with a group a channel. As a batch norm it brings that memkit.lean() can rebuild its result."""

    _op = "group_norm"
    records_only = True
    _dims: int

    def _stays(self, input: Tensor) -> bool:
        module: Any = self
        return (
            not is_lean()
            or module.track_running_stats
            or output_dtype(input) != input.dtype
            or input.dim() != self._dims + 2
            or input.shape[1] != module.num_features
            or input.shape[2:].numel() < 2  # which stock refuses
        )

    def _memkit(self, input: Tensor) -> Tensor:
        module: Any = self
        return F.group_norm(input, module.num_features, module.weight, module.bias, module.eps)


class InstanceNorm1d(InstanceNorm, nn.InstanceNorm1d):
    _dims = 1


class InstanceNorm2d(InstanceNorm, nn.InstanceNorm2d):
    _dims = 2


class InstanceNorm3d(InstanceNorm, nn.InstanceNorm3d):
    _dims = 3


class Conv2d(Layer, memkit_nn.Conv2d):
    """Brings less memory in backward where the input's gradient is made in parts of the batch: on the CPU, where the input
    is much larger than the weight (`conv_parts` in csrc/torch/consumer_layers.cpp), and the layer not pointwise."""

    _op = "conv2d"
    records_only = True

    def _stays(self, input: Tensor) -> bool:
        height, width = self.kernel_size
        weight = self.out_channels * self.in_channels // self.groups * height * width
        return not (
            input.device.type == "cpu"
            and not is_dynamo_compiling()
            and _C.conv_parts(input.numel(), weight) > 1  # first: most layers end here
            and is_lean()
            and takes(self, input)
            and self.weight.requires_grad
            and not torch.is_autocast_enabled("cpu")
        )


class Linear(Layer, memkit_nn.Linear):
    """Brings less memory in backward, for layers whose input is larger than their output: the network's widest tensor, when
    made again, is not there beside its gradient."""

    _op = "linear"
    records_only = True

    def _stays(self, input: Tensor) -> bool:
        weight: Any = self._parameters.get("weight")  # by its name a parametrization would be evaluated
        return not (
            input.requires_grad
            and input.numel() >= LEAST
            and not is_dynamo_compiling()
            and is_lean()
            and type(weight) is nn.Parameter
            and weight.requires_grad
            and weight.dtype == input.dtype
            and not is_dtensor(input)
            and not has_hooks(self)
            and not torch.is_autocast_enabled(input.device.type)
        )


LEAST = 2**20
"""Elements of such an input; a call costs 6 us, which smaller layers would notice more than they gain."""

LINEARS = {nn.Linear, Linear}


def is_linear(module: Any) -> TypeGuard[nn.Linear]:
    """Whether it is a Linear and nothing else."""
    return type(module) in LINEARS


def narrows(module: Any) -> bool:
    return is_linear(module) and module.in_features > module.out_features


LAYERS: dict[str, type[Layer]] = {
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
    "group_norm": GroupNorm,
    "dropout": Dropout,
    "dropout1d": Dropout1d,
    "dropout2d": Dropout2d,
    "dropout3d": Dropout3d,
    "alpha_dropout": AlphaDropout,
    "feature_alpha_dropout": FeatureAlphaDropout,
    "max_pool2d": MaxPool2d,
}
"""The names that `ops` takes, beside the activations' and "batch_norm_act"."""

BATCH_NORMS: dict[type[nn.Module], type[BatchNorm]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}

INSTANCE_NORMS: dict[type[nn.Module], type[InstanceNorm]] = {
    nn.InstanceNorm1d: InstanceNorm1d,
    nn.InstanceNorm2d: InstanceNorm2d,
    nn.InstanceNorm3d: InstanceNorm3d,
}

FUSED = Proof(False, dtypes=frozenset())
"""Of an activation that runs in its batch norm, and as stock wherever else it is called."""


class Sequential(Changed, nn.Sequential):
    """Runs a batch norm, the activation and the convolution behind it as one. Looks anew in each call: it may have been
    sliced or edited."""

    def forward(self, input):  # type: ignore[no-untyped-def]  # torch.fx writes what it finds there
        modules = tuple(self._modules.values())
        i = 0
        while i < len(modules):
            module, *behind = modules[i : i + 3]
            if (
                behind
                and is_pair(module, behind[0])
                and serves(input)
                and output_dtype(input) == input.dtype
                and has_statistics(module, input)
            ):
                act: Any = behind[0]
                params = dict(zip(_PARAMETERS.get(act._op, ()), act._params, strict=True))
                if len(behind) == 2 and takes(behind[1], input):
                    input = norm_act_conv_of(module, cast(nn.Conv2d, behind[1]), input, act._op, params)
                    i += 3
                    continue
                if not is_dynamo_compiling():  # compilers do as much with these two
                    input = batch_norm_of(module, input, act._op, params)
                    i += 2
                    continue
            input = cast(Any, module)(input)
            i += 1
        return input


CALLERS.add(Sequential.forward.__code__)


def takes(conv: Any, input: Tensor) -> bool:
    """Whether one operator computes the convolution with what is before it, and brings something."""
    return (
        is_convolution(conv)
        and conv.weight.dtype == input.dtype
        and input.dim() == 4
        and input.requires_grad
        and torch.is_grad_enabled()
    )


def is_convolution(module: Any) -> bool:
    """One that does what its parameters say, and nothing else."""
    return (
        type(module) in (nn.Conv2d, Conv2d)
        and not has_hooks(module)
        and type(module.weight) is nn.Parameter
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def is_pointwise(conv: Any) -> bool:
    return bool(conv.kernel_size + conv.stride == (1, 1, 1, 1))


def has_statistics(norm: Any, input: Tensor) -> bool:
    """In training an empty batch has none: PyTorch lets it pass, memkit's operators refuse it."""
    return not norm.training or input.numel() > 0


def is_pair(norm: Any, act: Any) -> bool:
    """A batch norm and an activation, and nothing that looks between them."""
    return (
        (type(norm) in BATCH_NORMS or isinstance(norm, BatchNorm))
        and isinstance(act, Swapped)
        and not (has_hooks(norm) or has_hooks(act) or has_global_hooks())
    )
