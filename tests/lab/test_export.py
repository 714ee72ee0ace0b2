"""What was pre-trained here can be exported and fine-tuned from, and is compared by claims T11 to
T15 as Table 3 does.
"""

import json
import os
import subprocess
import sys
from functools import partial
from math import inf
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import lab_text, launch, synthetic
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, BertForPreTraining

from onebit.lab import export
from onebit.lab.claims import CLAIMS, rows_of
from onebit.lab.claims.finetune import METRICS, ON_GLUE, pretrained_rows
from onebit.lab.claims.judge import judge
from onebit.lab.config import composed
from onebit.lab.runs.compare import PLACES, without
from onebit.lab.runs.metadata import read_run
from onebit.lab.tasks.corpus import split_segments
from onebit.lab.tasks.tokenizer import SPECIAL
from onebit.lab.training.evaluate import mean_model
from onebit.lab.training.loop import train
from onebit.lab.training.run import run_from

pytestmark = [
    pytest.mark.filterwarnings("ignore:the variance is frozen"),
    pytest.mark.filterwarnings("ignore:.* coordinates had so little gradient"),
]
ROOT = Path(__file__).resolve().parents[2]
SIZES = ["task.model.vocab_size=80", "task.model.hidden_size=32", "task.model.intermediate_size=64"]
TEXT = ["task.text._target_=helpers.lab_text.FewDocuments", *SIZES]
CLAIM = {claim.name: claim for claim in CLAIMS}


def trained(folder, cache, *more):
    """A run in threads."""
    run = run_from(
        composed(
            [
                "profile=smoke",
                "comm=threads",
                "progress=false",
                f"cache={cache}",
                f"output={folder}",
                *more,
            ]
        )
    )
    run.task.prepare()
    run.comm.run(partial(train, run))
    return folder


def pretrained(folder, cache, *more):
    return trained(
        folder,
        cache,
        "experiment=figure_04",
        *TEXT,
        "workers=3",
        "phases.seq128.steps=7",
        "checkpoint_every=4",
        "warmup_steps=3",
        *more,
    )


