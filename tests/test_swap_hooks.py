"""Hooks that come after swap: what they are given is what stock gives, whatever they do with it."""

import pytest
import torch
from swap_cases import Kept, assert_as_stock, batch, models
from torch import nn

from memkit import swap

pytestmark = pytest.mark.usefixtures("repeatable")


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
    getattr(hooked, register)(
        lambda module, *grads: [kept.add(g) for g in grads[-1] if g is not None] and None
    )
    assert_as_stock(model, x)
    kept.assert_unchanged()
    first, second = kept.values
    torch.testing.assert_close(first, second)
