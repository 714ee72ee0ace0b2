"""GLUE's tasks: batches, pairs, official metrics."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.finetuning import glue, schema, squad, stored

from onebit.lab.tasks.examples import cut_pair
from onebit.lab.tasks.glue import GLUE, HubGlue, accuracy, f1, matthews, pearson, spearman
from onebit.lab.tasks.hub import HubRows
from onebit.lab.tasks.made_up import MadeUpRows

pytestmark = pytest.mark.usefixtures("own_hub")


class Numbered:
    """STS-B's rows, scored by their numbers, so that a batch's labels say which they are."""

    def split(self, name, split):
        numbers = iter(range(1000))
        return MadeUpRows(
            lambda _: {"sentence1": "red", "sentence2": "blue", "label": float(next(numbers))},
            count=30,
            seed=0,
            name="numbered",
        )


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_an_epoch_sees_each_example_once_and_the_workers_take_disjoint_parts(tmp_path, workers):
    """5 steps of 12 are 2 epochs of 30 examples; and the steps are those of a single worker."""
    task = glue(tmp_path, "stsb", data=Numbered())

    def labels(step, rank, count):
        return task.batch(3, step, rank, 12 // count, 32)["labels"].tolist()

    steps = [
        [label for rank in range(workers) for label in labels(step, rank, workers)]
        for step in range(5)
    ]
    assert steps == [labels(step, 0, 1) for step in range(5)]
    seen = sum(steps, [])
    assert sorted(seen[:30]) == sorted(seen[30:]) == list(range(30)) and seen[:30] != seen[30:]


@pytest.mark.parametrize("make", [glue, squad])
def test_a_batch_is_a_function_of_seed_step_and_rank_and_of_no_cache(tmp_path, make):
    first, again = make(tmp_path / "a"), make(tmp_path / "a")
    anew = make(tmp_path / "b")
    batch = first.batch(3, 5, 1, 4, 32)
    for task in (first, again, anew):
        other = task.batch(3, 5, 1, 4, 32)
        assert batch.keys() == other.keys() and all(
            torch.equal(batch[key], other[key]) for key in batch
        )
    for coordinates in ((4, 5, 1), (3, 6, 1), (3, 5, 2)):
        assert not all(
            torch.equal(a, b)
            for a, b in zip(batch.values(), first.batch(*coordinates, 4, 32).values(), strict=True)
        )


def test_other_training_texts_teach_the_tokenizer_other_pieces_of_the_same_development_set(
    tmp_path,
):
    """Which is not taken from the cache then."""
    data = stored(tmp_path, "rte")
    first = glue(tmp_path / "cache", data=data).test[""]
    schema("rte").assign(sentence1="quite another vocabulary").to_parquet(
        tmp_path / "glue/rte/train.parquet"
    )
    again, anew = (glue(tmp_path / cache, data=data).test[""] for cache in ("cache", "other"))
    assert again.tokens.tolist() == anew.tokens.tolist() != first.tokens.tolist()


def test_a_pair_is_two_parts_between_separators_and_padding_is_not_attended(tmp_path):
    task = glue(tmp_path)
    inputs = task.train.inputs([0, 1])
    row = task.data.split("rte", "train").load("sentence1", "sentence2")[1]
    a, b = (
        task.tokenizer.encode(row[name], add_special_tokens=False).ids
        for name in ("sentence1", "sentence2")
    )
    cls, sep = task.tokenizer.token_to_id("[CLS]"), task.tokenizer.token_to_id("[SEP]")
    expected = [cls, *a, sep, *b, sep]
    used = int(inputs["attention_mask"][1].sum())
    assert inputs["input_ids"][1, :used].tolist() == expected
    assert inputs["token_type_ids"][1, :used].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert (
        inputs["attention_mask"].sum(1).max() == inputs["input_ids"].shape[1]
    )  # no wider than the longest


def test_the_longer_of_a_pair_gives_way_until_they_fit():
    """As taking the last token of the longer one away, again and again, does.

    Of two as long it is B's.
    """
    for count_a, count_b, room in product(range(8), range(8), range(2, 9)):
        a, b = list(range(count_a)), list(range(count_b))
        left = [list(a), list(b)]
        while len(left[0]) + len(left[1]) > room:
            left[len(left[1]) >= len(left[0])].pop()
        assert list(cut_pair(a, b, room)) == left, (count_a, count_b, room)


def test_examples_are_no_longer_than_asked(tmp_path):
    for name in GLUE:
        lengths = np.diff(glue(tmp_path, name, length=12).train.starts)
        assert lengths.max() <= 12


def test_metrics_against_hand_computed_values():
    """3 of class 1 found and 2 missed, 1 of class 0 taken for it and 4 not."""
    labels = np.array([1] * 5 + [0] * 5)
    predicted = np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 0])
    assert accuracy(predicted, labels) == 0.7
    assert f1(predicted, labels) == pytest.approx(2 * 3 / (2 * 3 + 1 + 2))
    assert matthews(predicted, labels) == pytest.approx((3 * 4 - 1 * 2) / (4 * 5 * 5 * 6) ** 0.5)
    # deviations -1.5 -0.5 0.5 1.5 and -1.5 0.5 -0.5 1.5: 4 / 5; the squares have the same order
    assert pearson(np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 4])) == pytest.approx(0.8)
    assert spearman(np.array([1.0, 4, 9, 16]), np.array([1.0, 3, 2, 4])) == pytest.approx(0.8)
    assert pearson(np.array([1.0, 4, 9, 16]), np.array([1.0, 3, 2, 4])) != pytest.approx(
        0.8, abs=0.01
    )


def test_one_class_for_all_correlates_with_nothing():
    labels, constant = np.array([0, 1, 1, 0]), np.zeros(4, int)
    assert matthews(constant, labels) == spearman(constant, labels) == f1(constant, labels) == 0


class Oracle(torch.nn.Module):
    """Knows the labels, in the order of the examples that it is asked for."""

    def __init__(self, *splits):
        super().__init__()
        self.labels = torch.from_numpy(np.concatenate(splits))

    def forward(self, input_ids, **_):
        now, self.labels = self.labels.split([len(input_ids), len(self.labels) - len(input_ids)])
        scores = (
            now[:, None] if now.dtype.is_floating_point else torch.nn.functional.one_hot(now, 3)
        )
        return SimpleNamespace(logits=scores)


OFFICIAL = {
    "cola": {"matthews"},
    "sst2": {"accuracy"},
    "mrpc": {"accuracy", "f1"},
    "stsb": {"pearson", "spearman"},
    "qqp": {"accuracy", "f1"},
    "mnli": {"accuracy", "accuracy_mismatched"},
    "qnli": {"accuracy"},
    "rte": {"accuracy"},
}


KINDS_OF_TASKS = ("cola", "mnli", "stsb")  # a class, two test sets, a score


@pytest.mark.parametrize(
    "name",
    [
        name if name in KINDS_OF_TASKS else pytest.param(name, marks=pytest.mark.more)
        for name in GLUE
    ],
)
def test_every_task_of_table_3_is_read_in_its_schema_and_has_its_official_metrics(tmp_path, name):
    """Trains, and a model that knows all answers has 100 %."""
    task = glue(tmp_path / "cache", name, data=stored(tmp_path, name))
    task.prepare()
    torch.manual_seed(0)
    model = task.model()
    loss = task.loss(model, task.batch(0, 0, 0, 4, 32))
    loss.backward()
    assert loss.isfinite() and model.classifier.weight.grad.abs().sum() > 0
    assert model.classifier.out_features == GLUE[name].classes
    assert {suffix: len(examples) for suffix, examples in task.test.items()} == (
        {"": 7, "_mismatched": 8} if name == "mnli" else {"": 7}
    )
    assert task.evaluate(model, torch.device("cpu")).keys() == OFFICIAL[name]
    known = task.evaluate(
        Oracle(*(examples.labels for examples in task.test.values())), torch.device("cpu")
    )
    assert known == pytest.approx(dict.fromkeys(OFFICIAL[name], 100))
    assert task.description()["data"]["train"]["source"] == f"glue/{name}/train.parquet"
    assert f"6 examples of GLUE's {name}" in task.description()["summary"]


def test_the_score_of_a_pair_is_learned_by_its_squared_error(tmp_path):
    task = glue(tmp_path, "stsb")
    model = task.model().eval()
    batch = task.batch(0, 0, 0, 4, 32)
    assert task.loss(model, batch).item() == pytest.approx(
        (model(**batch).logits[:, 0] - batch["labels"]).square().mean().item()
    )


def test_evaluation_can_be_of_the_first_examples_only(tmp_path):
    assert [
        len(glue(tmp_path, count=30, test_subset=count).test[""]) for count in (7, 99, None)
    ] == [7, 30, 30]


@pytest.mark.parametrize(
    ("make", "command"),
    [
        (
            partial(glue, data=HubGlue(path="nyu-mll/glue", data_root="nowhere")),
            r"load_dataset\('nyu-mll/glue', 'rte', split='train'\)",
        ),
        (
            partial(
                squad,
                train=HubRows(
                    name="squad", path="rajpurkar/squad", split="train", data_root="nowhere"
                ),
            ),
            r"load_dataset\('rajpurkar/squad', split='train'\)",
        ),
    ],
)
def test_missing_data_gives_the_command_that_fetches_it(tmp_path, make, command):
    with pytest.raises(RuntimeError, match=command):
        make(tmp_path).prepare()


def test_unknown_tasks_labels_and_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cola, sst2"):
        glue(tmp_path, "snli")
    with pytest.raises(RuntimeError, match="label -1"):
        glue(tmp_path, data=stored(tmp_path / "a", "rte", label=-1)).prepare()
    with pytest.raises(RuntimeError, match="must have one named sentence1"):
        data = stored(tmp_path / "b", "rte")
        schema("rte").rename(columns={"sentence1": "premise"}).to_parquet(
            tmp_path / "b/glue/rte/train.parquet"
        )
        glue(tmp_path, data=data).prepare()
