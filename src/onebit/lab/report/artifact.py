"""Figures, tables and sweeps as objects: each file of experiments/ that reads runs defines one.

    ARTIFACT = Figure(name="figure_04", title=..., experiment="figure_04", optimizers=..., plot=...)

    if __name__ == "__main__":
        main(ARTIFACT)

`onebit.lab.plan` and `onebit.lab.reproduce` ask an artifact which runs it needs, and `save` makes
its files from the runs that are committed.
"""

import argparse
import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pandas as pd

from onebit.lab.report import captions, sweep, table
from onebit.lab.report.figure import Drawing, write
from onebit.lab.runs.compare import require_alike
from onebit.lab.runs.load import PROFILES, RESULTS, load_records, load_rows
from onebit.lab.runs.metadata import ROOT

EXPERIMENTS = ROOT / "experiments"
KINDS = ("figure", "sweep", "table")
Rows = pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """What is made from runs: it knows which it needs, and makes its files from them.

    Attributes:
        name: the name of its file in experiments/, without .py.
        title: a sentence that says what it shows.
        optimizers: the methods that it compares, as runs are called after them.
        smoke_optimizers: those that the profile smoke trains, where all would take too long.
        workstation_optimizers: those that the profile workstation trains, where it has more.
        plan_notes: by profile, what `onebit.lab.plan` says besides.
    """

    name: str
    title: str
    optimizers: tuple[str, ...]
    smoke_optimizers: tuple[str, ...] = ()
    workstation_optimizers: tuple[str, ...] = ()
    plan_notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def experiments(self) -> tuple[str, ...]:
        """The experiments of conf/experiment that it trains."""
        raise NotImplementedError

    def experiments_at(self, profile: str) -> tuple[str, ...]:
        """The experiments that it trains at a profile."""
        return self.experiments

    def optimizers_at(self, profile: str) -> tuple[str, ...]:
        """The methods that it trains at a profile."""
        own = {"smoke": self.smoke_optimizers, "workstation": self.workstation_optimizers}
        return own.get(profile) or self.optimizers

    def runs(self, profile: str) -> list[tuple[str, str]]:
        """The (experiment, method) pairs that it trains at a profile."""
        return [
            (experiment, optimizer)
            for experiment in self.experiments_at(profile)
            for optimizer in self.optimizers_at(profile)
        ]

    def overrides(self, optimizer: str) -> list[str]:
        """The options of `onebit.lab.train` that choose one of its methods."""
        return [f"optimizer={optimizer}"]

    def measure(self, profile: str) -> None:
        """Measure what it shows besides runs: nothing, for most.

        Raises RuntimeError if that fails.
        """

    def save(self, profile: str, root: Path, live_root: Path | None = None) -> Path:
        """Make its files from the runs under `root` and the live ones; returns the main file.

        Raises FileNotFoundError, with the command that trains them, if there are no runs, and
        ValueError if runs cannot be compared.
        """
        raise NotImplementedError

    def path(self, profile: str, root: Path) -> Path:
        """Where its files go, without their suffixes."""
        return root / "figures" / (self.name if profile == "laptop" else f"{self.name}_{profile}")

    def no_runs(self, profile: str, root: Path) -> FileNotFoundError:
        """The error if there are no runs, with the remedy."""
        make = (
            f"make plan-{target(self.name)} PROFILE=paper says how to launch them"
            if profile == "paper"
            else f"make reproduce-{target(self.name)} PROFILE={profile} trains them"
        )
        return FileNotFoundError(
            f"There are no finished runs of {', '.join(self.experiments)}, profile {profile}, "
            f"under {root}: {make}."
        )


@dataclass(frozen=True, kw_only=True)
class Figure(Artifact):
    """A figure of one experiment's runs.

    Attributes:
        experiment: the experiment of conf/experiment whose runs it shows.
        plot: rows of `load_rows` -> the drawing.
        note: what the caption says besides.
    """

    experiment: str
    plot: Callable[[Rows], Drawing]
    note: str = ""

    @property
    def experiments(self) -> tuple[str, ...]:
        return (self.experiment,)

    def caption(self, rows: Rows, records: list[dict]) -> str:
        """What was run and what the paper ran."""
        return captions.of_figure(rows, records)

    def draw(self, profile: str, root: Path, live_root: Path | None = None) -> tuple[Drawing, str]:
        """The drawing and its caption, from the committed runs and live ones.

        A live run may have read other data than the committed ones, such as another Python's
        documentation.
        """
        roots = [root] + [live_root] * (live_root is not None)
        shown = tuple({*self.optimizers, *self.optimizers_at(profile)})
        groups = [load_records(r, self.experiment, profile, shown) for r in roots]
        for group in groups:
            require_alike(group)
        records = [record for group in groups for record in group]
        require_alike(records, apart_from=("corpus_sha256", "data"))
        if not records:
            raise self.no_runs(profile, root)
        frames = [load_rows(group, live=i > 0) for i, group in enumerate(groups) if group]
        rows = pd.concat(frames, ignore_index=True)
        text = " ".join(filter(None, (self.caption(rows, records), self.note)))
        return self.plot(rows), text

    def save(self, profile: str, root: Path, live_root: Path | None = None) -> Path:
        """Draw figures/<name>.png and .pdf; returns the former."""
        drawing, text = self.draw(profile, root, live_root)
        return write(drawing, text, self.path(profile, live_root or root))


