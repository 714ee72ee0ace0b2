"""Tokenized examples on disk, of one text or two: [CLS] A [SEP] B [SEP]."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from tokenizers import Tokenizer
from torch import Tensor

from onebit.lab.tasks.tokenizer import CLS, PAD, SEP

FORMAT = 1  # a part of the cache's key: increase it when the stored format changes


@dataclass(frozen=True)
class Examples:
    """The tokens of all examples, end to end.

    tokens: int32 [n].
    starts: int64 [m + 1], where each example starts in `tokens`, and n at the end.
    second: int64 [m], the number of the example's tokens before B.
    labels: [m], or [m, k].
    pad: the number of the piece [PAD].
    """

    tokens: np.ndarray
    starts: np.ndarray
    second: np.ndarray
    labels: np.ndarray
    pad: int

    def __len__(self) -> int:
        return len(self.second)

    def inputs(self, chosen: Sequence[int]) -> dict[str, Tensor]:
        """These examples as the inputs of a BERT, padded to the longest of them."""
        rows = [self.tokens[self.starts[i] : self.starts[i + 1]] for i in chosen]
        ids = np.full((len(rows), max(map(len, rows))), self.pad, np.int64)
        attended, is_b = np.zeros_like(ids), np.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], attended[i, : len(row)] = row, 1
            is_b[i, self.second[chosen[i]] : len(row)] = 1
        arrays = {"input_ids": ids, "token_type_ids": is_b, "attention_mask": attended}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def sha256(self) -> str:
        """The checksum of tokens and labels."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.starts, self.labels):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()


def joined(
    examples: Iterable[tuple[list[int], list[int] | None, object]], tokenizer: Tokenizer
) -> Examples:
    """Examples of (A, B or None, label), with their [CLS] and [SEP]."""
    cls, sep, pad = (tokenizer.token_to_id(piece) for piece in (CLS, SEP, PAD))
    tokens, starts, second, labels = [], [0], [], []
    for a, b, label in examples:
        tokens += [cls, *a, sep] + ([] if b is None else [*b, sep])
        starts.append(len(tokens))
        second.append(len(a) + 2)
        labels.append(label)
    return Examples(
        np.array(tokens, np.int32), np.array(starts), np.array(second), np.array(labels), pad
    )


def cut_pair(a: list[int], b: list[int], room: int) -> tuple[list[int], list[int]]:
    """Both texts, cut to `room` tokens together: the longer one is cut first, at its end."""
    length_a = max(min(len(a), room - len(b)), min(len(a), (room + 1) // 2))
    return a[:length_a], b[: room - length_a]


def cached(cache: Path, key: str, build: Callable[[], Examples]) -> Examples:
    """What `build` returns, from `cache`, or built there by one process while the others wait."""
    path = cache / f"examples-{hashlib.sha256(f'{FORMAT}|{key}'.encode()).hexdigest()[:16]}.npz"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            partial = path.with_suffix(".partial.npz")
            np.savez(partial, **vars(build()))
            partial.rename(path)
    with np.load(path) as arrays:
        return Examples(**{name: arrays[name] for name in arrays})
