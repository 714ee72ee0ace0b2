"""Figures: drawn from made-up runs, every curve is there, ours and the paper's."""

import re

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from helpers import synthetic
from helpers.cases import more
from matplotlib.colors import to_hex

from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, load_artifact, names
from onebit.lab.report.captions import of_figure
from onebit.lab.report.style import LOOKS
from onebit.lab.runs import load as results

OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
# Those that are drawn from runs; the others are the time model's.
NAMES = [
    name
    for name in names()
    if name.startswith("figure_") and isinstance(load_artifact(name), Figure)
]
NUMBERED = [
    name for name in NAMES if name.split("_")[1].isdigit()
]  # those of the 1-bit Adam paper, whose curves are digitised


@pytest.fixture(scope="module", autouse=True)
def closed():
    """No figure stays open."""
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("results")
    synthetic.write_all(path)
    synthetic.write_images(path)
    synthetic.write_faces(path)
    synthetic.write_language_models(path)
    return path


def drawn(name, root):
    figure = load_artifact(name)
    return figure, figure.plot(results.load(root, figure.experiment, "laptop", figure.optimizers))


def legend_of(drawing):
    return [text.get_text() for text in drawing.legends[0].get_texts()]


@pytest.fixture(scope="module")
def drawings(root):
    """{figure: (module, drawing)} of the made-up runs; not to be changed."""
    return {name: drawn(name, root) for name in NAMES}


def test_every_optimizer_is_in_the_legend_with_its_seeds(drawings):
    for name, (module, drawing) in drawings.items():
        labels = [LOOKS[optimizer][0] for optimizer in module.optimizers]
        found = legend_of(drawing)[: len(labels)]
        assert found == [f"{label}, n = 3 seeds" for label in labels], name


def test_the_papers_curve_is_drawn_on_the_papers_axes(drawings):
    for name in [*NUMBERED, "figure_zero_one_adam"]:
        assert_papers_curves(name, drawings[name][1])


def assert_papers_curves(name, drawing):
    pattern = (
        rf"fig{int(name.split('_')[1])}[a-z]?"
        if name in NUMBERED
        else name.removeprefix("figure_") + ".*"
    )
    files = [path for path in results.PAPER.glob("*.csv") if re.fullmatch(pattern, path.stem)]
    points = [pd.read_csv(path) for path in files]
    known = [set(curve.x) for frame in points for _, curve in frame.groupby("curve")]
    papers = [axes for axes in drawing.axes if "paper" in axes.get_title()]
    assert papers, name
    for axes in papers:
        curves = [tuple(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) > 2]
        assert curves and all(any(set(xs) <= own for own in known) for xs in curves), name


def test_an_optimizer_looks_the_same_in_every_panel(drawings):
    lines = [
        (name, line)
        for name, (_, drawing) in drawings.items()
        for axes in drawing.axes
        for line in axes.lines
    ]
    for label, colour, style, _ in LOOKS.values():
        labels = f"{label}, n = 3 seeds", f"{label} (paper)"
        for name, line in lines:
            if line.get_label() in labels:
                found = to_hex(line.get_color()).upper(), line.get_linestyle()
                assert found == (colour, style), (name, label)


def test_looks_differ_in_line_and_marker_and_in_each_figure_in_colour():
    labels, colours, lines, markers = zip(*LOOKS.values(), strict=True)
    assert len(set(labels)) == len(set(zip(lines, markers, strict=True))) == len(labels)
    assert set(colours) <= OKABE_ITO
    for name in NAMES:
        optimizers = load_artifact(name).optimizers
        assert len({LOOKS[optimizer][1] for optimizer in optimizers}) == len(optimizers), name


@pytest.mark.parametrize(
    "name", [name for name in NAMES if load_artifact(name).experiment == "figure_06"]
)
def test_loss_and_accuracy_are_drawn_ours_and_the_papers(name, drawings):
    module, drawing = drawings[name]
    number = int(name.split("_")[1])
    assert [axes.get_title() for axes in drawing.axes] == [
        "Ours: training loss",
        "Ours: test accuracy (%)",
        f"The paper's Figure {number}a",
        f"The paper's Figure {number}b",
    ]
    assert [axes.get_ylabel() for axes in drawing.axes] == 2 * [
        "training loss",
        "test accuracy (%)",
    ]
    ends = [line.get_ydata()[-1] for line in drawing.axes[1].lines]
    assert ends == pytest.approx(
        [100 - synthetic.ERRORS[optimizer] * 40.2 for optimizer in module.optimizers]
    )


def test_a_curve_is_the_mean_over_seeds_of_blocks_of_steps_with_the_range_as_its_band():
    runs = [
        synthetic.rows("adam", seed, loss).assign(total_steps=synthetic.STEPS)
        for seed, loss in ((0, 1.0), (1, 2.0), (2, 6.0))
    ]
    curve = figures.curve(pd.concat(runs), "step", "loss", points=20)
    assert len(curve) == 20
    last = curve.iloc[-1]
    assert (last["mean"], last.low, last.high) == (3.0, 1.0, 6.0)
    assert last.x == sum(range(191, 201)) / 10


