"""SQuAD: windows, labels, answers and their official comparison."""

import random
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers.cases import holds_for_each
from helpers.finetuning import squad

from onebit.lab.tasks.made_up import MadeUpRows
from onebit.lab.tasks.squad import (
    NOWHERE,
    Window,
    answers,
    ends,
    exact_match,
    f1_score,
    window_starts,
)

pytestmark = pytest.mark.usefixtures("own_hub")


@holds_for_each(
    [
        ("The Cat!", "cat", 1, 1),
        ("an apple, a day", "apple day", 1, 1),
        ("in the big house", "big red house", 0, 2 * 2 / (3 + 3)),
        ("rose rose", "rose rose rose", 0, 2 * 2 / (2 + 3)),
        ("theatre", "atre", 0, 0),
        ("U.S.", "us", 1, 1),
        ("the", "a", 1, 0),
    ]
)
def test_answers_are_compared_as_the_official_script_does(predicted, right, exact, shared):
    """Lower case, then no punctuation, no articles; words as often as they occur.

    No shared word is 0.
    """
    assert (exact_match(predicted, right), f1_score(predicted, right)) == (
        exact,
        pytest.approx(shared),
    )


def test_questions_without_an_answer_are_refused(tmp_path):
    """SQuAD 2.0 has the same columns."""
    row = {
        "context": "the sky is blue",
        "question": "who?",
        "answers": {"text": [], "answer_start": []},
    }
    for split in ("train", "test"):
        with pytest.raises(RuntimeError, match=r"'who\?' has no answer"):
            squad(
                tmp_path, **{split: MadeUpRows(lambda _: row, count=2, seed=0, name="unanswered")}
            ).prepare()


def test_windows_cover_every_token_and_step_by_the_stride():
    for count, room, stride in product(range(20), range(1, 9), range(1, 12)):
        starts = window_starts(count, room, stride)
        covered = {token for start in starts for token in range(start, start + room)}
        assert covered >= set(range(count))
        assert len(starts) == 1 or starts[-2] + room < count  # and no window more
        assert {b - a for a, b in zip(starts, starts[1:], strict=False)} <= {min(stride, room)}


def test_windows_of_a_text_hold_all_of_it_and_fit(tmp_path):
    task = squad(tmp_path)
    rows = task.test[0]
    by_row = {}
    for window in task.windows(rows):
        assert len(window.question) <= 8 and len(window.question) + len(window.part) + 3 <= 40
        by_row.setdefault(window.row, []).append(window)
    assert all(len(windows) > 1 for windows in by_row.values())
    for number, windows in by_row.items():
        spans = {span for window in windows for span in window.spans}
        assert spans == set(
            task.tokenizer.encode(rows[number]["context"], add_special_tokens=False).offsets
        )


def test_the_labels_of_a_window_are_the_answers_tokens_or_none(tmp_path):
    task = squad(tmp_path)
    rows, windows = task.test
    held = set()
    for window in windows:
        first, last = ends(window, rows[window.row]["answers"])
        if (first, last) != NOWHERE:
            before = len(window.question) + 2
            begin, end = window.spans[first - before][0], window.spans[last - before][1]
            assert rows[window.row]["context"][begin:end] == rows[window.row]["answers"]["text"][0]
            held.add(window.row)
    assert held == set(range(len(rows)))


def test_an_answer_that_a_window_cuts_is_not_in_it():
    window = Window(0, [7], [1, 2, 3], [(10, 14), (15, 19), (20, 24)])
    cases = (
        (10, "abcd", (3, 3)),
        (15, "abcd efgh", (4, 5)),
        (16, "b", (4, 4)),
        (5, "abcd efgh", NOWHERE),
        (20, "abcdefg", NOWHERE),
    )
    for begin, text, expected in cases:
        assert ends(window, {"answer_start": [begin], "text": [text]}) == expected


class SquadOracle(torch.nn.Module):
    """Gives the ends of the answer 5, all else noise below 1 and, in a window without the
    answer, [CLS] 9.
    """

    def __init__(self, task):
        super().__init__()
        rows, windows = task.test
        self.ends = [ends(window, rows[window.row]["answers"]) for window in windows]

    def forward(self, input_ids, **_):
        logits = torch.rand(2, *input_ids.shape, generator=torch.Generator().manual_seed(0))
        for i in range(len(input_ids)):
            places = self.ends.pop(0)
            for kind, place in enumerate(places):
                logits[kind, i, place] = 9 if places == NOWHERE else 5
        return SimpleNamespace(start_logits=logits[0], end_logits=logits[1])


def test_answers_are_recovered_from_perfect_logits(tmp_path):
    """Over several windows of each question, of which [CLS] of those without the answer has the
    highest logits.
    """
    task = squad(tmp_path)
    assert task.evaluate(SquadOracle(task), torch.device("cpu")) == {"exact_match": 100, "f1": 100}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_whose_logits_are_no_numbers_answers_nothing(tmp_path, value):
    """Nor does it stop the run, in windows that are shorter than their question."""

    def broken(input_ids, **_):
        return SimpleNamespace(
            start_logits=torch.full(input_ids.shape, value),
            end_logits=torch.full(input_ids.shape, value),
        )

    task = squad(tmp_path)
    rows, windows = task.test
    task.test = (
        rows,
        [window._replace(part=window.part[:1], spans=window.spans[:1]) for window in windows],
    )
    model = torch.nn.Module()
    model.forward = broken
    assert task.evaluate(model, torch.device("cpu")) == {"exact_match": 0, "f1": 0}


def test_the_best_of_several_right_answers_counts(tmp_path):
    task = squad(tmp_path)
    for row in task.test[0]:
        row["answers"]["text"].append(row["answers"]["text"][0] + " indeed")
        row["answers"]["answer_start"].append(0)
    oracle = SquadOracle(task)
    for row in task.test[0]:
        row["answers"]["text"].reverse()
    assert task.evaluate(oracle, torch.device("cpu")) == {"exact_match": 100, "f1": 100}


def test_an_answer_lies_in_the_text_ends_after_it_begins_and_is_short():
    """Against all pairs, one by one."""
    chooser = random.Random(0)
    windows = [
        Window(0, [0] * chooser.randint(1, 5), [0] * chooser.randint(1, 45), []) for _ in range(20)
    ]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 20, 60, generator=generator)
    for i, (score, first, last) in enumerate(
        answers(SimpleNamespace(start_logits=logits[0], end_logits=logits[1]), windows)
    ):
        before, count = len(windows[i].question) + 2, len(windows[i].part)
        best = max(
            (float(logits[0, i, before + a] + logits[1, i, before + b]), a, b)
            for a in range(count)
            for b in range(a, min(count, a + 30))
        )
        assert (score, first, last) == (pytest.approx(best[0]), *best[1:])


def test_windows_without_room_are_refused(tmp_path):
    with pytest.raises(ValueError, match="leave no room"):
        squad(tmp_path, length=11)
