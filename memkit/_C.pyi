"""The compiled module. One section for each source file that adds to it."""  # noqa: N999

from collections.abc import Callable, Sequence
from typing import Any

from torch import Generator, Tensor, device, dtype

# csrc/bindings.cpp

def cpu_isa() -> str:
    """The instruction set that the CPU loops run with: v4 (AVX-512), v3 (AVX2) or base."""

def conv_parts(input: int, weight: int) -> int:
    """How many parts of the batch bring something where the CPU makes a convolution's input gradient, by elements."""

# csrc/torch/fast_call.cpp

def activation(
    op: str,
    input: Tensor,
    bias: Tensor | None,
    dim: int,
    params: tuple[float, ...],
    inplace: bool | str,
    save: str,
) -> Tensor | None:
    """An activation in eager mode; None where the call has to go through torch.ops."""

# csrc/torch/dropout.cpp: in eager mode; None as above.

def dropout(
    input: Tensor, p: float, training: bool, inplace: bool | str, generator: Generator | None, alpha: bool
) -> Tensor | None: ...
def dropout_add(
    input: Tensor,
    residual: Tensor,
    p: float,
    training: bool,
    inplace: bool | str,
    generator: Generator | None,
) -> Tensor | None: ...
def bias_dropout_add(
    input: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    p: float,
    training: bool,
    inplace: bool | str,
    generator: Generator | None,
    dim: int,
) -> Tensor | None: ...
def draw_seed(input: Tensor, generator: Generator | None) -> Tensor | None: ...
def act_dropout(
    input: Tensor,
    act: str,
    p: float,
    training: bool,
    inplace: bool | str,
    generator: Generator | None,
    bias: Tensor | None,
    dim: int,
    params: list[float] | None,
    save: str,
) -> Tensor | None: ...

# csrc/torch/consumer.cpp

def consumer(
    inputs: Sequence[Tensor | None],
    op: str,
    act: str,
    packing: str,
    numbers: Sequence[float],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    conv: Sequence[int],
) -> tuple[list[Tensor], list[Tensor]] | None: ...
def norm_act_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: Sequence[int],
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    act: str,
    numbers: Sequence[float],
) -> Tensor | None:
    """None also where something does not fit, which Python refuses."""

# csrc/torch/glu.cpp

def glu(gate: Tensor, up: Tensor | None, act: str, packing: str) -> Tensor | None: ...

# csrc/torch/pooling.cpp

def max_pool2d(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor | None: ...

# csrc/torch/rotary.cpp

def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    interleaved: bool,
    heads_at: int,
    rotary: int,
    inplace: bool | str,
) -> tuple[Tensor, Tensor] | None: ...
def apply_rotary_to_one(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    interleaved: bool,
    heads_at: int,
    rotary: int,
    inplace: bool | str,
) -> Tensor | None: ...

# csrc/torch/softmax.cpp

def softmax(
    input: Tensor,
    dim: int,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    log: bool,
    dtype: dtype | None,
    inplace: bool | str,
) -> Tensor | None: ...

# csrc/torch/row_norm_call.cpp

def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dim: int,
    denominator: str,
    inplace: bool | str,
    save: str,
) -> Tensor | None: ...
def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    dim: int,
    denominator: str,
    inplace: bool | str,
    save: str,
) -> Tensor | None: ...
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    inplace: bool | str,
    save: str,
) -> tuple[Tensor, Tensor] | None: ...
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    inplace: bool | str,
    save: str,
) -> tuple[Tensor, Tensor] | None: ...
def follow_weight(made: Tensor, parameter: Tensor) -> None: ...
def norm_saves(normed: Tensor) -> str: ...

# csrc/torch/channel_norm_call.cpp

def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor | None: ...
def move_running(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, count: int, momentum: float
) -> Tensor | None: ...
def count_batch(counter: Tensor) -> Tensor | None: ...
def batch_norm_act(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    act: str,
    params: list[float],
) -> Tensor | None:
    """None also where something does not fit, which Python refuses."""

# csrc/torch/scale_shift.cpp

def scale_shift(first: Tensor, second: Tensor, shift: Tensor | None) -> Tensor | None:
    """first * second + shift, where one factor and the shift have few elements."""

# csrc/torch/linear_scale.cpp

def linear_scale(first: Tensor, second: Tensor) -> Tensor | None:
    """first * second, where one is what a linear layer made and the other has few elements, which the first is not kept for
    in the graph; None where the caller does better with the product."""

# csrc/torch/saved_tensor.cpp

class SavedTensor:
    """A tensor as autograd saves one, by the saved-tensor hooks around."""

    def __init__(self, tensor: Tensor) -> None: ...
    def tensor(self) -> Tensor:
        """It, or autograd's error where it was changed in place in between."""

# csrc/torch/lean.cpp

