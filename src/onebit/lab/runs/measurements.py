"""What experiments that measure have in common: their files, and the options of their command.

results/<folder>/<name>.csv has the rows. <name>.json beside it has the machine, the date, the
commit and the options.
"""

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from onebit.lab.runs.load import RESULTS
from onebit.lab.runs.machine import machine
from onebit.lab.runs.metadata import commit


def write(root: Path, folder: str, name: str, rows: list[dict], config: dict, **facts) -> None:
    """Write folder/<name>.csv and .json under `root`. config: the options, with the seed."""
    path = Path(root) / folder / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = {
        "experiment": name,
        "date": date,
        "commit": commit(),
        "config": config,
        **facts,
        "machine": machine(),
    }
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def read(root: Path, folder: str, name: str) -> tuple[pd.DataFrame, dict]:
    """The rows, and the contents of the JSON file.

    Raises:
        FileNotFoundError: there are none; the message says how to measure them.
    """
    path = Path(root) / folder / f"{name}.csv"
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {path}: python experiments/{name}.py --measure makes it"
        )
    rows = pd.read_csv(path, keep_default_na=False, na_values=[""])
    return rows, json.loads(path.with_suffix(".json").read_text())


# ---- the command line


def positive(kind: type) -> Callable[[str], float]:
    """The type of an option that is a positive number, for argparse."""

    def parse_positive(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise ValueError
        return value

    parse_positive.__name__ = f"positive {kind.__name__}"
    return parse_positive


def parser(description: str) -> argparse.ArgumentParser:
    """A parser of the options that all such experiments have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--measure", action="store_true", help="measure first; otherwise redraw from the CSV"
    )
    made.add_argument(
        "--quick",
        action="store_true",
        help="measure tiny sizes in few rounds, to see that it runs, into results/live",
    )
    made.add_argument(
        "--results", type=Path, help="the folder that holds the measurements' folders and figures/"
    )
    return made


def parse(made: argparse.ArgumentParser, quick: dict) -> argparse.Namespace:
    """The options of the command line. With --quick, those of `quick` are the defaults."""
    options = made.parse_args()
    if options.quick:
        made.set_defaults(**quick)
        options = made.parse_args()
    options.results = options.results or (RESULTS / "live" if options.quick else RESULTS)
    return options
