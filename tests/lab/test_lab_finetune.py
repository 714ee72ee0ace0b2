"""Fine-tuning on GLUE and SQuAD: batches, windows, official metrics, pretrained weights, Table 3."""

import random
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import synthetic
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, BertModel, RobertaConfig, RobertaModel

from onebit.lab.claims import CLAIMS
from onebit.lab.claims.finetune import METRICS
from onebit.lab.claims.judge import judge
from onebit.lab.config import composed
from onebit.lab.plan import MACHINES, describe
from onebit.lab.report.artifact import load_artifact
from onebit.lab.reproduce import runs_of
from onebit.lab.runs.load import load, paper_number
from onebit.lab.tasks.examples import cut_pair
from onebit.lab.tasks.glue import GLUE, Glue, HubGlue, accuracy, f1, matthews, pearson, spearman
from onebit.lab.tasks.hub import HubRows
from onebit.lab.tasks.made_up import MadeUpGlue, MadeUpRows, made_up_questions
from onebit.lab.tasks.squad import (
    NOWHERE,
    Squad,
    Window,
    answers,
    ends,
    exact_match,
    f1_score,
    window_starts,
)
from onebit.lab.tasks.tokenizer import TrainedWordPiece
from onebit.lab.tasks.weights import HubWeights, PackagedWeights
from onebit.lab.training.loop import decayed_and_not, train
from onebit.lab.training.run import run_from

pytestmark = [
    pytest.mark.filterwarnings("ignore:the variance is frozen"),
    pytest.mark.filterwarnings("ignore:.* coordinates had so little gradient"),
]
MODEL = {
    "vocab_size": 256,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
}
TABLE = load_artifact("table_03")


@pytest.fixture(autouse=True)
def own_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def options(cache, **changed):
    common = {
        "model": MODEL,
        "weights": None,
        "tokenizer": TrainedWordPiece(vocab_size=256),
        "batch": 12,
        "length": 32,
        "cache": cache,
    }
    return common | changed


def glue(cache, name="rte", count=30, **changed):
    return Glue(name=name, **options(cache, **{"data": MadeUpGlue(count=count), **changed}))


def squad(cache, test=None, **changed):
    sources = {
        "train": made_up_questions(20, seed=0),
        "test": test or made_up_questions(20, seed=1),
    }
    return Squad(
        **options(cache, **{**sources, "stride": 12, "question_length": 8, "length": 40, **changed})
    )


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
    """As taking the last token of the longer one away, again and again, does; of two as long it is B's."""
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


@pytest.mark.parametrize(
    ("predicted", "right", "exact", "shared"),
    [
        ("The Cat!", "cat", 1, 1),
        ("an apple, a day", "apple day", 1, 1),
        ("in the big house", "big red house", 0, 2 * 2 / (3 + 3)),
        ("rose rose", "rose rose rose", 0, 2 * 2 / (2 + 3)),
        ("theatre", "atre", 0, 0),
        ("U.S.", "us", 1, 1),
        ("the", "a", 1, 0),
    ],
)
def test_answers_are_compared_as_the_official_script_does(predicted, right, exact, shared):
    """Lower case, then no punctuation, no articles; words as often as they occur; no shared word is 0."""
    assert (exact_match(predicted, right), f1_score(predicted, right)) == (
        exact,
        pytest.approx(shared),
    )


def schema(name, count=6):
    """Rows as the hub stores them."""
    about = GLUE[name]
    labels = (
        [0.5 * i for i in range(count)]
        if about.classes == 1
        else [i % about.classes for i in range(count)]
    )
    texts = {column: [f"word{i} {column}" for i in range(count)] for column in about.columns}
    return pd.DataFrame(texts | {"label": labels, "idx": range(count)})


