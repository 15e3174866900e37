"""Whether a module computes what its twin computes: values, gradients, and what it reads and writes beside."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..drawn import Generators, drew_alike, generators, seed_all
from ..layers import Norm
from ..trial import exact_convolutions, own_copy
from ..types import HALVES
from ..untouched import untouched, without_hooks
from .elsewhere import DTYPES, HERE, Asks, Place, asks_of, features_of, other_shapes, sizes_of
from .match import Match
from .norms import further_probes
from .reads import (
    INTERNAL,
    Read,
    Reads,
    another,
    differing,
    instead,
    marks,
    numbers_read,
    read_of_class,
    uses,
    value_of,
    why_stock_has_to_run,
    written_in_place,
)
from .twin import MIXINS, TOLERANCE, numbers, twin_of, why_not_fits
from .writes import is_foreign


class Verifier:
    """Remembers, for one model, which kinds of modules compute what their twins compute."""

    def __init__(self) -> None:
        self._known: dict[Hashable, str] = {}
        self._unread: dict[Hashable, tuple[Read, ...]] = {}
        self._unread_of: dict[Hashable, tuple[Read, ...]] = {}
        self._elsewhere: dict[Hashable, str] = {}

    def why_not(self, module: nn.Module, match: Match) -> str:
        """Why a module does not get this twin; nothing if it does."""
        kind = (match.kind, match.choice, _signature(module))
        key = kind, self._values(module, kind)
        if key not in self._known:
            why = self._verify(module, match)
            if not why and kind not in self._unread:
                why = self._look(module, match, kind)
                key = kind, self._values(module, kind)
            self._known[key] = why
        return self._known[key]

    def watched(self, module: nn.Module, match: Match) -> Reads:
        """Of a module that gets this twin: what the twin has to be called with, or stock serves."""
        if not any(self._unread.values()):
            return ()
        return self._values(module, (match.kind, match.choice, _signature(module)))

    def _values(self, module: nn.Module, kind: Hashable) -> Reads:
        return tuple((*read, value_of(module, read)) for read in self._unread.get(kind, ()))

    def _look(self, module: nn.Module, match: Match, kind: Hashable) -> str:
        self._unread[kind] = ()
        alike = match.kind, match.choice, _alike(module)
        asks = asks_of(type(module), match.method)
        sizes = sizes_of(module, match) if asks.shapes else frozenset[int]()
        at = alike, sizes - features_of(module, match)
        if at not in self._elsewhere:
            self._elsewhere[at] = _why_not_elsewhere(module, match, asks, sizes)
        if self._elsewhere[at]:
            return self._elsewhere[at]
        unread = self._unread_of.get(alike)
        if unread is None:
            unread = self._unread_of[alike] = _unread(module, match)
        shadowed = read_of_class(module, match.method) & vars(module).keys()
        for read in (*unread, *(("", name) for name in shadowed)):
            value = value_of(module, read)
            followed = not isinstance(value, Tensor) and _is_hashable(value) and read[1] not in shadowed
            if not followed or match.method != "forward":
                return f"{type(module).__name__} computes with {read[1]}, which memkit's {match.op} does not"
        self._unread[kind] = unread
        return ""

    @staticmethod
    def _verify(module: nn.Module, match: Match) -> str:
        held = (*match.probe, *module.parameters())
        if not all(tensor.numel() for tensor in held) or any(tensor.is_meta for tensor in held):
            return "its parameters have no values yet"
        if not match.probe:
            return "its first layer is none that memkit knows what to give"
        twin = twin_of(match.kind, type(module))
        if why := why_not_fits(module, twin):
            return why
        if why := _why_stock_has_to_run(module, match):
            return why
        device = match.probe[0].device
        # Under autocast norms stay stock's, if asked to be exact: nothing would be compared.
        plain = torch.autocast(device.type, enabled=False) if issubclass(twin, Norm) else nullcontext()
        tried = _of_other_numbers(module) if issubclass(twin, Norm) else (module,)
        with exact_convolutions(device), plain:
            if unseen := written_in_place(module, match.method) - _changed(tried[0], match):
                return f"{type(module).__name__} changes {', '.join(sorted(unseen))} in some calls"
            # In both modes: a dropout that its forward writes out would not show in evaluation.
            for training in (module.training, not module.training):
                for each, probe in product(tried, (match.probe, *match.further)):
                    probed, noted = match._replace(probe=probe), list[Noted]()
                    reason = _why_not(each, probed, training, noted)
                    if reason and not _rounds_alike(each, probed, training):
                        return reason
                    if reason := _why_not_beside(each, match, noted):
                        return reason
                if issubclass(twin, Norm) and (reason := _why_not_wide(tried[-1], match, training)):
                    return reason
                feeds_forward = match.op in ("act_linear", "gated") and match.kind != "gated_norm"
                if feeds_forward and (reason := _why_not_far(module, match, training)):
                    return reason
        return ""


def _why_stock_has_to_run(module: nn.Module, match: Match) -> str:
    """By its code, and that of the parts whose forwards the twin does not call."""
    parts: list[Any] = [part for part in match.takes if part is not module and is_foreign(part)]
    if match.kind == "bert_layer":
        parts += [module._modules["intermediate"], module._modules["output"]]
    why = (why_stock_has_to_run(module, match.method), *map(why_stock_has_to_run, parts))
    return next(filter(None, why), "")


def _changed(module: nn.Module, match: Match) -> set[str]:
    """What a run of stock's changes, in one of the modes."""
    found = set()
    for training in (True, False) if written_in_place(module, match.method) else ():
        noted: list[Noted] = []
        _both(module, match, training, noted=noted)
        if noted[1:]:
            found |= {name for at, name in differing(noted[0].marks, noted[1].marks) if not at}
    return found


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _unread(module: nn.Module, match: Match) -> tuple[Read, ...]:
    """What stock's values depend on, or whether it draws numbers, and the twin's do not."""
    found = []
    asked = read_of_class(module, match.method)
    wide = _wide(module, match)
    here = match._replace(probe=_widened(match.probe))

    def differs(wide: nn.Module) -> bool:
        noted: list[Noted] = []
        theirs, ours = _both(wide, here, module.training, noted=noted)
        if isinstance(theirs, Exception):
            return not _twin_raises(wide, here)
        drew = len(noted) == 3 and not drew_alike(noted[1].generators, noted[2].generators)
        return drew or not _is_same(match, ours, theirs)

    for read, value in numbers_read(module, match.method).items():
        # An index may be compared with one.
        if read[1].endswith(INDEX) or (not read[0] and read[1] in asked):
            found.append(read)
            continue
        for changed in _others(value):
            if wide is None:
                break
            with instead(wide, read, changed), torch.autocast(here.probe[0].device.type, enabled=False):
                if differs(wide):
                    found.append(read)
                    break
    if wide is None or issubclass(MIXINS[match.kind], Norm):  # of which other parameters are tried
        return tuple(found)
    with torch.autocast(here.probe[0].device.type, enabled=False):
        for name, parameter in _without_gradients(wide, here).items():
            for changed in _others(parameter.data):
                with _of_value(parameter, changed):
                    if differs(wide):
                        found.append(("", name))
                        break
    return tuple(found)


