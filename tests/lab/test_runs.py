"""Whole runs: the same on every backend, paired by seed, recorded as promised."""

import csv
import math
import subprocess
from types import SimpleNamespace

import pytest
from helpers.lab_runs import environment, record, train_command, train_in_threads
from helpers.mpi_ranks import run_mpirun
from helpers.waiting import eventually

from onebit.lab.config import composed
from onebit.lab.runs.compare import check_folder, differing, what_is_computed
from onebit.lab.runs.recorder import COLUMNS, Recorder
from onebit.lab.training.loop import Training

DROPOUT = ["task.model.hidden_dropout_prob=0.1", "task.model.attention_probs_dropout_prob=0.1"]


def rows(folder):
    """curve.csv without what depends on the clock and the commit."""
    with open(folder / "curve.csv", newline="") as file:
        return [
            {key: row[key] for key in COLUMNS if key not in ("seconds", "commit")}
            for row in csv.DictReader(file)
        ]


def test_threads_gloo_and_mpi_give_the_same_losses_bit_for_bit(options, tmp_path):
    """With dropout, two workers, and both phases of the optimizer and of the sequence length."""
    train_in_threads(options("threads", "workers=2", *DROPOUT))
    subprocess.run(
        train_command(options("gloo", "comm=gloo", "workers=2", *DROPOUT)),
        env=environment(),
        check=True,
        timeout=240,
    )
    expected = rows(tmp_path / "threads")
    assert [row["phase"] for row in expected] == ["warmup"] * 6 + ["compressed"] * 34 + [
        "warmup"
    ] + ["compressed"] * 2
    assert len({row["loss"] for row in expected}) == 43
    assert rows(tmp_path / "gloo") == expected
    process = run_mpirun(2, train_command(options("mpi", "comm=mpi", *DROPOUT))[1:])
    assert process.returncode == 0, process.stdout
    assert rows(tmp_path / "mpi") == expected


