"""Hooks that come after swap: what they are given is what stock gives, whatever they do with it; those that are known to do
nothing with it cost no memory."""

import copy

import pytest
import torch
from swap_cases import Block, D, assert_as_stock, batch, mlp, plain, step
from torch import nn

from memkit import swap
from memkit._hooks import READ, shows_result, was_read
from memkit.functional import norm_saves
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

CHANGED = "modified by an inplace operation"
ZERO3 = "deepspeed.runtime.zero.parameter_offload"


def normed(by_sample):
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)).double()
    return model, model[1]


def in_sequence(by_sample):
    model = mlp(nn.GELU())
    return model, model[1]


def in_block(by_sample):
    model = Block(plain)
    return model, model.act


MODELS = [(normed, True), (in_sequence, False), (in_sequence, True), (in_block, True)]
models = pytest.mark.parametrize(("build", "by_sample"), MODELS)


class Kept:
    """What hooks kept, and what it was at the time."""

    def __init__(self):
        self.tensors, self.values = [], []

    def add(self, tensor):
        self.tensors.append(tensor)
        self.values.append(tensor.detach().clone())

    def assert_unchanged(self):
        assert self.tensors
        for tensor, value in zip(self.tensors, self.values, strict=True):
            assert tensor.detach().equal(value)


def keep_input(kept):
    return lambda module, args, out: kept.add(args[0])


def keep_input_and_replace(kept):
    def hook(module, args, out):
        kept.add(args[0])
        return out * args[0]

    return hook


def keep_output(kept):
    return lambda module, args, out: kept.add(out)


def change_output(kept):
    def hook(module, args, out):
        kept.values.append(out.detach().clone())
        kept.tensors.append(out.detach().clone())
        out.mul_(2)

    return hook


def change_output_past_its_version(kept):
    def hook(module, args, out):
        kept.add(args[0])
        out.data.mul_(2)

    return hook


def replace_output(kept):
    def hook(module, args, out):
        kept.add(out)
        return out * 2

    return hook


def change_a_view(kept):
    def hook(module, args, out):
        kept.add(args[0])
        out.view(-1)[::2].zero_()

    return hook


@pytest.mark.parametrize(
    "make",
    [
        keep_input,
        keep_input_and_replace,
        keep_output,
        change_output,
        change_output_past_its_version,
        replace_output,
        change_a_view,
    ],
)
@models
def test_forward_hooks(build, by_sample, make):
    (model, hooked), x, kept = build(by_sample), batch(), Kept()
    assert swap(model, sample=x if by_sample else None).changed
    hooked.register_forward_hook(make(kept))
    assert_as_stock(model, x)
    kept.assert_unchanged()
    first, second = kept.values  # the swapped model's call, then stock's
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("replacement", [torch.clone, lambda x: x + 0, lambda x: x.view_as(x), lambda x: x])
@pytest.mark.parametrize("keeps", [True, False])
@models
def test_pre_hooks_that_put_something_in_the_inputs_place(build, by_sample, replacement, keeps):
    (model, hooked), x, kept = build(by_sample), batch(), Kept()
    assert swap(model, sample=x if by_sample else None).changed

    def hook(module, args):
        given = replacement(args[0])
        kept.add(given if keeps else args[0])
        return (given,)

    handle = hooked.register_forward_pre_hook(hook)
    assert_as_stock(model, x)
    kept.assert_unchanged()
    handle.remove()
    kept = Kept()
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: hook(module, args) if module is hooked else None
    )
    try:
        assert_as_stock(model, x)
    finally:
        handle.remove()
    kept.assert_unchanged()


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@models
def test_backward_hooks(build, by_sample, register):
    (model, hooked), x, kept = build(by_sample), batch(), Kept()
    assert swap(model, sample=x if by_sample else None).changed
    getattr(hooked, register)(lambda module, *grads: [kept.add(g) for g in grads[-1] if g is not None] and None)
    assert_as_stock(model, x)
    kept.assert_unchanged()
    first, second = kept.values
    torch.testing.assert_close(first, second)


# -- hooks as DeepSpeed puts them on every module ---------------------------------------------------------------------------


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def of_deepspeed(function, name, module=ZERO3):
    function.__module__, function.__name__ = module, name
    return function


def traced(func):
    def wrapped_fn(*args, **kwargs):
        return func(*args, **kwargs)

    return of_deepspeed(wrapped_fn, "wrapped_fn", "deepspeed.utils.nvtx")


def hook_all(model, seen):
    """Both forward hooks and both pre-hooks, on every module."""
    for module in model.modules():
        pre = of_deepspeed(lambda m, args: seen.append(type(m)), "_pre_forward_module_hook")
        post = of_deepspeed(lambda m, args, out: None, "_post_forward_module_hook")
        module.register_forward_pre_hook(pre)
        module.register_forward_hook(traced(post))
        wrap = of_deepspeed(lambda m, args, out: Identity.apply(out), "_pre_backward_module_hook")
        module.register_forward_hook(wrap)
        unwrap = of_deepspeed(lambda m, args: (Identity.apply(args[0]),), "_post_backward_module_hook")
        module.register_forward_pre_hook(unwrap)
    return model


@models
def test_hooks_whose_source_was_read(build, by_sample):
    """The layer's result is kept, which the next layer keeps anyway, and not its input."""
    (model, hooked), (stock, _), x, seen = build(by_sample), build(by_sample), batch(64, D), []
    stock.load_state_dict(model.state_dict())
    assert swap(model, sample=x if by_sample else None).changed
    hook_all(model, seen)
    hook_all(stock, seen)
    assert not shows_result(hooked)
    assert_as_stock(model, x)
    ours, theirs = (measure(lambda m=m: m(x).sum()).saved for m in (model, stock))
    assert ours <= theirs - 0.9 * x.nbytes
    handle = hooked.register_forward_hook(lambda module, args, out: None)
    assert shows_result(hooked)
    assert_as_stock(model, x)
    assert measure(lambda: model(x).sum()).saved >= theirs - 0.1 * x.nbytes
    handle.remove()
    hooked.register_forward_hook(lambda module, args, out: out.mul_(2))
    assert_as_stock(model, x)


@models
def test_a_result_that_is_changed_behind_such_hooks(build, by_sample):
    """Autograd's version counter sees it through them."""
    (model, hooked), x = build(by_sample), batch()
    assert swap(model, sample=x if by_sample else None).changed
    hook_all(model, [])
    last = list(model.children())[1] if isinstance(model, Block) else model[2]
    last.register_forward_pre_hook(lambda module, args: args[0].mul_(2), prepend=True)
    with pytest.raises(RuntimeError, match=CHANGED):
        step(model, x)


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
    """What would take a hooked module's place runs as stock: its parameters may be there during its own call alone."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2), nn.ReLU()
    ).double()
    x, stock, seen = torch.randn(2, 2, 8, 8, dtype=torch.float64), copy.deepcopy(model), []
    swap(model)
    hook_all(model, seen)
    for ours, theirs in zip(step(model, x), step(stock, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(seen) == 7  # each module, the Sequential too


def test_norms_that_save_their_output_beside_such_hooks():
    (model, norm), x = normed(True), batch()
    swap(model, sample=x)
    results = []
    norm.register_forward_pre_hook(lambda module, args: None)
    assert norm_saves(model[1](model[0](x))) == "output"
    norm.register_forward_hook(lambda module, args, out: results.append(out))
    assert norm_saves(model[1](model[0](x))) == "input"