def recipe(tensor: Tensor, asks_again: bool = False, /) -> object | None:
    """How to compute a saved tensor again; None where it has to be kept. Of PyTorch's operators where what they keep may be
    asked for again."""

def nonzeros(tensor: Tensor) -> tuple[object, Tensor, Tensor] | None:
    """What has to be known beside a saved tensor's elements that are not zero, these, and a bit for each element; None
    where they would not be much smaller."""

def spread(frame: object, values: Tensor, bits: Tensor) -> Tensor:
    """The tensor that `nonzeros` gave them of."""

def concatenation(
    tensor: Tensor, keep: Callable[[Tensor], object], give_back: Callable[[object], Tensor]
) -> object | None:
    """How to join a concatenation again, where most of it is kept anyway; what is copied goes through the hooks around."""

def keep(tensor: Tensor, keep: Callable[[Tensor], object], give_back: Callable[[object], Tensor]) -> object:
    """A tensor as the hooks around keep it, for concatenations to know of."""

def note_joined(tensor: Tensor, tensors: Sequence[Tensor]) -> None:
    """Which tensors a concatenation was made of: what others of them share with it need not be compared."""

def copy_parameters(copies: bool) -> None:
    """Whether parameters of what is made again are copied, as their memory may be gone then."""

def pack(tensor: Tensor) -> object:
    """The recipe, the parts, the elements that are not zero, or the tensor as autograd keeps it."""

def unpack(packed: object) -> Tensor | None:
    """Of what any of these gave; None for anything else."""

# csrc/torch/known_gradients.cpp

def take_place_of_norm(loss: Tensor) -> bool:
    """Of a reduced `linear_cross_entropy` in lean(): runs the backward of the norm before it now, where nothing else can
    send that a gradient any more, so that it keeps nothing. Whether it did."""

# csrc/torch/cross_entropy.cpp

def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    inplace: bool | str,
) -> Tensor | None:
    """Cross entropy in eager mode, softcap 0 for none; None where the call has to go through torch.ops."""

# csrc/torch/tap.cpp

class StorageRef:
    """A tensor's storage, known without a Python object of its own, which would count among the storage's holders.

    Does not keep it alive, but keeps its address from naming another one.
    """

    def __init__(self, tensor: Tensor) -> None: ...
    @property
    def key(self) -> int:
        """`torch.UntypedStorage._cdata`."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...

class Tap:
    """Counts the CPU tensor storage of the process (every thread), from its creation until `stop()`.

    Any number may run at once, nested or not. Bytes are those torch asked its allocator for.
    """

    def __init__(self, samples: int = 0) -> None:
        """`samples`: record bytes alive at every allocation and release, thinned out to so many points."""

    def stop(self) -> None:
        """Ends the counting; a second call does nothing."""

    def read(self) -> tuple[int, int, int]:
        """Bytes alive and their peak, above the start (negative where more was freed), and allocations."""

    def samples(self) -> list[tuple[float, int]]:
        """Seconds since the start and bytes alive. The first is (0.0, 0), the last is now, or the end."""

    def covers(self, storage: int) -> bool:
        """Whether a living `torch.UntypedStorage`, given by its `_cdata`, got its memory since the start."""

# csrc/torch/pool_call.cpp, pool_python.cpp

class PoolBase:
    """What an instance holds as `_empty` is what it answers for `empty`, whatever its class defines there.

    So are `zeros`, `ones` and `full`.
    """

class Pool:
    """The compiled half of memkit.Pool. Bytes throughout."""

    def __init__(
        self, device: str, pinned: bool, size: int, max: int, grow: bool, growth: int, debug: bool
    ) -> None:
        """`max` 0: none."""

    @property
    def id(self) -> int:
        """What torch.ops.memkit.pool_empty knows it by."""

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """empty, empty_strided, zeros, ones and full, and empty_op: empty through the dispatcher."""

    def close(self) -> None: ...
    def closed(self) -> bool: ...
    def inherited(self) -> bool:
        """Made before a fork(), seen in the child."""

    def trim(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def reset_peaks(self) -> None: ...
    def holders(self) -> list[tuple[str, int, int]]: ...
    def chunks(self) -> list[tuple[int, int, list[tuple[int, int, int, str, int, str, str]]]]:
        """(address, size, blocks), a block being (address, size, requested, state, lane, tag, stack)."""

    def check(self) -> str:
        """The first violated invariant, or ""."""

    def violations(self) -> list[str]:
        """What debug mode found wrong so far."""

    def enter_scope(self) -> int:
        """A number that leave_scope() wants back."""

    def leave_scope(self, number: int) -> tuple[int, list[tuple[str, int, str, int]]]:
        """How many scopes ended, with those inside it; and what is still alive as (tag, bytes, stack, address)."""

    def push_tag(self, name: str) -> int:
        """On this thread; its number."""

    def pop_tag(self, number: int) -> bool:
        """False: this thread is in none of that number."""

    def sleep(self, tag: str, file: int) -> int: ...
    def wake(self) -> None: ...
    def asleep(self) -> bool: ...
    def refusal(self, text: str) -> Exception | None: ...

class PoolUse:
    """One `with pool.use()`: from enter() to leave() this thread's CPU allocations come from the pool."""

    def __init__(self, pool: Pool) -> None: ...
    def enter(self) -> None: ...
    def leave(self) -> bool | None:
        """Whether it was the innermost; None, and nothing was done: it is not this thread's."""

