"""Write what a run has pre-trained as a folder of transformers, from which fine-tuning can start.

    python -m onebit.lab.export RUN DIR

RUN is the folder of a run of BERT pre-training that keeps checkpoints, for example
results/runs/table_02/paper/onebit_adam/seed-1. From its newest checkpoint DIR gets

    config.json, model.safetensors    the exact mean of the workers' models, as for an evaluation
    tokenizer.json                    the pieces of the pre-training
    pretraining.json                  what was run, which fine-tuning copies into its own run.json

ONEBIT_CACHE and ONEBIT_DATA_ROOT say, as in training, where the text is. A tokenizer that was
trained on the text is trained again, and must be the same.

Fine-tuning (experiments squad, glue_rte, ...) reads DIR with the options

    task/weights=bert_base_uncased task.weights.name=DIR task/model=MODEL
    task/tokenizer=bert_base_uncased task.tokenizer.name=DIR/tokenizer.json

where MODEL is the pre-training's own: bert_large in profile paper, or bert_base of table_02_base;
bert_tiny in profiles smoke and laptop. Claims T11 to T15 also need the seed of the pre-training,
whose optimizer was NAME, and a folder of their own, in single quotes:

    optimizer=adam seed=N
    'output=results/runs/pretrained/${profile}/NAME/seed-${seed}/${experiment}'
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from hydra.utils import get_class, instantiate
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertConfig, BertForPreTraining

from onebit.lab.config import composed
from onebit.lab.runs.metadata import read_run
from onebit.lab.tasks.bert import BertPretraining
from onebit.lab.tasks.corpus import load_corpus
from onebit.lab.tasks.model import configured
from onebit.lab.tasks.tokenizer import TrainedWordPiece
from onebit.lab.tasks.weights import PRETRAINING
from onebit.lab.training.checkpoint import newest


def export(run: Path, folder: Path) -> dict:
    """Write the folder; returns what its pretraining.json says.

    Raises:
        ValueError: there is no such run, its model is no BERT, or the folder is not empty.
        FileNotFoundError: the run has no complete checkpoint.
        RuntimeError: the tokenizer cannot be read.
    """
    record = read_run(run)
    if not record:
        raise ValueError(
            f"{run} holds no run: give the folder with its run.json and checkpoints, "
            "results/runs/EXPERIMENT/PROFILE/OPTIMIZER/seed-N."
        )
    options = record["config"]["task"]
    if not issubclass(get_class(options["_target_"]), BertPretraining):
        kind = options["_target_"].rpartition(".")[2]
        raise ValueError(
            f"{run} is a run of {kind} ({record['experiment']}): only BERT pre-training can be "
            "exported."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: choose another.")
    step, weights = mean_weights(run, record["workers"])
    model = BertForPreTraining(configured(BertConfig, options["model"]))
    model.load_state_dict(weights)
    tokenizer = tokenizer_of(record)
    about = record | {"step": step}
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / PRETRAINING).write_text(json.dumps(about, indent=1) + "\n")
    return about


def mean_weights(run: Path, workers: int) -> tuple[int, dict[str, Tensor]]:
    """The step of the newest checkpoint, and the mean of the ranks' weights.

    It has the same bits as that of `mean_model`, but only one rank's weights are in memory.
    """
    source = newest(run / "checkpoints")
    files = [source / f"rank-{rank}.pt" for rank in range(workers)] if source else []
    missing = [file for file in files if not file.exists()]
    if missing or not files:
        raise FileNotFoundError(
            f"{missing[0]} is missing: all workers' files must be in one folder."
            if missing
            else f"{run} has no checkpoint. A run keeps its newest two if checkpoint_every is at "
            f"least 1 (it is {read_run(run)['config']['checkpoint_every']}): train it again with "
            "checkpoint_every=N overwrite=true."
        )
    total = None
    for file in files:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if total is None:
            step, first, total = (
                state["step"],
                state["weights"],
                {name: _wide(tensor).clone() for name, tensor in state["weights"].items()},
            )
        else:
            for name, tensor in state["weights"].items():
                total[name] += _wide(tensor) if tensor.is_floating_point() else 0
    return step, {
        name: (t / workers if t.is_floating_point() else t).to(first[name].dtype)
        for name, t in total.items()
    }


def _wide(tensor: Tensor) -> Tensor:
    """In at least float32, in which the mean is taken."""
    return (
        tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if tensor.is_floating_point()
        else tensor
    )


def tokenizer_of(record: dict) -> Tokenizer:
    """The tokenizer of a run of BERT pre-training.

    Raises:
        ValueError: it was trained on another text than is here.
    """
    options, places = record["config"]["task"], composed([])
    tokenizer = instantiate(options["tokenizer"])
    text = instantiate(with_data_root(options["text"], places.data_root), _convert_="all")
    if isinstance(tokenizer, TrainedWordPiece):
        sha256 = load_corpus(text, tokenizer, Path(places.cache).expanduser()).sha256
        if sha256 != record["corpus_sha256"]:
            raise ValueError(
                "The text is not the one that the run has read, so that a tokenizer trained on it "
                "has other pieces: export with the run's data and Python "
                f"({record['environment']['python']})."
            )
    return tokenizer.build(text.documents())


def with_data_root(options: object, data_root: str | None) -> object:
    """A text's options, with the place of the data wherever a data set of the hub is named.

    run.json does not have it, since it belongs to the machine.
    """
    if not isinstance(options, dict):
        return options
    restored = {name: with_data_root(value, data_root) for name, value in options.items()}
    return restored | ({"data_root": data_root} if "path" in options else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m onebit.lab.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("folder", type=Path, metavar="DIR", help="new, or empty")
    options = parser.parse_args()
    try:
        about = export(options.run.expanduser(), options.folder.expanduser())
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    step, steps = about["step"], about["total_steps"]
    if step < steps:
        print(
            f"warning: step {step:,} of {steps:,} (the run is {about['status']}): the pre-training "
            "is not complete.",
            file=sys.stderr,
        )
    print(
        f"{options.folder}: {about['optimizer']}, seed {about['seed']} of {about['experiment']}, "
        f"step {step:,}, the mean of {about['workers']} workers; --help says how to fine-tune it"
    )


if __name__ == "__main__":
    main()
