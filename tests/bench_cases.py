"""What the tests of the benchmarks share: the smallest job."""

from pathlib import Path

from memkit import cli

ROOT = Path(__file__).resolve().parents[1]
TINY = "--dropout 0 --layers 1 --d-model 32 --heads 2 --seq-len 32 --vocab 400 --batch 4 --steps 4 --device cpu --quiet"


def bench(argv: str, out: Path) -> int:
    return cli.main(["bench", *f"{TINY} {argv}".split(), "--out", str(out)])
