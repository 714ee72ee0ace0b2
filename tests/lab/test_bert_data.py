"""BERT's data: a function of (seed, step, rank), with the masks and pairs of the paper."""

import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.lab_text import TEXT, FewDocuments, build_corpus

from onebit.lab.tasks.bert import IGNORED, BertPretraining
from onebit.lab.tasks.corpus import load_corpus, split_segments
from onebit.lab.tasks.text import HubText, PythonDocs, Texts
from onebit.lab.tasks.tokenizer import (
    CLS,
    MASK,
    PAD,
    SEP,
    SPECIAL,
    LoadedWordPiece,
    TrainedWordPiece,
)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return BertPretraining(
        model={"vocab_size": 80},
        text=FewDocuments(),
        tokenizer=TrainedWordPiece(vocab_size=80),
        cache=cache,
    )


def same(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


def test_a_batch_is_a_function_of_seed_step_and_rank(task):
    batch = task.batch(3, 5, 1, size=8, length=24)
    task.batch(0, 0, 0, size=8, length=24)
    assert same(batch, task.batch(3, 5, 1, size=8, length=24))
    for other in ((4, 5, 1), (3, 6, 1), (3, 5, 2)):
        assert not same(batch, task.batch(*other, size=8, length=24))


def test_examples_are_two_neighbours_or_strangers_half_of_the_time(task):
    """[CLS] A [SEP] B [SEP]: with the masks undone, A and B are pieces of documents.

    B follows A where the label says so.
    """
    batch = task.batch(0, 0, 0, size=2000, length=24)
    special, corpus = task.corpus.special, task.corpus
    original = torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])
    starts = [0, *sorted(set(corpus.document_ends.tolist()))]
    documents = [
        corpus.tokens[corpus.segments[a] : corpus.segments[b]].tolist() for a, b in pairwise(starts)
    ]
    for row, types, attended, strange in zip(
        original,
        batch["token_type_ids"],
        batch["attention_mask"],
        batch["next_sentence_label"],
        strict=True,
    ):
        row = row[attended.bool()].tolist()
        assert row[0] == special[CLS] and row[-1] == special[SEP] and row.count(special[SEP]) == 2
        middle = row.index(special[SEP])
        a, b = row[1:middle], row[middle + 1 : -1]
        assert a and b
        assert types[: len(row)].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        homes = [
            {i for i, document in enumerate(documents) if is_part(part, document)}
            for part in (a, b)
        ]
        assert homes[0] and homes[1]
        assert strange or homes[0] & homes[1]
    assert batch["next_sentence_label"].float().mean().item() == pytest.approx(0.5, abs=0.04)


def is_part(part, document):
    return any(document[i : i + len(part)] == part for i in range(len(document) - len(part) + 1))


def test_masks_are_15_percent_of_the_words_80_10_10(task):
    batch = task.batch(0, 0, 0, size=4000, length=24)
    special = task.corpus.special
    chosen = batch["labels"] != IGNORED
    words = batch["attention_mask"].bool()
    for piece in (CLS, SEP, PAD):
        assert not (batch["labels"] == special[piece]).any()
        words = words & (batch["input_ids"] != special[piece])
    share = chosen.sum(1) / words.sum(1)
    assert share.mean().item() == pytest.approx(0.15, abs=0.01)
    assert (chosen.sum(1) >= 1).all()
    inputs, labels = batch["input_ids"][chosen], batch["labels"][chosen]
    masked = (inputs == special[MASK]).float().mean().item()
    kept = (inputs == labels).float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1 + 0.1 / 75, abs=0.02)  # a random piece may be the right one


def test_the_tokenizer_is_a_function_of_the_text():
    vocabularies = [TrainedWordPiece(vocab_size=80).build([TEXT]).get_vocab() for _ in range(3)]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]
    assert [piece for piece, number in sorted(vocabularies[0].items(), key=lambda item: item[1])][
        :5
    ] == list(SPECIAL)


