"""swap and modules of a Linear with the activation or gate behind it, as diffusers and x-transformers write them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memkit import swap, unswap
from memkit.memory import measure

D, H = 16, 64
DOUBLE = {"dtype": torch.float64}


class GEGLU(nn.Module):
    def __init__(self, dim: int = D, hidden: int = H, **options: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, 2 * hidden, **options)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return value * F.gelu(gate)


class GateFirst(GEGLU):
    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.proj(x).chunk(2, dim=-1)
        return F.silu(gate) * value


GateFirst.__name__ = "SwiGLUGateFirst"


class SwiGLU(GEGLU):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * self.activation(gate)


class GELU(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(D, H, **options)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class ApproximateGELU(GELU):
    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        return x * torch.sigmoid(1.702 * x)


class LinearActivation(GELU):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.proj(x))


class HalvesSwiGLU(nn.Module):
    """Without a Linear."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


class Network(nn.Module):
    def __init__(self, first: nn.Module, p: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.net = nn.ModuleList([first, nn.Dropout(p), nn.Linear(H, D, **options), nn.Dropout(p)])

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for module in self.net:
            hidden_states = module(hidden_states)
        return hidden_states


GATED = [GEGLU, GateFirst, SwiGLU]
PLAIN = [GELU, ApproximateGELU, LinearActivation]


def network(kind: Any = GEGLU, p: float = 0.0, sequential: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    made = Network(kind(**options), p, **options)
    return nn.Sequential(*made.net) if sequential else made


def batch(*shape: int, **options: Any) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (3, 5)), D, **{**DOUBLE, **options})


def results(module: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])]


def same(ours: list[Tensor], theirs: list[Tensor], **how: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **how)


def rows(model: nn.Module, **options: Any) -> dict[str, str]:
    return {row.path: row.after for row in swap(model, **options).rows}


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", GATED + PLAIN)
def test_networks(kind: Any, given: bool, sequential: bool) -> None:
    model = network(kind, sequential=sequential, **DOUBLE)
    ours = copy.deepcopy(model)
    x = batch()
    found = rows(ours, sample=x if given else None)
    assert found.pop("") == "memkit"
    assert all("dropout" in type(ours.get_submodule(path)).__name__.lower() for path in found)
    same(results(ours, x), results(model, x), rtol=1e-8, atol=1e-10)
    ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
    unswap(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("kind", GATED + PLAIN)
def test_what_networks_keep(kind: Any, lean: Any, p: float) -> None:
    model = network(kind, p, dtype=torch.float32)
    x = batch(64, dtype=torch.float32)
    stock = measure(lambda: model(x)).saved
    report = swap(model, sample=x, lean=lean)
    ours = measure(lambda: model(x)).saved
    hidden = 64 * H * 4 * (2 if kind in GATED else 1)
    assert report.saved_after == ours
    assert ours <= hidden + 2 * x.nbytes + 2048  # the input, and of the last dropout its seed
    assert ours <= stock - hidden // (2 if kind in GATED else 1)


@pytest.mark.parametrize("kind", [*GATED, *PLAIN])
def test_alone(kind: Any) -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = kind(**DOUBLE), nn.Identity(), nn.Linear(H, D, **DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)))

    torch.manual_seed(0)
    model = Behind()
    ours = copy.deepcopy(model)
    x = batch()
    assert rows(ours, sample=x, lean="call")["first"] == "memkit"
    same(results(ours, x), results(model, x), rtol=1e-8, atol=1e-10)
    stock, kept = (measure(lambda m=m: m(x)).saved for m in (model, ours))  # type: ignore[misc]
    assert kept <= stock - 15 * H * 8


def test_halves_of_what_is_given() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 2 * H, **DOUBLE), HalvesSwiGLU(), nn.Linear(H, D, **DOUBLE))
    ours = copy.deepcopy(model)
    x = batch()
    assert rows(ours, sample=x, lean="call") == {"1": "memkit"}
    same(results(ours, x), results(model, x), rtol=1e-8, atol=1e-10)
    stock, kept = (measure(lambda m=m: m(x)).saved for m in (model, ours))  # type: ignore[misc]
    assert kept == stock - 2 * 15 * H * 8
    with pytest.raises(RuntimeError) as theirs:
        model[1](torch.ones(3, 5))
    with pytest.raises((RuntimeError, ValueError)):
        ours[1](torch.ones(3, 5))
    assert theirs.value


class Limited(GEGLU):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate.clamp(max=10.0))


class Shifted(GEGLU):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return (value + 1) * F.gelu(gate)


class OtherDimension(GEGLU):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=1)
        return value * F.gelu(gate)


class WithParameter(GEGLU):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scale = nn.Parameter(torch.ones(H, **options))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


@pytest.mark.parametrize("kind", [Limited, Shifted, OtherDimension, WithParameter])
def test_others_stay(kind: Any) -> None:
    kind = type(kind.__name__ + "GLU", (kind,), {})
    for model in (kind(**DOUBLE), network(kind, **DOUBLE)):
        ours = copy.deepcopy(model)
        found = rows(ours)
        assert found.get("", "unchanged") == found.get("net.0", "unchanged") == "unchanged"
        x = 30 * batch(2, 4)
        if kind.__mro__[1] is not OtherDimension:
            same(results(ours, x), results(model, x))


def test_without_the_gate_it_stays_stock() -> None:
    assert "" not in rows(network(), ops=["gelu", "dropout"])
    assert "" not in rows(network(GELU), ops=["gated", "dropout"])