@dataclass(frozen=True)
class Variant:
    """One setting of a sweep.

    Attributes:
        label: what the figure calls it.
        changes: the options that it changes in 1-bit Adam's, as overrides of `onebit.lab.train`.
    """

    label: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sweep(Figure):
    """1-bit Adam with one option varied, beside Adam. The papers have none, so none is judged.

    A variant is `optimizer=onebit_adam` with further options, under a method name of its own, which
    names its folder and its run. A variant without changes is a file of conf/optimizer.

    Attributes:
        variants: method -> variant, in the order in which they are shown.
        option: what varies, for the axis.
    """

    variants: Mapping[str, Variant]
    option: str
    optimizers: tuple[str, ...] = field(init=False)
    plot: Callable[[Rows], Drawing] = field(init=False)

    def __post_init__(self) -> None:
        plot = functools.partial(sweep.plot, labels=self.labels, option=self.option)
        object.__setattr__(self, "optimizers", ("adam", *self.variants))
        object.__setattr__(self, "plot", plot)

    @property
    def labels(self) -> dict[str, str]:
        """What the figure calls each variant."""
        return {method: variant.label for method, variant in self.variants.items()}

    def overrides(self, optimizer: str) -> list[str]:
        changes = self.variants[optimizer].changes if optimizer in self.variants else ()
        if not changes:
            return [f"optimizer={optimizer}"]
        return ["optimizer=onebit_adam", f"method={optimizer}", *changes]

    def caption(self, rows: Rows, records: list[dict]) -> str:
        """What was run and what is shown."""
        return captions.of_sweep(records)


@dataclass(frozen=True, kw_only=True)
class Table(Artifact):
    """A table of scores: figures/<name>.md, and .csv with more digits.

    Attributes:
        trains: the experiments of conf/experiment that it trains.
        smoke_trains: those that the profile smoke trains, where all would take too long.
        reads: the experiments whose runs it reads, where it reads more than it trains.
        table: {experiment: rows of `load_rows`} -> the table.
        note: what stands below it.
        needs_runs: whether there is nothing to say without runs.
    """

    trains: tuple[str, ...]
    smoke_trains: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    table: Callable[[dict[str, Rows]], Rows]
    note: str
    needs_runs: bool = True

    @property
    def experiments(self) -> tuple[str, ...]:
        return self.trains

    def experiments_at(self, profile: str) -> tuple[str, ...]:
        return (self.smoke_trains if profile == "smoke" else ()) or self.trains

    def save(self, profile: str, root: Path, live_root: Path | None = None) -> Path:
        """Write figures/<name>.md and .csv of the runs under `root`, or of the live ones alone."""
        root = live_root or root
        records = {
            experiment: load_records(root, experiment, profile, self.optimizers)
            for experiment in self.reads or self.trains
        }
        for found in records.values():
            require_alike(found)
        if self.needs_runs and not any(records.values()):
            raise self.no_runs(profile, root)
        frame = self.table({name: load_rows(found) for name, found in records.items()})
        path = self.path(profile, root)
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(path.with_suffix(".csv"), index=False, float_format="%.6g")
        text = table.markdown(self.title, frame, self.note, records, profile)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        return path.with_suffix(".md")


# ---- experiments by name


def names() -> list[str]:
    """The names of all figures, sweeps and tables."""
    return sorted(path.stem for kind in KINDS for path in EXPERIMENTS.glob(f"{kind}_*.py"))


def load_module(name: str) -> ModuleType:
    """The module experiments/<name>.py, e.g. figure_04 or kernel_speed."""
    path = EXPERIMENTS / f"{name}.py"
    if not path.exists():
        raise ValueError(f"There is no experiment {name!r}; there are {', '.join(names())}.")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_artifact(name: str) -> Artifact:
    """The figure, sweep or table of experiments/<name>.py."""
    return load_module(name).ARTIFACT


def target(name: str) -> str:
    """The make target of a file of experiments/: figure_04 -> figure-4."""
    kind, _, rest = name.partition("_")
    return f"{kind}-{int(rest) if rest.isdigit() else rest.replace('_', '-')}"


@functools.cache
def sweep_overrides() -> dict[str, list[str]]:
    """The options of each method that only a sweep trains."""
    sweeps = [load_artifact(name) for name in names() if name.startswith("sweep_")]
    return {
        method: sweep.overrides(method)
        for sweep in sweeps
        for method, variant in sweep.variants.items()
        if variant.changes
    }


def overrides_of(method: str) -> list[str]:
    """The options of `onebit.lab.train` for a method: a file of conf/optimizer, or a variant."""
    return sweep_overrides().get(method, [f"optimizer={method}"])


def main(artifact: Artifact) -> None:
    """Redraw the figure, or write the table, from the committed CSV."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--profile", default="laptop", choices=PROFILES)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder that holds runs/ and figures/"
    )
    options = parser.parse_args()
    try:
        print(artifact.save(options.profile, options.results))
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