def test_figure_2_marks_the_end_of_the_warm_up(drawings):
    _, drawing = drawings["figure_02"]
    upright = [
        line.get_xdata()[0] for line in drawing.axes[0].lines if len(set(line.get_xdata())) == 1
    ]
    assert upright == [synthetic.WARMUP]


ONE_OF_EACH = ["figure_04", "figure_08", "figure_12"]  # losses, faces, images


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *more(*sorted({*NAMES} - {*ONE_OF_EACH}))])
def test_the_same_csv_gives_the_same_files(name, root):
    first = load_artifact(name).save("laptop", root)
    kept = first.read_bytes(), first.with_suffix(".pdf").read_bytes()
    again = load_artifact(name).save("laptop", root)
    assert (again.read_bytes(), again.with_suffix(".pdf").read_bytes()) == kept


def test_a_live_run_lies_beside_the_committed_ones_in_a_file_of_its_own(root, tmp_path):
    synthetic.write_all(tmp_path, seeds=(4,))
    module = load_artifact("figure_04")
    assert module.save("laptop", root, tmp_path) == tmp_path / "figures" / "figure_04.png"
    rows = pd.concat(
        [
            results.load(root, "figure_04", "laptop"),
            results.load_rows(results.load_records(tmp_path, "figure_04", "laptop"), live=True),
        ]
    )
    legend = legend_of(module.plot(rows))
    assert "Adam, n = 3 seeds" in legend and "thin: live, seed 4" in legend


def test_the_caption_says_what_was_run_and_what_the_paper_ran(root):
    records = results.load_records(root, "figure_04", "laptop")
    text = of_figure(results.load_rows(records), records).replace("\N{NO-BREAK SPACE}", " ")
    for part in (
        "n = 3 seeds",
        "4 workers",
        "32 samples a step",
        "a point averages 1% of the steps",
        "200 steps",
        "T_w = 40",
        "BERT-Large (24 layers, 1024 wide",
        "4,096",
        "152,000",
        "23,000",
    ):
        assert part in text


def test_the_caption_of_images_says_what_was_run_and_what_is_evaluated(root):
    records = results.load_records(root, "figure_06", "laptop")
    text = of_figure(results.load_rows(records), records).replace("\N{NO-BREAK SPACE}", " ")
    for part in (
        "a small ResNet, 4 workers",
        "64 samples a step",
        "mean of the workers' models on 10,000 test images",
        "ResNet-18 on CIFAR-10 (all 50,000 training images, 8 workers), 1,024 samples a step, "
        "9,800 steps, T_w = 637",
    ):
        assert part in text


def test_the_caption_of_faces_says_what_was_run_and_what_the_paper_leaves_out(root):
    records = results.load_records(root, "figure_08", "laptop")
    text = of_figure(results.load_rows(records), records).replace("\N{NO-BREAK SPACE}", " ")
    for part in (
        "a small DCGAN, 4 workers",
        "Distance: made up.",
        "DCGAN on CelebA (more than 200,000 images",
        "not stated), 8,000 steps, T_w = 1,600",
    ):
        assert part in text


def test_faces_are_drawn_with_both_players_losses_and_samples_of_one_seed(drawings):
    _, drawing = drawings["figure_08"]
    ends = [[line.get_ydata()[-1] for line in axes.lines] for axes in drawing.axes[:2]]
    assert ends == [pytest.approx([0.8 * 1.2] * 2), pytest.approx([2.4 * 1.2] * 2)]
    assert [axes.get_title() for axes in drawing.axes[4:]] == [
        "Adam, seed 1: distance 0.066",
        "1-bit Adam, seed 1: distance 0.066",
    ]
    assert all(
        axes.images[0].get_array()[0, 0, 0] == pytest.approx(0.1, abs=0.01)
        for axes in drawing.axes[4:]
    )


def test_a_figure_without_runs_says_how_to_make_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="make reproduce-figure-4 PROFILE=laptop"):
        load_artifact("figure_04").save("laptop", tmp_path)


def test_an_unknown_figure_names_those_that_exist():
    with pytest.raises(ValueError, match="figure_04"):
        load_artifact("figure_99")


def test_an_unknown_curve_of_the_paper_names_those_that_exist():
    with pytest.raises(ValueError, match="1-bit Adam"):
        results.paper_curve("fig4a", "2-bit Adam")


def test_a_run_that_diverged_stays_in_the_range_of_those_that_finished(tmp_path):
    synthetic.write_all(tmp_path, seeds=(1, 2), adam=1.0)
    synthetic.write(tmp_path, "adam", 3, 1e9, status="diverged", steps=50)
    module, drawing = drawn("figure_04", tmp_path)
    legend = legend_of(drawing)
    assert legend[0] == "Adam, n = 2 seeds, 1 of 3 diverged"
    assert drawing.axes[0].get_ylim()[1] < 30


def test_an_optimizer_that_always_diverged_is_still_named(tmp_path):
    synthetic.write_all(tmp_path, seeds=(), adam=1.0)
    synthetic.write(tmp_path, "adam", 1, 4.0)
    synthetic.write(tmp_path, "naive_onebit_adam", 1, float("nan"), status="diverged", steps=50)
    _, drawing = drawn("figure_01", tmp_path)
    assert "Adam (1-bit naive), diverged" in legend_of(drawing)