def _twin_raises(module: nn.Module, match: Match) -> bool:
    """As stock does."""
    stock, changed = type(module), cast(Any, module)
    with untouched(module, deep=False), without_hooks(module), torch.enable_grad():
        changed._swap, changed.__class__ = match.choice, twin_of(match.kind, stock)
        try:
            _values(module, match, 0)
        except Exception:
            return True
        finally:
            changed.__class__ = stock
    return False


def _others(value: Any) -> list[Any]:
    """Values to see what depends on one. Of whole numbers, which may be indices, some that are in range too."""
    if isinstance(value, Tensor) and value.dtype in WHOLE:
        order = value.flip(0) if value.dim() else value
        return [each for each in (order, value + 1, value - 1) if not torch.equal(each, value)]
    changed = another(value)
    return [] if changed is None else [changed]


def _without_gradients(module: nn.Module, match: Match) -> dict[str, nn.Parameter]:
    """Parameters of its own that its code names, and may read past autograd: detached, or as numbers."""
    names = uses(type(module), match.method).names
    named = {name: p for name, p in module._parameters.items() if p is not None and name in names}
    if not named:
        return {}
    theirs, _ = _both(module, match, module.training)
    if isinstance(theirs, Exception):
        return {}
    trained = (p for p in module.parameters() if p.is_floating_point())
    gradients = zip(trained, theirs[1 + len(match.probe) :], strict=True)
    used = {p for p, gradient in gradients if gradient is not None}
    return {name: p for name, p in named.items() if p not in used}


