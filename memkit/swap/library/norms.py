"""Norms over rows as model libraries write them. All are computed in float32 at least, and rounded once at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ... import _C
from ... import functional as F
from ..._hooks import only_read
from ...functional._norm import Denominator
from ..layers import Norm, is_stocks, row_shape
from ..types import HALVES
from .twin import Twin, numbers

GAINS = "gamma", "g", "scale", "alpha", "a_2", "a"
"""What libraries call a norm's weight besides."""
OFFSETS = "bias", "beta", "b", "shift", "b_2", "offset"
LEAST_LENGTH = 1e-12
"""Of torch.nn.functional.normalize."""
BY_RMS, BY_DEVIATION = (
    ("rms_norm/deviation", "rms_norm/least"),
    ("layer_norm/sample", "layer_norm/deviation"),
)
"""Kinds that divide by something else than a root of a sum with eps."""
WIDTH = 16
"""Of the numbers that a norm without a weight is tried on."""


class _RMSNorm(Norm, Twin):
    _op = "rms_norm"
    _denominator: Denominator = "root"

    def _memkit(self, input: Tensor) -> Tensor:
        shape, gain, eps = row_shape(self, input.shape), self._gain(input), eps_of(self)
        return F.rms_norm(input, shape, gain, eps, denominator=self._denominator, save=self.save)

    def _gain(self, input: Tensor) -> Tensor | None:
        raise NotImplementedError


class RMSNorm(_RMSNorm, kind="rms_norm"):
    """weight * norm(x), as in Llama and T5, or without a weight, as in nanochat. Weights of another dtype would decide the
    result's, and are left to stock."""

    def _stays(self, input: Tensor) -> bool:
        weight = self._gain(input)
        return (weight is not None and weight.dtype != input.dtype) or super()._stays(input)

    def _gain(self, input: Tensor) -> Tensor | None:
        return parameter_of(self, "weight", *GAINS)


class DeviationRMSNorm(RMSNorm, kind="rms_norm/deviation"):
    """weight * x / (rms + eps), as in Zhang and Sennrich's own code."""

    _denominator = "deviation"


class LeastRMSNorm(RMSNorm, kind="rms_norm/least"):
    """weight * x / max(rms, eps), as in x-transformers' older ones."""

    def _stays(self, input: Tensor) -> bool:
        return input.dim() == 0 or super()._stays(input)

    def _memkit(self, input: Tensor) -> Tensor:
        gain: Any = self._gain(input)
        root = input.shape[-1] ** 0.5
        weight, eps = made_of(gain * root, gain), eps_of(self) * root
        return F.rms_norm(input, input.shape[-1:], weight, eps, denominator="norm", save=self.save)


class ScaleNorm(LeastRMSNorm, kind="scale_norm"):
    """g * x / max(|x|, eps), of one g (Nguyen and Salazar, "Transformers without tears", 2019)."""

    def _memkit(self, input: Tensor) -> Tensor:
        gain: Any = self._gain(input)
        weight = made_of(gain.expand(input.shape[-1]), gain)
        eps = eps_of(self)
        return F.rms_norm(input, input.shape[-1:], weight, eps, denominator="norm", save=self.save)