def from_weights(folder, *more):
    """Options of a fine-tuning that begins there: those of `python -m onebit.lab.export --help`."""
    lines = [line.split() for line in export.__doc__.splitlines() if "task.weights.name=" in line]
    assert len(lines) == 1
    return (
        [option.replace("DIR", str(folder)).replace("=MODEL", "=bert_tiny") for option in lines[0]]
        + SIZES
        + list(more)
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEBIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def mean_of_ranks(run):
    """The weights of the model that `mean_model` makes of the newest checkpoint's."""
    source = run / "checkpoints" / (run / "checkpoints/latest").read_text()

    def mean(communicator):
        model = BertForPreTraining(AutoConfig.from_pretrained(run.parent / "weights"))
        model.load_state_dict(
            torch.load(source / f"rank-{communicator.rank}.pt", weights_only=True)["weights"]
        )
        averaged = mean_model(model, communicator)
        return model.state_dict(), averaged and averaged.state_dict()

    ranks = launch.run_threads(3, mean)
    return [own for own, _ in ranks], ranks[0][1]


# Whose ranks have different weights after step 7.
DRIFTED = {
    "adam": False,
    "onebit_adam": False,
    "zero_one_adam": True,
    "local_momentum_sgd": True,
    "lazy_variance_5": True,
}


@pytest.mark.parametrize("optimizer", DRIFTED)
def test_the_exported_weights_are_the_mean_models_bit_for_bit(cache, tmp_path, optimizer):
    steps = [
        "optimizer.variance_freeze_step=2",
        "optimizer.local_step_scaler=1",
        "optimizer.local_step_clipper=4",
    ] * (optimizer == "zero_one_adam")
    run, folder = (
        pretrained(tmp_path / "run", cache, f"optimizer={optimizer}", *steps),
        tmp_path / "weights",
    )
    assert export.export(run, folder)["step"] == 7
    ranks, mean = mean_of_ranks(run)
    assert DRIFTED[optimizer] != all(
        torch.equal(ranks[0][name], rank[name]) for rank in ranks for name in mean
    )
    saved = BertForPreTraining.from_pretrained(folder).state_dict()
    assert saved.keys() == mean.keys() and len(mean) > 30
    task = run_from(
        composed(
            [
                "experiment=glue_rte",
                "profile=smoke",
                "optimizer=adam",
                f"cache={cache}",
                *from_weights(folder),
            ]
        )
    ).task
    encoder = task.model().bert.state_dict()
    for name, tensor in mean.items():
        assert torch.equal(saved[name], tensor)
        if name.startswith("bert."):
            assert torch.equal(encoder.pop(name.removeprefix("bert.")), tensor)
    assert not encoder


def test_fine_tuning_goes_on_from_what_was_exported_and_is_gathered_by_its_pre_training(
    cache, tmp_path, monkeypatch
):
    """With the command itself, and the tokenizer that the pre-training has read its text with."""
    run, folder = pretrained(tmp_path / "run", cache, "optimizer=onebit_adam"), tmp_path / "weights"
    command = [sys.executable, "-m", "onebit.lab.export", run, folder]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert "onebit_adam, seed 1 of figure_04, step 7, the mean of 3 workers" in done.stdout
    tokens = run_from(
        composed(["profile=smoke", "experiment=figure_04", f"cache={cache}", *TEXT])
    ).task.corpus.tokens
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    segment = split_segments(lab_text.DOCUMENTS[0])[0]
    ids = tokenizer.encode(segment, add_special_tokens=False).ids
    assert (
        ids
        == tokens[: len(ids)].tolist()
        == AutoTokenizer.from_pretrained(folder)(segment, add_special_tokens=False)["input_ids"]
    )

    monkeypatch.chdir(tmp_path)
    output = (
        next(line for line in export.__doc__.splitlines() if "output=" in line)
        .split("output=")[1]
        .strip("'")
        .replace("NAME", "onebit_adam")
    )
    options = [
        "experiment=glue_rte",
        "workers=2",
        "optimizer=adam",
        "seed=1",
        "phases.train.steps=3",
        "evaluate_every=3",
    ]
    trained(output, cache, *options, *from_weights(folder))
    record = read_run(tmp_path / "results/runs/pretrained/smoke/onebit_adam/seed-1/glue_rte")
    assert record["pretraining"] == read_run(run) | {"step": 7} and record["status"] == "finished"
    rows = pretrained_rows(tmp_path / "results", "smoke", ("onebit_adam", "adam"))
    assert (
        rows[["optimizer", "seed"]].values.tolist() == [["onebit_adam", 1]]
        and 0 <= rows.glue_rte[0] <= 100
    )


def refused(run, folder, capsys, monkeypatch):
    """What the command says."""
    monkeypatch.setattr(sys, "argv", ["export_weights", str(run), str(folder)])
    with pytest.raises(SystemExit, match="^error: ") as end:
        export.main()
    return str(end.value)


def test_what_cannot_be_exported_is_refused_with_the_reason(cache, tmp_path, capsys, monkeypatch):
    say, folder = partial(refused, capsys=capsys, monkeypatch=monkeypatch), tmp_path / "weights"
    assert "holds no run" in say(tmp_path / "nothing", folder)
    run = pretrained(
        tmp_path / "without", cache, "phases.seq128.steps=1", "warmup_steps=1", "checkpoint_every=0"
    )
    assert "checkpoint_every=N overwrite=true" in say(run, folder)
    glue = trained(
        tmp_path / "glue",
        cache,
        "experiment=glue_rte",
        "workers=1",
        "phases.train.steps=1",
        "evaluate_every=null",
        "batch=4",
    )
    assert "run of Glue (glue_rte): only BERT" in say(glue, folder)

    run = pretrained(tmp_path / "run", cache)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    assert "not an empty folder" in say(run, tmp_path / "full") and "not an empty folder" in say(
        run, tmp_path / "full/mine"
    )
    monkeypatch.setattr(lab_text, "DOCUMENTS", lab_text.DOCUMENTS[1:])
    monkeypatch.setattr(lab_text.FewDocuments, "fingerprint", lambda self: "fewer documents")
    assert "text is not the one" in say(run, folder)
    monkeypatch.undo()
    (run / "checkpoints/step-00000007/rank-1.pt").unlink()
    assert "rank-1.pt is missing" in say(run, folder)
    assert not folder.exists()


def test_a_run_that_has_not_finished_is_exported_with_a_warning(
    cache, tmp_path, capsys, monkeypatch
):
    run = pretrained(tmp_path / "run", cache)
    (run / "checkpoints/latest").write_text("step-00000004")
    monkeypatch.setattr(sys, "argv", ["export_weights", str(run), str(tmp_path / "weights")])
    export.main()
    assert "warning: step 4 of 7" in capsys.readouterr().err


def test_a_loaded_tokenizer_needs_no_text_and_hub_texts_get_back_their_folder(
    cache, tmp_path, monkeypatch
):
    """run.json names no folder of a machine."""
    options = OmegaConf.to_container(
        composed(["profile=paper", "experiment=table_02", "data_root=/there"]), resolve=True
    )
    kept = without(options, PLACES)
    assert export.with_data_root(kept["task"]["text"], "/there") == options["task"]["text"]
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "a"]))
    kept["task"]["tokenizer"]["name"] = str(tmp_path / "vocab.txt")
    assert export.tokenizer_of({"config": kept}).get_vocab_size() == 6


