"""Whole runs: the same on every backend, resumed as if never stopped, recorded, ended by an error without a hang."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from helpers import launch
from hydra.errors import InstantiationException

from onebit.lab.config import composed
from onebit.lab.runs.compare import check_folder
from onebit.lab.runs.recorder import COLUMNS
from onebit.lab.training.loop import train
from onebit.lab.training.precision import LossScale
from onebit.lab.training.run import run_from
from onebit.lab.training.workers import hold

# These runs are short.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the variance is frozen"),
    pytest.mark.filterwarnings("ignore:.* coordinates had so little gradient"),
]
DROPOUT = ["task.model.hidden_dropout_prob=0.1", "task.model.attention_probs_dropout_prob=0.1"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def options(cache, tmp_path):
    """Options of a run of 43 steps, 40 of 16 tokens and 3 of 64, warm-ups 6 and 1, into tmp_path / name."""

    def options(name, *more):
        return [
            "profile=smoke", "experiment=table_02", "task.text._target_=helpers.lab_text.FewDocuments", "task.model.vocab_size=80",
            "task.model.hidden_size=32", "task.model.intermediate_size=64", "progress=false", "checkpoint_every=11",
            f"cache={cache}", f"output={tmp_path / name}", *more,
        ]  # fmt: skip

    return options


def run_threads(options, at_most=None):
    """The run in threads of this process; it breaks off before step `at_most`."""
    run = run_from(composed([*options, "comm=threads"]))
    batch = run.task.batch

    def batch_until(seed, step, *rest):
        if step == at_most:
            raise KeyboardInterrupt
        return batch(seed, step, *rest)

    run.task.batch = batch_until
    run.comm.run(partial(train, run))
    return run


def train_command(options):
    return [sys.executable, "-m", "onebit.lab.train", *options]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def rows(folder):
    """curve.csv without what depends on the clock and the commit."""
    with open(folder / "curve.csv", newline="") as file:
        return [
            {key: row[key] for key in COLUMNS if key not in ("seconds", "commit")}
            for row in csv.DictReader(file)
        ]


def record(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.timeout(240)  # seven processes import torch and transformers
def test_threads_gloo_and_mpi_give_the_same_losses_bit_for_bit(options, tmp_path):
    """With dropout, three workers, and both phases of the optimizer and of the sequence length."""
    run_threads(options("threads", "workers=3", *DROPOUT))
    subprocess.run(
        train_command(options("gloo", "comm=gloo", "workers=3", *DROPOUT)),
        env=environment(),
        check=True,
        timeout=90,
    )
    expected = rows(tmp_path / "threads")
    assert [row["phase"] for row in expected] == ["warmup"] * 6 + ["compressed"] * 34 + [
        "warmup"
    ] + ["compressed"] * 2
    assert len({row["loss"] for row in expected}) == 43
    assert rows(tmp_path / "gloo") == expected
    process = launch.run_mpirun(
        3, train_command(options("mpi", "comm=mpi", *DROPOUT))[1:], timeout=120
    )
    assert process.returncode == 0, process.stdout
    assert rows(tmp_path / "mpi") == expected


@pytest.mark.parametrize(
    ("optimizer", "stop"),
    [
        ("onebit_adam", 3),
        ("onebit_adam", 17),
        ("onebit_adam", 42),
        ("adam", 42),
        ("naive_onebit_adam", 17),
        ("local_momentum_sgd", 17),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(options, tmp_path, optimizer, stop):
    """Stopped before the first checkpoint, in the compressed phase, after the change of the sequence length; resumed between two averages."""
    chosen = [f"optimizer={optimizer}", "workers=2", *DROPOUT]
    run_threads(options("whole", *chosen))
    with pytest.raises(KeyboardInterrupt):
        run_threads(options("broken", *chosen), at_most=stop)
    assert record(tmp_path / "broken")["status"] == "running"
    run_threads(options("broken", *chosen, "resume=true"))
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    final = [record(tmp_path / name)["final"] for name in ("broken", "whole")]
    assert [{**entry, "seconds": 0} for entry in final][0] == {**final[1], "seconds": 0}


def test_a_killed_run_leaves_no_process_and_a_checkpoint(options, tmp_path):
    """kill -9 of the parent: its workers end by themselves."""
    command = train_command(options("killed", "comm=gloo", "workers=2", "scale.steps_divisor=400"))
    process = subprocess.Popen(
        command, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True
    )
    latest = tmp_path / "killed/checkpoints/latest"
    deadline = time.monotonic() + 60
    while not latest.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while processes_of_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of_session(process.pid) == []
    assert latest.exists()
    assert record(tmp_path / "killed")["status"] == "running"


def processes_of_session(session):
    listed = subprocess.run(
        ["ps", "-eo", "sess=,stat=,pid="], capture_output=True, text=True, check=True
    ).stdout
    fields = [line.split() for line in listed.splitlines()]
    return [pid for sess, stat, pid in fields if sess == str(session) and not stat.startswith("Z")]


def test_two_checkpoints_are_kept_with_a_file_for_each_rank(options, tmp_path):
    run_threads(options("run", "workers=3"))
    folder = tmp_path / "run/checkpoints"
    assert (folder / "latest").read_text() == "step-00000043"
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.pt")) == [
        f"step-{step:08d}/rank-{rank}.pt" for step in (33, 43) for rank in range(3)
    ]


def test_another_number_of_workers_cannot_resume(options):
    with pytest.raises(KeyboardInterrupt):
        run_threads(options("run", "workers=2"), at_most=12)
    with pytest.raises(RuntimeError, match="workers=2"):
        run_threads(options("run", "workers=3", "resume=true"))


def test_resume_with_nothing_to_resume_starts_and_says_so(options, capsys):
    run_threads(options("run", "workers=1", "resume=true", "scale.steps_divisor=15000"))
    assert "from the start" in capsys.readouterr().err


def test_a_run_is_neither_lost_nor_continued_as_another(options):
    run_threads(options("run", "workers=1", "scale.steps_divisor=15000"))

    def check(*more):
        return check_folder(
            composed([*options("run", "comm=threads", "workers=1", "scale.steps_divisor=15000"), *more])
        )

    with pytest.raises(ValueError, match="overwrite=true"):
        check()
    with pytest.raises(ValueError, match="another lr, phases"):
        check("resume=true", "lr=0.5")
    with pytest.raises(ValueError, match="leave one of them out"):
        check("resume=true", "overwrite=true")
    assert check("resume=true", "wandb=offline") == "finished"
    assert check("overwrite=true") is None


def test_methods_of_one_seed_see_the_same_weights_and_data(options, tmp_path):
    """Their first losses are equal; another seed's is not."""
    names = ["adam", "onebit_adam", "onebit_adam_32bit", "naive_onebit_adam"]
    for name in names:
        run_threads(options(name, "workers=2", "scale.steps_divisor=15000", f"optimizer={name}"))
    run_threads(options("other", "workers=2", "scale.steps_divisor=15000", "seed=2"))
    first = {name: rows(tmp_path / name)[0]["loss"] for name in [*names, "other"]}
    assert len({first[name] for name in names}) == 1
    assert first["other"] != first["adam"]


