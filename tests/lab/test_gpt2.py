"""GPT-2's batches, its held-out text and its validation."""

from math import exp

import pytest
import torch
from helpers.gpt2_task import GPT2_MODEL, make_task
from helpers.lab_runs import rows, train_in_threads
from helpers.lab_text import DOCUMENTS, FewDocuments
from tokenizers import Tokenizer, models, pre_tokenizers

from onebit.lab.config import composed
from onebit.lab.runs.recorder import COLUMNS, EVALUATION, TENSORS
from onebit.lab.tasks.tokenizer import END, SEP, LoadedWordPiece
from onebit.lab.training.run import run_from


@pytest.fixture(scope="module")
def task(cache):
    return make_task(cache)


def test_a_batch_is_a_function_of_seed_step_and_rank_and_made_of_blocks_of_the_training_text(task):
    batch = task.batch(3, 5, 1, size=8, length=12)["input_ids"]
    assert torch.equal(batch, task.batch(3, 5, 1, size=8, length=12)["input_ids"])
    for other in ((4, 5, 1), (3, 6, 1), (3, 5, 2)):
        assert not torch.equal(batch, task.batch(*other, size=8, length=12)["input_ids"])
    text = task.train.tokens.tolist()
    assert all(any(text[i : i + 12] == block for i in range(len(text))) for block in batch.tolist())


def test_every_fifth_document_is_held_out_and_each_ends_with_its_token(task, cache):
    """Nothing is lost and nothing seen twice: the two parts decode to the documents, in order."""
    tokenizer = task.tokenizer.build(task.texts["train"].documents())
    end = tokenizer.token_to_id(SEP)
    for corpus, documents in (
        (task.validation, DOCUMENTS[4::5]),
        (task.train, [d for i, d in enumerate(DOCUMENTS) if i % 5 != 4]),
    ):
        expected = [
            id
            for document in documents
            for id in [*tokenizer.encode(document, add_special_tokens=False).ids, end]
        ]
        assert corpus.tokens.tolist() == expected


def test_what_quotes_a_held_out_document_is_trained_on_without_the_quotation(cache):
    """As one topic of Python's language reference holds another, indented."""

    class Quoting(FewDocuments):
        def fingerprint(self):
            return "the second document ends with the fifth"

        def documents(self):
            yield from DOCUMENTS[:1]
            yield DOCUMENTS[1] + "\n \n   " + DOCUMENTS[4].replace("\n\n", "\n\n   ")
            yield from DOCUMENTS[2:]

    few, quoting = (
        [list(part.documents()) for part in make_task(cache, text).texts.values()]
        for text in (FewDocuments(), Quoting())
    )
    assert few == quoting


def test_the_pieces_are_learned_from_the_training_documents_alone(cache):
    class Strange(FewDocuments):
        def fingerprint(self):
            return "the fifth documents have a letter of their own"

        def documents(self):
            yield from (
                document.replace("a", "ж") if i % 5 == 4 else document
                for i, document in enumerate(DOCUMENTS)
            )

    task = make_task(cache, Strange())
    unknown = task.train.special["[UNK]"]
    assert unknown in task.validation.tokens and unknown not in task.train.tokens


def test_a_tokenizer_with_an_end_of_text_of_its_own_ends_documents_with_it(cache, tmp_path):
    letters = sorted({letter for document in DOCUMENTS for letter in document})
    tokenizer = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate([*letters, END, SEP])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([END, SEP])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    task = make_task(cache, tokenizer=LoadedWordPiece(name=str(tmp_path / "tokenizer.json")))
    assert task.train.tokens.tolist().count(len(letters)) == 16 and task.train.tokens[-1] == len(
        letters
    )


def test_the_loss_is_transformers_own(task):
    model, batch = task.model(), task.batch(0, 0, 0, size=3, length=12)
    theirs = model(**batch, labels=batch["input_ids"]).loss
    assert task.loss(model, batch).item() == pytest.approx(theirs.item(), rel=1e-6)