# ---- claims T11 to T15


def write(root, optimizer, seed, experiment, score, status="finished", changes=None, before=None):
    """A made-up fine-tuning of what `optimizer` has pre-trained."""
    folder = root / "runs/pretrained/paper" / optimizer / f"seed-{seed}" / experiment
    pretraining = synthetic.record(
        optimizer, seed, experiment="lamb" if "lamb" in optimizer else "table_02"
    ) | {"step": synthetic.STEPS}
    config = synthetic.config("adam", experiment) | {"seed": seed}
    config["task"] = config["task"] | {"weights": {"name": f"weights/{optimizer}/seed-{seed}"}}
    record = synthetic.record(
        "adam", seed, status, experiment, config=config, pretraining=pretraining | (before or {})
    )
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record | (changes or {})))
    rows = {
        "step": [synthetic.STEPS // 2, synthetic.STEPS],
        "metric": METRICS[experiment],
        "value": [11.0, score],
    }
    if status == "finished":
        pd.DataFrame(rows).to_csv(folder / "evaluation.csv", index=False)
    return folder


def write_all(root, gaps, optimizer="onebit_adam", seeds=(1, 2, 3)):
    """The reference scores 60 and a little more at each seed; gaps: what the other has more, by
    experiment.
    """
    for experiment, gap in gaps.items():
        for seed in seeds:
            write(root, "lamb" if "lamb" in optimizer else "adam", seed, experiment, 60 + seed)
            write(root, optimizer, seed, experiment, 60 + seed + gap)


def judged(root, name="T11"):
    claim = CLAIM[name].at("paper")
    return judge(claim, rows_of(claim, root))


@pytest.mark.parametrize(
    ("gaps", "mean", "expected"),
    [
        (dict.fromkeys(ON_GLUE, -0.5), -0.005, "reproduced"),
        (dict.fromkeys(ON_GLUE, -2), -0.02, "not reproduced"),
        ({"glue_rte": 3.0, "glue_cola": -2.0}, 0.005, "reproduced"),
    ],
)
def test_the_score_of_a_pre_training_is_the_mean_over_the_tasks(tmp_path, gaps, mean, expected):
    write_all(tmp_path, gaps)
    write_all(tmp_path, {"squad": 50})
    judgement = judged(tmp_path)
    assert (judgement.verdict, judgement.interval.mean, judgement.interval.n) == (
        expected,
        pytest.approx(mean),
        3,
    )
    assert judgement.detail.startswith(f"onebit_adam {62 + 100 * mean:.1f}, adam 62.0")
    assert ("without glue_mrpc, glue_sst2" in judgement.detail) == (len(gaps) == 2)


def test_squad_is_judged_by_itself(tmp_path):
    write_all(tmp_path, {"squad": -0.6}, "onebit_lamb")
    write_all(tmp_path, {"glue_rte": 0}, "onebit_lamb")
    assert (
        judged(tmp_path, "T15").verdict == "not reproduced"
        and judged(tmp_path, "T13").verdict == "reproduced"
    )


def test_a_task_that_one_run_lacks_counts_for_none(tmp_path):
    """Otherwise the seed without the hard task would have the better mean."""
    write_all(tmp_path, {"glue_rte": 0.0, "glue_cola": 20.0})
    (tmp_path / "runs/pretrained/paper/adam/seed-2/glue_cola/run.json").write_text(
        json.dumps({"status": "running"})
    )
    judgement = judged(tmp_path)
    assert (judgement.interval.mean, judgement.interval.n) == (0, 3)
    assert "without glue_mrpc, glue_cola" in judgement.detail
    write(tmp_path, "lamb", 1, "squad", 60)  # another claim's runs change nothing
    write(tmp_path, "adam", 4, "glue_mnli", 60)  # nor does a seed that only one of the two has
    assert judged(tmp_path) == judgement


def test_a_run_that_was_not_evaluated_lacks_its_task(tmp_path):
    write_all(tmp_path, {"glue_rte": 0.0, "glue_cola": 20.0})
    (tmp_path / "runs/pretrained/paper/adam/seed-2/glue_cola/evaluation.csv").unlink()
    assert judged(tmp_path).interval.mean == 0


@pytest.mark.parametrize("where", ["after", "before"])
@pytest.mark.parametrize(("who", "expected"), [("onebit_adam", (-inf, 3)), ("adam", (0, 2))])
def test_a_run_that_diverged_is_not_averaged_away(tmp_path, where, who, expected):
    write_all(tmp_path, {"glue_rte": 0.0})
    write_all(tmp_path, {"glue_cola": 0.0}, seeds=(1, 2))
    for name in ("adam", "onebit_adam"):
        lost = (
            {"status": "diverged"}
            if where == "after"
            else {"before": {"status": "diverged", "step": 50}}
        )
        write(tmp_path, name, 3, "glue_cola", 60, **(lost if name == who else {}))
    judgement = judged(tmp_path)
    assert (judgement.interval.mean, judgement.interval.n) == expected
    assert f"{who} 61.5 (1 diverged)" in judgement.detail


def test_one_run_that_diverged_does_not_decide_what_is_to_fall_behind(tmp_path):
    write_all(tmp_path, {"glue_rte": 0.0}, "lamb_basic_onebit", seeds=(1, 2, 3))
    write(tmp_path, "lamb", 4, "glue_rte", 60)
    write(tmp_path, "lamb_basic_onebit", 4, "glue_rte", 60, "diverged")
    judgement = judged(tmp_path, "T14")
    assert (judgement.verdict, judgement.interval.n) == (
        "not reproduced",
        3,
    ) and "(1 diverged)" in judgement.detail


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"changes": {"pretraining": None}},
            "not fine-tuned from weights that onebit.lab.export wrote",
        ),
        ({"changes": {"optimizer": "onebit_adam"}}, "fine-tuned with onebit_adam"),
        ({"before": {"optimizer": "adam"}}, "weights of adam, seed-2"),
        ({"before": {"seed": 1}}, "weights of onebit_adam, seed-1"),
        ({"before": {"step": 150}}, "had not finished: step 150 of 200"),
        ({"before": {"workers": 8}}, "differ in workers.*the pre-training of"),
        ({"changes": {"workers": 8}}, "differ in workers"),
    ],
)
def test_runs_that_do_not_compare_the_pre_training_are_refused(tmp_path, changed, reason):
    write_all(tmp_path, {"glue_rte": 0.0}, seeds=(1,))
    write(tmp_path, "adam", 2, "glue_rte", 60)
    write(tmp_path, "onebit_adam", 2, "glue_rte", 60, **changed)
    with pytest.raises(ValueError, match=reason):
        judged(tmp_path)
