"""The `memkit` command. A subcommand is a function that adds its parser; SUBCOMMANDS lists them all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__

Parsers = Any  # argparse keeps the type of add_subparsers()'s result to itself
Command = Callable[[argparse.Namespace], int]


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names defaults, but none where there is nothing to name."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unnamed = action.default is None or action.default is False or "default" in (action.help or "")
        return action.help if unnamed else super()._get_help_string(action)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="memkit", description="Less memory for PyTorch training, and tools that measure it."
    )
    parser.add_argument("--version", action="version", version=f"memkit {__version__}")
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in SUBCOMMANDS:
        add(parsers)
    args = parser.parse_args(argv)
    command: Command = args.command
    return command(args)


def add_bench(parsers: Parsers) -> None:
    from .bench.options import (
        BATCH,
        DTYPES,
        INGREDIENTS,
        LEAST_STEPS,
        MODELS,
        POOLS,
        STEPS,
        VARIANTS,
        Options,
    )

    default = Options()
    parser = parsers.add_parser(
        "bench",
        help="train two models as stock eager, torch.compile and memkit; compare memory, time and loss",
        description="Trains a transformer and a CNN from the same seed as stock eager, stock torch.compile "
        "and memkit, and prints one table: peak memory, memory saved for backward, step time, loss. Writes "
        "bench.json and memory.png into the output folder. The defaults take a few minutes on two CPU cores.",
        formatter_class=_Help,
    )
    parser.set_defaults(command=run_bench)
    what = parser.add_argument_group("what runs")
    what.add_argument("--model", choices=(*MODELS, "both"), default="both", help="which model to train")
    what.add_argument(
        "--variants",
        type=_names,
        default=",".join(VARIANTS),
        metavar="A,B",
        help="what to compare: eager, and any of compile and memkit",
    )
    what.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default=default.device, help="auto: a GPU if any"
    )
    what.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="of the weights (default: float32); with --amp, what autocast computes in (default: bfloat16)",
    )
    what.add_argument(
        "--amp", action="store_true", help="automatic mixed precision: float32 weights, autocast to --dtype"
    )
    what.add_argument(
        "--inexact",
        action="store_true",
        help="memkit.swap(exact=False): changes gelu and its like in half precision too, less exactly",
    )
    what.add_argument(
        "--pool",
        choices=POOLS,
        default=default.pool,
        help="memory of memkit's step: PyTorch's own (none), a memkit.Pool by pool.use() (use), or a plan recorded "
        "once and replayed (plan, CPU only)",
    )
    what.add_argument(
        "--ingredients",
        type=_names,
        default=",".join(INGREDIENTS),
        metavar="A,B",
        help="what memkit's variant is made of, a part of these",
    )
    what.add_argument(
        "--ablation", action="store_true", help="memkit's ingredients one after the other, a row each"
    )
    what.add_argument("--seed", type=int, default=default.seed, help="of weights, data order and dropout")

    sizes = parser.add_argument_group("sizes")
    for name, value, text in (
        ("layers", default.layers, "transformer blocks"),
        ("d-model", default.d_model, "width of the transformer"),
        ("heads", default.heads, "attention heads"),
        ("seq-len", default.seq_len, "tokens in a sequence"),
        ("vocab", default.vocab, "tokens in the vocabulary"),
    ):
        sizes.add_argument(f"--{name}", type=int, default=value, metavar="N", help=text)
    sizes.add_argument(
        "--dropout", type=float, default=default.dropout, metavar="P", help="in the transformer; 0: none"
    )
    hint = ", ".join(f"{model} {BATCH[model]}" for model in MODELS)
    sizes.add_argument(
        "--batch", type=int, default=argparse.SUPPRESS, metavar="N", help=f"batch size (default: {hint})"
    )
    hint = ", ".join(f"{model} {STEPS[model]}" for model in MODELS)
    sizes.add_argument(
        "--steps",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"steps, at least {LEAST_STEPS} (default: {hint})",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=default.out, metavar="DIR", help="folder for results")
    output.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="results file (default: DIR/bench.json)",
    )
    output.add_argument("--no-plot", action="store_true", help="no memory.png")
    output.add_argument("--quiet", action="store_true", help="only the table: no progress")


def run_bench(args: argparse.Namespace) -> int:
    from . import bench
    from .bench import report
    from .bench.options import MODELS

    options = bench.Options(
        models=MODELS if args.model == "both" else (args.model,),
        variants=args.variants,
        layers=args.layers,
        d_model=args.d_model,
        heads=args.heads,
        seq_len=args.seq_len,
        vocab=args.vocab,
        batch=getattr(args, "batch", None),
        steps=getattr(args, "steps", None),
        device=args.device,
        dtype=args.dtype,
        amp=args.amp,
        exact=not args.inexact,
        pool=args.pool,
        ingredients=args.ingredients,
        ablation=args.ablation,
        dropout=args.dropout,
        seed=args.seed,
        out=args.out,
        json=args.json,
        plot=not args.no_plot,
        quiet=args.quiet,
    )
    try:
        result = bench.run(options)
    except bench.OptionError as error:
        print(f"memkit {error}", file=sys.stderr)
        return 2
    status = 130 if result.get("interrupted") else 0
    if not result["models"]:
        print("memkit bench: no model was measured, nothing is written", file=sys.stderr)
        return status
    report.write_json(result, options.results_file)
    written = [str(options.results_file)]
    if options.plot:
        report.plot(result, options.out / "memory.png")
        written.append(str(options.out / "memory.png"))
    print(report.full_text(result))
    print(f"\n{result['wall_seconds']:.0f} s; wrote {' and '.join(written)}")
    return status


def add_doctor(parsers: Parsers) -> None:
    parser = parsers.add_parser(
        "doctor",
        help="what is installed, what it was built for, and what runs here",
        description="Says what is installed and what it was built for, and tries out what should run here. Takes seconds; "
        "ends with exit status 1 if a trial fails.",
    )
    parser.set_defaults(command=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    from . import doctor

    return 0 if doctor.run(print) else 1


def add_plan(parsers: Parsers) -> None:
    parser = parsers.add_parser(
        "plan",
        help="allocation plans: print and draw them, make them from traces",
        description="Works with plan files: memkit.Pool.record makes a plan of a step's allocations, Plan.save writes it.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    show = actions.add_parser("show", help="what a plan needs, how good it is, its biggest buffers")
    show.set_defaults(command=run_plan, action="show")
    show.add_argument(
        "file", type=Path, metavar="FILE", help="plan file, written by Plan.save, Plans.save or solve"
    )
    show.add_argument("--png", type=Path, metavar="OUT", help="draw it: time to the right, addresses upwards")
    show.add_argument("--biggest", type=int, default=10, metavar="N", help="buffers to list (default: 10)")

    solve = actions.add_parser(
        "solve",
        help="plan a trace: CSV with the columns lower, upper and size",
        formatter_class=_Help,
    )
    solve.set_defaults(command=run_plan, action="solve")
    solve.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="CSV file: a line a buffer, alive from instant lower to before upper",
    )
    solve.add_argument("-o", "--out", type=Path, required=True, metavar="PLAN", help="plan file to write")
    solve.add_argument("--budget", type=float, default=10, metavar="SECONDS", help="time to search at most")
    solve.add_argument(
        "--alignment", type=int, default=64, metavar="BYTES", help="the offsets are multiples of it"
    )
    solve.add_argument("--seed", type=int, default=0, help="seed of the search")
    solve.add_argument(
        "--signature", help="name of the plan in a set of plans (default: the name of the trace)"
    )


def run_plan(args: argparse.Namespace) -> int:
    from . import _plan_report as report
    from .plan import Plan, read_trace

    try:
        if args.action == "solve":
            _check_folder("--out", args.out)  # before the search, which takes its time
            buffers = read_trace(args.trace)
            if not buffers:
                raise ValueError(f"{args.trace}: expected a line for each buffer, got none")
            plan = Plan.solve(
                buffers,
                alignment=args.alignment,
                budget=args.budget,
                seed=args.seed,
                signature=args.signature or args.trace.stem,
            )
            plan.save(args.out)
            print(f"{report.summary(plan)}\n\nwrote {args.out}")
            return 0
        if args.png:
            _check_folder("--png", args.png)
        plans = report.load(args.file)
        print("\n\n".join(report.text(plan, args.biggest) for plan in plans))
        if args.png:
            report.draw(plans, args.png)
            print(f"\nwrote {args.png}")
    except (OSError, ValueError) as error:
        print(f"memkit plan {args.action}: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(
            f"memkit plan {args.action}: --png needs matplotlib ({error}); pip install matplotlib",
            file=sys.stderr,
        )
        return 2
    return 0


def _check_folder(option: str, path: Path) -> None:
    """A folder that is made where a path was mistyped goes unseen."""
    if path.is_dir():
        raise ValueError(f"{option}: expected a file to write to, got the folder {path}")
    if not path.parent.is_dir():
        raise ValueError(
            f"{option}: expected a folder that exists to write {path.name} to, got {path.parent}"
        )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


SUBCOMMANDS: tuple[Callable[[Parsers], None], ...] = (add_bench, add_doctor, add_plan)

if __name__ == "__main__":
    sys.exit(main())
