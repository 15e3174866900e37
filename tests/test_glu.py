"""Gated units: value, gradients, packings, memory; and `lean()`, which drops their products and other cheap results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit.memory import measure

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
PACKINGS = ["split", "gate_up", "up_gate", "interleaved"]


def operands(x: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """Gate and up of what packs them, by stock operators."""
    if packing == "interleaved":
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return (second, first) if packing == "up_gate" else (first, second)


def ours(x: Tensor, act: str, packing: str) -> Tensor:
    if packing == "split":
        return M.gated(*(half.contiguous() for half in x.chunk(2, -1)), act)
    return M.gated(x, None, act, packing=packing)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradients(act: str, packing: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    for shape in ((3, 5, 22), (7, 2), (2, 4098), (1, 0), (0, 8)):
        x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
        y = ours(x, act, packing)
        grad = torch.randn_like(y)
        (slope,) = torch.autograd.grad(y, x, grad)

        def composed(x: Tensor) -> Tensor:
            gate, up = operands(x, packing)
            return ACTS[act](gate) * up

        def both(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
            x = x.detach().requires_grad_()
            y = composed(x)
            return y.detach(), torch.autograd.grad(y, x, grad)[0]

        exact, stock = both(x.double(), grad.double()), both(x, grad)
        assert y.shape == exact[0].shape
        for got, truth, usual in zip((y, slope), exact, stock, strict=True):
            if truth.numel():
                # In small samples stock's error may be 0; in float64 stock is the truth itself.
                floor = torch.finfo(dtype).eps * truth.abs().max() * (4 if dtype == torch.float64 else 1)
                assert (got - truth).abs().max() <= 2 * (usual - truth).abs().max() + floor


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("act", ACTS)
def test_gradcheck(act: str, packing: str) -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ours(x, act, packing), x)
    assert torch.autograd.gradgradcheck(lambda x: ours(x, act, packing), x)


def test_saved_bytes() -> None:
    """Of SwiGLU -> Linear in bfloat16: 8 bytes an element in stock, 6 without act(gate), 4 without the product."""
    width, rows = 64, 256
    h = torch.randn(rows, 32, dtype=torch.bfloat16)
    gate, up, down = (
        nn.Linear(a, b, dtype=torch.bfloat16) for a, b in ((32, width), (32, width), (width, 32))
    )
    n = rows * width

    def stock() -> Tensor:
        return down(F.silu(gate(h)) * up(h))

    def fused() -> Tensor:
        return down(M.swiglu(gate(h), up(h)))

    def lean() -> Tensor:
        with memkit.lean():
            return fused()

    assert [measure(f).saved / n for f in (stock, fused, lean)] == [8.0, 6.0, 4.0]
    slopes = [torch.autograd.grad(f().square().sum(), gate.weight)[0] for f in (fused, lean)]
    assert torch.equal(*slopes)


def test_gradients_take_the_memory_of_gate_and_up() -> None:
    n = 1 << 18
    leaves = [torch.randn(n, requires_grad=True) for _ in range(2)]
    seen: list[int] = []

    def step(retain: bool, keep: bool) -> None:
        gate, up = (leaf * 2 for leaf in leaves)
        places = [gate.data_ptr(), up.data_ptr()]
        gate.register_hook(
            lambda g: seen.append(places.index(g.data_ptr()) if g.data_ptr() in places else -1)
        )
        before = gate.detach().clone()
        y = M.swiglu(gate, up).sum()
        kept = gate if keep else None
        del gate, up
        y.backward(retain_graph=retain)
        if kept is not None:
            assert torch.equal(kept, before)
        if retain:
            y.backward()
        else:
            with pytest.raises(RuntimeError, match="second time"):
                y.backward()

    for retain, keep in ((False, False), (False, True), (True, False), (True, True)):
        step(retain, keep)
    assert seen[0] == 0  # in gate's memory
    assert seen[1] == -1  # gate is still looked at
    wanted = 4 * torch.autograd.grad(M.swiglu(*((leaf * 2) for leaf in leaves)).sum(), leaves[0])[0]
    torch.testing.assert_close(leaves[0].grad, wanted / 4 * 6)  # six backward passes in all


def test_a_use_beside_the_product_forbids_it() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    for other in (lambda h: h.sin(), lambda h: h * h, lambda h: h.exp()):
        gate, up = x * 2, x * 3
        (slope,) = torch.autograd.grad((M.swiglu(gate, up) + other(gate) + other(up)).sum(), x)
        gate, up = x * 2, x * 3
        (wanted,) = torch.autograd.grad((F.silu(gate) * up + other(gate) + other(up)).sum(), x)
        torch.testing.assert_close(slope, wanted)


@pytest.mark.parametrize("layout", ["transposed", "strided", "channels_last", "expanded", "mixed"])
def test_layouts(layout: str) -> None:
    base = torch.randn(4, 6, 8, 10, requires_grad=True)
    gate, up = base * 1, base * 2
    if layout == "transposed":
        gate, up = gate.transpose(1, 3), up.transpose(1, 3)
    elif layout == "strided":
        gate, up = gate[:, ::2], up[:, 1::2]
    elif layout == "channels_last":
        gate, up = (t.contiguous(memory_format=torch.channels_last) for t in (gate, up))
    elif layout == "expanded":
        gate, up = gate[:1].expand(4, 6, 8, 10), up
    else:
        up = up.transpose(0, 1).contiguous().transpose(0, 1)
    y = M.swiglu(gate, up)
    wanted = F.silu(gate) * up
    torch.testing.assert_close(y, wanted)
    for grad in (torch.randn(y.shape), torch.randn(y.shape[::-1]).permute(3, 2, 1, 0)):
        slopes = [torch.autograd.grad(each, base, grad, retain_graph=True)[0] for each in (y, wanted)]
        torch.testing.assert_close(*slopes)
    packed = torch.randn(4, 6, 20)[:, ::2]
    torch.testing.assert_close(M.swiglu(packed), F.silu(packed[..., :10]) * packed[..., 10:])


def test_stock_glu_is_a_packing() -> None:
    x = torch.randn(5, 12)
    torch.testing.assert_close(M.gated(x, act="sigmoid", packing="up_gate"), F.glu(x))


def test_transforms_and_compile() -> None:
    x = torch.randn(6, 8)
    for packing in ("gate_up", "interleaved"):

        def f(x: Tensor, packing: str = packing) -> Tensor:
            return M.swiglu(x, packing=packing)

        gate, up = operands(x, packing)
        torch.testing.assert_close(torch.vmap(f)(x), F.silu(gate) * up)
        _, tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(tangent, torch.func.jacfwd(f)(x).sum((-1, -2)))
        leaf = x.clone().requires_grad_()
        torch._dynamo.reset()  # up to 2.12 it takes one f for another, whose defaults are what differs
        compiled = torch.compile(lambda x, f=f: f(x) * 2, fullgraph=True, backend="aot_eager")
        (slope,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
        (wanted,) = torch.autograd.grad((f(leaf) * 2).sum(), leaf)
        torch.testing.assert_close(slope, wanted)


def test_opcheck() -> None:
    ops = torch.ops.memkit
    for grad in (False, True):
        gate, up = (torch.randn(4, 6, requires_grad=grad) for _ in range(2))
        torch.library.opcheck(ops._glu.default, (gate, up, "silu", "gate_up"))
        torch.library.opcheck(ops._glu.default, (gate, None, "gelu", "interleaved"))
    torch.library.opcheck(
        ops._glu_backward.default, (torch.randn(4, 6), gate.detach(), up.detach(), "relu", "gate_up")
    )
    torch.library.opcheck(
        ops._glu_backward.default, (torch.randn(4, 3), gate.detach(), None, "relu", "up_gate")
    )


def test_special_values() -> None:
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38]
    gate = torch.tensor([a for a in values for _ in values])
    up = torch.tensor(values * len(values))
    for act, function in ACTS.items():
        # Stock's vectorised gelu makes NaN of infinity.
        wanted = function(gate.double()).float() if act == "gelu" else function(gate)
        torch.testing.assert_close(M.gated(gate, up, act), wanted * up, equal_nan=True)


def test_bad_input() -> None:
    x = torch.randn(4, 6)
    for call, error, message in (
        (lambda: M.swiglu(x, torch.randn(4, 5)), ValueError, "swiglu: expected gate and up of one shape"),
        (lambda: M.swiglu(x, x.double()), TypeError, "swiglu: expected gate and up of one dtype"),
        (
            lambda: M.swiglu(torch.randn(4, 5)),
            ValueError,
            "swiglu: expected gate and up packed in an even last dimension",
        ),
        (lambda: M.swiglu(torch.tensor(1.0)), ValueError, "swiglu: expected gate and up packed"),
        (lambda: M.swiglu(x, packing="halves"), ValueError, "gated: expected packing"),
        (lambda: M.gated(x, act="tanh"), ValueError, "gated: expected act"),
        (lambda: M.geglu(x, approximate="erf"), ValueError, "geglu: expected approximate"),
        (lambda: M.swiglu(x.long()), TypeError, "swiglu: expected float32, float64, float16 or bfloat16"),
        (lambda: M.swiglu(x.to_sparse()), RuntimeError, "swiglu: expected a dense"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_modules() -> None:
    x, up = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.equal(memkit.nn.SwiGLU()(x, up), M.swiglu(x, up))
    assert torch.equal(
        memkit.nn.GeGLU("tanh", packing="interleaved")(x), M.geglu(x, None, "tanh", packing="interleaved")
    )
    assert torch.equal(memkit.nn.ReGLU()(x), M.reglu(x))
    assert repr(memkit.nn.GeGLU("tanh", packing="up_gate")) == "GeGLU(approximate='tanh', packing='up_gate')"


# lean()


class Block(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(16, 64), nn.Linear(64, 16), act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("act", ["gelu", "silu", "mish", "hardswish", "dropout", "biased"])
@pytest.mark.parametrize("dims", [2, 3])
def test_lean_is_exact_and_keeps_one_tensor(act: str, dims: int) -> None:
    special = {
        "dropout": lambda h: M.act_dropout(h, "gelu", 0.3),
        "biased": lambda h: M.bias_act(h, torch.ones(64), "gelu"),
    }
    function = special.get(act) or getattr(M, act)
    model = nn.Sequential(*(Block(function) for _ in range(3)))
    x = torch.randn(*(5,) * (dims - 1), 16)

    def plain() -> Tensor:
        torch.manual_seed(1)
        return model(x)

    def lean() -> Tensor:
        torch.manual_seed(1)
        with memkit.lean():
            return model(x)

    assert torch.equal(plain(), lean())
    for got, want in zip(gradients(model, lean().sum()), gradients(model, plain().sum()), strict=True):
        assert torch.equal(got, want)
    hidden = 3 * x.numel() // 16 * 64 * 4
    assert measure(plain).saved - measure(lean).saved == hidden


def test_lean_with_other_hooks() -> None:
    model = nn.Sequential(*(Block(M.gelu) for _ in range(2)))
    x = torch.randn(4, 16, requires_grad=True)
    wanted = gradients(model, model(x).sum())

    def once(run: Callable[[], Tensor]) -> None:
        for got, want in zip(gradients(model, run().sum()), wanted, strict=True):
            assert torch.equal(got, want)

    def nested() -> Tensor:
        with memkit.lean(), memkit.lean():
            return model(x)

    def offloaded() -> Tensor:
        with save_on_cpu(), memkit.lean():
            return model(x)

    def inside() -> Tensor:
        with memkit.lean(), save_on_cpu():
            return model(x)

    def checkpointed(reentrant: bool) -> Tensor:
        with memkit.lean():
            return model[1](checkpoint(model[0], x, use_reentrant=reentrant))

    def in_checkpoint(reentrant: bool) -> Tensor:
        def body(x: Tensor) -> Tensor:
            with memkit.lean():
                return model(x)

        return checkpoint(body, x, use_reentrant=reentrant)

    for run in (nested, offloaded, inside):
        once(run)
    for reentrant in (False, True):
        once(lambda reentrant=reentrant: checkpointed(reentrant))
        once(lambda reentrant=reentrant: in_checkpoint(reentrant))
    context = memkit.lean()
    with context, context:  # may be entered again
        once(lambda: model(x))


def test_lean_retained_graph_and_second_derivative() -> None:
    model = Block(M.gelu)
    x = torch.randn(4, 16, requires_grad=True)
    with memkit.lean():
        loss = model(x).sum()
    first = gradients_of(loss, model, retain_graph=True)
    again = gradients_of(loss, model)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    with memkit.lean():
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    for got, want in zip(
        torch.autograd.grad(slope.square().sum(), model.up.weight),
        torch.autograd.grad(wanted.square().sum(), model.up.weight),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def gradients_of(loss: Tensor, model: nn.Module, **options: bool) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), **options))


def test_lean_and_in_place() -> None:
    """What is changed after it was made is no longer what a recipe makes; a changed input raises."""
    up, down = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(3, 8)

    def changed(lean: bool) -> Tensor:
        h = M.gelu(up(x))
        with torch.no_grad():
            h.add_(1)
        if not lean:
            return down(h)
        with memkit.lean():
            return down(h)

    assert torch.equal(*(torch.autograd.grad(changed(lean).sum(), down.weight)[0] for lean in (False, True)))
    with memkit.lean():
        h = up(x)
        y = down(M.gelu(h))
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_lean_leaves_the_rest_alone() -> None:
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    with memkit.lean():
        y = (M.relu(x * 2).exp() * M.gelu(x)[10:20].sum()).sum()
    z = (F.relu(x * 2).exp() * F.gelu(x)[10:20].sum()).sum()
    torch.testing.assert_close(*(torch.autograd.grad(each, x)[0] for each in (y, z)))

    def f(x: Tensor) -> Tensor:
        with memkit.lean():
            return M.gelu(x) * M.silu(x)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*(torch.autograd.grad(g(x).sum(), x)[0] for g in (f, compiled)))


def test_lean_lets_go_of_the_graph() -> None:
    """Dropped without backward, nothing stays."""
    model = Block(M.gelu)
    x = torch.randn(64, 16)

    def forward() -> None:
        with memkit.lean():
            model(x)

    forward()
    assert measure(forward).live == 0