def test_what_is_changed_later() -> None:
    for sequential in (False, True):
        model = network(sequential=sequential, **DOUBLE)
        ours = copy.deepcopy(model)
        swap(ours)
        x = batch()
        for m in (model, ours):
            parts = m if sequential else m.net
            parts[0].proj = nn.Sequential(parts[0].proj, nn.Tanh())
            parts.append(nn.LayerNorm(D, **DOUBLE))
        same(results(ours, x), results(model, x), rtol=1e-8, atol=1e-10)
        for m in (model, ours):
            parts = m if sequential else m.net
            parts[2] = nn.Sequential(parts[2], nn.Tanh())
        same(results(ours, x), results(model, x), rtol=1e-8, atol=1e-10)
        other = nn.Linear(D, H, **DOUBLE)
        for m in (model, ours):
            parts = m if sequential else m.net
            parts[0] = other
        same(results(ours, x), results(model, x), rtol=1e-8, atol=1e-10)
    model = network(sequential=True, **DOUBLE)
    ours = copy.deepcopy(model)
    swap(ours)
    same([ours[:2](x), ours[1:](ours[0](x))], [model[:2](x), model(x)])


@pytest.mark.parametrize("at", ["net.0", "net.0.proj", "net.1", "net.2", "net.3"])
def test_hooks_see_what_they_see_in_stock(at: str) -> None:
    model = network(**DOUBLE)
    ours = copy.deepcopy(model)
    swap(ours)
    seen: dict[int, list[Tensor]] = {}
    for m in (model, ours):
        found = seen.setdefault(id(m), [])
        m.get_submodule(at).register_forward_hook(
            lambda _, given, out, found=found: found.extend((*given, out))
        )
    x = batch()
    same(results(ours, x), results(model, x), rtol=1e-8, atol=1e-10)
    same(seen[id(ours)], seen[id(model)])


def test_copies_compiled_and_beside_autocast() -> None:
    model = network(dtype=torch.float32)
    ours = copy.deepcopy(model)
    swap(ours)
    x = batch(dtype=torch.float32)
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        same(results(made, x), results(model, x))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    same(results(compiled, x), results(model, x))
    torch.testing.assert_close(torch.export.export(ours, (x,)).module()(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        same(results(ours, x), results(model, x), rtol=0.05, atol=0.05)
    ours.bfloat16(), model.bfloat16()
    same(results(ours, x.bfloat16()), results(model, x.bfloat16()), rtol=0.05, atol=0.05)
    torch.testing.assert_close(ours(x.bfloat16(), 3, scale=None), model(x.bfloat16()), rtol=0.05, atol=0.05)


def test_by_itself_first_and_then_in_its_network() -> None:
    model = network(**DOUBLE)
    ours = copy.deepcopy(model)
    swap(ours.net[0])
    assert rows(ours)[""] == "memkit"
    x = batch()
    same(results(pickle.loads(pickle.dumps(ours)), x), results(model, x), rtol=1e-8, atol=1e-10)
    unswap(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in model.modules()]


def test_dropout_is_drawn_once_for_a_checkpoint() -> None:
    for kind in (GEGLU, GELU):
        model = network(kind, 0.4, **DOUBLE)
        swap(model)
        x = batch().requires_grad_()

        def gradients(call: Any, x: Tensor = x, model: Any = model) -> list[Tensor]:
            torch.manual_seed(5)
            y = call(x)
            return [y, *torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])]

        theirs = gradients(model)
        again = gradients(
            lambda x, model=model: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        )
        same(again, theirs)
        assert theirs[0].eq(0).any()


class Frozen(dict):  # type: ignore[type-arg]
    """As a library holds its configuration."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")

    clear = __setitem__ = __delitem__ = update


def test_a_configuration_that_nobody_may_change() -> None:
    model = network(**DOUBLE)
    model.config, model.log = Frozen(a=1, b=[2]), [1]
    model.register_forward_hook(lambda m, *_: m.log.append(2))
    swap(model, sample=batch())
    assert model.config == {"a": 1, "b": [2]}
    assert model.log == [1]


class ResnetBlock(nn.Module):
    """One activation behind two norms, and of what is no norm's."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, channels, **DOUBLE), nn.GroupNorm(2, channels, **DOUBLE)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, **DOUBLE) for _ in range(2))
        self.time = nn.Linear(D, channels, **DOUBLE)
        self.nonlinearity = nn.SiLU()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(self.nonlinearity(self.norm1(x)))
        h = h + self.time(self.nonlinearity(time))[:, :, None, None]
        return x + self.conv2(self.nonlinearity(self.norm2(h)))


def test_an_activation_behind_norms_and_elsewhere() -> None:
    torch.manual_seed(0)
    model = ResnetBlock()
    ours = copy.deepcopy(model)
    given = torch.randn(2, 8, 12, 12, **DOUBLE), torch.randn(2, D, **DOUBLE)
    assert rows(ours, sample=given, lean="call")["nonlinearity"] == "in lean()"
    stock, kept = (measure(lambda m=m: m(*given)).saved for m in (model, ours))  # type: ignore[misc]
    image = given[0].nbytes
    assert kept < 2 * image + 2048 < 5 * image <= stock  # each norm's input
    outs = [[y := m(*given), *torch.autograd.grad(y.sin().sum(), [*m.parameters()])] for m in (model, ours)]
    same(outs[1], outs[0], rtol=1e-8, atol=1e-10)