@pytest.mark.parametrize(
    ("optimizer", "stops"),
    [
        ("onebit_adam", (3, 17, 42)),
        ("adam", (42,)),
        ("naive_onebit_adam", (17,)),
        ("local_momentum_sgd", (17,)),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(options, tmp_path, optimizer, stops):
    """Stopped before the first checkpoint, in the compressed phase, after the change of the
    sequence length; resumed between two averages.
    """
    chosen = [f"optimizer={optimizer}", "workers=2", *DROPOUT]
    train_in_threads(options("whole", *chosen))
    for stop in stops:
        broken = f"broken-{stop}"
        with pytest.raises(KeyboardInterrupt):
            train_in_threads(options(broken, *chosen), at_most=stop)
        assert record(tmp_path / broken)["status"] == "running"
        train_in_threads(options(broken, *chosen, "resume=true"))
        assert rows(tmp_path / broken) == rows(tmp_path / "whole")
        ends = [record(tmp_path / name)["final"] | {"seconds": 0} for name in (broken, "whole")]
        assert ends[0] == ends[1]


def test_two_checkpoints_are_kept_with_a_file_for_each_rank(options, tmp_path):
    train_in_threads(options("run", "workers=3"))
    folder = tmp_path / "run/checkpoints"
    assert (folder / "latest").read_text() == "step-00000043"
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.pt")) == [
        f"step-{step:08d}/rank-{rank}.pt" for step in (33, 43) for rank in range(3)
    ]


def test_another_number_of_workers_cannot_resume(options):
    with pytest.raises(KeyboardInterrupt):
        train_in_threads(options("run", "workers=2"), at_most=12)
    with pytest.raises(RuntimeError, match="workers=2"):
        train_in_threads(options("run", "workers=3", "resume=true"))


def test_only_a_run_whose_checkpoint_is_missing_says_that_it_starts_again(options, capsys):
    more = ("workers=1", "resume=true", "scale.steps_divisor=15000", "checkpoint_every=0")
    train_in_threads(options("run", *more))
    assert "checkpoint" not in capsys.readouterr().err
    train_in_threads(options("run", *more))
    assert "has no checkpoint: the run starts from the beginning" in capsys.readouterr().err


def test_a_run_is_neither_lost_nor_continued_as_another(options):
    train_in_threads(options("run", "workers=1", "scale.steps_divisor=15000"))

    def check(*more):
        return check_folder(
            composed(
                [*options("run", "comm=threads", "workers=1", "scale.steps_divisor=15000"), *more]
            )
        )

    with pytest.raises(ValueError, match="overwrite=true"):
        check()
    with pytest.raises(ValueError, match="another lr, phases"):
        check("resume=true", "lr=0.5")
    with pytest.raises(ValueError, match="leave one of them out"):
        check("resume=true", "overwrite=true")
    assert check("resume=true", "wandb=offline") == "finished"
    assert check("overwrite=true") is None


def test_a_run_from_before_bounded_steps_is_one_without_the_bound():
    """It may be compared and continued with a run that says so, but not with a bounded one."""
    own = {"_target_": "onebit.OneBitAdam", "betas": [0.9, 0.999], "warmup": 3}
    older, off, on = (
        {"optimizer": "onebit_adam", "workers": 2, "config": {"lr": 1.0, "optimizer": own | more}}
        for more in ({}, {"bound_steps": False}, {"bound_steps": True})
    )
    assert what_is_computed(older["config"]) == what_is_computed(off["config"])
    assert differing(older, off) == []
    assert differing(older, on) == differing(off, on) == ["optimizer.bound_steps"]


def test_methods_of_one_seed_see_the_same_weights_and_data(options, tmp_path):
    """Their first losses are equal; another seed's is not."""
    names = ["adam", "onebit_adam", "onebit_adam_32bit", "naive_onebit_adam"]
    for name in names:
        train_in_threads(
            options(name, "workers=2", "scale.steps_divisor=15000", f"optimizer={name}")
        )
    train_in_threads(options("other", "workers=2", "scale.steps_divisor=15000", "seed=2"))
    first = {name: rows(tmp_path / name)[0]["loss"] for name in [*names, "other"]}
    assert len({first[name] for name in names}) == 1
    assert first["other"] != first["adam"]


def test_an_optimizer_without_a_variance_leaves_its_columns_empty(options, tmp_path):
    train_in_threads(
        options("run", "workers=2", "scale.steps_divisor=15000", "optimizer=local_momentum_sgd")
    )
    assert {
        row[name]
        for row in rows(tmp_path / "run")
        for name in ("variance_l1", "variance_l2", "variance_ratio")
    } == {""}


def test_a_run_is_recorded_as_promised(options, tmp_path):
    train_in_threads(options("run", "workers=2", "record_every=4", "optimizer.betas=[0.9,0.875]"))
    read, facts = rows(tmp_path / "run"), record(tmp_path / "run")
    assert [int(row["step"]) for row in read] == [*range(4, 41, 4), 43]
    assert [int(row["samples"]) for row in read] == [12 * int(row["step"]) for row in read]
    # The window is 1 / (1 - 0.875) = 8 steps.
    assert [row["variance_ratio"] != "" for row in read] == [False, False] + [True] * 8 + [False]
    norms = [float(row["variance_l1"]) for row in read]
    assert float(read[2]["variance_ratio"]) == pytest.approx(norms[2] / norms[0], rel=1e-4)
    assert all(math.isfinite(float(row["loss"])) for row in read)
    sent = [int(row["bytes_sent"]) for row in read]
    assert sent == sorted(sent) and facts["final"]["bytes_sent"] == sent[-1]
    assert (facts["status"], facts["warmup_steps"], facts["total_steps"], facts["optimizer"]) == (
        "finished",
        6,
        43,
        "onebit_adam",
    )
    assert facts["config"]["phases"]["seq512"]["length"] == 64
    assert len(facts["corpus_sha256"]) == 64
    assert {"python", "torch", "cpu"} <= facts["environment"].keys()


def test_run_json_does_not_name_the_folders_of_a_machine(options, tmp_path):
    train_in_threads(options("run", f"data_root={tmp_path}"))
    assert str(tmp_path) not in (tmp_path / "run/run.json").read_text()
    assert check_folder(composed(options("run", "resume=true", "data_root=null"))) == "finished"


def test_a_run_that_diverges_is_recorded_and_ends_in_order(options, tmp_path):
    train_in_threads(
        options("run", "workers=2", "lr=1e7", "optimizer=adam", "optimizer.max_grad_norm=null")
    )
    facts = record(tmp_path / "run")
    assert facts["status"] == "diverged"
    assert [row["step"] for row in rows(tmp_path / "run")] == [
        str(1 + i) for i in range(len(rows(tmp_path / "run")))
    ]  # skipped ones too
    assert rows(tmp_path / "run")[-1]["loss"] == "nan"


def test_accumulation_sees_the_same_examples(options, tmp_path):
    """Micro-batches are a matter of memory: the losses differ only as a mean of means does, by
    how many words each part masks.
    """
    for name, micro in (("whole", 6), ("parts", 2)):
        run = train_in_threads(
            options(
                name,
                "workers=2",
                f"micro_batch={micro}",
                "scale.steps_divisor=15000",
                "optimizer=adam",
            )
        )
        assert run.micro_batches(run.phases["seq128"], 2) == (6 // micro, micro)
    whole, parts = (
        [float(row["loss"]) for row in rows(tmp_path / name)] for name in ("whole", "parts")
    )
    assert parts == pytest.approx(whole, rel=0.02)
    assert rows(tmp_path / "parts")[0]["samples"] == "12"


def test_checkpoints_leave_other_files_alone(options, tmp_path):
    mine = tmp_path / "run" / "checkpoints" / "mine"
    mine.mkdir(parents=True)
    train_in_threads(options("run", "workers=1", "scale.steps_divisor=15000"))
    assert mine.exists()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_single_precision(options, tmp_path, precision):
    for chosen in ("fp32", precision):
        train_in_threads(
            options(
                chosen,
                "workers=2",
                "optimizer=adam",
                f"precision={chosen}",
                "phases.seq512.steps=1",
            )
        )
    single, half = (float(rows(tmp_path / name)[-1]["loss"]) for name in ("fp32", precision))
    assert half == pytest.approx(single, rel=0.02)
    assert half != single


def test_offline_wandb_writes_files(options, tmp_path):
    train_in_threads(options("run", "workers=1", "scale.steps_divisor=15000", "wandb=offline"))
    files = list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 1
    expected = b"variance_l1", b"onebit_adam-smoke-seed-1"
    # W&B's own process writes the file, on a busy machine after `finish` has returned.
    assert eventually(lambda: all(word in files[0].read_bytes() for word in expected))


@pytest.mark.parametrize(("has_warmup", "phase"), [(True, " warmup,"), (False, "")])
def test_the_bar_says_what_the_whole_run_has_sent_and_the_phase_if_there_are_two(
    tmp_path, has_warmup, phase
):
    """A resumed run counts what it had sent before; plain Adam has no warm-up to speak of."""
    recorder = Recorder(tmp_path, dict.fromkeys(COLUMNS[:4]), "disabled")
    recorder.before["bytes_sent"] = 66_000_000
    sent = SimpleNamespace(bytes_sent=300_000, bytes_received=0, calls=0)
    training = SimpleNamespace(
        recorder=recorder,
        optimizers=[SimpleNamespace(communication=sent)],
        plan=SimpleNamespace(at=lambda step: ("seq128", None, 0)),
        run=SimpleNamespace(has_warmup=has_warmup),
    )
    text = Training.progress_text(training, 1, {"model": 2.0}, "warmup")
    assert text == f"loss 2.000, seq128,{phase} sent 66.3MB"