def test_validation_is_the_mean_over_all_whole_blocks_of_the_held_out_text(task, cache):
    """More blocks than are evaluated at once, in parts of unequal size.

    Perplexity is the exponential.
    """
    model = task.model().eval()
    tokens = torch.from_numpy(task.validation.tokens.astype("int64"))
    blocks = tokens[: len(tokens) // 12 * 12].view(-1, 12)
    assert len(blocks) > 32 and len(blocks) % 32
    with torch.no_grad():
        expected = sum(
            task.loss(model, {"input_ids": block[None]}).item() for block in blocks
        ) / len(blocks)
    found = task.evaluate(model, torch.device("cpu"))
    assert found["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(exp(expected), rel=1e-4)
    assert make_task(cache, validation_blocks=7).evaluate(model, torch.device("cpu"))[
        "validation_loss"
    ] != pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_trained_or_evaluated_is_refused(task, cache):
    with pytest.raises(ValueError, match="task.model.n_positions=13"):
        task.batch(0, 0, 0, size=1, length=13)
    with pytest.raises(ValueError, match="at least 2"):
        make_task(cache, held_out=1)
    with pytest.raises(RuntimeError, match="hold out more"):
        make_task(cache, held_out=99).prepare()
    with pytest.raises(RuntimeError, match="longer text"):
        make_task(cache, model=GPT2_MODEL | {"n_positions": 2000}).prepare()
    with pytest.raises(ValueError, match="task.model.vocab_size=80"):
        make_task(cache, model=GPT2_MODEL | {"vocab_size": 60}).prepare()
    with pytest.raises(ValueError, match="n_hed"):
        make_task(cache, model=GPT2_MODEL | {"n_hed": 2}).model()


def test_gpt2_small_has_124_million_parameters():
    task = run_from(
        composed(["experiment=zero_one_adam_gpt2", "profile=paper", "comm=threads", "workers=64"])
    ).task
    with torch.device("meta"):
        assert sum(p.numel() for p in task.model().parameters()) == 124_439_808


def gpt2_options(cache, folder, *more):
    return [
        "profile=smoke",
        "task.text._target_=helpers.lab_text.FewDocuments",
        "task.model.vocab_size=80",
        "workers=2",
        "progress=false",
        "checkpoint_every=5",
        f"cache={cache}",
        f"output={folder}",
        *more,
    ]


GPT2 = (
    "experiment=zero_one_adam_gpt2",
    "task.model.n_embd=16",
    "task.held_out=5",
    "scale.steps_divisor=7600",
)


LAMB = (
    "experiment=lamb",
    "task.model.hidden_size=16",
    "task.model.intermediate_size=32",
    "scale.steps_divisor=300",
    "watch.every=3",
)


def test_gpt2_learns_what_it_is_evaluated_by(cache, tmp_path):
    train_in_threads(
        gpt2_options(
            cache,
            tmp_path,
            *GPT2,
            "optimizer=zero_one_adam",
            "scale.steps_divisor=3000",
            "lr=1e-2",
            "evaluate_every=10",
        )
    )
    losses = [
        float(row["value"])
        for row in rows(tmp_path, "evaluation", EVALUATION)
        if row["metric"] == "validation_loss"
    ]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("evaluation", (*GPT2, "optimizer=zero_one_adam")),
        ("tensors", (*LAMB, "optimizer=onebit_lamb")),
    ],
)
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(cache, tmp_path, name, chosen):
    columns = {"evaluation": EVALUATION, "tensors": TENSORS}[name]
    train_in_threads(gpt2_options(cache, tmp_path / "whole", *chosen))
    with pytest.raises(KeyboardInterrupt):
        train_in_threads(gpt2_options(cache, tmp_path / "broken", *chosen), at_most=14)
    train_in_threads(gpt2_options(cache, tmp_path / "broken", *chosen, "resume=true"))
    assert rows(tmp_path / "broken", name, columns) == rows(tmp_path / "whole", name, columns)


def test_training_does_not_notice_that_it_is_watched(cache, tmp_path):
    for name, more in (("with", []), ("without", ["watch=null"])):
        train_in_threads(
            gpt2_options(cache, tmp_path / name, *LAMB, "optimizer=onebit_lamb", *more)
        )
    assert rows(tmp_path / "with", "curve", COLUMNS) == rows(tmp_path / "without", "curve", COLUMNS)
    assert {row["step"] for row in rows(tmp_path / "with", "tensors", TENSORS)} == {
        "3",
        "6",
        "9",
        "12",
        "15",
        "18",
    }
    assert not (tmp_path / "without/tensors.csv").exists()