def stored(root, name, **changed):
    """6 examples to train on, 7 and 8 to test."""
    folder = root / "glue" / name
    folder.mkdir(parents=True)
    for count, split in enumerate(("train", *GLUE[name].tests), 6):
        schema(name, count).assign(**changed).to_parquet(folder / f"{split}.parquet")
    return HubGlue(path="nyu-mll/glue", data_root=str(root))


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


OFFICIAL = {"cola": {"matthews"}, "sst2": {"accuracy"}, "mrpc": {"accuracy", "f1"}, "stsb": {"pearson", "spearman"}, "qqp": {"accuracy", "f1"},
            "mnli": {"accuracy", "accuracy_mismatched"}, "qnli": {"accuracy"}, "rte": {"accuracy"}}  # fmt: skip


@pytest.mark.parametrize("name", GLUE)
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
    """Gives the ends of the answer 5, all else noise below 1 and, in a window without the answer, [CLS] 9."""

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
    """Over several windows of each question, of which [CLS] of those without the answer has the highest logits."""
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


def saved(folder, **changed):
    torch.manual_seed(1)
    encoder = BertModel(BertConfig(**MODEL | changed))
    encoder.save_pretrained(folder)
    return encoder


@pytest.mark.parametrize("make", [glue, squad])
def test_the_encoder_begins_with_the_pretrained_weights_and_the_head_with_the_seeds(tmp_path, make):
    theirs = saved(tmp_path / "bert").state_dict()
    task = make(tmp_path, weights=HubWeights(name=str(tmp_path / "bert")))
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(task.model())
        ours = models[-1].bert.state_dict()
        assert len(ours) > 20 and all(
            torch.equal(theirs[name], tensor) for name, tensor in ours.items()
        )
    heads = [list(model.parameters())[-2] for model in models]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert "weights of bert;" in task.description()["summary"]


def test_embeddings_that_are_kept_have_no_gradient_and_no_optimizer(tmp_path):
    task = glue(tmp_path, train_embeddings=False)
    model = task.model()
    task.loss(model, task.batch(0, 0, 0, 4, 32)).backward()
    trained = {name for group in decayed_and_not(model) for name, _ in group["params"]}
    assert trained == {
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    kept = {name for name, _ in model.named_parameters()} - trained
    assert kept and all(name.startswith("bert.embeddings.") for name in kept)
    assert not any("embeddings" in name for name in trained)


def test_weights_that_are_not_there_or_of_another_network_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError, match="hf download google-bert/bert-base-uncased"):
        glue(tmp_path, weights=HubWeights(name="google-bert/bert-base-uncased")).prepare()
    missing = PackagedWeights(
        package="no_such_bert", folder="model", requirement="no-such-bert==1.0", title="none"
    )
    with pytest.raises(RuntimeError, match="pip install --no-deps no-such-bert==1.0"):
        glue(tmp_path, weights=missing).prepare()
    saved(tmp_path / "bert", num_hidden_layers=2)
    with pytest.raises(ValueError, match="set task.model.num_hidden_layers=2"):
        glue(tmp_path, weights=HubWeights(name=str(tmp_path / "bert"))).model()


def test_a_network_is_not_filled_up_with_random_weights(tmp_path):
    """transformers gives what a file lacks random values; only the pooler, which a model of masked words does not have, may begin so."""
    theirs = saved(tmp_path / "bert").state_dict()
    lacks = {name: tensor for name, tensor in theirs.items() if "query.weight" not in name}
    save_file(lacks, tmp_path / "bert/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks encoder.layer.0.attention.self.query.weight"):
        glue(tmp_path, weights=HubWeights(name=str(tmp_path / "bert"))).model()
    BertForMaskedLM(BertConfig(**MODEL)).save_pretrained(tmp_path / "words")
    glue(tmp_path, weights=HubWeights(name=str(tmp_path / "words"))).model()


