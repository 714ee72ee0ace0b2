"""Small tasks of GLUE and SQuAD, and data in the hub's schema."""

import pandas as pd

from onebit.lab.tasks.glue import GLUE, Glue, HubGlue
from onebit.lab.tasks.made_up import MadeUpGlue, made_up_questions
from onebit.lab.tasks.squad import Squad
from onebit.lab.tasks.tokenizer import TrainedWordPiece

FINETUNED_MODEL = {
    "vocab_size": 256,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
}


def finetuning_options(cache, **changed):
    common = {
        "model": FINETUNED_MODEL,
        "weights": None,
        "tokenizer": TrainedWordPiece(vocab_size=256),
        "batch": 12,
        "length": 32,
        "cache": cache,
    }
    return common | changed


def glue(cache, name="rte", count=30, **changed):
    return Glue(
        name=name, **finetuning_options(cache, **{"data": MadeUpGlue(count=count), **changed})
    )


def squad(cache, test=None, **changed):
    sources = {
        "train": made_up_questions(20, seed=0),
        "test": test or made_up_questions(20, seed=1),
    }
    return Squad(
        **finetuning_options(
            cache, **{**sources, "stride": 12, "question_length": 8, "length": 40, **changed}
        )
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
