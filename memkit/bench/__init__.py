"""`memkit bench`: stock PyTorch eager, stock torch.compile and memkit train the same models on this machine.

options.py   what can be asked for, and the checks before any work
data.py      Python's standard library as BPE tokens; scikit-learn's digits
models.py    the two networks, plain PyTorch
train.py     the variants of a model, side by side
pooled.py    a step in a pool
timing.py    contenders in turns, medians of ratios
machine.py   hardware, versions, commit
report.py    table, plot, JSON
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

from . import machine, report
from .options import OptionError as OptionError
from .options import Options as Options
from .options import checked
from .timing import until_interrupted


def run(options: Options) -> dict[str, Any]:
    """The whole job; returns what the JSON file holds. OptionError, before any training, if it cannot run.

    A KeyboardInterrupt ends it: the models that were finished by then are in the result, which says `interrupted`.
    """
    options = checked(options)

    from tqdm import tqdm

    from .train import TASKS, compare

    started = time.perf_counter()
    result: dict[str, Any] = {"kind": report.KIND, "format": report.FORMAT, **machine.stamp(options.device)}
    result["options"] = options.as_json()
    result["models"] = {}
    total = sum(options.steps_of(model) for model in options.models) * len(options.runs)
    # disable=None: drawn on a terminal, silent in a log, where the lines of say() tell how far it is.
    with tqdm(total=total, unit="step", disable=True if options.quiet else None) as bar:

        def say(text: str) -> None:
            if not options.quiet:
                tqdm.write(text, file=sys.stderr)

        def advance() -> None:
            bar.update()

        say("preparing data")
        tasks = [TASKS[model](options) for model in options.models]
        # What is imported by now lives on: without it a collection takes a tenth of the time, in the steps too.
        gc.collect()
        gc.freeze()
        try:
            with until_interrupted(result):
                for task in tasks:
                    result["models"][task.name] = compare(task, options, say, advance)
        finally:
            gc.unfreeze()
    result["wall_seconds"] = round(time.perf_counter() - started, 1)
    return result