@contextmanager
def _of_value(parameter: nn.Parameter, value: Tensor) -> Iterator[None]:
    before = parameter.data
    parameter.data = value
    try:
        yield
    finally:
        parameter.data = before


def _of_other_numbers(module: nn.Module) -> tuple[nn.Module, ...]:
    """A copy, as a norm may set its parameters by what it is given first, and one with other parameters than it starts with,
    which are ones and zeros."""
    first, other = own_copy(module), own_copy(module)
    if first is None or other is None:
        return (module,)
    with torch.no_grad():
        for parameter in other.parameters():
            if type(parameter) is nn.Parameter and parameter.is_floating_point():
                parameter.add_(numbers(parameter.shape, parameter))
    return first, other


FAR = 1e4
ELSEWHERE = {
    Place(inputs=False, gradients=False): "without gradients",
    Place(inputs=False): "of inputs without gradients",
    Place(parameters=False): "with frozen parameters",
}
CALLED, UNDER_AUTOCAST = Place(), Place(autocast=True)


def _why_not_far(module: nn.Module, match: Match, training: bool) -> str:
    """The same for inputs that show what a function does with large values, such as a limit. In float32 for half precision,
    which may not have them."""
    wide = _wide(module, match)
    if wide is None:
        return f"{type(module).__name__} {_NO_COPY}"
    probe = tuple(FAR * x for x in _widened(match.probe))
    with torch.autocast(probe[0].device.type, enabled=False):
        return _why_not(wide, match._replace(probe=probe), training)


def _why_not_wide(module: nn.Module, match: Match, training: bool) -> str:
    """Of a norm in half precision, in float32: rounding hides by what a row's squares are divided."""
    if match.probe[0].dtype not in HALVES:
        return ""
    wide = _wide(module, match)
    if wide is None:
        return f"{type(module).__name__} {_NO_COPY}"
    probes = (tuple(x.float() for x in match.probe), *further_probes(wide, match.kind))
    return next(filter(None, (_why_not(wide, match._replace(probe=probe), training) for probe in probes)), "")


def _why_not_elsewhere(module: nn.Module, match: Match, asks: Asks, sizes: frozenset[int]) -> str:
    """The same for inputs of other shapes, without gradients, with frozen parameters, under autocast, and in other dtypes if
    its code asks for them: where its code may do something else, and stock does not refuse them. But for dtypes in float32,
    as in `_why_not_far`."""
    wide, device = _wide(module, match), match.probe[0].device
    if wide is None:
        return f"{type(module).__name__} {_NO_COPY}"
    here, else_ = (
        match._replace(probe=_widened(match.probe)),
        f"{type(module).__name__} computes something else",
    )
    with exact_convolutions(device), torch.autocast(device.type, enabled=False):
        for place, where in ELSEWHERE.items():
            for training in (True, False) if asks.modes else (False,):
                if not _gives_alike(wide, here, training, place):
                    return f"{else_} {where} than memkit's {match.op}"
        for factor, training in product((1e-2 * FAR, FAR), (True, False)):
            large = here._replace(probe=tuple(factor * x for x in here.probe))
            if not _gives_alike(wide, large, training, CALLED):
                return f"{else_} of large inputs than memkit's {match.op}"
        for probe in other_shapes(here, asks, sizes):
            if not _gives_alike(wide, here._replace(probe=probe), module.training, CALLED):
                shape = tuple(probe[0].shape)
                return f"{else_} of inputs of shape {shape} than memkit's {match.op}"
        # Norms are stock's there, if asked to be exact, and else of another dtype.
        if not issubclass(MIXINS[match.kind], Norm) and getattr(match.choice, "exact", True):
            half = torch.get_autocast_dtype(device.type)
            for given in (here.probe, tuple(x.to(half) for x in here.probe)):
                if not _gives_alike(wide, here._replace(probe=given), module.training, UNDER_AUTOCAST):
                    return f"{else_} under autocast than memkit's {match.op}"
        for dtype in DTYPES if asks.dtypes else ():
            if dtype != match.probe[0].dtype and not _is_same_in(dtype, module, match):
                return f"{else_} in {dtype} than memkit's {match.op}"
    return ""


