"""Experiments that measure: each file of experiments/ that makes its own rows defines one object.

MEASUREMENT = SpeedMeasurement(name="kernel_speed", measure=..., plot=..., ...)

if __name__ == "__main__":
    MEASUREMENT.main()

python experiments/NAME.py               redraw the figure from results/<folder>/NAME.csv
python experiments/NAME.py --measure     measure first
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pandas as pd

from onebit.lab.bench.bars import Bar, check_bars
from onebit.lab.bench.timing import FOREIGN_LIMIT, HIGH, LOW
from onebit.lab.report.figure import Drawing, write
from onebit.lab.runs import measurements

Rows = pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is measured, and how it is drawn and judged.

    Attributes:
        name: the name of its file in experiments/, and of its CSV.
        description: its docstring, which --help prints.
        add_options: adds its options to the parser.
        quick: the options' values with --quick: tiny sizes, to see that it runs.
        recorded: the names of the options that the JSON keeps.
        constants: what the JSON keeps besides.
        measure: options -> the rows of the CSV.
        plot: rows -> the drawing.
        note: (rows, what the JSON says) -> what the caption says besides how it was measured.
        rules: rows -> a table of its acceptance rules, which is printed.
    """

    name: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    quick: Mapping[str, object]
    recorded: tuple[str, ...]
    measure: Callable[[argparse.Namespace], list[dict]]
    plot: Callable[[Rows], Drawing]
    note: Callable[[Rows, dict], str]
    rules: Callable[[Rows], Rows] | None = None
    constants: Mapping[str, object] = field(default_factory=dict)
    folder: ClassVar[str]  # of results/
    facts: ClassVar[Mapping[str, object]] = {}  # further entries of the JSON

    def common_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that all measurements of the folder have."""

    def caption(self, rows: Rows, facts: dict) -> str:
        """How it was measured, from the files."""
        raise NotImplementedError

    def parse(self) -> argparse.Namespace:
        """The options of the command line."""
        parser = measurements.parser(self.description)
        self.common_options(parser)
        self.add_options(parser)
        return measurements.parse(parser, quick=dict(self.quick))

    def main(self) -> None:
        """Measure if that is asked for, print the table of the rules and draw the figure."""
        options = self.parse()
        try:
            if options.measure:
                config = {name: getattr(options, name) for name in self.recorded} | self.constants
                rows = self.measure(options)
                measurements.write(
                    options.results, self.folder, self.name, rows, config, **self.facts
                )
            rows, facts = measurements.read(options.results, self.folder, self.name)
        except (FileNotFoundError, RuntimeError, ValueError) as error:
            raise SystemExit(f"error: {error}") from None
        if self.rules:
            print(self.rules(rows).to_string(index=False, float_format="%.3f"))
        path = options.results / "figures" / self.name
        print(write(self.plot(rows), self.whole_caption(rows, facts), path))

    def draw(self, root: Path) -> tuple[Drawing, str]:
        """The drawing and its caption, from the files under `root`."""
        rows, facts = measurements.read(root, self.folder, self.name)
        return self.plot(rows), self.whole_caption(rows, facts)

    def whole_caption(self, rows: Rows, facts: dict) -> str:
        return f"{self.note(rows, facts)} {self.caption(rows, facts)}"


@dataclass(frozen=True, kw_only=True)
class SpeedMeasurement(Measurement):
    """Times of contenders that run in turn: rows of `timing.Timings.summary` in results/speed.

    bars: the acceptance rules.
    """

    bars: tuple[Bar, ...] = ()
    folder: ClassVar[str] = "speed"
    facts: ClassVar[Mapping[str, object]] = {
        "foreign_limit": FOREIGN_LIMIT,
        "spread": f"percentiles {LOW} and {HIGH} of the rounds",
    }

    def __post_init__(self) -> None:
        if self.bars:
            object.__setattr__(self, "rules", lambda rows: check_bars(self.bars, rows))

    def common_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--rounds",
            type=measurements.positive(int),
            default=31,
            help="rounds that count, in each setting",
        )
        parser.add_argument("--seed", type=int, default=1)

    def caption(self, rows: Rows, facts: dict) -> str:
        host, rounds = facts["machine"], sorted({int(rows.rounds.min()), int(rows.rounds.max())})
        kept = int(rows.disturbed.max())
        kept_text = f"; up to {kept} had to be kept" if kept else ""
        return (
            f"Line or point: median of {' to '.join(map(str, rounds))} rounds, in each of which "
            f"all contenders run in turn; for ratios, the ratio of the medians. Band or whisker: "
            f"{LOW}th to {HIGH}th percentile of the rounds, for ratios of the ratios of single "
            "rounds, so that the ratio of the medians can lie a little outside. Rounds in which "
            f"other processes took more than {facts['foreign_limit']:.0%} of the CPU were dropped "
            f"and repeated (at most {int(rows.dropped.max())} for a setting{kept_text}). "
            f"{host['cpu']}, family {host['cpu_family']} model {host['cpu_model']}, "
            f"{host['cores']} cores, {host['memory_gb']:g} GB; Python {host['python']}, torch "
            f"{host['torch']}, numba {host['numba']}; {commit_and_date(facts)}"
        )


@dataclass(frozen=True, kw_only=True)
class TheoryMeasurement(Measurement):
    """Simulations of the theory, one number for each seed: rows in results/theory."""

    folder: ClassVar[str] = "theory"

    def caption(self, rows: Rows, facts: dict) -> str:
        return (
            f"Line: mean of n = {rows.seed.nunique()} seeds; band: lowest to highest seed. "
            f"C{commit_and_date(facts)[1:]}"
        )


def commit_and_date(facts: dict) -> str:
    """'commit 0123456, 2026-01-31.'"""
    changed = " with changes" if "dirty" in facts["commit"] else ""
    return f"commit {facts['commit'][:7]}{changed}, {facts['date'][:10]}."