def test_an_optimizer_without_a_variance_leaves_its_columns_empty(options, tmp_path):
    run_threads(options("run", "workers=2", "scale.steps_divisor=15000", "optimizer=local_momentum_sgd"))
    assert {
        row[name]
        for row in rows(tmp_path / "run")
        for name in ("variance_l1", "variance_l2", "variance_ratio")
    } == {""}


def test_a_run_is_recorded_as_promised(options, tmp_path):
    run_threads(options("run", "workers=2", "record_every=4", "optimizer.betas=[0.9,0.875]"))
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
    run_threads(options("run", f"data_root={tmp_path}"))
    assert str(tmp_path) not in (tmp_path / "run/run.json").read_text()
    assert check_folder(composed(options("run", "resume=true", "data_root=null"))) == "finished"


def test_a_run_that_diverges_is_recorded_and_ends_in_order(options, tmp_path):
    run_threads(
        options("run", "workers=2", "lr=1e7", "optimizer=adam", "optimizer.max_grad_norm=null")
    )
    facts = record(tmp_path / "run")
    assert facts["status"] == "diverged"
    assert [row["step"] for row in rows(tmp_path / "run")] == [
        str(1 + i) for i in range(len(rows(tmp_path / "run")))
    ]  # skipped ones too
    assert rows(tmp_path / "run")[-1]["loss"] == "nan"