def test_processes_that_start_together_tokenize_once(tmp_path):
    with ProcessPoolExecutor(3, mp_context=get_context("forkserver")) as pool:
        assert len(set(pool.map(build_corpus, [tmp_path] * 3))) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [
        path.stem for path in tmp_path.glob("*.lock")
    ]


def test_a_tokenizer_file_is_loaded_with_its_own_numbers(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "a", "##b", "c"]))
    assert LoadedWordPiece(name=str(tmp_path / "vocab.txt")).build([]).encode(
        "AB c", add_special_tokens=False
    ).ids == [5, 6, 7]
    TrainedWordPiece(vocab_size=60).build([TEXT]).save(str(tmp_path / "tokenizer.json"))
    assert LoadedWordPiece(name=str(tmp_path / "tokenizer.json")).build([]).get_vocab_size() == 60


def test_sentences_end_at_stops_and_paragraphs_at_blank_lines():
    assert split_segments("One is\nthis. Two!  Or\n \n3.5 is three\n\n\n") == [
        "One is this.",
        "Two!",
        "Or",
        "3.5 is three",
    ]


def test_a_text_without_sentence_pairs_is_refused(tmp_path):
    class Lines(FewDocuments):
        def documents(self):
            yield from ["one line", "another line"]

    with pytest.raises(RuntimeError, match="longer documents"):
        load_corpus(Lines(), TrainedWordPiece(vocab_size=60), tmp_path)


def test_a_model_with_too_few_pieces_is_refused(tmp_path):
    task = BertPretraining(
        model={"vocab_size": 60},
        text=FewDocuments(),
        tokenizer=TrainedWordPiece(vocab_size=80),
        cache=tmp_path,
    )
    with pytest.raises(ValueError, match="task.model.vocab_size=80"):
        task.batch(0, 0, 0, 1, 24)


def test_hub_schema_is_read_from_the_data_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "wiki").mkdir()
    pd.DataFrame(
        {"id": ["0", "1", "2"], "title": ["x"] * 3, "text": ["One.\n\nTwo.", "Three.", "Four."]}
    ).to_parquet(tmp_path / "wiki/train.parquet")
    options = {
        "name": "wiki",
        "path": "wikimedia/wikipedia",
        "split": "train",
        "data_root": str(tmp_path),
    }
    articles, sentences = HubText(**options), HubText(**options, rows=2)
    assert list(articles.documents()) == ["One.\n\nTwo.", "Three.", "Four."]
    assert list(sentences.documents()) == ["One.\n\nTwo.\n\nThree.", "Four."]
    assert list(Texts(a=articles, b=sentences).documents())[2:4] == [
        "Four.",
        "One.\n\nTwo.\n\nThree.",
    ]
    assert articles.fingerprint() != sentences.fingerprint()


def test_missing_data_gives_the_command_that_fetches_it(tmp_path, monkeypatch):
    options = {
        "name": "wiki",
        "path": "wikimedia/wikipedia",
        "config": "20231101.en",
        "split": "train",
    }
    command = r"load_dataset\('wikimedia/wikipedia', '20231101.en', split='train'\)"
    with pytest.raises(RuntimeError, match=command):
        HubText(**options, data_root=str(tmp_path)).fingerprint()
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError, match=command):
        list(HubText(**options, data_root=None).documents())


def test_python_docs_are_real_text_and_import_nothing():
    before = set(sys.modules)
    first = list(PythonDocs().documents())
    assert set(sys.modules) - before <= {"pydoc_data", "pydoc_data.topics"}
    assert 1_500_000 < sum(map(len, first)) < 4_000_000
    assert any("Shuffle list x in place" in document for document in first)  # a docstring
    assert any(
        'The "assert" statement' in document or "Assert statements" in document
        for document in first
    )  # a topic


def test_text_is_spread_over_all_of_the_corpus(task):
    """Drawn with replacement, every segment that has a successor comes up as A."""
    seen = np.zeros(task.corpus.vocab_size, bool)
    batch = task.batch(0, 0, 0, size=2000, length=24)
    seen[batch["input_ids"].numpy().ravel()] = True
    assert seen[np.unique(task.corpus.tokens)].all()
