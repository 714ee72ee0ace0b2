"""SQuAD 1.1: the answer to a question is a part of a text."""

import re
import string
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertForQuestionAnswering

from onebit.lab.tasks.examples import Examples, cached, joined
from onebit.lab.tasks.finetune import FineTuning, in_parts, on_device

COLUMNS = ("context", "question", "answers")
LONGEST_ANSWER = 30  # tokens
NOWHERE = (0, 0)  # the answer, at [CLS], of a window that does not hold it


class Window(NamedTuple):
    """A question with a part of its text. row: its number. spans: for each token of the part, its characters in the text, (start, end)."""

    row: int
    question: list[int]
    part: list[int]
    spans: list[tuple[int, int]]


class Squad(FineTuning):
    """Rajpurkar et al. 2016: [CLS] question [SEP] text [SEP]; the loss is the mean of the cross-entropies of the answer's two ends.

    A text that is too long is cut into windows that overlap: each begins `stride` tokens after the one before. In a window that does not
    hold the whole answer, both ends are at [CLS]. The prediction is the part of at most 30 tokens with the greatest sum of its ends' logits
    in all windows of the question. Metrics, in %, the best of a question's answers counts: `exact_match` and `f1`, see `f1_score`.

    train, test: rows with a context, a question and answers, see `HubRows`.
    stride, question_length: in tokens; a longer question is cut at its end.
    subset, test_subset: how many questions there are, the first ones; None: all.
    """

    network = BertForQuestionAnswering

    def __init__(
        self,
        *,
        train,
        test,
        stride: int,
        question_length: int,
        subset: int | None = None,
        test_subset: int | None = None,
        **options,
    ):
        super().__init__(**options)
        if stride < 1 or question_length < 1 or self.length < question_length + 4:
            raise ValueError(
                f"length={self.length}, stride={stride} and question_length={question_length} leave no room for the text: "
                "a window has room for length - question_length - 3 tokens of it."
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
                    f"{row['question']!r} has no answer in {source.source}: SQuAD 1.1 has one to every question, SQuAD 2.0 has not."
                )
        return rows

    @cached_property
    def train(self) -> Examples:
        source, count = self.sources["train"]
        key = f"squad {source.fingerprint()} {self.wordpiece.fingerprint()} {self.length} {self.stride} {self.question_length} {count}"
        return cached(self.cache, key, self._build)

    def _build(self) -> Examples:
        rows = self._rows("train")
        found = self.windows(rows)
        return joined(
            ((w.question, w.part, ends(w, rows[w.row]["answers"])) for w in found), self.tokenizer
        )

    @cached_property
    def test(self) -> tuple[list[dict], list[Window]]:
        rows = self._rows("test")
        return rows, list(self.windows(rows))

    def windows(self, rows: list[dict]) -> Iterator[Window]:
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
                if (
                    score > best[window.row][0]
                ):  # neither of a model that has diverged, NaN or -inf: it answers nothing
                    best[window.row] = (
                        score,
                        rows[window.row]["context"][window.spans[first][0] : window.spans[last][1]],
                    )
        found = [(text, row["answers"]["text"]) for (_, text), row in zip(best, rows, strict=True)]
        return {
            score.__name__.removesuffix("_score"): 100
            * float(np.mean([max(score(text, right) for right in known) for text, known in found]))
            for score in (exact_match, f1_score)
        }

    @property
    def data_summary(self) -> str:
        return f"{len(self.train):,} windows of {self.length} tokens of SQuAD's questions"

    def data_description(self) -> dict:
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
    """Where the windows begin that cover `count` tokens; no token is left out."""
    starts = [0]
    while starts[-1] + room < count:
        starts.append(starts[-1] + min(stride, room))
    return starts


def ends(window: Window, known: dict) -> tuple[int, int]:
    """The places of the first and the last token of the first known answer, in [CLS] question [SEP] text [SEP]."""
    begin = known["answer_start"][0]
    end = begin + len(known["text"][0])
    if not window.spans or window.spans[0][0] > begin or window.spans[-1][1] < end:
        return NOWHERE
    first = sum(span_end <= begin for _, span_end in window.spans)
    last = sum(span_start < end for span_start, _ in window.spans) - 1
    before = len(window.question) + 2
    return before + first, before + last


def answers(output, windows: list[Window]) -> Iterator[tuple[float, int, int]]:
    """For each window: the score, the first and the last token of the best answer, counted in its part of the text."""
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
    """The words of an answer: lower case, without punctuation and without a, an and the."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def exact_match(predicted: str, right: str) -> float:
    return float(normalised(predicted) == normalised(right))


def f1_score(predicted: str, right: str) -> float:
    """The harmonic mean of precision and recall of the words, each as often as it occurs; 0 if none is shared."""
    one, two = normalised(predicted), normalised(right)
    shared = sum((Counter(one) & Counter(two)).values())
    return 2 * shared / (len(one) + len(two)) if shared else 0.0
