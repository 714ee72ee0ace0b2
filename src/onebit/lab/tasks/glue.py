"""GLUE: single sentences or pairs of them are classified or, for STS-B, scored."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from transformers import BertForSequenceClassification

from onebit.lab.tasks.examples import Examples, cached, cut_pair, joined
from onebit.lab.tasks.finetune import FineTuning, in_parts, on_device
from onebit.lab.tasks.hub import HubRows

if TYPE_CHECKING:
    from onebit.lab.tasks.made_up import MadeUpGlue


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """The share of predictions that are right."""
    return float((predicted == labels).mean())


def f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """2 TP / (2 TP + FP + FN) of class 1; 0 if it neither occurs nor is predicted."""
    right = int(((predicted == 1) & (labels == 1)).sum())
    return 2 * right / max(1, int((predicted == 1).sum() + (labels == 1).sum()))


def matthews(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Matthews' correlation of two classes: Pearson's correlation of the numbers 0 and 1."""
    return pearson(predicted, labels)


def pearson(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Pearson's correlation."""
    return float(stats.pearsonr(predicted, labels).statistic) if vary(predicted, labels) else 0.0


def spearman(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Spearman's rank correlation."""
    return float(stats.spearmanr(predicted, labels).statistic) if vary(predicted, labels) else 0.0


def vary(*columns: np.ndarray) -> bool:
    """Whether a correlation is defined. If it is not, as with one class for all, it counts as 0."""
    return all(np.ptp(column) > 0 for column in columns)


class GlueTask(NamedTuple):
    """What is particular to a task.

    columns: the names of the columns with the texts.
    classes: their number; 1 for a score.
    metrics: the official ones; the first one is compared.
    tests: the splits that are evaluated.
    """

    columns: tuple[str, ...]
    classes: int
    metrics: tuple[Callable, ...]
    tests: tuple[str, ...] = ("validation",)


PAIR = ("sentence1", "sentence2")
# The tasks of the papers' tables, neither of which has WNLI.
GLUE = {
    "cola": GlueTask(("sentence",), 2, (matthews,)),
    "sst2": GlueTask(("sentence",), 2, (accuracy,)),
    "mrpc": GlueTask(PAIR, 2, (accuracy, f1)),
    "stsb": GlueTask(PAIR, 1, (spearman, pearson)),
    "qqp": GlueTask(("question1", "question2"), 2, (accuracy, f1)),
    "mnli": GlueTask(
        ("premise", "hypothesis"), 3, (accuracy,), ("validation_matched", "validation_mismatched")
    ),
    "qnli": GlueTask(("question", "sentence"), 2, (accuracy,)),
    "rte": GlueTask(PAIR, 2, (accuracy,)),
}


class HubGlue:
    """The splits of a task, from the hub or from data_root/glue/<task>/<split>.parquet."""

    def __init__(self, *, path: str, data_root: str | None):
        self.path, self.data_root = path, data_root

    def split(self, name: str, split: str) -> HubRows:
        return HubRows(
            name=f"glue/{name}", path=self.path, config=name, split=split, data_root=self.data_root
        )


class Glue(FineTuning):
    """A task of GLUE (Wang et al. 2019), evaluated on its development set, whose labels are public.

    The metrics are the official ones, in %: `matthews` for CoLA; `pearson` and `spearman` for
    STS-B, whose scores are learned by the mean squared error; `accuracy` for the others, and also
    `f1` for MRPC and QQP. `accuracy_mismatched` is that of MNLI's second development set.

    name: the hub's name of the task.
    data: `HubGlue`, or `made_up.MadeUpGlue`.
    test_subset: evaluate only so many first examples of each development set; None: all.
    """

    network = BertForSequenceClassification

    def __init__(
        self,
        *,
        name: str,
        data: "HubGlue | MadeUpGlue",
        test_subset: int | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        if name not in GLUE:
            raise ValueError(f"GLUE's tasks are {', '.join(GLUE)}, not {name}.")
        self.name = name
        self.about = GLUE[name]
        self.data = data
        self.test_subset = test_subset

    def head(self) -> dict:
        return {"num_labels": self.about.classes}

    @cached_property
    def train(self) -> Examples:
        return self._examples("train")

    @cached_property
    def test(self) -> dict[str, Examples]:
        """{suffix of the metrics' names: examples of a development set}."""
        suffix = {"validation_mismatched": "_mismatched"}
        return {
            suffix.get(split, ""): self._examples(split, self.test_subset)
            for split in self.about.tests
        }

    def _examples(self, split: str, count: int | None = None) -> Examples:
        rows = self.data.split(self.name, split)
        documents = self.data.split(self.name, "train")  # the tokenizer may be trained on them
        key = (
            f"glue {self.name} {rows.fingerprint()} {documents.fingerprint()} "
            f"{self.wordpiece.fingerprint()} {self.length} {count}"
        )
        return cached(
            self.cache,
            key,
            lambda: joined(
                self._tokenized(rows.load(*self.about.columns, "label"), count), self.tokenizer
            ),
        )

    def _tokenized(self, rows: Any, count: int | None) -> Iterator[tuple]:
        for part in in_parts(min(count or len(rows), len(rows)), 1000):
            some = [rows[i] for i in part]
            sides = [
                self.tokenizer.encode_batch([row[column] for row in some], add_special_tokens=False)
                for column in self.about.columns
            ]
            for row, *encoded in zip(some, *sides, strict=True):
                yield *self._cut([side.ids for side in encoded]), self._label(row["label"])

    def _cut(self, sides: list[list[int]]) -> tuple[list[int], list[int] | None]:
        if len(sides) == 1:
            return sides[0][: self.length - 2], None
        return cut_pair(*sides, room=self.length - 3)

    def _label(self, label: int | float) -> int | float:
        if self.about.classes > 1 and label not in range(self.about.classes):
            raise RuntimeError(
                f"{self.name} has a label {label}, and has {self.about.classes} classes: use "
                "splits whose labels are public."
            )
        return label

    def documents(self) -> Iterator[str]:
        for row in self.data.split(self.name, "train").load(*self.about.columns, "label"):
            yield from (row[column] for column in self.about.columns)

    def labels(self, labels: np.ndarray) -> dict[str, Tensor]:
        return {
            "labels": torch.from_numpy(
                labels.astype(np.float32 if self.about.classes == 1 else np.int64)
            )
        }

    @torch.no_grad()
    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        model.eval()
        found = {}
        for suffix, examples in self.test.items():
            logits = torch.cat(
                [
                    model(**on_device(examples.inputs(part), device)).logits.float().cpu()
                    for part in in_parts(len(examples))
                ]
            )
            predicted = (logits[:, 0] if self.about.classes == 1 else logits.argmax(1)).numpy()
            found |= {
                metric.__name__ + suffix: 100 * metric(predicted, examples.labels)
                for metric in self.about.metrics
            }
        return found

    @property
    def data_summary(self) -> str:
        """What a caption says of the data."""
        return f"{len(self.train):,} examples of GLUE's {self.name}, {self.length} tokens at most"

    def data_description(self) -> dict:
        """What run.json says of the data."""
        splits = {"train": self.train} | {
            split: examples
            for split, examples in zip(self.about.tests, self.test.values(), strict=True)
        }
        return {
            split: {
                "source": self.data.split(self.name, split).source,
                "examples": len(examples),
                "sha256": examples.sha256(),
            }
            for split, examples in splits.items()
        }
