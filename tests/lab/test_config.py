"""The configuration: every combination is one, says what the paper says, and a mistake in it is
named.
"""

import re
import subprocess
import sys
from itertools import product

import pytest
import torch
from helpers.cases import holds_for_each
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from onebit.lab.config import CONF, composed, wrong_override
from onebit.lab.training.loop import decayed_and_not
from onebit.lab.training.run import REFERRED_TO, run_from

NAMES = {
    group: sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    for group in ("experiment", "profile", "optimizer", "comm")
}


def assert_composes(experiment, profile, optimizer):
    """A key that nobody reads is an error of `run_from`."""
    chosen = [f"experiment={experiment}", f"profile={profile}", f"optimizer={optimizer}"]
    run = run_from(composed([*chosen, "comm=threads"]))
    assert (run.experiment, run.profile, run.method) == (experiment, profile, optimizer)


@pytest.mark.parametrize("profile", NAMES["profile"])
def test_every_experiment_composes_in_every_profile_and_every_key_is_read(profile):
    for experiment in NAMES["experiment"]:
        assert_composes(experiment, profile, "onebit_adam")


@pytest.mark.parametrize("experiment", ["figure_04", "figure_06"])
def test_every_optimizer_composes_and_every_key_is_read(experiment):
    for optimizer in NAMES["optimizer"]:
        assert_composes(experiment, "smoke", optimizer)


@pytest.mark.more
@pytest.mark.parametrize("experiment", NAMES["experiment"])
@pytest.mark.parametrize("profile", NAMES["profile"])
def test_every_combination_composes_and_every_key_is_read(profile, experiment):
    """GLUE's tasks differ in their name and their number of steps only: one has all optimizers."""
    inherits = experiment.startswith("glue_") and experiment != "glue_rte"
    for optimizer in ["onebit_adam"] if inherits else NAMES["optimizer"]:
        assert_composes(experiment, profile, optimizer)


def test_a_choice_of_communication_changes_nothing_else():
    """Nor does the number of workers, which is none of the configuration's business."""
    configs = [
        composed([f"comm={comm}", f"workers={workers}"])
        for comm, workers in product(NAMES["comm"], (1, 2))
    ]
    plain = [
        {
            key: value
            for key, value in OmegaConf.to_container(c, resolve=True).items()
            if key not in ("comm", "workers")
        }
        for c in configs
    ]
    assert all(config == plain[0] for config in plain)
    assert all(callable(get_class(config.comm["_target_"])) for config in configs)


@holds_for_each(
    [
        (experiment, profile, steps)
        for experiment in ("figure_04", "table_02", "glue_rte")
        for profile, steps in (("smoke", 5), ("laptop", 400), ("paper", 997))
    ]
)
def test_steps_is_the_total_number_of_steps_and_scales_the_rest(experiment, profile, steps):
    """All phases together have so many; T_w and the rate's schedule keep the paper's proportion."""
    paper = composed([f"experiment={experiment}", "profile=paper"])
    config = composed([f"experiment={experiment}", f"profile={profile}", f"steps={steps}"])
    assert sum(phase.steps for phase in config.phases.values()) == steps
    for name, phase in config.phases.items():
        theirs = paper.phases[name]
        assert abs(phase.steps - theirs.steps / phase.lr.stretch) <= 1
        assert abs(phase.warmup - theirs.warmup / phase.lr.stretch) <= 1


@pytest.mark.parametrize("steps", ["0", "1.5", "abc", "2"])
def test_a_number_of_steps_that_cannot_be_is_refused(steps):
    """Each phase has at least one, and with two steps one of them would have too many."""
    with pytest.raises(ValueError, match="steps is the total number|choose steps=3"):
        composed(["experiment=table_02", f"steps={steps}"])


def test_an_experiment_differs_between_profiles_in_scale_only():
    """Every number of steps, and every length, is the paper's over one factor.

    All else is the same.
    """
    for experiment in NAMES["experiment"]:
        paper = composed([f"experiment={experiment}", "profile=paper"])
        for profile in ("smoke", "laptop"):
            config = composed([f"experiment={experiment}", f"profile={profile}"])
            for name, phase in config.phases.items():
                theirs = paper.phases[name]
                assert phase.steps == max(1, round(theirs.steps / config.scale.steps_divisor))
                assert phase.warmup == max(1, round(theirs.warmup / config.scale.steps_divisor))
                assert phase.get("length", 1) == theirs.get("length", 1) / config.scale.get(
                    "length_divisor", 1
                )
                unscaled = {
                    key: value for key, value in phase.lr.items() if key not in ("peak", "stretch")
                }
                assert unscaled == {key: theirs.lr[key] for key in unscaled}
                assert phase.lr.stretch == config.scale.steps_divisor
            scaled = ("betas", "warmup", "max_grad_norm")
            assert {k: v for k, v in config.optimizer.items() if k not in scaled} == {
                k: v for k, v in paper.optimizer.items() if k not in scaled
            }


def test_the_papers_images_are_the_papers_run():
    """8 workers x 128, 200 epochs, T_w = 13 epochs, x0.1 after 100 of them.

    1e-1 for SGD and its relatives, 1e-4 for Adam's (Section 7.2).
    """
    for optimizer, peak in (
        ("adam", 1e-4),
        ("onebit_adam", 1e-4),
        ("sgd", 0.1),
        ("ef_momentum_sgd", 0.1),
        ("local_sgd", 0.1),
    ):
        run = run_from(
            composed(
                [
                    "experiment=figure_06",
                    "profile=paper",
                    f"optimizer={optimizer}",
                    "comm=threads",
                    "workers=8",
                ]
            )
        )
        phase = run.phases["train"]
        assert (phase.steps, phase.warmup, run.micro_batches(phase, 8)) == (
            200 * 49,
            13 * 49,
            (1, 128),
        )
        assert [phase.lr(done) for done in (0, 100 * 49 - 1, 100 * 49)] == pytest.approx(
            [peak, peak, peak / 10]
        )


