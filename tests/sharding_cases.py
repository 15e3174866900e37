"""Every operator on DTensors, in which placements: shared by test_sharding.py and distributed/sharded.py."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

import memkit.functional as F
from memkit._older import OLD


def on_ranks(function, ranks=3):
    """Runs it in as many threads, each a rank; an error in one ends all and is raised here."""
    if OLD:
        pytest.skip("stock's DTensor crashes in threads up to 2.12; distributed/sharded.py has processes")
    errors = []

    def rank(_):
        try:
            function()
        except BaseException as error:
            errors.append(error)
            raise

    try:
        spawn_threads_and_init_comms(rank, world_size=ranks)(None)
    except RuntimeError:
        raise errors[0] from None


def placement(text):
    return Shard(int(text[1:])) if text[0] == "S" else {"R": Replicate(), "P": Partial()}[text]


def placements(text):
    """ "S0" on a mesh of one dimension, "S0,R" on one of two."""
    return tuple(placement(each) for each in text.split(","))


def numbers(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def distributed(x, mesh, text):
    """A leaf. "plain": no DTensor. Where it is Partial each rank has another share of it."""
    if text == "plain":
        return x
    wanted = placements(text)
    if Partial() in wanted:
        (_,) = wanted
        n = dist.get_world_size()
        share = 2 * (dist.get_rank() + 1) / (n * (n + 1))
        made = DTensor.from_local(x.detach() * share, mesh, wanted)
    else:
        made = distribute_tensor(x.detach().clone(), mesh, wanted)
    return made.detach().requires_grad_(x.requires_grad)


def flat(found):
    found = found if isinstance(found, (tuple, list)) else (found,)
    return [each for each in found if each is not None]


def objective(outs):
    """With another slope for each element."""
    total = 0.0
    for i, out in enumerate(outs):
        whole = out.full_tensor() if isinstance(out, DTensor) else out
        slopes = torch.linspace(-1, 1 + i, max(1, whole.numel()), dtype=whole.dtype)
        total = total + (whole * slopes[: whole.numel()].view(whole.shape)).sum()
    return total


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def check(function, tensors, row, mesh, rtol=1e-9, atol=1e-9, compiled=False):
    """A row: placements of the arguments, -> of the results, | of the gradients; ! where the forward communicates.

    A compiled function is not asked what it communicates: compilers want no modes around them.
    """
    row, communicates = row.rstrip(" !"), "!" in row
    given, _, rest = row.partition("->")
    results, _, grads = rest.partition("|")
    plain = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    expected = flat(function(*plain))
    sharded = [distributed(x, mesh, text) for x, text in zip(tensors, given.split(), strict=True)]
    comms = CommDebugMode()
    with contextlib.nullcontext() if compiled else comms:
        found = flat(function(*sharded))
    assert compiled or (comms.get_total_counts() > 0) == communicates, (row, comms.get_comm_counts())
    assert [tuple(each.placements) for each in found] == [placements(text) for text in results.split()], row
    objective(expected).backward()
    objective(found).backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(full(ours), theirs, rtol=rtol, atol=atol, msg=lambda m: f"{row}: {m}")
    for ours, theirs in zip(sharded, plain, strict=True):
        assert (ours.grad is None) == (theirs.grad is None), row
        if theirs.grad is not None:
            torch.testing.assert_close(
                full(ours.grad), theirs.grad, rtol=rtol, atol=atol, msg=lambda m: f"gradient, {row}: {m}"
            )
    for text, x in zip(grads.split(), (x for x in sharded if x.requires_grad), strict=bool(grads)):
        wanted = [placements(text)]
        if OLD:  # stock's redistribution, and what it compiles, give all of a gradient to every rank
            wanted.append((Replicate(),) * mesh.ndim)
        assert tuple(x.grad.placements) in wanted, (row, x.grad.placements)


X = (5, 4, 6)
Q, K = (5, 4, 7, 6), (5, 2, 7, 6)
ROWS = [
    "S0 {0} -> S0 | S0 {1}",
    "S1 {0} -> S1 | S1 {1}",
    "R {0} -> R | R {2}",
    "P {0} -> R !",
    "S2 {0} -> R !",
]


def rows(weights):
    """Of an operator that needs the last dimension whole, beside so many weights."""
    kept = [" ".join(text * weights) for text in (["R"], ["P"], ["R"])]
    return [row.format(*kept) for row in ROWS]


def rotary(q, k, cos, sin, ids=None, **options):
    return F.apply_rotary(q, k, cos, sin, ids, **options)


def target(*shape, classes=6, ignored=True):
    found = torch.arange(torch.Size(shape).numel()).view(shape) * 5 % classes
    if ignored and found.numel() > 2:
        found.view(-1)[2] = -100
    return found


TABLE = torch.linspace(0, 3, 9 * 6, dtype=torch.float64).view(9, 6)
IDS = torch.tensor([[3, 1, 4, 1, 5, 8, 2]]) - torch.arange(5)[:, None].clamp(max=1)
MASK = torch.arange(4 * 6).view(4, 6) % 5 > 0

CASES = {
    "gelu": (F.gelu, [X], ["S0 -> S0 | S0", "S1 -> S1", "S2 -> S2 | S2", "R -> R | R", "P -> R !"]),
    "gelu from the output": (lambda x: F.gelu(x, save="output"), [X], ["S0 -> S0 | S0", "S2 -> S2 | S2"]),
    "leaky_relu in place": (
        lambda x: F.leaky_relu(x * 1, 0.2, inplace=True),
        [X],
        ["S0 -> S0 | S0", "S2 -> S2 | S2", "R -> R | R"],
    ),
    "bias_act": (
        F.bias_act,
        [X, (6,)],
        ["S0 R -> S0 | S0 P", "S2 R -> S2 | S2 R", "S2 S0 -> S2 | S2 S0", "R S0 -> S2", "R R -> R | R R"],
    ),
    "bias_act, channels": (
        lambda x, b: F.bias_act(x, b, "silu", dim=1),
        [X, (4,)],
        ["S1 S0 -> S1 | S1 S0", "S2 R -> S2 | S2 P", "P R -> R !"],
    ),
    "act_dropout": (
        lambda x, b: F.act_dropout(x, "gelu", 0.0, bias=b),
        [X, (6,)],
        ["S2 S0 -> S2 | S2 S0", "S0 R -> S0 | S0 P"],
    ),
    "dropout_add": (
        lambda x, r: F.dropout_add(x, r, 0.5, False),
        [X, X],
        ["S0 S0 -> S0 | S0 S0", "S2 R -> S2", "R S1 -> S1", "P P -> P | R R", "P S1 -> S1 !", "P R -> R !"],
    ),
    "swiglu": (F.swiglu, [X, X], ["S0 S0 -> S0 | S0 S0", "S2 S2 -> S2 | S2 S2", "R S2 -> S2", "P R -> R !"]),
    "geglu, packed": (F.geglu, [X], ["S0 -> S0 | S0", "S2 -> R !"]),
    "interleaved": (
        lambda x: F.reglu(x, packing="interleaved"),
        [(5, 6)],
        ["S0 -> S0 | S0", "S1 -> S1 | S1", "R -> R"],
    ),
    "interleaved, odd parts": (lambda x: F.reglu(x, packing="interleaved"), [(5, 8)], ["S1 -> R !"]),
    "softmax": (lambda x: F.softmax(x, -1, scale=0.5), [X], rows(0)),
    "softmax, first": (lambda x: F.softmax(x, 0), [X], ["S1 -> S1 | S1", "S2 -> S2 | S2", "S0 -> R !"]),
    "log_softmax, causal": (
        lambda x: F.log_softmax(x, -1, causal=True)[..., :1],
        [(5, 4, 4)],
        ["S0 -> S0 | S0", "S1 -> R !"],
    ),
    "softmax, mask": (
        lambda x, m: F.softmax(x, -1, mask=m),
        [X, MASK],
        [
            "S0 R -> S0 | S0",
            "S1 R -> S1 | S1",
            "S1 S0 -> S1",
            "S1 plain -> S1",
            "R plain -> R",
            "S2 R -> R !",
        ],
    ),
    "softmax, added mask": (
        lambda x, m: F.softmax(x, -1, mask=m),
        [X, (5, 1, 6)],
        ["S0 S0 -> S0 | S0 S0", "S1 R -> S1 | S1 P"],
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, [6], w, b), [X, (6,), (6,)], rows(2)),
    "rms_norm": (lambda x, w: F.rms_norm(x, [6], w), [X, (6,)], rows(1)),
    "rms_norm from the output": (
        lambda x, w: F.rms_norm(x, [6], w, save="output"),
        [X, (6,)],
        ["S0 R -> S0 | S0 P", "S0 S0 -> S0 !"],
    ),
    "layer_norm of two": (
        lambda x, w: F.layer_norm(x, [4, 6], w),
        [X, (4, 6)],
        ["S0 R -> S0 | S0 P", "S1 R -> R !"],
    ),
    "layer_norm of the second": (
        lambda x, w: F.layer_norm(x, [4], w, dim=1),
        [X, (4,)],
        ["S0 R -> S0 | S0 P", "S2 R -> S2 | S2 P", "S1 R -> R !"],
    ),
    "add_rms_norm": (
        lambda x, r, w: F.add_rms_norm(x, r, [6], w),
        [X, X, (6,)],
        ["S1 S1 R -> S1 S1 | S1 S1 P", "R S1 R -> S1 S1", "P S1 R -> S1 S1 !", "R R R -> R R | R R R"],
    ),
    "add_layer_norm": (
        lambda x, r, w, b: F.add_layer_norm(x, r, [6], w, b),
        [X, X, (6,), (6,)],
        ["S0 S0 R R -> S0 S0 | S0 S0 P P"],
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        [X, (4,), (4,)],
        ["S0 R R -> S0 | S0 P P", "S1 R R -> R !", "R R R -> R | R R R"],
    ),
    "batch_norm_act, training": (
        lambda x, w, b: F.batch_norm_act(x, None, None, w, b, True, act="relu"),
        [X, (4,), (4,)],
        ["S1 R R -> S1 | S1 R R", "S1 S0 S0 -> S1 | S1 S0 S0", "S0 R R -> R !", "R R R -> R | R R R"],
    ),
    "batch_norm_act": (
        lambda x, w, b, m, v: F.batch_norm_act(x, m, v.abs() + 1, w, b, act="silu"),
        [X, (4,), (4,), numbers(4), numbers(4)],
        ["S0 R R R R -> S0 | S0 P P", "S1 R R plain plain -> S1 | S1 R R", "P R R R R -> R !"],
    ),
    "apply_rotary": (
        rotary,
        [Q, K, TABLE[:7], TABLE[:7].flip(0)],
        [
            "S0 S0 R R -> S0 S0 | S0 S0",
            "S1 S1 plain plain -> S1 S1 | S1 S1",
            "S1 R plain plain -> S1 R | S1 R",
            "S2 S2 S0 S0 -> S2 S2 | S2 S2",
            "S2 S2 plain plain -> S2 S2",
            "P R plain plain -> P R | R R",
            "S3 R R R -> R R !",
        ],
    ),
    "apply_rotary, longer tables": (
        rotary,
        [Q, K, TABLE, TABLE.flip(0)],
        ["S2 S2 plain plain -> S2 S2 | S2 S2", "S1 S0 R R -> S1 S0 | S1 S0"],
    ),
    "apply_rotary, rows of a batch": (
        rotary,
        [Q, K, TABLE[:7].repeat(5, 1, 1), TABLE[:7].flip(0).repeat(5, 1, 1)],
        ["S0 S0 R R -> S0 S0", "S2 S2 R R -> S2 S2", "S0 S0 S0 S0 -> S0 S0"],
    ),
    "apply_rotary, position_ids": (
        rotary,
        [Q, K, TABLE, TABLE.flip(0), IDS],
        ["S0 S0 R R R -> S0 S0", "S2 S2 plain plain S1 -> S2 S2", "S1 S1 R R plain -> S1 S1 | S1 S1"],
    ),
    "apply_rotary of one, bshd": (
        lambda q, c, s: F.apply_rotary(q, None, c, s, layout="bshd", interleaved=True),
        [(5, 7, 4, 6), TABLE, TABLE],
        ["S1 plain plain -> S1 | S1", "S2 plain plain -> S2 | S2"],
    ),
    "act_linear": (
        lambda x, w, b: F.act_linear(x, w, b, "gelu"),
        [X, (8, 6), (8,)],
        [
            "S0 R R -> S0 | S0 P P",
            "S1 R R -> S1 | S1 P P",
            "S2 S1 R -> P | S2 S1 P",
            "S2 R R -> P | S2 R P",
            "R S0 S0 -> S2 | P S0 S0",
            "R R R -> R | R R R",
            "P R R -> R !",
        ],
    ),
    "act_linear, two layers": (
        lambda x, c, v, w, b: F.act_linear(x, [v, w], [None, b], "silu", act_bias=c),
        [X, (6,), (8, 6), (3, 6), (3,)],
        [
            "S2 S0 S1 S1 R -> P P | S2 S0 S1 S1 P",
            "R R S0 S0 S0 -> S2 S2 | P P S0 S0 S0",
            "S0 R R R R -> S0 S0 | S0 P P P P",
        ],
    ),
    "act_linear, empty parts": (
        F.act_linear,
        [(5, 4), (4, 4), (4,)],
        ["S1 S1 R -> P | S1 S1 P", "R S0 S0 -> S1 | P S0 S0", "S0 R R -> S0"],
    ),
    "glu_linear": (
        lambda g, u, w, b: F.glu_linear(g, u, w, b),
        [X, X, (8, 6), (8,)],
        ["S2 S2 S1 R -> P | S2 S2 S1 P", "S0 S0 R R -> S0 | S0 S0 P P", "R R S0 S0 -> S2 | P P S0 S0"],
    ),
    "glu_linear, packed": (
        lambda x, w: F.glu_linear(x, None, w, packing="interleaved"),
        [(5, 12), (8, 6)],
        ["S1 S1 -> P | S1 S1", "S0 R -> S0 | S0 P"],
    ),
    "norm_linear": (
        lambda x, g, w, b: F.norm_linear(x, w, b, norm="rms_norm", norm_weight=g),
        [X, (6,), (8, 6), (8,)],
        ["S1 R R R -> S1 | S1 P P P", "R R S0 S0 -> S2 | P P S0 S0", "S2 R R R -> R !"],
    ),
    "linear": (
        F.linear,
        [X, (8, 6), (8,)],
        ["S1 R R -> S1 | S1 P P", "R S0 S0 -> S2 | P S0 S0", "S2 S1 R -> P | S2 S1 P", "P R R -> R !"],
    ),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        [(5, 4, 6, 7), (8, 4, 3, 3), (8,)],
        [
            "S0 R R -> S0 | S0 P P",
            "R S0 S0 -> S1 | P S0 S0",
            "S1 S1 R -> R !",
            "S2 R R -> R !",
        ],
    ),
    "conv2d, groups": (
        lambda x, w: F.conv2d(x, w, groups=2),
        [(5, 4, 6, 7), (8, 2, 3, 3)],
        ["S0 R -> S0 | S0 P", "R S0 -> R !"],
    ),
    "norm_act_conv2d, training": (
        lambda x, w, b, g: F.norm_act_conv2d(x, w, b, norm_weight=g, training=True, padding=1),
        [(5, 4, 6, 7), (8, 4, 3, 3), (8,), (4,)],
        ["R S0 S0 R -> S1 | P S0 S0 P", "S0 R R R -> R !"],
    ),
    "norm_act_conv2d": (
        lambda x, w, m, v: F.norm_act_conv2d(x, w, running_mean=m, running_var=v.abs() + 1, stride=2),
        [(5, 4, 6, 7), (8, 4, 3, 3), numbers(4), numbers(4)],
        ["S0 R R R -> S0 | S0 P", "S0 R plain plain -> S0"],
    ),
    "cross_entropy": (
        F.cross_entropy,
        [(5, 6), target(5)],
        [
            "S0 S0 -> P | S0 !",
            "S0 R -> P | S0",
            "S0 plain -> P | S0",
            "R S0 -> P !",
            "R plain -> R | R",
            "S1 R -> R !",
        ],
    ),
    "cross_entropy, weights": (
        lambda x, t, w: F.cross_entropy(x, t, w.abs(), label_smoothing=0.1, z_loss=1e-2, softcap=5.0),
        [(5, 6, 4), target(5, 4), numbers(6)],
        ["S0 S0 R -> P | S0 !", "S2 S1 plain -> P | S2 !", "S2 R R -> P", "R R R -> R"],
    ),
    "cross_entropy, probabilities": (
        lambda x, t: F.cross_entropy(x, t.softmax(-1), reduction="mean"),
        [(5, 6), numbers(5, 6)],
        ["S0 S0 -> P | S0", "S0 R -> P | S0", "R R -> R"],
    ),
    "cross_entropy, gradients of all": (
        lambda x, t, w: F.cross_entropy(x, t.softmax(-1), w.abs()),
        [(5, 6), (5, 6), (6,)],
        ["S0 S0 R -> P | S0 S0 P", "R R R -> R | R R R"],
    ),
    "cross_entropy, sum": (
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
        [(5, 6), target(5)],
        ["S0 S0 -> P | S0"],
    ),
    "cross_entropy, none": (
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        [(5, 6, 4), target(5, 4)],
        ["S0 S0 -> S0 | S0", "S2 plain -> S1 | S2", "S1 R -> R !"],
    ),
    "linear_cross_entropy": (
        lambda x, w, b, t: F.linear_cross_entropy(x, w, t, linear_bias=b, z_loss=1e-2),
        [X, (8, 6), (8,), target(5, 4)],
        [
            "S0 R R S0 -> P | S0 P P !",
            "S1 R R plain -> P | S1 P P",
            "R R R R -> R | R R R",
            "S0 S0 S0 R -> P !",
        ],
    ),
    "linear_cross_entropy, none": (
        lambda x, w, t: F.linear_cross_entropy(x, w, t, reduction="none"),
        [X, (8, 6), target(5, 4)],
        ["S0 R S0 -> S0 | S0 P", "S1 R S1 -> S1"],
    ),
}


def tensors_of(shapes):
    """Shapes become numbers that require a gradient."""
    made = []
    for i, each in enumerate(shapes):
        made.append(each if isinstance(each, torch.Tensor) else numbers(*each, seed=i).requires_grad_())
    return made


ON_FOUR = {
    "layer_norm": [
        "S0,S1 R,R R,R -> S0,S1 | S0,S1 P,P P,P",
        "S0,R R,R R,R -> S0,R | S0,R P,R P,R",
        "S0,S2 R,R R,R -> S0,R !",
    ],
    "bias_act": ["S0,S2 R,S0 -> S0,S2 | S0,S2 P,S0", "S0,S0 R,R -> S0,S0 | S0,S0 P,P"],
    "glu_linear": ["S0,S2 S0,S2 R,S1 R,R -> S0,P | S0,S2 S0,S2 P,S1 P,P"],
    "act_linear": ["S0,R R,S0 R,S0 -> S0,S2 | S0,P P,S0 P,S0"],
    "cross_entropy, none": ["S0,S2 R,R -> S0,S1 | S0,S2"],
    "linear_cross_entropy": ["S0,S1 R,R R,R R,R -> P,P | S0,S1 P,P P,P"],
}
"""On a mesh of two dimensions, 2 x 2."""