def _gives_alike(module: nn.Module, match: Match, training: bool, place: Place) -> bool:
    """Whether both give the same there, or stock raises."""
    theirs, ours = _both(module, match, training, place=place)
    if isinstance(theirs, Exception):
        return True
    if not place.autocast:
        return _is_same(match, ours, theirs)
    if ours is None or (a := ours[0]) is None or (b := theirs[0]) is None:
        return False
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool((a.double() - b.double()).norm() <= TOLERANCE[torch.bfloat16] * b.double().norm())


def _is_same_in(dtype: torch.dtype, module: nn.Module, match: Match) -> bool:
    """Or stock raises. What cannot be copied is not the same."""
    copy = own_copy(module)
    if copy is None:
        return False
    copy.to(dtype)
    there = match._replace(probe=tuple(x.to(dtype) for x in match.probe), further=())
    theirs, ours = _both(copy, there, module.training)
    if isinstance(theirs, Exception):
        return True
    return _rounds_alike(copy, there, module.training) if dtype in HALVES else _is_same(there, ours, theirs)


def _widened(probe: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.float() if x.dtype in HALVES else x for x in probe)


def _wide(module: nn.Module, match: Match) -> nn.Module | None:
    """In float32, if it is in half precision and can be copied."""
    if match.probe[0].dtype not in HALVES:
        return module
    wide = own_copy(module)
    return None if wide is None else wide.float()


def _rounds_alike(module: nn.Module, match: Match, training: bool) -> bool:
    """Whether a twin differs by the rounding of half precision alone: not in float32, and else it is as near to what that
    gives as stock, on one of a few inputs: an element that rounding takes across a kink may be stock's or the twin's alone.
    """
    given = match.probe[0]
    autocast = torch.is_autocast_enabled(given.device.type)
    half = torch.get_autocast_dtype(given.device.type) if autocast else given.dtype
    if half not in HALVES:
        return False
    wide: nn.Module | None = module
    if given.dtype in HALVES and (wide := own_copy(module)) is not None:
        wide.float()
    return wide is not None and any(
        _is_near(module, wide, match._replace(probe=tuple(factor * x for x in match.probe)), training, half)
        for factor in (1, 1.01, 1.02, 1.03)
    )


def _is_near(module: nn.Module, wide: nn.Module, match: Match, training: bool, half: torch.dtype) -> bool:
    """`wide` is the module in float32."""
    theirs, ours = _both(module, match, training)
    widened = match._replace(probe=_widened(match.probe))
    with torch.autocast(match.probe[0].device.type, enabled=False):
        exact, own = _both(wide, widened, training)
    if isinstance(theirs, Exception) or isinstance(exact, Exception) or ours is None or own is None:
        return False
    if not _rounds(theirs[0], exact[0], half):
        return False
    # A bias before a batch norm has no gradient but for rounding: compared at the scale of the others, as in _agree.
    inputs = len(match.probe)
    largest = max((float(c.double().norm()) for c in exact[1 + inputs :] if c is not None), default=0.0)
    slack = 1e-2 * TOLERANCE[half] * largest
    return _agree(own, exact, inputs, _tolerance(widened)) and all(
        _is_as_near(a, b, c, slack if i > inputs else 0.0)
        for i, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True))
    )


def _rounds(output: Tensor | None, exact: Tensor | None, half: torch.dtype) -> bool:
    """Whether an output is that of float32 but for rounding, which does not make it larger or smaller as a whole."""
    if output is None or exact is None or output.shape != exact.shape:
        return False
    error, size = output.double() - exact.double(), exact.double().square().sum()
    return bool(error.norm() <= TOLERANCE[half] * size.sqrt()) and bool(
        (error * exact.double()).sum().abs() <= torch.finfo(half).eps * size
    )


