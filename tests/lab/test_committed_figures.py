"""Committed figures and tables are what the code makes of the committed rows."""

import matplotlib.pyplot as plt
import pytest
from helpers.cases import holds_for_each
from PIL import Image

from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import load_artifact, load_module, names
from onebit.lab.report.content import fingerprint
from onebit.lab.runs.load import RESULTS


@pytest.fixture(autouse=True)
def closed():
    """No figure stays open."""
    yield
    plt.close("all")


MEASURED = ("beside_deepspeed", "error_feedback", "kernel_speed", "linear_speedup", "overlap")
MEASURED += ("step_cost",)
COMMITTED = [*(name for name in names() if not name.startswith("table_")), *MEASURED]


def redrawn(name):
    """The drawing of the committed rows under its caption."""
    module = load_module(name)
    drawing, text = (
        module.MEASUREMENT.draw(RESULTS)
        if name in MEASURED
        else module.ARTIFACT.draw("laptop", RESULTS)
    )
    figures.add_caption(drawing, text)
    return drawing


@holds_for_each([(name,) for name in COMMITTED])
def test_a_committed_figure_is_what_the_code_draws_from_the_committed_rows(name):
    """Both of its files carry the fingerprint of all texts and data that were drawn."""
    path = RESULTS / "figures" / f"{name}.png"
    mark = fingerprint(redrawn(name))
    assert Image.open(path).text["Description"] == mark, f"python experiments/{name}.py redraws it"
    assert mark.encode() in path.with_suffix(".pdf").read_bytes()


def test_a_fingerprint_tells_every_text_and_number_and_no_font():
    def drawing(title="a", y=2.0, label="b", size=9):
        made, (axes,) = figures.canvas(1)
        axes.plot([0, 1], [1, y], label=label)
        axes.set_title(title, fontsize=size)
        figures.legend(made)
        return fingerprint(made)

    same = drawing()
    assert drawing(size=12) == same
    assert len({same, drawing(title="c"), drawing(y=2.001), drawing(label="d")}) == 4


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("table_")])
def test_a_committed_table_is_what_the_code_writes_from_the_committed_rows(name, tmp_path):
    (tmp_path / "runs").symlink_to(RESULTS / "runs")
    written = load_artifact(name).save("laptop", tmp_path)
    for suffix in (".md", ".csv"):
        committed = (RESULTS / "figures" / name).with_suffix(suffix)
        assert committed.read_text() == written.with_suffix(suffix).read_text()
