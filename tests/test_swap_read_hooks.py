"""Hooks whose source was read, as DeepSpeed puts them on every module: they look at nothing, and cost no memory."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from swap_cases import Block, D, Kept, assert_as_stock, batch, models, normed, step
from torch import nn

from memkit import swap
from memkit._hooks import READ, shows_result, was_read
from memkit.functional import norm_saves
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

CHANGED = "modified by an inplace operation"
ZERO3 = "deepspeed.runtime.zero.parameter_offload"


def of_deepspeed(function, name, module=ZERO3):
    function.__module__, function.__name__ = module, name
    return function


def traced(func):
    def wrapped_fn(*args, **kwargs):
        return func(*args, **kwargs)

    return of_deepspeed(wrapped_fn, "wrapped_fn", "deepspeed.utils.nvtx")


class Sharded:
    """What ZeRO 3 does to a model by its hooks: a module's own parameters have values during its call and its backward."""

    def __init__(self, model):
        self.model, self.calls = model, []
        self.whole = {parameter: parameter.data for parameter in model.parameters()}
        self.accumulators = {name: accumulator(p) for name, p in model.named_parameters()}  # of whole shapes
        for module in model.modules():
            self.hook(module)
            self.release(module)

    def hook(self, module):
        after, before = self.identity(module, self.gather), self.identity(module, self.release)
        pre = of_deepspeed(lambda m, args: self.gather(m, called=True), "_pre_forward_module_hook")
        post = of_deepspeed(lambda m, args, out: self.release(m), "_post_forward_module_hook")
        module.register_forward_pre_hook(pre)
        module.register_forward_hook(traced(post))
        module.register_forward_hook(
            of_deepspeed(lambda m, args, out: after.apply(out), "_pre_backward_module_hook")
        )
        module.register_forward_pre_hook(
            of_deepspeed(lambda m, args: tuple(map(before.apply, args)), "_post_backward_module_hook")
        )

    @staticmethod
    def identity(module, in_backward):
        class Identity(torch.autograd.Function):
            @staticmethod
            def forward(ctx, tensor):
                return tensor.detach()

            @staticmethod
            def backward(ctx, grad):
                in_backward(module)
                return grad

        return Identity

    def gather(self, module, called=False):
        if called:
            self.calls.append(module)
        for parameter in module.parameters(recurse=False):
            parameter.data = self.whole[parameter]

    def release(self, module):
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def step(self, x):
        """The result, and the gradients by their parameters' names."""
        out = self.model(x)
        assert not any(parameter.numel() for parameter in self.model.parameters())
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        grads = {}

        def taking(name):
            return lambda given: grads.__setitem__(name, given[0].clone()) or (None,)

        handles = [node.register_prehook(taking(name)) for name, node in self.accumulators.items()]
        (out * weights).sum().backward()
        for handle in handles:
            handle.remove()
        return [out.detach(), *(grads[name] for name in self.accumulators)]


def accumulator(parameter):
    return torch.autograd.graph.get_gradient_edge(parameter).node