def test_a_task_is_chosen_by_its_experiment():
    tasks = {
        name: composed([f"experiment={name}"]).task["_target_"].rpartition(".")[2]
        for name in NAMES["experiment"]
    }
    assert {tasks[name] for name in ("figure_04", "table_02", "table_02_base")} == {
        "BertPretraining"
    }
    assert tasks["figure_06"] == "ImageClassification"


@pytest.mark.parametrize(("experiment", "millions"), [("table_02_base", 110), ("table_02", 340)])
def test_paper_models_have_the_papers_parameters(experiment, millions):
    task = instantiate(
        composed(["profile=paper", f"experiment={experiment}"]).task, _convert_="all"
    )
    with torch.device("meta"):
        count = sum(p.numel() for p in task.model().parameters())
    assert count == pytest.approx(millions * 1e6, rel=0.03)


def test_no_weight_decay_on_biases_and_layer_norms():
    model = instantiate(composed(["profile=smoke"]).task, _convert_="all").model()
    decayed, spared = ({name for name, _ in group["params"]} for group in decayed_and_not(model))
    assert spared == {
        name for name, _ in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name
    }
    assert decayed | spared == {name for name, _ in model.named_parameters()}
    assert decayed_and_not(model)[1]["weight_decay"] == 0


@holds_for_each(
    [
        ("optimiser=adam", "optimizer"),
        ("optimizer=onebit_adm", "onebit_adam"),
        ("sede=3", "seed"),
        ("phases.seq128.warmups=3", "phases.seq128.warmup"),
        ("optimizer.beta=3", "optimizer.betas"),
        ("scale.step_divisor=3", "scale.steps_divisor"),
        ("warmup_step=3", "warmup_steps"),
        ("checkpoint-every=3", "checkpoint_every"),
        ("--seed=3", "seed=3"),
        ("optimizer.variance_floor=1e-3", "write +optimizer.variance_floor=1e-3"),
    ]
)
def test_a_wrong_option_names_the_nearest(argument, named):
    assert named in wrong_override(["profile=smoke", argument])


def test_right_options_are_not_called_wrong():
    assert (
        wrong_override(
            ["experiment=table_02", "phases.seq512.steps=3", "task/model=bert_base", "seed=1"]
        )
        is None
    )


@holds_for_each(
    [
        (["+sedd=1"], "sedd"),
        (["+task.depth=1"], "depth"),
        (["+phases.seq128.stepps=1"], "stepps"),
        (["+optimizer.freeze_step=1"], "did you mean 'warmup'"),
        (["+comm.port=1"], "port"),
        (["batch=13", "workers=4"], "choose workers=N or batch=N"),
        (["workers=0"], "at least 1"),
        (["precision=bf6"], "Did you mean bf16"),
        (["wandb=ofline"], "Did you mean offline"),
        (["record_every=0"], "at least 1"),
        (["phases.seq128.steps=0"], "at least 1"),
        (["+task.model.hidden_sise=1"], "hidden_sise"),
        (["task.model.hidden_size=97"], "multiple of the number of attention"),
        (["lr=abc"], "must be a number above 0"),
        (["lr=-1"], "must be a number above 0"),
        (["seed=-1"], "seed must be a whole number"),
        (["batch=abc"], "batch must be a whole number"),
        (["record_every=2"], "choose a divisor of 5"),
        *([] if torch.cuda.is_available() else [(["device=cuda"], "no GPU")]),
    ]
)
def test_a_key_that_nobody_reads_or_a_wrong_value_is_an_error(overrides, error):
    with pytest.raises(Exception, match=error):
        run_from(composed(["profile=smoke", *overrides]))


def test_options_for_other_options_are_referred_to():
    """Each of them stands in some ${...}, else nobody would read it."""
    text = "\n".join(path.read_text() for path in CONF.rglob("*.yaml"))
    assert [name for name in REFERRED_TO if f"${{{name}" not in text] == []
    for path in (CONF / "scale").glob("*.yaml"):
        keys = composed([f"scale={path.stem}"]).scale
        assert [
            key for key in keys if not re.search(rf"\$\{{[^}}]*\bscale\.{key}\b", text)
        ] == [], path


def test_command_line_errors_are_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "onebit.lab.train",
        "profile=smoke",
        "optimiser=adam",
        f"output={tmp_path}",
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert process.returncode == 1
    assert process.stderr.splitlines() == [
        "error: There is no option optimiser. Did you mean optimizer?"
    ]


@holds_for_each([(path.stem,) for path in sorted((CONF / "task").glob("*.yaml"))])
def test_every_task_has_a_scale_for_each_profile(task):
    needed = [CONF / "scale" / f"{task}_{profile}.yaml" for profile in NAMES["profile"]]
    missing = [f"conf/scale/{path.name}" for path in needed if not path.exists()]
    if missing:
        pytest.fail(f"task={task} also needs {', '.join(missing)}", pytrace=False)


def test_a_wandb_mode_without_the_option_warns(monkeypatch):
    run = run_from(composed(["profile=smoke"]))
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "WANDB_MODE=offline has no effect by itself" in run.warnings()[0]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert run.warnings() == []