class OffsetRMSNorm(_RMSNorm, kind="rms_norm+1"):
    """(1 + weight) * norm(x), as in Gemma, in float32 and of the input's dtype."""

    def _gain(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        return made_of(1.0 + (weight if input.dtype == torch.float64 else weight.float()), weight)


class Normalized(_RMSNorm, kind="normalized"):
    """sqrt(d) * x / max(|x|, 1e-12) * gamma, as in x-transformers and vit-pytorch, for rows of d numbers."""

    def _stays(self, input: Tensor) -> bool:
        gain = parameter_of(self, *GAINS)
        width = _width(self) if gain is None else gain.shape[0]
        promotes = gain is not None and gain.dtype != input.dtype
        return promotes or input.dim() == 0 or input.shape[-1] != width or super()._stays(input)

    def _memkit(self, input: Tensor) -> Tensor:
        width = input.shape[-1]
        return F.rms_norm(input, (width,), self._gain(input), LEAST_LENGTH**2 / width, save=self.save)

    def _gain(self, input: Tensor) -> Tensor | None:
        return parameter_of(self, *GAINS)


class OffsetNormalized(Normalized, kind="normalized+1"):
    def _gain(self, input: Tensor) -> Tensor | None:
        gain = parameter_of(self, *GAINS)
        return None if gain is None else made_of(gain + 1, gain)


class LayerNorm(Norm, Twin, kind="layer_norm"):
    """A class like torch.nn.LayerNorm, or of its own as in DeBERTa, without a bias as in Cohere's models, or a weight as in
    OLMo's, that computes the same."""

    _op = "layer_norm"
    _denominator: Denominator = "root"

    def _stays(self, input: Tensor) -> bool:
        own = not isinstance(self, nn.LayerNorm)
        return _looks_on(self) or (own and self._promotes(input)) or super()._stays(input)

    def _promotes(self, input: Tensor) -> bool:
        """Whether weights of another dtype may decide the result's, in a class that adds a bias itself."""
        weight = self._gain()
        if weight is None or weight.dtype == input.dtype or torch.is_autocast_enabled(input.device.type):
            return False
        # Libraries whose norms have a weight alone round to the input's dtype behind it.
        return parameter_of(self, *OFFSETS) is not None or "weight" not in self._parameters

    def _memkit(self, input: Tensor) -> Tensor:
        weight, bias = self._gain(), parameter_of(self, *OFFSETS)
        eps = 1e-5 if (own := eps_of(self)) is None else own
        shape, denominator = row_shape(self, input.shape), self._denominator
        return F.layer_norm(input, shape, weight, bias, eps, denominator=denominator, save=self.save)

    def _gain(self) -> Tensor | None:
        return parameter_of(self, "weight", *GAINS)


class OffsetLayerNorm(LayerNorm, kind="layer_norm+1"):
    """With 1 + weight, as in Nemotron."""

    def _gain(self) -> Tensor | None:
        module: Any = self
        return made_of(module.weight + 1, module.weight)


class DeviationLayerNorm(LayerNorm, kind="layer_norm/deviation"):
    """weight * (x - mean) / (deviation + eps) + bias."""

    _denominator = "deviation"


class SampleLayerNorm(LayerNorm, kind="layer_norm/sample"):
    """With the deviation of a sample, which `x.std()` is, as in "The Annotated Transformer"."""

    _denominator = "sample_deviation"


class LayerNorm2d(LayerNorm, kind="layer_norm_2d"):
    """Over the channels of [N, C, H, W]."""

    def over_rows(self, input: Tensor) -> Tensor:
        return super()._memkit(input)

    def _memkit(self, input: Tensor) -> Tensor:
        return self.over_rows(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GroupNorm(Norm, Twin, kind="group_norm"):
    """A class of its own that computes what torch.nn.GroupNorm does, as timm's with one group."""

    _op = "group_norm"

    def _stays(self, input: Tensor) -> bool:
        return _looks_on(self) or is_stocks(input) or super()._stays(input)

    def _memkit(self, input: Tensor) -> Tensor:
        module: Any = self
        return F.group_norm(input, module.num_groups, module.weight, module.bias, module.eps)


def row_of(parameter: Tensor | None) -> Tensor | None:
    """Of shape (C,) if it is of (C, 1, 1) or (1, C, 1, 1)."""
    return parameter if parameter is None or parameter.dim() == 1 else parameter.flatten()


def input_dims(module: nn.Module) -> int:
    """Of a norm over channels: of how many dimensions its inputs are, by the weight that is broadcast to them."""
    parameter = parameter_of(module, "weight", *GAINS)
    if parameter is None or parameter.dim() < 2:
        return 4
    return parameter.dim() + (parameter.shape[0] != 1)


def _width(module: Any) -> int:
    """Of the rows that a norm without a weight multiplies by its square root."""
    width: int = round(module.scale**2)
    return width


def made_of(weight: Tensor, parameter: Tensor) -> Tensor:
    """What a call computes from a parameter, as the weight of a norm."""
    if weight.is_cuda and not is_compiling():
        _C.follow_weight(weight, parameter)
    return weight


def parameter_of(module: nn.Module, *names: str) -> Tensor | None:
    """A parameter of the first of these names that there is, or what else goes by it; nn.Module's own way to it takes four
    times as long, and more where there is none."""
    for name in names:
        parameter = module._parameters.get(name)
        if parameter is None and (
            name in module._buffers or name in vars(module) or hasattr(type(module), name)
        ):
            parameter = getattr(module, name, None)
        if isinstance(parameter, Tensor):
            return parameter
    return None


def _looks_on(module: nn.Module) -> bool:
    """Whether a child of a norm, which stood there for nothing, is something else now or has hooks."""
    children = module._modules
    return len(children) > 0 and not all(type(c) is nn.Identity and only_read(c) for c in children.values())


def norm_kinds(module: nn.Module) -> tuple[str, ...]:
    """Which twins may be it, by its looks."""
    cls = type(module)
    if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
        return () if cls in (nn.GroupNorm, nn.LayerNorm) else _kinds_of_subclass(module)
    name = cls.__name__.lower()
    rms = name.endswith(("rmsnorm", "l2norm", "scalenorm"))
    rows = (
        rms
        or name.endswith(("layernorm", "normalization"))
        or (name.endswith("norm") and not module._buffers)
    )
    if not rows or isinstance(module, nn.RMSNorm) or module._modules:
        return ()
    if any(name in module._parameters for name in GAINS):
        return _kinds_by_gain(module, rms)
    if holds_others(module, "weight", "bias"):
        return ()
    weight, shape = (getattr(module, name, None) for name in ("weight", "normalized_shape"))
    held = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if weight is None and not held and not module._buffers:
        known = eps_of(module) is not None if rms else shape is not None
        if rms and not known and isinstance(getattr(module, "scale", None), float):
            return ("normalized",)
        return ("rms_norm" if rms else "layer_norm",) if known else ()
    if "weight" not in held or any(each.dim() != 1 for each in held.values()) or eps_of(module) is None:
        return ()
    if held.keys() != {"weight"}:  # DeBERTa's
        return ("layer_norm",) if not rms and held.keys() == {"weight", "bias"} else ()
    # T5's kin names the one as the other.
    return ("rms_norm", "rms_norm+1", *BY_RMS) if rms else ("layer_norm", "rms_norm", *BY_DEVIATION)


def holds_others(module: nn.Module, *names: str) -> bool:
    """Whether those, which a norm's parameters have, or its shape's stand for something else."""
    shape = vars(module).get("normalized_shape", ())
    parameters = (getattr(module, name, None) for name in names)
    return not isinstance(shape, tuple | list) or not all(isinstance(x, Tensor | None) for x in parameters)


def _kinds_by_gain(module: nn.Module, rms: bool) -> tuple[str, ...]:
    """Of one whose weight is called gamma, say, a layer norm's bias beta."""
    held = {
        name: each
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is not None
    }
    eps = eps_of(module)
    if rms and held.keys() <= {*GAINS} and all(each.numel() == 1 for each in held.values()):
        return () if eps is None else ("scale_norm",)
    allowed = {*GAINS} if rms else {*GAINS, *OFFSETS}
    if not held.keys() <= allowed or any(each.dim() != 1 for each in held.values()):
        return ()
    if rms:
        return (*(() if eps is None else ("rms_norm", *BY_RMS)), "normalized", "normalized+1")
    return ("layer_norm", *(() if eps is None else BY_DEVIATION))


def _kinds_of_subclass(module: Any) -> tuple[str, ...]:
    """Of one of torch.nn's norms, which may call what is behind it."""
    first = getattr(module, "data_format", "") == "channels_first" or "2d" in type(module).__name__
    images = first and len(getattr(module, "normalized_shape", ())) == 1
    idle = all(type(child) is nn.Identity for child in module._modules.values())
    batch = isinstance(module, nn.BatchNorm2d)
    if batch or not idle:
        kind = "batch" if batch else "group" if isinstance(module, nn.GroupNorm) else "layer"
        calls_act = module._modules.keys() in ({"drop", "act"}, {"activation"})
        return (f"{kind}_norm_act" + "_2d" * images,) if calls_act else ()
    if isinstance(module, nn.GroupNorm):
        return ("group_norm",)
    return ("layer_norm_2d",) if images else ("layer_norm", "layer_norm+1")


def norm_probe(module: nn.Module, kind: str) -> tuple[Tensor, ...]:
    weight: Any = parameter_of(module, "weight", *GAINS)
    if isinstance(module, nn.BatchNorm2d):
        return (numbers((2, module.num_features, 3, 2), weight),)
    if isinstance(module, nn.GroupNorm):
        return (of_two_sizes(numbers((2, module.num_channels, 3, 2), weight)),)
    width = _width(module) if weight is None and kind == "normalized" else WIDTH
    own = None if kind == "scale_norm" else row_of(weight)
    row = row_shape(module, (width,) if own is None else own.shape)
    behind = (3, 2, 2)[: input_dims(module) - 2]
    shape = (2, *row, *behind) if _is_of_images(kind) else (2, 3, *row)
    return (of_two_sizes(numbers(shape, weight)),)


def further_probes(module: nn.Module, kind: str) -> tuple[tuple[Tensor, ...], ...]:
    """Of rows so small that it shows where eps is added; of a norm without a weight, which would say of what dtype and
    width its input is, of others and of more dimensions."""
    (rows,), eps = norm_probe(module, kind), eps_of(module)
    small = () if eps is None or not 0 < eps < 1 or rows.dtype in HALVES else ((rows * _near(kind, eps),),)
    if (
        kind not in ("rms_norm", "layer_norm", "channel_rms_norm")
        or parameter_of(module, "weight", *GAINS) is not None
    ):
        return small
    row = row_shape(module, (WIDTH + 8,))
    shape = (2, *row, 5, 3) if _is_of_images(kind) else (2, 5, 3, *row)
    more = (of_two_sizes(numbers(shape, None)).to(dtype) for dtype in (torch.bfloat16, torch.float64))
    return (*small, *((each,) for each in more))


def _near(kind: str, eps: float) -> float:
    """What eps is as large as: a deviation, or a variance."""
    return eps if "/" in kind or kind == "scale_norm" else eps**0.5


def _is_of_images(kind: str) -> bool:
    return kind.endswith("_2d") or kind.startswith("channel_")


def of_two_sizes(rows: Tensor) -> Tensor:
    """Half of them so small that eps shows."""
    rows[1:] *= 1e-3
    return rows


def eps_of(module: nn.Module) -> Any:
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(value := vars(module).get(name), float):
            return value
    return None
