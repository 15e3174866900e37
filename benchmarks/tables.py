"""The tables of README.md and docs/benchmarks.md, each a function of all results."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import bench_matrix
import bench_models
import bench_peers
import bench_pool
import bench_steps
import highlights
from common import RESULTS

from memkit.bench import report

ROOT = RESULTS.parents[1]
BENCH, ACTIVATION, OPS = report.KIND, "memkit-activation", "memkit-ops"
POOL, OPTIM, LOSS = "memkit-pool", "memkit-optim", "memkit-loss"
CHECKS = "memkit-checks"  # what tests and sanitizers said on a GPU
ABLATION, NO_DROPOUT, LARGE = f"{BENCH}, ablation", f"{BENCH}, no dropout", f"{BENCH}, large"

Result = dict[str, Any]
Results = dict[tuple[str, str], Result]  # (kind, device) -> the newest

CONTENDERS = {
    "memkit": "memkit",
    "memkit_inplace": "memkit in place",
    "reused": "stock, output reused",
    "compiled": "torch.compile",
}

ABLATION_COLUMNS = (
    "model",
    "variant",
    "peak of a step",
    "saved for backward",
    "step time",
    "max loss difference",
)

# What is built, the tests that cover it on the CPU, its CUDA kernels (None: Python over both), and the
# benchmark that runs it on a GPU.
FEATURES = (
    ("activations and `bias_act`", "tests/test_activation.py", "csrc/cuda/activation_forward.cu", ACTIVATION),
    ("dropout", "tests/test_dropout.py", "csrc/cuda/activation_forward.cu", OPS),
    ("gated units", "tests/test_glu.py", "csrc/cuda/glu.cu", OPS),
    ("rotary embeddings", "tests/test_rotary.py", "csrc/cuda/rotary.cu", OPS),
    ("max pooling", "tests/test_pooling.py", "csrc/cuda/pooling.cu", OPS),
    ("softmax", "tests/test_softmax.py", "csrc/cuda/softmax.cu", OPS),
    ("norms", "tests/test_norm.py", "csrc/cuda/row_norm.cu", OPS),
    ("losses", "tests/test_loss.py", "csrc/cuda/loss.cu", LOSS),
    ("an operator and its layer as one (`act_linear`, `nn.MLP`)", "tests/test_consumer.py", None, CHECKS),
    ("`memkit.optim`", "tests/test_optim.py", "csrc/cuda/optimizer.cu", OPTIM),
    ("`memkit.lean`", "tests/test_glu.py", None, BENCH),
    ("`memkit.nn`, `memkit.swap`", "tests/test_swap.py", None, BENCH),
    ("`memkit.Pool`", "tests/test_pool.py", "csrc/torch/pool_cuda.cpp", POOL),
    ("`memkit.memory`", "tests/test_memory.py", None, BENCH),
    ("`memkit bench`", "tests/test_bench.py", None, BENCH),
)


class ReportError(Exception):
    pass


def of_kind(results: Results, kind: str) -> list[Result]:
    """CPU first, then CUDA."""
    found = [results[key] for key in sorted(results) if key[0] == kind]
    if not found:
        raise ReportError(f"report: expected a results file of kind {kind} in {RESULTS.name}/, got none")
    return found


def heading(result: Result) -> str:
    """Above a device's tables, of which another's may follow."""
    hardware = result["hardware"]
    return f"**{hardware['gpu'] if hardware['device'] == 'cuda' else 'CPU, ' + hardware['cpu']}**"


def bench_table(results: Results, kind: str = BENCH) -> str:
    parts = []
    for result in of_kind(results, kind):
        parts.append(heading(result))
        table = report.markdown_table(report.COLUMNS, report.rows(result))
        parts += [table, report.conditions(result), report.origin(result)]
    return "\n\n".join(parts)


def highlights_table(results: Results) -> str:
    parts = []
    for device in ("cpu", "cuda"):
        kinds = [results.get((kind, device)) for kind in (ACTIVATION, LOSS, OPTIM, POOL)]
        known = [result for result in kinds if result]
        if known:
            machines = dict.fromkeys(heading(result).strip("*") for result in known)
            table = report.markdown_table(list(highlights.COLUMNS), highlights.rows(*kinds))
            parts += [f"**{'; '.join(machines)}**", table]
    return "\n\n".join(parts)


def losses_text(results: Results) -> str:
    """How far the losses lie apart where no masks are drawn."""
    lines = []
    for result in of_kind(results, NO_DROPOUT):
        for name, found in result["models"].items():
            memkit = found["variants"]["memkit"]
            lines.append(
                f"Without dropout (`--dropout 0`) the losses of the {name}'s {found['steps']} steps lie at most "
                f"{memkit['loss_max_difference']:.1e} from stock's. {report.origin(result)}"
            )
    return "\n\n".join(lines)


def ablation_table(results: Results) -> str:
    """What each ingredient brings, added one after the other."""
    parts = []
    chosen = [report.COLUMNS.index(name) for name in ABLATION_COLUMNS]
    for result in of_kind(results, ABLATION):
        parts.append(heading(result))
        body = [[row[i] for i in chosen] for row in report.rows(result)]
        parts += [report.markdown_table(ABLATION_COLUMNS, body), report.origin(result)]
    return "\n\n".join(parts)


def activation_table(results: Results) -> str:
    """A row for each op: its geometric mean over sizes and dtypes."""
    return _condensed(results, "op", lambda case: f"`{case['op']}`")


def sizes_table(results: Results) -> str:
    """A row for each dtype and size: the geometric mean over the ops."""
    return _condensed(results, "elements", lambda case: f"{case['dtype']}, {case['size']}")


def ops_table(results: Results) -> str:
    """A table a mode: an op and dtype a row, a size a column; then where memkit is slower."""
    parts = []
    for result in of_kind(results, OPS):
        parts.append(heading(result))
        sizes = list(dict.fromkeys(case["size"] for case in result["cases"]))
        for mode in dict.fromkeys(case["mode"] for case in result["cases"]):
            rows: dict[tuple[str, str], dict[str, str]] = {}
            shown = ["memkit", "in_place", "compiled"] if mode == "forward" else ["memkit", "compiled"]
            for case in (c for c in result["cases"] if c["mode"] == mode):
                cells = [f"{case['ratio'][n]:.2f}" if n in case["ratio"] else "–" for n in shown]
                rows.setdefault((case["op"], case["dtype"]), {})[case["size"]] = " / ".join(cells)
            body = [[*key, *(cells.get(size, "") for size in sizes)] for key, cells in rows.items()]
            order = " / ".join(CONTENDERS["memkit_inplace" if n == "in_place" else n] for n in shown)
            parts.append(f"{mode.capitalize()}, time as a ratio to stock eager: {order}.")
            parts.append(report.markdown_table([mode, "dtype", *sizes], body))
        slow = [line for line in result["slower"] if line.endswith("stock")]
        count = len(result["cases"])
        parts.append(f"Slower than stock eager by more than 5%: {len(slow)} of {count} cases.")
        if result.get("interrupted"):
            parts.append("The run was stopped by its time limit: the operators that are missing come last.")
        parts += ["\n".join(f"- {line}" for line in slow)] if slow else []
        parts.append(report.origin(result))
    return "\n\n".join(parts)


def peers_table(results: Results) -> str:
    """A table a device: an op, dtype and size a row, forward and backward."""
    parts = []
    for result in (results[key] for key in sorted(results) if key[0] == bench_peers.KIND):
        parts.append(heading(result))
        cases = [case for case in result["cases"] if case["mode"] == "forward+backward"]
        names = [name for name in bench_peers.CONTENDERS if any(name in case["ratio"] for case in cases)]
        body = []
        for case in cases:
            row = [case["op"], case["dtype"], case["size"]]
            row += [f"{case['ratio'][n]:.2f}×" if n in case["ratio"] else "–" for n in names if n != "stock"]
            row += [report.size(case["peak"][n]) if n in case["peak"] else "–" for n in names]
            body.append(row)
        labels = {name: bench_peers.CONTENDERS[name] for name in names}
        columns = ["forward+backward", "dtype", "size"]
        columns += [f"time: {label}" for name, label in labels.items() if name != "stock"]
        columns += [f"peak: {label}" for label in labels.values()]
        parts.append(report.markdown_table(columns, body))
        liger = result["versions"]["liger-kernel"]
        note = f"Liger-Kernel {liger}" if liger else f"Liger-Kernel left out ({result['left_out']['liger']})"
        parts.append(
            "Time as a ratio to stock eager; the most bytes alive at a time above the inputs and incoming gradients, over "
            "which Liger writes in some operators. Its two losses wait for the device inside of the call, so that their "
            f"times hold the host's. {note}; {report.origin(result)}"
        )
        slow = [line for line in result["slower"] if line.endswith("Liger")]
        if slow:
            parts.append(
                f"Slower than Liger-Kernel by more than 5%, forward alone included, in {len(slow)} cases:"
            )
            parts.append("\n".join(f"- {line}" for line in slow))
    return "\n\n".join(parts) or "Not yet run."


def loss_table(results: Results) -> str:
    """linear_cross_entropy against the layer and the loss apart."""
    parts = []
    for result in of_kind(results, LOSS):
        parts.append(heading(result))
        body = [
            [
                case["dtype"],
                f"{case['classes']:,}",
                report.size(case["peak"]["stock"]),
                report.size(case["peak"]["memkit"]),
                f"{case['share_of_stock_beside_gradients']:.1%}",
                f"{case['ratio']['memkit']:.2f}×",
                f"{case['ratio']['chunked']:.2f}×" if "chunked" in case["ratio"] else "",
            ]
            for case in result["linear"]
        ]
        columns = [
            "dtype",
            "classes",
            "stock's peak",
            "memkit's",
            "beside gradients",
            "time",
            "PyTorch chunked",
        ]
        parts += [report.markdown_table(columns, body), report.origin(result)]
    return "\n\n".join(parts)


def overhead_table(results: Results) -> str:
    """Nanoseconds a call on 8 elements, the median over the ops."""
    parts = []
    columns = ["", "stock", "memkit", "stock in place", "memkit in place"]
    for result in of_kind(results, ACTIVATION):
        parts.append(heading(result))
        body = []
        for grad in (False, True):
            rows = [row["nanoseconds"] for row in result["overhead"] if row["grad"] is grad]
            cells = []
            for name in ("stock", "memkit", "stock_inplace", "memkit_inplace"):
                known = [ns[name] for ns in rows if name in ns]
                cells.append(f"{statistics.median(known):.0f} ns" if known else "")
            body.append([f"{'with' if grad else 'without'} grad", *cells])
        text = "A call on 8 elements, the median over the activations."
        parts += [report.markdown_table(columns, body), f"{text} {report.origin(result)}"]
    return "\n\n".join(parts)


def pool_table(results: Results) -> str:
    """A training step, and single calls."""
    parts = []
    for result in _whole_pool(results):
        parts.append(heading(result))
        step = result["step"]
        body = []
        for name, taken in step["seconds"].items():
            memory, share = step["reserved_bytes"][name], step["reserved_to_live"][name]
            cells = [report.size(memory), f"{share:.3f}×"] if memory else ["", ""]
            body.append([name, f"{taken * 1e3:.0f} ms", f"{step['ratio'][name]:.3f}×", *cells])
        columns = ["", "step time", "to stock", "peak memory of the step", "to what is alive at most"]
        parts.append(report.markdown_table(columns, body))
        live = report.size(step["live_bytes"])
        if result["hardware"]["device"] == "cuda":
            planned, measured = (
                "",
                "what its caching allocator holds for a step beside the weights, after empty_cache()",
            )
        else:
            planned = f"; {step['served_by_plan']:,} go by the plan when it is replayed"
            measured = (
                "the growth of the resident set in a process of its own, with free memory given back before"
            )
        parts.append(
            f"A training step of the gpt above, batch {step['batch']}: {step['allocations']:,} allocations, at most {live} "
            f"alive at once{planned}. Stock's peak is {measured}; the pool's is the smallest "
            "pool that a step gets through. Ratios are medians of each round's own."
        )
        if "lengths" in result:
            title = f"{bench_pool.pool_step.LENGTHS} steps of varying length"
            rows = bench_pool.lengths_rows(result["lengths"])
            parts.append(report.markdown_table([title, "reserved MiB", "to what is alive at most"], rows))
            whose = (
                "all that its caching allocator holds beside the weights"
                if result["hardware"]["device"] == "cuda"
                else "the growth of the resident set"
            )
            parts.append(
                f"One step each of the same training; stock's is {whose}, from the first step to the last."
            )
        body = []
        for case in result["calls"]:
            for name, taken in case["seconds"].items():
                if name != "stock":
                    times = [f"{each * 1e6:,.2f} µs" for each in (case["seconds"]["stock"], taken)]
                    body.append([case["case"], times[0], name, times[1], f"{case['ratio'][name]:.2f}×"])
        parts += [report.markdown_table(["", "stock", "", "time", "to stock"], body), report.origin(result)]
    return "\n\n".join(parts)


def core_table(results: Results) -> str:
    """Below the tensors: the allocator alone, and the planner."""
    parts = []
    for result in _whole_pool(results):
        if "core" not in bench_pool.PARTS[result["hardware"]["device"]]:
            continue
        parts.append(heading(result))
        stock = result["calls"][0]["seconds"]["stock"] * 1e9
        columns = ["an allocation and its free, with", "memkit", "std::set, best fit", "list, best fit"]
        rows = bench_pool.core_rows(result["core"])
        body = [[head, *(f"{ns} ns" if ns else "" for ns in times)] for head, *times in rows]
        parts.append(report.markdown_table(columns, body))
        parts.append(
            f"The allocator alone, in C++, no memory touched; torch.empty of 4 KiB and its drop take "
            f"{stock:.0f} ns from Python. Among live blocks each pair drops a random one and makes one of another size: "
            "where there are many, most of the time goes into fetching what is known of it from memory (not of where the "
            "benchmark has it: that is fetched before). The last row makes one and drops it again, on top of a million."
        )
        columns = ["plan of", "buffers", "most alive at once", "the plan is above it by", "solved in"]
        parts += [
            report.markdown_table(columns, bench_pool.plan_rows(result["plans"])),
            report.origin(result),
        ]
    return "\n\n".join(parts)


def optim_table(results: Results) -> str:
    parts = []
    for result in of_kind(results, OPTIM):
        parts.append(heading(result))
        names = ["for-loop", "foreach", "memkit", "memkit bf16", "memkit 8bit"]
        columns = ["rule", "parameters", "dtype", "fused", *names, "fused", *names[2:]]
        body = []
        for c in result["steps"]:
            kept = [c["state_bytes"][name] / c["elements"] for name in ("fused", *names[2:])]
            row = [c["rule"], f"{c['elements'] / 1e6:.1f} M in {c['tensors']:,}", c["dtype"]]
            row += [f"{c['seconds']['fused'] * 1e3:.1f} ms", *(f"{c['ratio'][name]:.2f}×" for name in names)]
            body.append([*row, *(f"{each:.2f} B" for each in kept)])
        parts += [report.markdown_table(columns, body), report.origin(result)]
    return "\n\n".join(parts)


def support_table(results: Results) -> str:
    body = []
    for name, tests, kernels, kind in FEATURES:
        if not (ROOT / tests).exists():
            continue
        gpu = results.get((kind, "cuda"))
        if gpu:
            cuda = f"run on {gpu['hardware']['gpu']}, {gpu['date'][:10]}"
        elif kernels is None:
            cuda = "not yet run on a GPU"
        elif (ROOT / kernels).exists():
            cuda = "compiled, not yet run on a GPU"
        else:
            cuda = "no"
        body.append([name, "tested", cuda])
    return report.markdown_table(["", "CPU", "CUDA"], body)


def checks_text(results: Results) -> str:
    lines = []
    for result in of_kind(results, CHECKS):
        hardware, versions = result["hardware"], result["versions"]
        said = "; ".join(f"{stage}: {', '.join(each)}" for stage, each in result["said"].items())
        where = f"{hardware['gpu']}, driver {hardware['driver']}, PyTorch {versions['torch']}, nvcc {versions['nvcc']}"
        lines.append(f"{said}. {where}; {result['date'][:10]}, commit {result['commit'][:10]}.")
    return "\n\n".join(lines)


def models_table(results: Results) -> str:
    """A row for each model."""
    parts = []
    for result in of_kind(results, bench_models.KIND):
        table = report.markdown_table(bench_models.COLUMNS, bench_models.rows(result))
        batch = result.get("batch", 1)
        said = f"batches of {batch} times as many; " if batch > 1 else ""
        parts += [table, f"{said}{_libraries(result)}; {report.origin(result)}"]
    return "\n\n".join(parts)


def steps_table(results: Results) -> str:
    """A row for each model and variant, on a GPU."""
    result = results.get((bench_steps.KIND, "cuda"))
    if result is None:
        return "Not yet run on a GPU."
    table = report.markdown_table(bench_steps.columns(result), bench_steps.rows(result))
    said = f"{bench_steps.libraries(result)}{report.origin(result)}"
    return "\n\n".join([table, bench_steps.conditions(result), said])


def matrix_table(results: Results) -> str:
    """A row for each model: ticks, and the numbers of notes."""
    parts = []
    for result in of_kind(results, bench_matrix.KIND):
        columns = bench_matrix.columns_of(result)
        notes: dict[str, int] = {}
        body = []
        for name, cells in result["cells"].items():
            marks = []
            for cell in map(cells.get, columns):
                mark = bench_matrix.MARKS[cell["state"]] if cell else ""
                if cell and cell["reason"]:
                    note = f"{cell['state']}: `{cell['reason']}`"
                    mark = f"{mark} ({notes.setdefault(note, len(notes) + 1)})".strip()
                marks.append(mark)
            body.append([name, *marks])
        parts.append(report.markdown_table(["", *columns], body))
        parts += ["\n".join(f"{number}. {note}" for note, number in notes.items())] if notes else []
        states = [cell["state"] for cells in result["cells"].values() for cell in cells.values()]
        counted = [f"{state} {states.count(state)}" for state in bench_matrix.MARKS if state in states]
        parts.append(f"Of {len(states)} cells: {', '.join(counted)}.")
        parts.append(f"{_libraries(result)}; {report.origin(result)}")
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[Results], str]] = {
    "bench": bench_table,
    "large": lambda results: bench_table(results, LARGE),
    "steps": steps_table,
    "losses": losses_text,
    "highlights": highlights_table,
    "ablation": ablation_table,
    "activation": activation_table,
    "activation-sizes": sizes_table,
    "overhead": overhead_table,
    "ops": ops_table,
    "peers": peers_table,
    "linear-cross-entropy": loss_table,
    "pool": pool_table,
    "pool-core": core_table,
    "optim": optim_table,
    "models": models_table,
    "matrix": matrix_table,
    "support": support_table,
    "checks": checks_text,
}


def _libraries(result: Result) -> str:
    versions = result["versions"]
    return ", ".join(f"{name} {versions[name]}" for name in bench_matrix.LIBRARIES if versions.get(name))


def _whole_pool(results: Results) -> list[Result]:
    found = of_kind(results, POOL)
    for result in found:
        parts = bench_pool.PARTS[result["hardware"]["device"]]
        # Lengths are optional: there were results before there were lengths.
        missing = [part for part in parts if part != "lengths" and "error" in result.get(part, ["error"])]
        if missing:
            raise ReportError(
                f"report: expected pool results with every part, got none of {', '.join(missing)}"
            )
    return found


def _condensed(results: Results, head: str, label: Callable[[Result], str]) -> str:
    parts = []
    for result in of_kind(results, ACTIVATION):
        parts.append(heading(result))
        modes = list(dict.fromkeys(case["mode"] for case in result["cases"]))
        columns = [head, *(f"{mode}: {text}" for mode in modes for text in CONTENDERS.values())]
        groups: dict[str, list[Result]] = {}
        for case in result["cases"]:
            groups.setdefault(label(case), []).append(case)
        body = []
        for name, cases in groups.items():
            row = [name]
            for mode in modes:
                for contender in CONTENDERS:
                    chosen = [c["ratio"] for c in cases if c["mode"] == mode and contender in c["ratio"]]
                    mean = statistics.geometric_mean([each[contender] for each in chosen]) if chosen else None
                    row.append(f"{mean:.2f}×" if mean else "")
            body.append(row)
        options = result["options"]
        over = f"Sizes {', '.join(options['sizes'])}; {', '.join(options['dtypes'])}; torch.compile "
        over += "for each size." if options["static"] else "once for all sizes (dynamic=True)."
        again = [case for case in result["cases"] if "processes" in case]
        if again:
            over += f" {len(again)} cases in which memkit seemed slower: the median of {again[0]['processes']} processes."
        text = f"Time as a ratio to stock eager, the geometric mean over a row's cases. {over}"
        parts += [report.markdown_table(columns, body), f"{text} {report.origin(result)}"]
    return "\n\n".join(parts)
