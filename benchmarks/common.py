"""What the op benchmarks share: buffers to run over, clocks for both devices, rounds in turns, options, results files."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from memkit.bench.report import write_json
from memkit.bench.timing import interleave, ratio

RESULTS = Path(__file__).resolve().parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {"16Ki": 1 << 14, "128Ki": 1 << 17, "1Mi": 1 << 20, "8Mi": 1 << 23, "32Mi": 1 << 25}
MODES = ("forward", "forward+backward")
SLOWER = 1.05
VISITS = 3

# One timed sample runs over several buffers, so that it lasts long enough to be timed.
CPU_ELEMENTS = 1 << 20
CPU_BUFFERS = 64

# Of a GPU's clock, a call: three milliseconds.
MOST_AHEAD_CYCLES = 6_400_000


@dataclass
class Contender:
    """`prepare` makes the arguments of every call of one sample, untimed; `call` is timed on each of them."""

    prepare: Callable[[], Sequence[tuple[Any, ...]]]
    call: Callable[..., object]
    ahead_cycles: int = 200_000  # a call: for so long a GPU waits before a sample's first


def buffer_count(elements: int, dtype: torch.dtype, device: str) -> int:
    """On a GPU as many as fill its L2 cache twice: each call then reads its input from memory."""
    if device == "cuda":
        cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        return max(1, -(-2 * cache // (elements * dtype.itemsize)))
    return max(1, min(CPU_BUFFERS, CPU_ELEMENTS // elements))


def settle_allocator() -> None:
    """Results of more than 8 MiB come from the system, zeroed page by page, smaller ones from memory used before.

    So it is with glibc most of the time; left alone, the bounds follow what was freed before, and half-way between them
    chance decides which contender waits for pages.
    """
    mmap_threshold, trim_threshold = -3, -1  # malloc.h
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 8 << 20)
        mallopt(trim_threshold, 1 << 30)


def normal(elements: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(elements, dtype=dtype, device=device, generator=generator)


def sample(contender: Contender, device: str) -> float:
    """Seconds per call that the device takes, averaged over one pass over the prepared arguments.

    A GPU is kept busy until all calls are in its queue, as a training step keeps it: what the host takes for them is
    host_sample's to say.
    """
    if device != "cuda":
        return host_sample(contender, device)
    call = contender.call
    while True:
        arguments = contender.prepare()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(contender.ahead_cycles * (1 + len(arguments)))
        start.record()
        for each in arguments:
            call(*each)
        end.record()
        in_time = not start.query()
        end.synchronize()
        if in_time or contender.ahead_cycles >= MOST_AHEAD_CYCLES:
            return start.elapsed_time(end) / 1e3 / len(arguments)
        contender.ahead_cycles *= 2
        del arguments, each  # before the next ones are made


def host_sample(contender: Contender, device: str) -> float:
    """Seconds per call until the call returns, whatever a GPU still has to do."""
    arguments = contender.prepare()
    call = contender.call
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for each in arguments:
        call(*each)
    return (time.perf_counter() - begin) / len(arguments)


class Rounds:
    """Samples of all contenders in turns: as many rounds as `budget` seconds allow, `least` to `most`.

    They can be taken in several visits, between which other cases have theirs: a machine that is slower for a few
    seconds, or keeps one of two threads waiting, then spoils a part of the rounds, which the median leaves out.
    """

    def __init__(
        self,
        contenders: Mapping[str, Contender],
        device: str,
        budget: float,
        clock: Callable[[Contender, str], float] = sample,
        least: int = 4,
        most: int = 60,
    ) -> None:
        self.timers = {name: lambda c=each: clock(c, device) for name, each in contenders.items()}
        self.budget, self.least, self.most = budget, least, most
        self.rounds = 0  # not known before the first visit
        self.times: dict[str, list[float]] = {name: [] for name in contenders}

    def take(self, visits: int = 1) -> None:
        """One of so many visits."""
        if not self.rounds:
            warm_round = min(self._round(), self._round())  # the first may start what all later ones use
            self.rounds = max(self.least, min(self.most, int(self.budget / warm_round)))
        done = len(next(iter(self.times.values())))
        for name, taken in interleave(self.timers, -(-self.rounds // visits), warm=0, first=done).items():
            self.times[name] += taken

    def _round(self) -> float:
        begin = time.perf_counter()
        interleave(self.timers, repeats=1, warm=0)
        return time.perf_counter() - begin

    def found(self) -> dict[str, Any]:
        return {
            "rounds": len(self.times["stock"]),
            "seconds": {name: statistics.median(taken) for name, taken in self.times.items()},
            "ratio": ratios(self.times, "stock"),
        }


def measure(
    contenders: Mapping[str, Contender], device: str, budget: float, **options: Any
) -> dict[str, Any]:
    """What all rounds at once find."""
    rounds = Rounds(contenders, device, budget, **options)
    rounds.take()
    return rounds.found()


def measure_in_turns(cases: Sequence[tuple[dict[str, Any], Rounds]], found: list[dict[str, Any]]) -> None:
    """Adds what each case says of itself, and what its rounds find in VISITS visits or until an interruption, to `found`."""
    try:
        for _ in range(VISITS):
            for case, rounds in cases:
                progress(" ".join(case[name] for name in ("op", "dtype", "size", "mode")))
                with torch.set_grad_enabled(case["mode"] != "forward"):
                    rounds.take(VISITS)
    finally:
        found += [case | rounds.found() for case, rounds in cases if rounds.times["stock"]]


def ratios(times: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    return {name: ratio(taken, times[reference]) for name, taken in times.items()}


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, end="\x1b[K\r", file=sys.stderr, flush=True)


def own_code(function: FunctionType) -> FunctionType:
    """The function with a code object to itself: torch.compile counts what it made of one, and looks through all of it."""
    return FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)


def compiles(run: Callable[[], object]) -> bool:
    """Whether `run`, which compiles something, gets through; says why where it does not."""
    try:
        run()
    except Exception as error:
        print(f"not compiled: {type(error).__name__}: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return False
    return True


def slower_than(
    cases: Iterable[Mapping[str, Any]],
    where: Sequence[str],
    labels: Mapping[str, str],
    pairs: Sequence[tuple[str, str]] = (("memkit", "stock"), ("memkit", "compiled")),
) -> list[str]:
    """Every case in which the first of a pair takes more than SLOWER times what the second takes, in words."""
    found = []
    for case in cases:
        ratio = case["ratio"]
        for mine, theirs in pairs:
            if mine in ratio and theirs in ratio and ratio[mine] > SLOWER * ratio[theirs]:
                place = " ".join(str(case[name]) for name in where)
                factor = ratio[mine] / ratio[theirs]
                found.append(f"{place}: {labels[mine]} takes {factor:.2f}× the time of {labels[theirs]}")
    return found


class Choices:
    """The options of an op benchmark: lists to choose from, --quick, --device and --json."""

    def __init__(
        self,
        doc: str | None,
        listed: Mapping[str, Iterable[str]],
        quick: Mapping[str, list[str]],
        file: str,
        compiler: bool = False,
    ) -> None:
        self.listed = {name: list(known) for name, known in listed.items()}
        self.quick = quick
        self.file = file
        self.parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
        for name, known in self.listed.items():
            self.parser.add_argument(f"--{name}", metavar="A,B", help=f"of {', '.join(known)} (default: all)")
        self.parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        few = "; ".join(", ".join(chosen) for chosen in quick.values())
        self.parser.add_argument("--quick", action="store_true", help=f"{few}; short measurements")
        self.parser.add_argument(
            "--json", nargs="?", const="", metavar="FILE", help=f"default: results/{file}-DEVICE.json"
        )
        if compiler:
            self.parser.add_argument(
                "--no-compile", dest="compile", action="store_false", help="without stock compiled"
            )

    def parse(self, argv: list[str] | None) -> argparse.Namespace:
        args = self.parser.parse_args(argv)
        for name, known in self.listed.items():
            text = getattr(args, name)
            chosen = text.split(",") if text else self.quick.get(name, known) if args.quick else known
            unknown = [each for each in chosen if each not in known]
            if unknown:
                self.parser.error(f"--{name}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
            setattr(args, name, chosen)
        if args.device == "auto":
            args.device = "cuda" if torch.cuda.is_available() else "cpu"
        if args.device == "cuda" and not torch.cuda.is_available():
            self.parser.error("--device cuda: expected a CUDA GPU, got none")
        if args.json is not None:
            args.json = Path(args.json) if args.json else RESULTS / f"{self.file}-{args.device}.json"
        return args


def write(result: dict[str, Any], args: argparse.Namespace) -> int:
    """Says where memkit is slower, and writes the results file where one is asked for; the exit status."""
    print(f"\nmemkit slower by more than {SLOWER - 1:.0%}: {len(result['slower']) or 'nowhere'}")
    for line in result["slower"]:
        print(f"  {line}")
    if args.json is not None:
        write_json(result, args.json)
        print(f"wrote {args.json.name}")
    return 130 if result.get("interrupted") else 0
