"""Table 2: what is configured beside what is printed, and T_w by the rule."""

import json

import numpy as np
import pandas as pd
import pytest
from helpers import synthetic

from onebit.lab.plan import MACHINES, describe
from onebit.lab.report import table as tables
from onebit.lab.report.artifact import load_artifact, load_module
from onebit.lab.reproduce import runs_of

TABLE = load_artifact("table_02")
RULE = load_module("table_02").RULE
KEYS = ["model", "length"]


def written(root, profile="laptop"):
    path = TABLE.save(profile, root)
    return path.read_text(), pd.read_csv(path.with_suffix(".csv")).set_index(KEYS)


def test_what_is_configured_is_what_the_paper_prints(tmp_path):
    text, frame = written(tmp_path)
    for what in ("steps", "T_w", "batch"):
        assert frame[f"configured: {what}"].tolist() == frame[f"paper: {what}"].tolist()
    assert frame.index.tolist() == [
        ("BERT-Base", 128),
        ("BERT-Base", 512),
        ("BERT-Large", 128),
        ("BERT-Large", 512),
    ]
    assert frame["configured: steps"].tolist() == [118, 22, 152, 10] and frame[
        "T_w, % of the steps"
    ].tolist() == [13.6, 6.8, 15.1, 15.0]
    assert frame[f"{RULE} n"].tolist() == [0] * 4 and "No runs of profile laptop yet" in text


def write(root, experiment, settles, steps=2700):
    """Runs of Adam whose recorded ratio is settled in some steps, {first: the first after};
    seed s begins s steps later.
    """
    for seed in (1, 2, 3):
        synthetic.write(
            root,
            "adam",
            seed,
            4.0,
            experiment=experiment,
            steps=steps,
            changes={"total_steps": steps},
        )
        path = root / f"runs/{experiment}/laptop/adam/seed-{seed}/curve.csv"
        curve = pd.read_csv(path)
        inside = np.any(
            [
                (curve.step >= first + seed) & (curve.step < until)
                for first, until in settles.items()
            ],
            axis=0,
        )
        curve["variance_ratio"] = np.where(inside, 1.04, 1.05)
        curve.to_csv(path, index=False)


def test_the_rule_counts_the_steps_of_each_phase_from_its_own_beginning(tmp_path):
    """2533 steps of length 128, in which the rate rises for 209, then 167, in which it rises
    for 3, but the variance's memory is 50.
    """
    write(tmp_path, "table_02", {0: 100, 500: 600, 2590: 3000})
    text, frame = written(tmp_path)
    large = frame.loc["BERT-Large"][[f"{RULE}{part}" for part in tables.PARTS[:4]]]
    assert large.loc[128].tolist() == pytest.approx(
        [100 * 502 / 2533, 100 * 501 / 2533, 100 * 503 / 2533, 3], rel=1e-5
    )
    assert large.loc[512].tolist() == pytest.approx(
        [100 * 59 / 167, 100 * 58 / 167, 100 * 60 / 167, 3], rel=1e-5
    )
    assert (
        "| 15.1 | 14.6 | 19.8 (19.8 to 19.9, n = 3) |" in text
        and "- table_02: BERT of 2 layers" in text
    )


def test_a_phase_that_begins_settled_takes_the_memory_of_the_variance(tmp_path):
    write(tmp_path, "table_02", {2500: 3000})
    _, frame = written(tmp_path)
    assert frame.loc[("BERT-Large", 128), RULE] == pytest.approx(100 * 2502 / 2533, rel=1e-5)
    assert frame.loc[("BERT-Large", 512), RULE] == pytest.approx(100 * 50 / 167, rel=1e-5)


def test_without_runs_of_its_own_the_first_phase_is_that_of_figure_4(tmp_path):
    write(tmp_path, "figure_04", {500: 3000}, steps=2533)
    _, frame = written(tmp_path)
    assert frame[f"{RULE} n"].tolist() == [0, 0, 3, 0]
    assert frame.loc[("BERT-Large", 128), RULE] == pytest.approx(100 * 502 / 2533, rel=1e-5)


def test_a_run_that_never_settles_is_left_out(tmp_path):
    write(tmp_path, "table_02", {9000: 9001})
    assert written(tmp_path)[1][f"{RULE} n"].tolist() == [0] * 4
    record = json.loads((tmp_path / "runs/table_02/laptop/adam/seed-1/run.json").read_text())
    assert list(record["config"]["phases"]) == ["seq128", "seq512"]


def test_its_plan_and_its_runs_are_those_of_both_models():
    text = describe("table_02", "paper", MACHINES["paper"])
    for part in (
        "110,106,428 parameters",
        "336,226,108 parameters",
        "118,000 steps, T_w = 16,000",
        "10,000 steps, T_w = 1,500",
    ):
        assert part in text
    assert runs_of([TABLE], "laptop") == [
        (name, optimizer)
        for name in ("table_02_base", "table_02")
        for optimizer in ("adam", "onebit_adam")
    ]
