"""The measurements of speed: rows and bars, and each experiment from measuring to its figure."""

import os
import subprocess
import sys
from itertools import product

import pandas as pd
import pytest
import torch

from onebit.kernels.torch_ops import pack_signs
from onebit.lab.bench.bars import Bar, check_bars
from onebit.lab.bench.drawing import SIZES, size_text
from onebit.lab.report.artifact import load_module
from onebit.lab.runs import measurements
from onebit.lab.runs.load import RESULTS
from onebit.lab.runs.machine import machine
from onebit.lab.runs.metadata import ROOT

EXPERIMENTS = ("kernel_speed", "step_cost", "overlap")


def test_rows_and_facts_are_read_as_they_were_written(tmp_path):
    rows = [
        {"contender": "a", "n": 64, "ratio": 0.25, "hidden": None},
        {"contender": "b", "n": 64, "ratio": 1.0, "hidden": 0.5},
    ]
    measurements.write(tmp_path, "speed", "made_up", rows, {"seed": 3})
    read, facts = measurements.read(tmp_path, "speed", "made_up")
    pd.testing.assert_frame_equal(read, pd.DataFrame(rows).astype({"hidden": float}))
    assert (
        facts["config"] == {"seed": 3}
        and facts["machine"] == machine()
        and facts["commit"]
        and facts["date"]
    )
    with pytest.raises(FileNotFoundError, match="python experiments/other.py --measure"):
        measurements.read(tmp_path, "speed", "other")


def test_a_bar_that_is_missed_or_not_measured_is_said_so():
    found = {"contender": "a", "ratio_low": 0.1, "ratio_high": 0.9, "ratio_to": "b"}
    rows = pd.DataFrame([{**found, "n": n, "ratio": ratio} for n, ratio in ((1, 0.5), (2, 0.51))])
    bars = tuple(Bar("a", "ratio", 0.5, {"n": n}) for n in (1, 2, 3))
    assert list(check_bars(bars, rows).holds) == ["yes", "NO", "not measured"]


@pytest.mark.parametrize("name", ["kernel_speed", "step_cost"])
def test_every_bar_is_about_something_that_is_measured(name):
    module = load_module(name)
    measured = {"n": SIZES, "threads": (1, 2), "workers": (2, 4), "tensors": (1,)}
    for bar in module.BARS:
        assert bar.contender in {*module.LABELS, *getattr(module, "FAMILY", ())}
        assert all(value in measured[column] for column, value in bar.where.items())


def test_sizes_are_written_short():
    assert [size_text(n) for n in (*SIZES, 205000)] == [
        "64K",
        "256K",
        "1M",
        "4M",
        "16M",
        "64M",
        "200.2K",
    ]


def test_the_kernels_that_are_timed_do_the_same_work():
    made = load_module("kernel_speed").contenders(2**12, seed=1)
    for _ in range(3):
        made["compress"]()
        made["torch_ops"]()
    assert torch.equal(made["compress"].compensated, made["torch_ops"].compensated)
    tidy = made["torch_tidy"]
    assert torch.equal(tidy(), pack_signs(tidy.m)) and not torch.equal(
        tidy(), pack_signs(tidy.m)
    )  # the second time with an error
    assert torch.equal(load_module("kernel_speed").TorchTidy(tidy.m)(), pack_signs(tidy.m))


QUICK = {"kernel_speed": (2**16,), "step_cost": (2**12,)}


def run(name, root, *arguments):
    command = [
        sys.executable,
        str(ROOT / "experiments" / f"{name}.py"),
        "--results",
        str(root),
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def settings(name, rows, quick):
    """What there must be a row for: {(contender, setting)}."""
    module = load_module(name)
    if name == "kernel_speed":
        sizes = QUICK[name] if quick else SIZES
        return {
            (contender, n, threads)
            for contender in module.BYTES
            for n in sizes
            for threads in module.THREADS
        }, ["n", "threads"]
    if name == "step_cost":
        sizes = QUICK[name] if quick else SIZES
        tensors = [(n, 1) for n in sizes] + [(rows.n[rows.tensors > 1].iloc[0], rows.tensors.max())]
        wanted = set(product(module.LABELS, tensors, module.RANKS))
        if quick or set(rows.contender) & module.FAMILY.keys():  # older rows are without it
            size = sizes[0] if quick else module.FAMILY_SIZE
            wanted |= set(product(module.FAMILY, [(size, 1)], module.RANKS))
        return {(contender, *case, W) for contender, case, W in wanted}, ["n", "tensors", "workers"]
    rates = (1000.0,) if quick else (1000.0, 200.0)
    left_out = {module.RIVAL} if set(rows["mode"]) == {"delay"} else set()
    return set(product(module.LABELS.keys() - left_out, module.COMPUTED, rates)), [
        "computed",
        "rate_mbit",
    ]


def check(name, root, quick):
    rows, facts = measurements.read(root, "speed", name)
    wanted, columns = settings(name, rows, quick)
    found = list(rows[["contender", *columns]].itertuples(index=False, name=None))
    assert len(found) == len(set(found)) and set(found) == wanted
    assert (rows[["median_ms", "ratio", "ratio_low", "ratio_high"]] > 0).all(axis=None)
    assert (rows.rounds >= facts["config"]["rounds"]).all()
    assert {"cpu", "cores", "memory_gb", "kernel", "python", "torch", "numba"} <= facts[
        "machine"
    ].keys() and "seed" in facts["config"]
    return rows


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("kernel_speed", []), ("step_cost", []), ("overlap", []), ("overlap", ["--delay"])],
)
def test_an_experiment_runs_from_measuring_to_its_figure(
    name, arguments, tmp_path, monkeypatch, request
):
    if name == "overlap" and not arguments:
        request.getfixturevalue("link_or_skip")
    done = run(name, tmp_path, "--measure", "--quick", *arguments)
    assert done.returncode == 0, done.stderr
    rows = check(name, tmp_path, quick=True)
    if name == "kernel_speed":
        assert "yes" in done.stdout or "NO" in done.stdout  # the bar at 64K
    if name == "overlap":
        assert (
            set(rows["mode"]) == {"delay" if arguments else "namespaces"}
            and rows.hidden.notna().sum() == 2
        )
    figure = tmp_path / "figures" / f"{name}.png"
    before = figure.read_bytes(), figure.with_suffix(".pdf").read_bytes()
    monkeypatch.setattr(sys, "argv", [name, "--results", str(tmp_path)])
    load_module(name).MEASUREMENT.main()
    assert (figure.read_bytes(), figure.with_suffix(".pdf").read_bytes()) == before


def test_without_measurements_a_figure_says_how_to_make_them(tmp_path):
    done = run("kernel_speed", tmp_path)
    assert done.returncode == 1 and "--measure" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_committed_measurements_are_complete(name):
    """And a bar that is missed stands in docs/speed.md."""
    if not (RESULTS / "speed" / f"{name}.csv").exists():
        pytest.skip(
            f"results/speed/{name}.csv is not there: "
            f"python experiments/{name}.py --measure makes it"
        )
    rows = check(name, RESULTS, quick=False)
    module, docs = load_module(name), (ROOT / "docs" / "speed.md").read_text()
    family = set(getattr(module, "FAMILY", ())) - set(rows.contender)  # older rows are without it
    for line in check_bars(getattr(module, "BARS", ()), rows).itertuples():
        assert line.holds == "yes" or line.what in family or f"{line.bar:.2f}" in docs, line
    assert (RESULTS / "figures" / f"{name}.png").exists()