def _is_as_near(ours: Tensor | None, theirs: Tensor | None, exact: Tensor | None, slack: float) -> bool:
    if ours is None or theirs is None or exact is None:
        return ours is theirs is exact
    if ours.dtype != theirs.dtype or not ours.shape == theirs.shape == exact.shape:
        return False
    mine, stock = (float((x.double() - exact.double()).norm()) for x in (ours, theirs))
    return mine <= 2 * stock + TOLERANCE[torch.float32] * float(exact.double().norm()) + slack


def _why_not(module: nn.Module, match: Match, training: bool, noted: list[Noted] | None = None) -> str:
    """``noted``: see `_both`."""
    name = type(module).__name__
    theirs, ours = _both(module, match, training, noted=noted)
    if isinstance(theirs, AttributeError) and theirs.args == (_NO_MODE,):
        return f"{name} has {_NO_MODE}"
    if isinstance(theirs, Exception):
        where = "" if training == module.training else f" in {'training' if training else 'evaluation'}"
        return f"{name} takes other arguments{where}: {type(theirs).__name__}"
    same = _is_same(match, ours, theirs) and (
        not issubclass(MIXINS[match.kind], Norm) or _lie_alike(ours[0], theirs[0])  # type: ignore[index]
    )
    if not same:
        others, _ = _both(module, match, training, seed=1)
        if not isinstance(others, Exception) and not _is_same(match, others, theirs):
            return f"{name} {_DRAWS} {match.op} does not"
    elif any(map(_is_dropout, module.modules())):
        theirs, ours = _both(module, match, training, scales=True)
        same = not isinstance(theirs, Exception) and _is_same(match, ours, theirs)
        if not same:
            return f"{name} calls its dropouts elsewhere than memkit's {match.op}"
    return "" if same else f"{name} computes something else than memkit's {match.op}"


def _why_not_beside(module: nn.Module, match: Match, noted: list[Noted]) -> str:
    """What stock does beside its result and the twin does not, whatever both compute: it draws numbers, by which it may
    skip itself another time, or writes something down."""
    if len(noted) < 3:
        return ""
    before, stock, twin = noted
    name = type(module).__name__
    if not drew_alike(stock.generators, twin.generators):
        return f"{name} {_DRAWS} {match.op} does not"
    lost = differing(before.marks, stock.marks) - differing(stock.marks, twin.marks)
    changed = ", ".join(sorted(attribute for _, attribute in lost))
    return f"{name} changes {changed} in each call" if lost else ""


def _is_same(match: Match, ours: Values | None, theirs: Values) -> bool:
    return ours is not None and _agree(ours, theirs, len(match.probe), _tolerance(match))


def _is_dropout(module: nn.Module) -> bool:
    return "dropout" in type(module).__name__.lower() and not module._modules


