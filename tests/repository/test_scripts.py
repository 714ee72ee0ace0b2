"""Slurm jobs and sweeps start what they should, and what W&B has logged comes back as written."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import synthetic
from helpers.cases import holds_for_each
from helpers.waiting import eventually

from onebit.lab import mpirun_sweep, pull
from onebit.lab.config import CONF, composed
from onebit.lab.plan import MACHINES, SLURM, launch, resources, sbatch
from onebit.lab.runs.load import SEEDS, run_folder
from onebit.lab.runs.recorder import Recorder
from onebit.lab.training.run import run_from

ROOT = Path(__file__).resolve().parents[2]
JOB = SLURM / "train.sbatch"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))

# ---- Slurm


@pytest.fixture
def fakes(tmp_path):
    """A PATH on which Slurm's programs and mpirun print their arguments, one a line."""
    for name, text in (
        ("srun", 'printf "%s\\n" srun "$@"'),
        ("mpirun", 'printf "%s\\n" mpirun "$@"'),
        ("scontrol", "seq 3 30000 | sed s/^/node-/"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def started(fakes, *arguments, nodes=1, per_node=8, **environment):
    """What the second job of the array starts."""
    variables = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "31234",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_JOB_NODELIST": "node-[3-4]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "PYTHON": "python",
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") and name != "LAUNCHER"
    }
    return subprocess.run(
        ["bash", JOB, *arguments],
        env=kept | variables | {"PATH": fakes} | environment,
        capture_output=True,
        text=True,
    )


def test_every_experiment_has_a_row_of_resources():
    with open(SLURM / "resources.csv", newline="") as file:
        assert [row["experiment"] for row in csv.DictReader(file)] == EXPERIMENTS


@holds_for_each([(experiment,) for experiment in EXPERIMENTS])
def test_the_resources_are_the_workers_of_the_papers_run(experiment):
    """As many as the batch has micro-batches, 64 at most; the batch can be divided among them."""
    asked = resources(experiment)
    config = composed([f"experiment={experiment}", "profile=paper"])
    assert asked.workers == min(MACHINES["paper"].workers, config.batch // config.micro_batch)
    assert config.batch % asked.workers == 0


@pytest.mark.parametrize("experiment", ["figure_04", "glue_rte"])
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_job_starts_the_papers_run_on_its_processes(experiment, launcher, fakes):
    """With the options of the command that the plan prints: the arguments compose, each seed has a
    job, and the launcher starts as many processes as the plan assumes."""
    command = launch(experiment, "paper", resources(experiment).workers)[0]
    asked = dict(re.findall(r" --([a-z-]+)=(\S+)", command))
    assert command == sbatch(experiment, resources(experiment))
    assert command.split()[-3:] == ["scripts/slurm/train.sbatch", experiment, "optimizer=NAME"]
    assert f"#SBATCH --array={SEEDS[0]}-{SEEDS[-1]}\n" in JOB.read_text()
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    nodes, per_node = int(asked["nodes"]), int(asked["ntasks-per-node"])
    done = started(
        fakes,
        *(experiment, "optimizer=zero_one_adam", "wandb=offline"),
        nodes=nodes,
        per_node=per_node,
        LAUNCHER=launcher,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    arguments = words[words.index("onebit.lab.train") + 1 :]
    assert {"torchrun": "comm=nccl", "mpirun": "comm=mpi"}[launcher] == arguments[-1]
    workers = nodes * per_node
    run = run_from(composed([*arguments[:-1], "comm=threads", f"workers={workers}"]))
    found = (run.experiment, run.profile, run.method, run.seed, run.resume, run.wandb)
    assert found == (experiment, "paper", "zero_one_adam", 2, True, "offline")
    if launcher == "mpirun":
        assert words[:3] == ["mpirun", "-n", str(workers)]
    else:
        given = dict(zip(words, words[1:]))
        assert (words[0], given["--nnodes"], given["--nproc-per-node"]) == (
            "srun",
            str(nodes),
            str(per_node),
        )
        assert f"--ntasks={nodes}" in words and given["--rdzv-endpoint"] == "node-3:21234"


def test_a_job_without_an_optimizer_or_with_another_launcher_says_what_it_needs(fakes):
    assert "name the experiment and the optimizer" in started(fakes, "figure_04").stderr
    said = started(fakes, "figure_04", "optimizer=adam", LAUNCHER="mpiexec").stderr
    assert "torchrun or mpirun, not mpiexec" in said


# ---- mpirun_sweep


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Training that writes a made-up run instead of starting mpirun.

    `fails` names optimizers that fail, `diverges` one that diverges.
    """
    lab = SimpleNamespace(root=tmp_path, trained=[], fails=set(), diverges=set())

    def run(started, folder):
        optimizer, seed = folder.parent.name, int(folder.name.removeprefix("seed-"))
        lab.trained.append((optimizer, seed))
        if optimizer in lab.fails:
            return "failed, exit code 1"
        synthetic.write(
            tmp_path, optimizer, seed, 4.0, "diverged" if optimizer in lab.diverges else "finished"
        )
        return "diverged" if optimizer in lab.diverges else "finished"

    monkeypatch.setattr(mpirun_sweep, "run", run)
    return lab


def sweep(lab, monkeypatch, *more):
    arguments = [
        "figure_04",
        "--results",
        str(lab.root),
        "--mpirun",
        sys.executable,
        "--seeds",
        "1",
        "2",
        *more,
    ]
    monkeypatch.setattr(sys, "argv", ["mpirun_sweep", *arguments])
    with pytest.raises(SystemExit) as end:
        mpirun_sweep.main()
    return end.value.code


def test_a_sweep_goes_on_after_a_run_that_failed_or_diverged_and_then_tries_the_failed_ones_only(
    lab, monkeypatch, capsys
):
    lab.fails, lab.diverges = {"onebit_adam"}, {"naive_onebit_adam"}
    chosen = ("--optimizers", "onebit_adam", "adam", "naive_onebit_adam")
    assert sweep(lab, monkeypatch, *chosen) == 1
    assert lab.trained == [(name, seed) for seed in (1, 2) for name in chosen[1:]]
    assert "failed, exit code 1" in capsys.readouterr().out
    lab.trained.clear()
    lab.fails = set()
    assert sweep(lab, monkeypatch, *chosen) == 0
    assert lab.trained == [("onebit_adam", 1), ("onebit_adam", 2)]
    assert "diverged before, kept" in capsys.readouterr().out
    for other, named in ((("--workers", "2"), "workers"), (("--options", "batch=24"), "batch")):
        assert (
            f"seed-1 holds a run with another {named}: name another folder with --results"
            in sweep(lab, monkeypatch, *chosen, *other)
        )


def test_a_dry_run_prints_commands_that_compose_and_starts_nothing(lab, monkeypatch, capsys):
    assert sweep(lab, monkeypatch, "--dry-run", "--workers", "3", "--options", "batch=24") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]
    assert len(lines) == 2 * 4 and lab.trained == []  # the optimizers of figure 4
    for line in lines:
        before, arguments = line.split(" -m onebit.lab.train ")
        assert before.endswith(f"-n 3 {sys.executable}")
        run = run_from(
            composed([*arguments.replace("comm=mpi", "comm=threads").split(), "workers=3"])
        )
        assert (
            run.folder == run_folder(lab.root, "figure_04", "laptop", run.method, run.seed)
            and run.batch == 24
        )


def test_what_mpirun_left_is_the_outcome(tmp_path):
    """A run that ended in order has said so in run.json."""
    folder = run_folder(tmp_path, "figure_04", "laptop", "adam", 1)
    assert mpirun_sweep.run(["false"], folder) == "failed, exit code 1"
    assert mpirun_sweep.run(["true"], folder) == "failed, exit code 0"
    synthetic.write(tmp_path, "adam", 1, 4.0, "diverged")
    assert mpirun_sweep.run(["true"], folder) == "diverged"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["figure_4", "--optimizers", "adam"], "Did you mean figure_04"),
        (["figure_04", "--optimizers", "adm"], "Did you mean adam"),
        (["figure_04", "--options", "sede=1"], "Did you mean seed"),
        (["imagenet"], "with --optimizers"),
        (["figure_7"], "experiment has no figure_7"),
        (["figure_04", "--mpirun", "no-such-mpirun"], "there is no no-such-mpirun"),
    ],
)
def test_a_wrong_word_of_a_sweep_is_named_before_anything_starts(
    arguments, named, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["mpirun_sweep", *arguments])
    with pytest.raises(SystemExit, match="2"):
        mpirun_sweep.main()
    assert named in capsys.readouterr().err


# ---- Weights & Biases


class Optimizer:
    """What a recorder asks of an optimizer."""

    vectors = {"variance": "exp_avg_sq"}
    param_groups = [{"betas": (0.9, 0.5)}]

    def __init__(self):
        self.steps = 0
        self.communication = SimpleNamespace(bytes_sent=0, bytes_received=0, calls=0)

    def step(self):
        self.steps += 1
        self.communication = SimpleNamespace(
            bytes_sent=8 * self.steps, bytes_received=8 * self.steps, calls=self.steps
        )

    def variance_norms(self):
        return 1 / (1 + self.steps), 1 / (2 + self.steps)


def recorded(folder, first, last, state=None, finish=True, wandb="offline"):
    """A stretch of a made-up run of two players and at most 9 steps, whose loss is 4.0, then
    4/2, 4/3, ... and at last nan.
    """
    facts = {
        "experiment": "figure_06",
        "profile": "smoke",
        "optimizer": "onebit_adam",
        "seed": 1,
        "config": {"record_every": 1, "lr": None},
        "workers": 2,
        "warmup_steps": 3,
        "total_steps": 9,
    }
    recorder, optimizer = Recorder(folder, facts, wandb), Optimizer()
    recorder.start(state)
    kept = None
    for step in range(first, last + 1):
        optimizer.step()
        losses = {
            "generator": float("nan") if step == 9 else 3.0 / step,
            "discriminator": 1.0 / step,
        }
        recorder.row([optimizer], losses, step=step, samples=4 * step, lr=0.1 / 3, phase="warmup")
        if step % 2 == 0:
            recorder.evaluation(
                {"distance": 100 / 3 + step, "test_loss": 2.0}, step=step, samples=4 * step
            )
        if step % 3 == 0:  # in alphabetical order, which is that of what comes back
            recorder.tensors(
                [
                    {"tensor": "a.bias", "ratio": 1.0},
                    {"tensor": "b/c.weight", "variance": 1.0 / step, "ratio": 2.0},
                ],
                step=step,
                samples=4 * step,
            )
        if step == 4:
            kept = json.loads(json.dumps(recorder.state_dict([optimizer])))
            kept["norms"] = recorder.norms
    if finish:
        recorder.finish("diverged", last, [optimizer])
    else:
        recorder.curves.finish()
    return kept


FILES = ("curve.csv", "evaluation.csv", "tensors.csv", "run.json")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run under wandb=offline that was killed after step 6 and resumed from its checkpoint of
    step 4.
    """
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        state = recorded(folder, 1, 6, finish=False)
        recorded(folder, 5, 9, state)
    assert eventually(lambda: all(run.summary.get("status") for run in pull.offline(folder)))
    return folder


def test_a_resumed_run_is_the_same_run_in_wandb(resumed):
    files = sorted(resumed.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and {path.stem for path in files} == {
        f"run-{json.loads((resumed / 'run.json').read_text())['wandb_id']}"
    }


def test_what_wandb_wrote_offline_comes_back_byte_for_byte(resumed, tmp_path):
    """Players' losses, evaluations, tensors, missing numbers and the nan with which it ends
    included.

    The rows after the checkpoint are those of the second stretch.
    """
    (run,) = pull.offline(resumed)
    assert "9 rows" in pull.write(run, tmp_path)
    folder = run_folder(tmp_path, "figure_06", "smoke", "onebit_adam", 1)
    for name in FILES:
        assert (folder / name).read_bytes() == (resumed / name).read_bytes(), name


def online_run(resumed, **changes):
    """The same run as W&B's service gives it: 4 for 4.0, "NaN" for nan, keys of its own."""
    (run,) = pull.offline(resumed)
    history = [
        json.loads(json.dumps(row).replace("4.0", "4").replace("2.0", "2").replace("NaN", '"NaN"'))
        | {"_step": step, "_runtime": 1.5}
        for step, row in run.history.items()
    ]
    fake = SimpleNamespace(
        config=run.facts,
        summary=run.summary | {"_step": 9, "loss": 1},
        scan_history=lambda: iter(history),
    )
    for name, change in changes.items():
        setattr(fake, name, change)
    return fake


class Api:
    """The part of wandb.Api that is asked."""

    def __init__(self, *runs):
        self.found = runs

    def runs(self, path, filters):
        self.asked = path, filters
        return iter(self.found)


def test_what_the_service_gives_comes_back_byte_for_byte(resumed, tmp_path):
    api = Api(online_run(resumed))
    (run,) = pull.online(api, "me/onebit", "figure_06")
    assert api.asked == ("me/onebit", {"group": "figure_06"})
    pull.write(run, tmp_path)
    folder = run_folder(tmp_path, "figure_06", "smoke", "onebit_adam", 1)
    for name in FILES:
        assert (folder / name).read_bytes() == (resumed / name).read_bytes(), name


def test_runs_that_have_not_ended_and_runs_of_others_are_left_out(resumed, tmp_path):
    crashed, other = (
        online_run(resumed, summary={"_step": 3}),
        online_run(resumed, config={"lr": 1}),
    )
    said = [
        pull.write(run, tmp_path) for run in pull.online(Api(crashed, other), "me/onebit", None)
    ]
    assert (
        "has not ended" in said[0]
        and "has not trained" in said[1]
        and list(tmp_path.iterdir()) == []
    )


def test_a_run_that_is_there_is_kept_unless_it_is_to_be_replaced(resumed, tmp_path):
    (run,) = pull.offline(resumed)
    pull.write(run, tmp_path)
    folder = run_folder(tmp_path, "figure_06", "smoke", "onebit_adam", 1)
    (folder / "curve.csv").write_text("mine")
    assert (
        pull.write(run, tmp_path).startswith("kept")
        and (folder / "curve.csv").read_text() == "mine"
    )
    assert (
        pull.write(run, tmp_path, overwrite=True).startswith("written")
        and (folder / "curve.csv").read_text() != "mine"
    )


def test_what_was_fine_tuned_from_pre_training_done_here_does_not_mix_with_other_fine_tuning(
    resumed, tmp_path
):
    (run,) = pull.offline(resumed)
    run.facts |= {
        "experiment": "glue_rte",
        "optimizer": "adam",
        "pretraining": {"optimizer": "lamb"},
    }
    pull.write(run, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("run.json")] == [
        "runs/pretrained/smoke/lamb/seed-1/glue_rte/run.json"
    ]


def test_a_run_that_was_logged_from_its_middle_on_is_refused(resumed, tmp_path):
    (run,) = pull.offline(resumed)
    run.history = {step: row for step, row in run.history.items() if step > 4}
    with pytest.raises(ValueError, match="from step 5 on"):
        pull.write(run, tmp_path)


def test_a_record_longer_than_a_block_and_one_that_was_cut_off_are_read(tmp_path):
    """Three blocks for the first record, 3 bytes of padding, then a whole one, then the
    beginning of one.
    """
    long, data = bytes(range(256)) * 300, pull.HEADER + b"\xe1\xbe\x00"
    left, first = memoryview(long), True
    while left:
        room = pull.BLOCK - len(data) % pull.BLOCK - pull.PART.size
        part, left = left[:room], left[room:]
        kind = pull.FIRST if first else pull.MIDDLE if left else pull.LAST
        data, first = data + pull.PART.pack(0, len(part), kind) + part, False
    filler = b"x" * (pull.BLOCK - len(data) % pull.BLOCK - pull.PART.size - 3)
    data += (
        pull.PART.pack(0, len(filler), pull.ONLY)
        + filler
        + bytes(3)
        + pull.PART.pack(0, 2, pull.ONLY)
        + b"ok"
    )
    assert list(pull.messages(data + pull.PART.pack(0, 9, pull.ONLY) + b"cut")) == [
        long,
        filler,
        b"ok",
    ]
    with pytest.raises(ValueError, match="no .wandb file"):
        list(pull.messages(b"something else"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing():
    scripts = [JOB, ROOT / "scripts" / "make_venv", ROOT / "scripts" / "check_gpu.sh"]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