def test_accumulation_sees_the_same_examples(options, tmp_path):
    """Micro-batches are a matter of memory: the losses differ only as a mean of means does, by how many words each part masks."""
    for name, micro in (("whole", 6), ("parts", 2)):
        run = run_threads(
            options(
                name, "workers=2", f"micro_batch={micro}", "scale.steps_divisor=15000", "optimizer=adam"
            )
        )
        assert run.micro_batches(run.phases["seq128"], 2) == (6 // micro, micro)
    whole, parts = (
        [float(row["loss"]) for row in rows(tmp_path / name)] for name in ("whole", "parts")
    )
    assert parts == pytest.approx(whole, rel=0.02)
    assert rows(tmp_path / "parts")[0]["samples"] == "12"


def test_a_folder_belongs_to_one_run_at_a_time(options, tmp_path):
    with hold(tmp_path / "run"), pytest.raises(RuntimeError, match="another run"):
        hold(tmp_path / "run")
    with hold(tmp_path / "run"):
        pass


def test_checkpoints_leave_other_files_alone(options, tmp_path):
    mine = tmp_path / "run" / "checkpoints" / "mine"
    mine.mkdir(parents=True)
    run_threads(options("run", "workers=1", "scale.steps_divisor=15000"))
    assert mine.exists()


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize("comm", ["threads", "gloo"])
def test_workers_are_not_started_once_more_under_a_launcher(options, monkeypatch, variable, comm):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(InstantiationException, match="launcher has started 2 processes"):
        run_from(composed(options("run", f"comm={comm}")))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_single_precision(options, tmp_path, precision):
    for chosen in ("fp32", precision):
        run_threads(
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


def test_the_loss_scale_halves_after_an_overflow_and_doubles_after_patience():
    scale = LossScale("fp16", patience=2)
    scale.update(skipped=True)
    assert scale.value == 2.0**15
    scale.update(skipped=False)
    scale.update(skipped=False)
    assert scale.value == 2.0**16
    other = LossScale("fp16", patience=2)
    other.load_state_dict(scale.state_dict())
    assert other.value == scale.value
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([2.0**16, math.inf])
    scale.unscale([p, torch.nn.Parameter(torch.ones(1))])
    assert p.grad.tolist() == [1.0, math.inf]
    scale = LossScale("fp32")
    scale.update(skipped=True)
    assert scale.value == 1 and not scale.can_shrink


def test_offline_wandb_writes_files(options, tmp_path):
    run_threads(options("run", "workers=1", "scale.steps_divisor=15000", "wandb=offline"))
    files = list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 1
    deadline = (
        time.monotonic() + 30
    )  # W&B's own process writes the file, on a busy machine after `finish` has returned
    while b"variance_l1" not in (written := files[0].read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert b"variance_l1" in written and b"onebit_adam-smoke-seed-1" in written


def test_a_failing_worker_ends_all_with_its_traceback(options):
    broken = "task._target_=helpers.lab_broken.BrokenOnRank1"
    with pytest.raises(KeyError, match="broken data"):
        run_threads(options("threads", "workers=2", broken))
    command = train_command(options("gloo", "comm=gloo", "workers=2", broken))
    process = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert "worker 1 failed" in process.stderr
    assert "KeyError: 'broken data'" in process.stderr


def test_mpi_without_mpirun_gives_the_launch_line(options):
    if not launch.importlib.util.find_spec("mpi4py"):
        pytest.skip("no mpi4py")
    process = subprocess.run(
        train_command(options("run", "comm=mpi", "workers=3")),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 1
    assert "mpirun -n 3 python -m onebit.lab.train" in process.stderr