def _lie_alike(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """In memory, by which what follows goes."""
    return ours is not None and theirs is not None and ours.stride() == theirs.stride()


def _tolerance(match: Match) -> float:
    tolerance = TOLERANCE.get(match.probe[0].dtype, 0.0)
    if match.further:  # float32 inside is what a norm without a weight may have, whatever it is given
        tolerance = max(tolerance, TOLERANCE[torch.float32])
    return tolerance


def _scaled(factor: float, input: Tensor) -> Tensor:
    return factor * input


Values = list[Tensor | None]


class Noted(NamedTuple):
    """What there is to see of a module's attributes, and of the random generators."""

    marks: dict[Any, Any]
    generators: Generators


INDEX = "idx", "index"
WHOLE = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
_NO_COPY = "cannot be copied to be verified in float32"
_DRAWS = "draws random numbers, as dropout does, which memkit's"
_NO_MODE = "a part whose mode cannot be set"


def _both(
    module: nn.Module,
    match: Match,
    training: bool,
    seed: int = 0,
    scales: bool = False,
    noted: list[Noted] | None = None,
    place: Place = HERE,
) -> tuple[Values | Exception, Values | None]:
    """Of stock, or what it raises, and of its twin, if that does not raise. ``scales``: with a factor of its own in the
    place of each dropout, which shows where and how often it is called; else they do nothing. ``noted``: gets what there is
    to see before, after stock and after its twin."""
    stock = type(module)
    twin = twin_of(match.kind, stock)
    changed: Any = module
    with untouched(module, deep=False), without_hooks(module), torch.set_grad_enabled(place.gradients):
        try:
            for at, part in enumerate(module.modules()):
                mode = training and not _is_dropout(part)
                if part.training != mode:
                    part.training = mode
                if scales and _is_dropout(part):
                    part.forward = partial(_scaled, 1.3 + 0.4 * at)
        except AttributeError:
            return AttributeError(_NO_MODE), None
        for parameter in module.parameters():  # frozen ones too: what they are used for is compared
            parameter.requires_grad_(place.parameters and parameter.is_floating_point())
        _note(noted, module)
        try:
            theirs = _values(module, match, seed, place)
        except Exception as error:
            return error, None
        _note(noted, module)
        changed._swap, changed.__class__ = match.choice, twin
        try:
            if isinstance(changed, Norm) and place is HERE:  # which may leave it to stock
                changed._memkit(match.probe[0])
                if changed._stays(match.probe[0]):
                    return theirs, None
            ours = _values(module, match, seed, place)
            changed.__class__ = stock
            _note(noted, module)
            return theirs, ours
        except Exception:  # names propose a twin, whose shapes may not even fit
            return theirs, None
        finally:
            changed.__class__ = stock


def _note(noted: list[Noted] | None, module: nn.Module) -> None:
    if noted is not None:
        noted.append(Noted(marks(module), generators()))


def _values(module: nn.Module, match: Match, seed: int, place: Place = HERE) -> Values:
    """What it gives, and the gradients of what it was given and of its parameters; None of those that it does not use, and
    elsewhere than here of none.

    A parameter of its own may start at a value that changes nothing, which only its gradient shows.
    """
    seed_all(seed)
    inputs = [tensor.clone().requires_grad_(place.inputs) for tensor in match.probe]
    with torch.autocast(inputs[0].device.type) if place.autocast else nullcontext():
        output = getattr(module, match.method)(*inputs)
    if place is not HERE:
        return [output.detach()]
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape).to(output.dtype)
    leaves = [*inputs, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    return [output.detach(), *torch.autograd.grad(output, leaves, weights, allow_unused=True)]


def _agree(ours: Values, theirs: Values, inputs: int, tolerance: float) -> bool:
    """Of the output and the inputs each by itself, of a parameter beside the largest gradient of one: a bias before a batch
    norm has none but for rounding."""
    norms = [0.0 if b is None else float(b.double().norm()) for b in theirs]
    least = 1e-2 * max(norms[1 + inputs :], default=0.0)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            if a is not b:
                return False
            continue
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        scale = max(norms[i], least if i > inputs else 0.0, 1e-30)
        if not float((a.double() - b.double()).norm()) <= tolerance * scale:
            return False
    return True


def _signature(module: nn.Module) -> Hashable:
    """What a forward may depend on: classes, numbers and words, shapes; not the values of parameters, nor an index: see
    `Verifier.watched`."""
    plain = tuple(
        (name, _frozen(held))
        for name, held in vars(module).items()
        if name not in INTERNAL and not name.endswith(INDEX)
    )
    shapes = tuple((name, p.shape, p.dtype) for name, p in module._parameters.items() if p is not None)
    parts = tuple((name, _signature(child)) for name, child in module._modules.items() if child is not None)
    return type(module), plain, shapes, parts


def _alike(module: nn.Module) -> Hashable:
    """Of modules of one class: the way that its code takes, whatever their sizes are."""
    way = tuple(
        (k, v) for k, v in vars(module).items() if k not in INTERNAL and isinstance(v, bool | str | None)
    )
    parts = tuple((name, type(child)) for name, child in module._modules.items())
    held = frozenset(vars(module)), tuple(module._buffers)
    return (
        type(module),
        way,
        held,
        parts,
        tuple(name for name, p in module._parameters.items() if p is not None),
    )


def _frozen(held: Any) -> Hashable:
    """What tells one value from another: of what is no number or word, that it is the same object."""
    if isinstance(held, tuple | list):
        return tuple(map(_frozen, held))
    if isinstance(held, dict):
        return tuple((_frozen(key), _frozen(value)) for key, value in held.items())
    return held if isinstance(held, int | float | str) else id(held)
