"""Figures and tables about time: they need no run, and show what is printed and predicted."""

import pytest

from onebit.lab.bench.model import artifacts
from onebit.lab.bench.model.artifacts import ModelFigure, ModelTable, chosen, compared
from onebit.lab.bench.model.check import check
from onebit.lab.plan import MACHINES, describe
from onebit.lab.report.artifact import load_artifact, names
from onebit.lab.reproduce import runs_of

MODELS = [name for name in names() if isinstance(load_artifact(name), ModelFigure | ModelTable)]


@pytest.fixture(scope="module")
def found():
    return check()


def test_they_train_nothing_at_any_profile():
    assert len(MODELS) == 10
    loaded = [load_artifact(name) for name in MODELS]
    assert runs_of(loaded, "laptop") == runs_of(loaded, "smoke") == []


@pytest.mark.parametrize("name", ["figure_05", "figure_09"])
def test_the_plan_says_what_is_needed(name):
    text = describe(name, "laptop", MACHINES["laptop"])
    assert "measures" in text if name == "figure_09" else "No run is needed" in text


def test_figure_5_shows_every_point_and_its_prediction(found):
    drawing, text = load_artifact("figure_05").draw("laptop", None)
    shown = {float(y) for axes in drawing.axes for line in axes.lines for y in line.get_ydata()}
    for panel in "abc":
        for point in chosen(found, f"Figure 5{panel}", "samples/s"):
            assert {point.printed, point.predicted} <= shown
    assert "none of its inputs is fitted" in text


def test_a_table_names_what_contradicts_a_number(found):
    rows = compared(chosen(found, "Table 1"), found)
    marked = rows[rows.remark.str.contains("Figure 5b")]
    assert len(marked) == 0 or marked.setting.str.contains("64 GPUs").all()
    assert rows.remark.str.contains("1-bit LAMB, Table 5").any()


def test_what_a_figure_measures_runs_in_a_process_of_its_own(monkeypatch, tmp_path):
    (tmp_path / "tool.py").write_text("import sys; sys.exit(len(sys.argv) - 2)")
    monkeypatch.setattr(artifacts, "EXPERIMENTS", tmp_path)
    figure = ModelFigure(
        name="x",
        title="",
        plot=None,
        note="",
        measures={"smoke": ("tool",), "laptop": ("tool", "a")},
    )
    figure.measure("paper")
    figure.measure("smoke")
    with pytest.raises(RuntimeError, match="measuring tool failed"):
        figure.measure("laptop")
