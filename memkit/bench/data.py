"""Training data that every machine already has: Python's own standard library, and scikit-learn's digits."""

# torch.nn calls return Any, and parts of torch are untyped.
# mypy: disable-error-code="no-any-return,no-untyped-call"

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from .options import TRAIN_DIGITS, OptionError

CORPUS_BYTES = 4 << 20  # a bound, so that the tokenizer trains in seconds
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_text(limit: int) -> str:
    """Python sources of the running interpreter's standard library, in sorted order, up to `limit` bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    size = 0
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if _SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        parts.append(text)
        size += len(text.encode())
        if size >= limit:
            break
    return "".join(parts)


def corpus_tokens(vocab: int, cache: Path) -> Tensor:
    """The standard library as BPE tokens of a tokenizer trained on it; kept in `cache`, by content."""
    import tokenizers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = stdlib_text(CORPUS_BYTES)
    key = hashlib.sha256(f"{tokenizers.__version__} {vocab}\n{text}".encode()).hexdigest()[:20]
    file = cache / f"stdlib-bpe{vocab}-{key}.pt"
    if file.exists():
        return torch.load(file, weights_only=True).long()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    lines = text.splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    # Line by line: one string of megabytes is tokenized on one core, lines on all.
    tokens = torch.tensor([i for line in tokenizer.encode_batch(lines) for i in line.ids], dtype=torch.int32)
    cache.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save(tokens, partial)
    partial.replace(file)  # whole or not at all, should two jobs share the folder
    return tokens.long()


def windows(tokens: Tensor, length: int, batch: int, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of random windows, each with the same windows one token later."""
    if len(tokens) <= length:
        raise OptionError(
            f"bench: the corpus must be longer than seq-len, got {len(tokens)} tokens and {length}"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - length, (count, batch, 1), generator=generator)
    picked = tokens[starts + torch.arange(length + 1)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in picked]


def digits(batch: int, count: int, seed: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """`count` training batches, epoch after epoch, from 80% of the digits; the other 20% to test on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target, dtype=torch.long)
    train, test = train_test_split(
        range(len(labels)), train_size=TRAIN_DIGITS, random_state=seed, stratify=data.target
    )
    generator = torch.Generator().manual_seed(seed)
    pool = torch.tensor(train)
    order = torch.cat(
        [pool[torch.randperm(len(pool), generator=generator)] for _ in range(-(-count * batch // len(pool)))]
    )
    batches = [(images[rows], labels[rows]) for rows in order[: count * batch].split(batch)]
    return batches, (images[test], labels[test])
