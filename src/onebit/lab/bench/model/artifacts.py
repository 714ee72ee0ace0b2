"""Figures and tables about time: the papers' numbers beside the model's, drawn without any run."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from onebit.lab.bench.model.check import Check, check
from onebit.lab.bench.model.points import Point
from onebit.lab.claims.judge import table
from onebit.lab.report.artifact import EXPERIMENTS, Artifact
from onebit.lab.report.figure import Drawing, write
from onebit.lab.runs.load import PROFILES

SOURCE = (
    "Markers: the paper. Lines: the time model, of which docs/network.md tells inputs and errors; "
    "none of its inputs is fitted to a point that it predicts. "
)
# Okabe and Ito's palette: colour and marker of a curve
NO_RUNS = "No run is needed: the time model draws this from results/paper in seconds."
LOOKS = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "-"),
    ("#56B4E9", "^", "--"),
    ("#E69F00", "D", "--"),
    ("#009E73", "v", "-."),
    ("#CC79A7", "P", "-."),
)


@dataclass(frozen=True, kw_only=True)
class ModelFigure(Artifact):
    """A figure that needs no runs.

    Attributes:
        plot: the checked points -> the drawing.
        note: what the caption says.
        measures: by profile, the file of experiments/ and its options that measure what else the
            figure shows.
    """

    plot: Callable[[Check], Drawing]
    note: str
    measures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()
    plan_notes: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(PROFILES, NO_RUNS))

    @property
    def experiments(self) -> tuple[str, ...]:
        return ()

    def measure(self, profile: str) -> None:
        """Run what it measures, in a process of its own; RuntimeError if that fails."""
        if profile in self.measures:
            name, *options = self.measures[profile]
            command = [sys.executable, str(EXPERIMENTS / f"{name}.py"), "--measure", *options]
            if subprocess.run(command).returncode:
                raise RuntimeError(f"measuring {name} failed, see above; the rest is drawn")

    def draw(self, profile: str, root: Path, live_root: Path | None = None) -> tuple[Drawing, str]:
        """The drawing and its caption; all profiles have the same."""
        return self.plot(check()), self.note

    def save(self, profile: str, root: Path, live_root: Path | None = None) -> Path:
        """Draw figures/<name>.png and .pdf; returns the former."""
        drawing, text = self.draw(profile, root)
        return write(drawing, text, (live_root or root) / "figures" / self.name)


@dataclass(frozen=True, kw_only=True)
class ModelTable(Artifact):
    """A table that needs no runs.

    Attributes:
        table: the checked points -> the table.
        note: what stands below it.
    """

    table: Callable[[Check], pd.DataFrame]
    note: str
    optimizers: tuple[str, ...] = ()
    plan_notes: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(PROFILES, NO_RUNS))

    @property
    def experiments(self) -> tuple[str, ...]:
        return ()

    def save(self, profile: str, root: Path, live_root: Path | None = None) -> Path:
        """Write figures/<name>.md and .csv; returns the former."""
        frame = self.table(check())
        path = (live_root or root) / "figures" / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(path.with_suffix(".csv"), index=False, float_format="%.6g")
        cells = [[cell(value) for value in row] for row in frame.itertuples(index=False)]
        text = f"# {self.title}\n\n{table(frame.columns.tolist(), cells)}\n\n{self.note}\n"
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        return path.with_suffix(".md")


def cell(value: object) -> str:
    """A number with four digits, or a text."""
    return value if isinstance(value, str) else f"{value:,.4g}"


def chosen(found: Check, place: str, unit: str = "", task: str | None = None) -> list[Point]:
    """The points of a figure or table, perhaps of one unit, perhaps of a task only."""
    return [
        point
        for point in found.points
        if point.place == place
        and unit in ("", point.unit)
        and (task is None or (point.quantity and point.quantity[-1].task == task))
    ]


def draw_points(axes: Axes, points: list[Point], name: Callable[[Point], str]) -> None:
    """Markers at what is printed, lines through what is predicted; a curve for each name."""
    names = list(dict.fromkeys(map(name, points)))
    for look, label in enumerate(names):
        colour, marker, line = LOOKS[look % len(LOOKS)]
        curve = sorted((p for p in points if name(p) == label), key=lambda p: p.x)
        xs = [point.x for point in curve]
        printed, predicted = ([getattr(p, n) for p in curve] for n in ("printed", "predicted"))
        axes.plot(xs, printed, color=colour, marker=marker, linestyle="", markersize=4)
        alone = {"marker": "_", "markersize": 14} if len(xs) == 1 else {}
        style = {"color": colour, "linestyle": line, "linewidth": 1.3, **alone}
        axes.plot(xs, predicted, label=label, **style)


def plain_axis(axis: object, values: list[float]) -> None:
    """A logarithmic axis with these numbers beside it."""
    axis.set_ticks(values, labels=[f"{value:g}" for value in values])
    axis.set_minor_formatter("")


def compared(points: list[Point], found: Check) -> pd.DataFrame:
    """A row for each point: printed, predicted, and what there is to say."""
    remarks = {id(found.points[i]): text for i, text in found.contradicted.items()}
    return pd.DataFrame(
        [
            {
                "setting": f"{point.curve.partition(' (')[0]}, {point.what}",
                "unit": point.unit,
                "paper": point.printed,
                "model": point.predicted,
                "error": f"{point.error:.0%}",
                "remark": point.apart or remarks.get(id(point), ""),
            }
            for point in points
        ]
    )