class PoolReplay:
    """A plan served from a pool, step after step: `slots` are (size, offset) in the order of allocation."""

    def __init__(self, pool: Pool, slots: Sequence[tuple[int, int]], total: int, alignment: int) -> None: ...
    def enter(self) -> None: ...
    def leave(self) -> bool | None: ...
    def step(self) -> tuple[int, int, int, str]:
        """Of the last step: allocations planned, served by the plan, served by the pool instead, and the first of those."""

# csrc/torch/planning.cpp

Row = tuple[int, int, int]  # size in bytes, lower, upper: alive in [lower, upper) of any clock

class Recorder:
    """Records the CPU tensor storage that the creating thread allocates, in order, until `stop()`."""

    def stop(self) -> None:
        """Ends the recording; a second call does nothing."""

    def buffers(self) -> list[Row]:
        """Stops, and tells every allocation. The clock counts these and their releases, by whatever thread.

        What was never released lives until the end. Requested sizes, above 0.
        """

def solve_plan(
    buffers: Sequence[Row], alignment: int, budget: float, seed: int
) -> tuple[list[int], int, int, bool, str, float]:
    """Offsets, height and lower bound in bytes, whether no plan is lower, what found it, and the seconds.

    Searches for at most about `budget` seconds, without Python's lock.
    """

def check_plan(buffers: Sequence[Row], offsets: Sequence[int], alignment: int) -> str | None:
    """What is wrong with the offsets: not aligned, or an overlap of buffers alive together. None: they are sound."""

# csrc/torch/optimizer_call.cpp

def check_arrived(param: Tensor) -> None:
    """``RuntimeError``: hooks of its AccumulateGrad node, as DistributedDataParallel's, run after the tensor's own."""

def check_step(
    op: str, params: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], block: int
) -> None:
    """Raises where the operator would, with nothing written."""

def lies_as(state: Tensor, param: Tensor) -> bool:
    """Whether a moment lies in memory as its parameter does."""

def made_of(groups: list[list[Tensor]], state: dict[Tensor, Any]) -> list[Any]:
    """The parameters of the groups, and those in the state with all that it holds for them."""

def is_made_of(known: list[Any], groups: list[list[Tensor]], state: dict[Tensor, Any]) -> bool:
    """Whether `made_of` would be these very objects."""

class Gradients:
    """Of one device, taken from their parameters."""

    def __len__(self) -> int: ...

class Arrivals:
    """Gradients that arrive in backward and wait for a step together, on a GPU, until they have so many bytes."""

    BEGIN: int
    """The first of a backward or a stream, not taken: `begin`, then again."""
    STEP: int
    """Taken; those that wait are enough."""
    ALONE: int
    """Not taken: it does not wait."""

    def __init__(self, bytes: int) -> None: ...
    def take(self, param: Tensor) -> int:
        """Takes the gradient from the parameter, and says what is to be done: mostly 0, nothing."""
    def begin(self, device: device) -> None:
        """From now to `end`, those wait that arrive on the device in this backward, on the current stream."""
    def give(self, device: device) -> Gradients:
        """Those that wait, which the current stream can use."""
    def end(self, device: device) -> Gradients:
        """`give`, and no more wait."""
    def devices(self) -> list[device]:
        """With a `begin` that had no `end`."""

class StepList:
    """Parameters on one device with the lists of their state, for one call a step.

    Each `collect` gives a step of its own: threads may take theirs at once.
    """

    def __init__(self, op: str, params: list[Tensor], state: list[list[Tensor]]) -> None: ...
    def collect(self) -> Step:
        """Of those parameters that have a gradient."""
    def collect_one(self, index: int) -> Step: ...
    def collect_from(self, gradients: Gradients) -> Step:
        """Those of its parameters, which are no longer among the others then."""
    def lies_as_parameters(self) -> bool:
        """Whether the moments lie in memory as their parameters do."""

class Step:
    """Of as many parameters as it is long."""

    def __len__(self) -> int: ...
    def check(self, block: int) -> None:
        """Raises where the step would, with nothing written."""
    def adamw(
        self,
        lr: float,
        lr_tensor: Tensor | None,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        maximize: bool,
        block_size: int,
        stochastic: bool,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None: ...
    def sgd(
        self,
        lr: float,
        lr_tensor: Tensor | None,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        maximize: bool,
        block_size: int,
        stochastic: bool,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None: ...
