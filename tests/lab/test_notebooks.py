"""The notebooks run on what is committed, and say what the results say."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from helpers import synthetic
from nbclient import NotebookClient

from onebit.lab.runs.load import RESULTS
from onebit.lab.runs.state_log import QUANTITIES

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def executed(name, folder, replace=("", "")):
    """The notebook's outputs: (all that was printed, number of pictures). replace: in its code,
    first.
    """
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(*replace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(variable, str(folder / variable.lower()))
        NotebookClient(
            notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": ROOT}}
        ).execute()
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    printed = "".join(
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    return printed, sum("image/png" in output.get("data", ()) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def rule_by_hand(curve, first):
    """The first recorded step from `first` on at which the recorded ratio is settled."""
    settled = curve[
        (curve.step >= first) & (curve.variance_ratio >= 0.96) & (curve.variance_ratio <= 1 / 0.96)
    ]
    return settled.step.iloc[0] if len(settled) else None


def test_the_variance_notebook_chooses_the_step_that_the_recorded_ratio_gives(tmp_path):
    """The learning rate has warmed up after 12500 / 60 = 208 steps, and beta2 = 0.98 makes a
    window of 50.
    """
    printed, pictures = executed("variance_norm", tmp_path)
    assert "after 208 steps" in printed and "1 / (1 - beta2) = 50" in printed and pictures >= 1
    found = dict(re.findall(r"^(\d+) +(\d+) +[\d.]+%$", printed, re.M))
    seeds = sorted((RESULTS / "runs/figure_04/laptop/adam").glob("seed-*"))
    expected = {
        folder.name.removeprefix("seed-"): rule_by_hand(pd.read_csv(folder / "curve.csv"), 208)
        for folder in seeds
    }
    assert {seed: int(step) for seed, step in found.items()} == {
        seed: step for seed, step in expected.items() if step is not None and seed != "0"
    }


def test_the_variance_notebook_names_the_best_of_a_sweep(tmp_path):
    """Made-up runs whose variance stands still, so that the rule fires as soon as it may.

    Half of the steps as warm-up is best.
    """
    losses = {
        "adam": 4.0,
        "onebit_adam": 4.1,
        "onebit_adam_warmup_5": 4.4,
        "onebit_adam_warmup_50": 4.04,
    }
    for name, loss in losses.items():
        for seed in (1, 2, 3):
            changes = {"total_steps": 300, "warmup_steps": 150 if name.endswith("50") else 45}
            synthetic.write(tmp_path, name, seed, loss * seed, changes=changes, steps=300)
    folder = tmp_path / "runs/figure_04/laptop/adam/seed-1"
    empty = dict.fromkeys(QUANTITIES)
    pd.DataFrame(
        [
            {"step": step, "tensor": tensor} | empty | {"variance": 1.0}
            for step in (10, 40, 80)
            for tensor in ("a", "b")
        ]
    ).to_csv(folder / "tensors.csv", index=False)
    inline = "%matplotlib inline\n"
    printed, pictures = executed(
        "variance_norm",
        tmp_path,
        (inline, f"{inline}from pathlib import Path\nRESULTS = Path('{tmp_path}')\n"),
    )
    assert "best of the sweep: T_w = 150 (50%); the rule's median: 208" in printed
    assert (
        re.search(r"^50% +150 +\+1\.0% \[\+1\.0%, \+1\.0%\] +3$", printed, re.M) and pictures == 2
    )


def test_the_throughput_notebook_shows_the_measurements(tmp_path):
    """Its ratios of bytes and its rates are those of the CSV."""
    printed, pictures = executed("throughput", tmp_path)
    cost = pd.read_csv(RESULTS / "speed/step_cost.csv").query("workers == 2 and tensors == 1")
    for n, name in ((2**16, "64K"), (2**24, "16M")):
        (ours, theirs), (sent, whole) = (
            cost[cost.n == n].set_index("contender")[column][["onebit", "allreduce_adam"]]
            for column in ("median_ms", "bytes_sent")
        )
        below = (
            f"{8 * (whole - sent) / (ours - theirs) / 1e6:.1f} Gbit/s" if ours > theirs else "any"
        )
        assert re.search(
            rf"{name} +{whole / sent:.1f} +{ours - theirs:.1f} +{below}$", printed, re.M
        )
    assert pictures == 2
    links = pd.read_csv(RESULTS / "speed/overlap.csv")
    for rate, computed in set(zip(links.rate_mbit, links.computed)):
        assert f"{rate:g} Mbit/s, computed {computed}" in printed
