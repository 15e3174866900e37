"""What `memkit bench` can be asked for, and the checks that run before any work starts."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

MODELS = ("gpt", "cnn")
VARIANTS = ("eager", "compile", "memkit")
# What the variant memkit is made of: operators that memkit.swap changes, the head and its loss as one, memkit.lean(),
# and memkit.optim.AdamW with its steps inside of backward (after it where there is a GradScaler).
INGREDIENTS = ("activations", "norms", "dropouts", "loss", "lean", "optimizer")
POOLS = ("none", "use", "plan")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Sized so that the whole job, compilation included, stays under five minutes on two CPU cores.
BATCH = {"gpt": 4, "cnn": 128}
STEPS = {"gpt": 20, "cnn": 60}

TRAIN_DIGITS = 1437  # 80% of scikit-learn's

WARM_STEPS = 2  # the first steps compile and create the optimizer state: their times do not count
LEAST_STEPS = WARM_STEPS + 1


class OptionError(ValueError):
    """Options that cannot run here, or not together. Raised before any work."""


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = MODELS
    variants: tuple[str, ...] = VARIANTS
    layers: int = 6
    d_model: int = 384
    heads: int = 6
    seq_len: int = 256
    vocab: int = 8192
    dropout: float = 0.1
    batch: int | None = None
    steps: int | None = None
    device: str = "auto"
    dtype: str | None = None
    amp: bool = False
    exact: bool = True
    pool: str = "none"
    ingredients: tuple[str, ...] = INGREDIENTS
    ablation: bool = False
    seed: int = 0
    out: Path = Path("benchmark-results")
    json: Path | None = None
    plot: bool = True
    quiet: bool = False

    @property
    def runs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What is trained: the name of each variant, and what memkit's are made of."""
        if not self.ablation:
            return tuple((name, self.ingredients) for name in self.variants)
        stock = [(name, ()) for name in self.variants if name != "memkit"]
        made = [self.ingredients[:count] for count in range(1, len(self.ingredients) + 1)]
        names = [f"memkit: {made[0][0]}", *(f"+ {parts[-1]}" for parts in made[1:])]
        return (*stock, *zip(names, made, strict=True))

    def batch_of(self, model: str) -> int:
        return self.batch if self.batch is not None else BATCH[model]

    def steps_of(self, model: str) -> int:
        return self.steps if self.steps is not None else STEPS[model]

    @property
    def torch_dtype(self) -> torch.dtype:
        assert self.dtype is not None, "checked() fills it in"
        return DTYPES[self.dtype]

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Under AMP the parameters stay float32 and `dtype` is what autocast computes in."""
        return torch.float32 if self.amp else self.torch_dtype

    @property
    def results_file(self) -> Path:
        return self.json or self.out / "bench.json"

    def as_json(self) -> dict[str, Any]:
        # Where results go are paths of the machine that measured; they say nothing about the numbers.
        kept = {k: v for k, v in asdict(self).items() if k not in ("out", "json", "plot", "quiet")}
        kept["batch"] = {m: self.batch_of(m) for m in self.models}
        kept["steps"] = {m: self.steps_of(m) for m in self.models}
        return kept


def checked(options: Options) -> Options:
    """`options` with the defaults that depend on the machine filled in; OptionError for what cannot run."""
    _check_names(options)
    _check_sizes(options)
    device = _device(options.device)
    dtype = options.dtype or ("bfloat16" if options.amp else "float32")
    if dtype not in DTYPES:
        raise OptionError(f"bench: dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if options.amp and dtype == "float32":
        raise OptionError("bench: amp needs dtype bfloat16 or float16 to compute in, got float32")
    if dtype == "float16" and not options.amp:
        raise OptionError("bench: dtype float16 needs amp (float16 weights underflow in AdamW), got amp off")
    if dtype == "bfloat16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise OptionError(
            f"bench: dtype bfloat16 needs a GPU that has it, got {torch.cuda.get_device_name()}"
        )
    if options.results_file.is_dir():
        raise OptionError(f"bench: json must be a file, got the folder {options.results_file}")
    _check_ablation(options)
    _check_pool(options, device)
    _check_packages(options)
    _make_folder("out must be a folder", options.out)
    _make_folder("json must lie in a folder", options.results_file.parent)
    return replace(options, device=device, dtype=dtype)


def _check_names(options: Options) -> None:
    asked = (
        ("model", options.models, MODELS),
        ("variants", options.variants, VARIANTS),
        ("ingredients", options.ingredients, INGREDIENTS),
    )
    for what, got, known in asked:
        unknown = [name for name in got if name not in known]
        if unknown or not got:
            raise OptionError(
                f"bench: {what} must be of {', '.join(known)}, got {', '.join(unknown) or 'nothing'}"
            )
        if len(set(got)) != len(got):
            raise OptionError(f"bench: {what} must name each once, got {', '.join(got)}")
    if "eager" not in options.variants:
        given = ", ".join(options.variants)
        raise OptionError(
            f"bench: variants must contain eager, to which the others are compared, got {given}"
        )


def _check_sizes(options: Options) -> None:
    floors = {
        "layers": 1,
        "d_model": 1,
        "heads": 1,
        "seq_len": 2,
        "vocab": 300,
        "batch": 2,
        "steps": LEAST_STEPS,
    }
    for name, floor in floors.items():
        value = getattr(options, name)
        if value is not None and value < floor:
            raise OptionError(f"bench: {name.replace('_', '-')} must be at least {floor}, got {value}")
    if "cnn" in options.models and options.batch_of("cnn") > TRAIN_DIGITS:
        raise OptionError(
            f"bench: batch must be at most {TRAIN_DIGITS} for the cnn, which trains on as many digits, "
            f"got {options.batch_of('cnn')}"
        )
    if options.d_model % options.heads:
        raise OptionError(
            f"bench: d-model must be a multiple of heads, got {options.d_model} and {options.heads}"
        )
    if not 0 <= options.dropout < 1:
        raise OptionError(f"bench: dropout must lie in 0 .. 1, 1 excluded, got {options.dropout}")
    if not 0 <= options.seed < 2**31:
        raise OptionError(f"bench: seed must lie in 0 .. 2^31 - 1, got {options.seed}")


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise OptionError(f"bench: device must be auto, cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        why = "no GPU in sight" if torch.version.cuda else f"the CPU build of torch ({torch.__version__})"
        raise OptionError(f"bench: device cuda needs a CUDA GPU and a CUDA build of torch, got {why}")
    return name


def _make_folder(expected: str, folder: Path) -> None:
    """One that can be written to: a run of minutes must not end without a place for its results."""
    found = next(each for each in (folder, *folder.parents) if each.exists())
    if not found.is_dir():
        raise OptionError(f"bench: {expected}, got the file {found}")
    if not os.access(found, os.W_OK | os.X_OK):
        raise OptionError(f"bench: {expected} that can be written to, got {found}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file system may refuse what permissions allow
        raise OptionError(f"bench: {expected}, got {folder}: {error.strerror}") from None


def _check_ablation(options: Options) -> None:
    if options.ablation and "memkit" not in options.variants:
        given = ", ".join(options.variants)
        raise OptionError(f"bench: ablation needs the variant memkit, whose parts it adds up, got {given}")


def _check_pool(options: Options, device: str) -> None:
    if options.pool not in POOLS:
        raise OptionError(f"bench: pool must be one of {', '.join(POOLS)}, got {options.pool}")
    if options.pool != "none" and "memkit" not in options.variants:
        given = ", ".join(options.variants)
        raise OptionError(
            f"bench: pool {options.pool} needs the variant memkit, whose step it serves, got {given}"
        )
    if options.pool != "none" and options.ablation:
        raise OptionError(f"bench: ablation needs pool none, got {options.pool}")
    if options.pool == "plan" and device != "cpu":
        raise OptionError(f"bench: pool plan needs device cpu, where plans are replayed, got {device}")


def _check_packages(options: Options) -> None:
    needed = {"tqdm": "tqdm"}
    if "gpt" in options.models:
        needed["tokenizers"] = "tokenizers"
    if "cnn" in options.models:
        needed["sklearn"] = "scikit-learn"
    if options.plot:
        needed["matplotlib"] = "matplotlib"
    missing = [pip for module, pip in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise OptionError(f"bench: needs packages that are not installed: pip install {' '.join(missing)}")