def assert_sharded_as_stock(engine, stock, x):
    for ours, theirs in zip(engine.step(x), step(stock, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


def saved(model, x):
    return measure(lambda: model(x).sum()).saved


@models
def test_hooks_whose_source_was_read(build, by_sample):
    """The layer's result is kept, which the next layer keeps anyway, and not its input."""
    (model, hooked), x = build(by_sample), batch(64, D)
    stock, same = copy.deepcopy(model), copy.deepcopy(model)
    assert swap(model, sample=x if by_sample else None).changed
    ours, theirs = Sharded(model), Sharded(same)
    for _ in range(2):
        assert_sharded_as_stock(ours, stock, x)
    assert saved(model, x) <= saved(same, x) - 0.9 * x.nbytes
    theirs.calls.clear()
    ours.calls.clear()
    assert len(theirs.step(x)) == len(ours.step(x))
    assert [type(m) for m in theirs.calls] == [getattr(type(m), "_stock", type(m)) for m in ours.calls]
    assert not shows_result(hooked)
    hooked.register_forward_hook(lambda module, args, out: out.mul_(2))
    assert shows_result(hooked)
    handle = stock.get_submodule(name_of(model, hooked)).register_forward_hook(
        lambda m, args, out: out.mul_(2)
    )
    assert_sharded_as_stock(ours, stock, x)
    handle.remove()


def name_of(model, module):
    return next(name for name, each in model.named_modules() if each is module)


@models
def test_a_result_that_is_changed_behind_such_hooks(build, by_sample):
    """Autograd's version counter sees it through them."""
    (model, _), x = build(by_sample), batch()
    assert swap(model, sample=x if by_sample else None).changed
    engine = Sharded(model)
    last = model.second if isinstance(model, Block) else model[2]
    last.register_forward_pre_hook(lambda module, args: args[0].mul_(2), prepend=True)
    with pytest.raises(RuntimeError, match=CHANGED):
        engine.step(x)


class FeedForward(nn.Module):
    """As in ViT."""

    def __init__(self, act=nn.GELU, p=0.0):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.act = act()
        self.drop1, self.norm, self.drop2 = nn.Dropout(p), nn.Identity(), nn.Dropout(0.0)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class Gated(nn.Module):
    """As in Llama."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)
        self.act_fn, self.down_proj = nn.SiLU(), nn.Linear(3 * D, D, bias=False)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Packed(nn.Module):
    """As in Phi-3."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(D, 6 * D), nn.Linear(3 * D, D)
        self.activation_fn = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


NETWORKS = {"act": FeedForward, "relu": lambda: FeedForward(nn.ReLU), "gated": Gated, "packed": Packed}
FEWER = {"act": 3, "relu": 0, "gated": 6, "packed": 6}
"""Tensors of the input's size that stock keeps beside ours."""


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_beside_such_hooks(network):
    """The last layer's hooks run around one operator for it and what is before it, whose backward finds its weights."""
    model = nn.Sequential(nn.Linear(D, D), NETWORKS[network](), nn.Linear(D, D)).double()
    x, stock, same = batch(64, D), copy.deepcopy(model), copy.deepcopy(model)
    assert swap(model, sample=x).changed
    ours, _ = Sharded(model), Sharded(same)
    for _ in range(2):
        assert_sharded_as_stock(ours, stock, x)
    assert saved(same, x) - saved(model, x) >= FEWER[network] * x.nbytes - 4096
    assert all("forward" not in vars(module) for module in model.modules())
    last = [m for m in model[1].modules() if isinstance(m, nn.Linear)][-1]
    assert last in ours.calls
    # A hook that looks at what the layer is given sees what stock gives.
    kept = Kept()
    last.register_forward_pre_hook(lambda module, args: kept.add(args[0]))
    stock.get_submodule(name_of(model, last)).register_forward_pre_hook(lambda m, args: kept.add(args[0]))
    assert_sharded_as_stock(ours, stock, x)
    kept.assert_unchanged()
    first, second = kept.values
    torch.testing.assert_close(first, second)


def test_dropout_beside_such_hooks():
    model = nn.Sequential(nn.Linear(D, D), FeedForward(p=0.5), nn.Linear(D, D)).double()
    x = batch(64, D)
    assert swap(model, sample=x).changed
    plain_model = copy.deepcopy(model)
    engine = Sharded(model)
    torch.manual_seed(3)
    ours = engine.step(x)
    torch.manual_seed(3)
    out = plain_model(x)
    theirs = torch.autograd.grad(
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum(),
        list(plain_model.parameters()),
    )
    for a, b in zip(ours, [out.detach(), *theirs], strict=True):
        torch.testing.assert_close(a, b)


def test_threads_beside_such_hooks():
    model = nn.Sequential(FeedForward()).double()
    x = batch(4000, D)
    with torch.no_grad():
        expected = model(x)
        swap(model)
        for module in model.modules():
            module.register_forward_pre_hook(of_deepspeed(lambda *given: None, "_pre_forward_module_hook"))
        with ThreadPoolExecutor(4) as threads:
            for out in threads.map(model, [x] * 40):
                torch.testing.assert_close(out, expected)
    assert "forward" not in vars(model[0].fc2)


def test_a_forward_that_is_called_past_its_module():
    """What called it is not what called the module around it."""

    class Keeper(nn.Module):
        def __init__(self, act):
            super().__init__()
            self.act, self.lin = act, nn.Linear(D, D)

        def forward(self, x):
            h = self.lin(x)
            return self.act.forward(h) + h

    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(D, D), act, nn.Linear(D, D), nn.Sequential(Keeper(act))).double()
    assert swap(model).changed
    assert_as_stock(model, batch())


def test_an_error_in_such_a_call_leaves_the_layer_as_it_was():
    model = nn.Sequential(FeedForward()).double()
    swap(model, sample=batch())
    Sharded(model)
    down = model[0].fc2

    def broken(module, args):
        raise KeyError("broken")

    handle = down.register_forward_pre_hook(of_deepspeed(broken, "_pre_forward_module_hook"))
    with pytest.raises(KeyError, match="broken"):
        model(batch())
    assert "forward" not in vars(down)
    handle.remove()
    assert model(batch()).shape == (4, D)


def test_which_hooks_were_read():
    def hook(module, args, out):
        pass

    class Callable:
        def __call__(self, module, args, out):
            pass

    assert not was_read(hook)
    assert not was_read(Callable())
    for module, name in READ:
        assert was_read(of_deepspeed(lambda m, args, out: None, name, module))
        assert was_read(traced(of_deepspeed(lambda m, args, out: None, name, module)))
    assert not was_read(of_deepspeed(lambda m, args, out: None, "_post_forward_module_hook", "elsewhere"))
    assert not was_read(of_deepspeed(lambda m, args, out: None, "another", ZERO3))
    assert not was_read(traced(hook))
    assert not was_read(of_deepspeed(lambda m, args, out: None, "wrapped_fn", "deepspeed.utils.nvtx"))


def test_batch_norms_and_convolutions_beside_such_hooks():
    """Modules with parameters are called, so that those are there."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2), nn.ReLU()
    ).double()
    x, stock = torch.randn(2, 2, 8, 8, dtype=torch.float64), copy.deepcopy(model)
    swap(model)
    engine = Sharded(model)
    assert_sharded_as_stock(engine, stock, x)
    assert engine.calls == list(model.modules())


def test_norms_that_save_their_output_beside_such_hooks():
    (model, norm), x = normed(True), batch()
    swap(model, sample=x)
    results = []
    norm.register_forward_pre_hook(lambda module, args: None)
    assert norm_saves(model[1](model[0](x))) == "output"
    norm.register_forward_hook(lambda module, args, out: results.append(out))
    assert norm_saves(model[1](model[0](x))) == "input"
