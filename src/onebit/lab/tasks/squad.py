"""SQuAD 1.1: find the part of a text that answers a question."""

import re
import string
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertForQuestionAnswering

from onebit.lab.tasks.examples import Examples, cached, joined
from onebit.lab.tasks.finetune import FineTuning, in_parts, on_device

COLUMNS = ("context", "question", "answers")
LONGEST_ANSWER = 30  # in tokens
NOWHERE = (0, 0)  # where the answer is in a window that does not hold it: at [CLS]


class Window(NamedTuple):
    """A question with a part of its text.

    row: the number of the question.
    spans: for each token of the part, (start, end) of its characters in the text.
    """

    row: int
    question: list[int]
    part: list[int]
    spans: list[tuple[int, int]]


class Squad(FineTuning):
    """SQuAD 1.1 (Rajpurkar et al. 2016): the answer to a question is a part of a text.

    An example is [CLS] question [SEP] text [SEP]. The loss is the mean of the cross-entropies of
    the answer's two ends. A text that is too long is cut into overlapping windows, each of which
    begins `stride` tokens after the one before. In a window that does not hold the whole answer,
    both ends are at [CLS].

    The prediction is the part of at most 30 tokens, in all windows of the question, with the
    greatest sum of its ends' logits. The metrics are `exact_match` and `f1` (see `f1_score`), in %.
    Of several right answers to a question, the best one counts.

    train, test: rows with a context, a question and answers, see `HubRows`.
    stride, question_length: in tokens; a longer question is cut at its end.
    subset, test_subset: use so many first questions only; None: all.
    """

    network = BertForQuestionAnswering

    def __init__(
        self,
        *,
        train: Any,
        test: Any,
        stride: int,
        question_length: int,
        subset: int | None = None,
        test_subset: int | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        if stride < 1 or question_length < 1 or self.length < question_length + 4:
            raise ValueError(
                f"length={self.length}, stride={stride} and question_length={question_length} "
                "leave no room for the text: a window has room for length - question_length - 3 "
                "tokens of it."
            )
        self.sources = {"train": (train, subset), "test": (test, test_subset)}
        self.stride, self.question_length = stride, question_length

    def _rows(self, name: str) -> list[dict]:
        source, count = self.sources[name]
        rows = source.load(*COLUMNS)
        rows = [rows[i] for i in range(min(count or len(rows), len(rows)))]
        for row in rows:
            if not row["answers"]["text"]:
                raise RuntimeError(
                    f"{row['question']!r} has no answer in {source.source}: SQuAD 1.1 has one to "
                    "every question, SQuAD 2.0 does not."
                )
        return rows

    @cached_property
    def train(self) -> Examples:
        source, count = self.sources["train"]
        key = (
            f"squad {source.fingerprint()} {self.wordpiece.fingerprint()} {self.length} "
            f"{self.stride} {self.question_length} {count}"
        )
        return cached(self.cache, key, self._build)

    def _build(self) -> Examples:
        rows = self._rows("train")
        found = self.windows(rows)
        return joined(
            ((w.question, w.part, ends(w, rows[w.row]["answers"])) for w in found), self.tokenizer
        )

    @cached_property
    def test(self) -> tuple[list[dict], list[Window]]:
        """The evaluated questions, and all windows of their texts."""
        rows = self._rows("test")
        return rows, list(self.windows(rows))

    def windows(self, rows: list[dict]) -> Iterator[Window]:
        """All windows of the texts, in the order of the questions."""
        for chunk in in_parts(len(rows), 1000):
            questions, contexts = (
                self.tokenizer.encode_batch(
                    [rows[i][name] for i in chunk], add_special_tokens=False
                )
                for name in ("question", "context")
            )
            for i, asked, text in zip(chunk, questions, contexts, strict=True):
                question = asked.ids[: self.question_length]
                room = self.length - 3 - len(question)
                for start in window_starts(len(text.ids), room, self.stride):
                    yield Window(
                        i,
                        question,
                        text.ids[start : start + room],
                        text.offsets[start : start + room],
                    )

    def documents(self) -> Iterator[str]:
        for row in self._rows("train"):
            yield f"{row['question']} {row['context']}"

    def labels(self, labels: np.ndarray) -> dict[str, Tensor]:
        first, last = torch.from_numpy(labels.astype(np.int64)).unbind(1)
        return {"start_positions": first, "end_positions": last}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        model.eval()
        rows, windows = self.test
        examples = joined(((w.question, w.part, 0) for w in windows), self.tokenizer)
        best = [(-float("inf"), "")] * len(rows)
        for part in in_parts(len(windows)):
            output = model(**on_device(examples.inputs(part), device))
            for i, (score, first, last) in zip(
                part, answers(output, [windows[i] for i in part]), strict=True
            ):
                window = windows[i]
                # The scores of a diverged model are NaN or -inf, which are never better.
                if score > best[window.row][0]:
                    begin, end = window.spans[first][0], window.spans[last][1]
                    best[window.row] = score, rows[window.row]["context"][begin:end]
        found = [(text, row["answers"]["text"]) for (_, text), row in zip(best, rows, strict=True)]
        return {
            score.__name__.removesuffix("_score"): 100
            * float(np.mean([max(score(text, right) for right in known) for text, known in found]))
            for score in (exact_match, f1_score)
        }

    @property
    def data_summary(self) -> str:
        """What a caption says of the data."""
        return f"{len(self.train):,} windows of {self.length} tokens of SQuAD's questions"

    def data_description(self) -> dict:
        """What run.json says of the data."""
        train, test = self.sources["train"][0], self.sources["test"][0]
        return {
            "train": {
                "source": train.source,
                "windows": len(self.train),
                "sha256": self.train.sha256(),
            },
            "test": {"source": test.source, "questions": len(self.test[0])},
        }


def window_starts(count: int, room: int, stride: int) -> list[int]:
    """Where the windows begin that cover all of `count` tokens."""
    starts = [0]
    while starts[-1] + room < count:
        starts.append(starts[-1] + min(stride, room))
    return starts


def ends(window: Window, known: dict) -> tuple[int, int]:
    """The places of the first and the last token of the first right answer.

    They are counted in [CLS] question [SEP] text [SEP]. known: the answers of a row.
    """
    begin = known["answer_start"][0]
    end = begin + len(known["text"][0])
    if not window.spans or window.spans[0][0] > begin or window.spans[-1][1] < end:
        return NOWHERE
    first = sum(span_end <= begin for _, span_end in window.spans)
    last = sum(span_start < end for span_start, _ in window.spans) - 1
    before = len(window.question) + 2
    return before + first, before + last


def answers(output: Any, windows: list[Window]) -> Iterator[tuple[float, int, int]]:
    """For each window: the score, the first and the last token of the best answer.

    The tokens are counted in the window's part of the text. output: the network's.
    """
    width = output.start_logits.shape[1]
    allowed = torch.zeros(len(windows), width, dtype=torch.bool)
    for i, window in enumerate(windows):
        allowed[i, len(window.question) + 2 :][: len(window.part)] = True
    starts, stops = (
        logits.float().cpu().masked_fill(~allowed, -torch.inf)
        for logits in (output.start_logits, output.end_logits)
    )
    ordered = torch.ones(width, width, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
    scores = (starts[:, :, None] + stops[:, None, :]).masked_fill(~ordered, -torch.inf).flatten(1)
    for window, score, place in zip(
        windows, *(tensor.tolist() for tensor in scores.max(1)), strict=True
    ):
        before = len(window.question) + 2
        yield score, place // width - before, place % width - before


def normalised(text: str) -> list[str]:
    """The words of an answer in lower case, without punctuation, a, an and the."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def exact_match(predicted: str, right: str) -> float:
    """1 if both have the same words in the same order, else 0."""
    return float(normalised(predicted) == normalised(right))


def f1_score(predicted: str, right: str) -> float:
    """The harmonic mean of precision and recall of the words; 0 if none is shared.

    A word counts as often as it occurs.
    """
    one, two = normalised(predicted), normalised(right)
    shared = sum((Counter(one) & Counter(two)).values())
    return 2 * shared / (len(one) + len(two)) if shared else 0.0