def test_weights_of_another_kind_of_model_or_without_their_file_are_refused_before_training(
    tmp_path,
):
    """RoBERTa has BERT's sizes and names, but begins to count positions elsewhere."""
    RobertaModel(RobertaConfig(**MODEL)).save_pretrained(tmp_path / "roberta")
    with pytest.raises(ValueError, match="a roberta, not a bert"):
        glue(tmp_path, weights=HubWeights(name=str(tmp_path / "roberta"))).prepare()
    saved(tmp_path / "bert", num_hidden_layers=2)
    with pytest.raises(ValueError, match="set task.model.num_hidden_layers=2"):
        glue(tmp_path, weights=HubWeights(name=str(tmp_path / "bert"))).prepare()
    (tmp_path / "bert/model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="hf download"):
        glue(
            tmp_path,
            weights=HubWeights(name=str(tmp_path / "bert")),
            model=MODEL | {"num_hidden_layers": 2},
        ).prepare()


def test_weights_are_found_in_an_installed_package_and_not_looked_for_on_the_meta_device(
    tmp_path, monkeypatch
):
    weights = PackagedWeights(
        package="a_bert_of_the_test", folder="model", requirement="a-bert==1.0", title="a BERT"
    )
    with torch.device("meta"):
        glue(tmp_path, weights=weights).model()
    (tmp_path / "site/a_bert_of_the_test").mkdir(parents=True)
    (tmp_path / "site/a_bert_of_the_test/__init__.py").write_text("raise ImportError")
    theirs = saved(tmp_path / "site/a_bert_of_the_test/model").state_dict()
    monkeypatch.syspath_prepend(tmp_path / "site")
    ours = glue(tmp_path, weights=weights).model().bert.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results of short smoke runs: SQuAD and RTE, with the two optimizers of Table 3."""
    root = tmp_path_factory.mktemp("results")
    for experiment, optimizer in product(("squad", "glue_rte"), TABLE.optimizers):
        folder = root / "runs" / experiment / "smoke" / optimizer / "seed-1"
        run = run_from(composed([f"experiment={experiment}", "profile=smoke", f"optimizer={optimizer}", "comm=threads", "workers=2", "seed=1",
                                 "progress=false", f"cache={root / 'cache'}", f"output={folder}"]))  # fmt: skip
        run.task.prepare()
        run.comm.run(partial(train, run))
    return root


@pytest.mark.parametrize(
    ("experiment", "metric", "least"), [("squad", "f1", 20), ("glue_rte", "accuracy", 90)]
)
def test_a_smoke_run_learns_what_it_is_evaluated_by(trained, experiment, metric, least):
    """Chance: 50 % on the pairs; one of 8 answers, which share words, on the questions."""
    rows = load(trained, experiment, "smoke")
    for _, run in rows.groupby("optimizer"):
        assert run.loss.iloc[-1] < 0.6 * run.loss.iloc[0]
        assert run[metric].iloc[-1] > least


def test_table_3_is_written_from_runs(trained):
    path = TABLE.save("smoke", trained)
    assert path == trained / "figures/table_03_smoke.md"
    frame = pd.read_csv(path.with_suffix(".csv"), index_col=["task", "metric"])
    assert (
        frame.loc[("RTE", "accuracy"), "1-bit Adam n"] == 1
        and frame.loc[("MRPC", "accuracy"), "Adam n"] == 0
    )
    text = path.read_text()
    assert (
        "BERT of 2 layers, 96 wide, random weights; 120 examples of GLUE's rte" in text
        and "T_w = 9" in text
    )


def write(root, experiment, optimizer, seed, metric, value, **changed):
    """A made-up run of the laptop, evaluated at half of its steps and at the end."""
    synthetic.write(root, optimizer, seed, 1.0, experiment=experiment, **changed)
    folder = root / "runs" / experiment / "laptop" / optimizer / f"seed-{seed}"
    steps = [synthetic.STEPS // 2, synthetic.STEPS]
    pd.DataFrame({"step": steps, "metric": metric, "value": [11.0, value]}).to_csv(
        folder / "evaluation.csv", index=False
    )


def test_table_3_has_ours_beside_both_papers(tmp_path):
    for optimizer, seed in product(TABLE.optimizers, (1, 2, 3)):
        write(tmp_path, "glue_rte", optimizer, seed, "accuracy", 60 + seed + (optimizer == "adam"))
    path = TABLE.save("laptop", tmp_path)
    frame = pd.read_csv(path.with_suffix(".csv")).set_index(["task", "metric"])
    rte = frame.loc[("RTE", "accuracy")]
    assert rte[["Adam", "Adam low", "Adam high", "Adam n", "1-bit Adam"]].tolist() == [
        63,
        62,
        64,
        3,
        62,
    ]
    assert rte[
        ["1-bit Adam paper, Base: Adam", "Large: 1-bit Adam", "Large: basic 1-bit"]
    ].tolist() == [68.2, 70.4, 66.6]
    assert frame.loc[("MNLI", "accuracy mismatched"), "Base: 1-bit Adam"] == 83.9
    assert frame.loc[("SQuAD 1.1", "f1"), "Large: 1-bit Adam"] == 93.32
    assert (
        frame.loc[("STS-B", "pearson")]
        .drop([f"{name} {part}" for name in ("Adam", "1-bit Adam") for part in ("n", "diverged")])
        .isna()
        .all()
    )
    line = next(line for line in path.read_text().splitlines() if line.startswith("| RTE"))
    assert "63.0 (62.0 to 64.0, n = 3)" in line and "| 68.2 |" in line
    first = path.read_bytes(), path.with_suffix(".csv").read_bytes()
    TABLE.save("laptop", tmp_path)
    assert (path.read_bytes(), path.with_suffix(".csv").read_bytes()) == first


def test_a_table_says_which_runs_diverged(tmp_path):
    """The mean is that of the others, or there is none."""
    for experiment, seeds in (("glue_rte", (1, 2, 3)), ("glue_cola", (3,))):
        for seed in seeds:
            metric = "accuracy" if experiment == "glue_rte" else "matthews"
            write(
                tmp_path,
                experiment,
                "onebit_adam",
                seed,
                metric,
                60,
                **({"status": "diverged", "steps": 50} if seed == 3 else {}),
            )
    lines = TABLE.save("laptop", tmp_path).read_text().splitlines()
    rte, cola = (
        next(line for line in lines if line.startswith(f"| {name}")) for name in ("RTE", "CoLA")
    )
    assert "| 60.0 (60.0 to 60.0, n = 2), 1 diverged |" in rte and "| 1 diverged |" in cola


def test_a_table_without_runs_says_how_to_make_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="make reproduce-table-3 PROFILE=laptop"):
        TABLE.save("laptop", tmp_path)


@pytest.mark.parametrize("name", ["T1", "T3", "T4"])
@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0, "reproduced"), (-1.9, "reproduced"), (-2.5, "not reproduced"), (2.5, "not reproduced")],
)
def test_scores_are_the_same_if_they_differ_by_less_than_two_points(tmp_path, name, gap, expected):
    """Paired by seed: the seeds' own scores differ by 10 points."""
    claim = next(claim for claim in CLAIMS if claim.name == name)
    metric = METRICS[claim.experiment]
    for seed in (1, 2, 3):
        write(tmp_path, claim.experiment, "adam", seed, metric, 50 + 10 * seed)
        write(
            tmp_path,
            claim.experiment,
            "onebit_adam",
            seed,
            metric,
            50 + 10 * seed + gap + 0.01 * seed,
        )
    judgement = judge(claim, load(tmp_path, claim.experiment, "laptop"))
    assert judgement.verdict == expected
    assert judgement.interval.mean == pytest.approx((gap + 0.02) / 100)


def test_a_fine_tuning_that_diverged_is_infinitely_far_behind(tmp_path):
    claim = next(claim for claim in CLAIMS if claim.name == "T3")
    for seed in (1, 2, 3):
        write(tmp_path, "glue_sst2", "adam", seed, "accuracy", 60)
        write(
            tmp_path,
            "glue_sst2",
            "onebit_adam",
            seed,
            "accuracy",
            60,
            **({"status": "diverged", "steps": 50} if seed == 3 else {}),
        )
    judgement = judge(claim, load(tmp_path, claim.experiment, "laptop"))
    assert (judgement.interval.mean, judgement.verdict) == (-float("inf"), "not reproduced")
    assert judgement.detail == "accuracy 60.0 (1 diverged), Adam 60.0"


def test_the_papers_questions_are_the_papers_run():
    """Batch 96 on 32 GPUs, 3e-5, T_w = 400 of 1848 steps, windows of 384 that step by 128, dropout 0.1."""
    run = run_from(
        composed(
            [
                "experiment=squad",
                "profile=paper",
                "optimizer=onebit_adam",
                "comm=threads",
                "workers=32",
            ]
        )
    )
    phase = run.phases["train"]
    names = ("squad_steps", "squad_warmup", "squad_batch", "squad_lr")
    assert [phase.steps, phase.warmup, run.batch, phase.lr.peak] == [
        paper_number(name) for name in names
    ]
    assert (
        run.micro_batches(phase, 32),
        run.task.length,
        run.task.stride,
        run.task.question_length,
    ) == ((1, 3), 384, 128, 64)
    assert [phase.lr(done) for done in (0, 185, 1848)] == pytest.approx([0, 3e-5, 0])
    with torch.device("meta"):
        assert run.task.model().config.hidden_dropout_prob == 0.1


@pytest.mark.parametrize("name", GLUE)
def test_glue_is_three_epochs_at_batch_32(name):
    sizes = {
        "cola": 8551,
        "sst2": 67349,
        "mrpc": 3668,
        "stsb": 5749,
        "qqp": 363846,
        "mnli": 392702,
        "qnli": 104743,
        "rte": 2490,
    }
    run = run_from(
        composed([f"experiment=glue_{name}", "profile=paper", "comm=threads", "workers=4"])
    )
    phase = run.phases["train"]
    assert run.batch * phase.steps == pytest.approx(3 * sizes[name], abs=16)
    assert phase.warmup / phase.steps == pytest.approx(400 / 1848, abs=0.002)
    assert phase.lr(phase.steps) == 0 and run.task.name == name


def test_the_plan_counts_no_bytes_for_embeddings_that_are_kept():
    """264 steps of 2 * 3/4 * 4 bytes for each of the other parameters."""
    text = describe("table_03", "laptop", MACHINES["laptop"]).partition("\n\n")[0]
    trained = 22_566_146 - 384 * (30522 + 512 + 2 + 2)
    assert f"22,566,146 parameters, {trained:,} of them trained" in text
    assert f"exact: {264 * 6 * trained / 1e9:.3g} GB sent by a worker" in text


def test_the_profile_smoke_trains_one_experiment_of_each_kind():
    """4 runs: all 18 take longer than the minute that the profile promises."""
    assert runs_of([TABLE], "smoke") == list(product(("squad", "glue_rte"), TABLE.optimizers))
    assert runs_of([TABLE], "laptop") == list(product(TABLE.trains, TABLE.optimizers))


def test_the_plan_of_a_table_is_that_of_all_its_experiments():
    text = describe("table_03", "paper", MACHINES["paper"])
    assert text.count("\n\n") == len(TABLE.trains) - 1
    for part in (
        "rajpurkar/squad",
        "nyu-mll/glue",
        "1,848 steps, T_w = 400, 96 examples of 384 tokens a step: 32 workers x 1 x 3",
        "233 steps",
        "experiment=glue_mnli profile=paper optimizer=NAME",
        "scripts/export_weights each; fine-tune with Adam",
    ):
        assert part in text
