"""Record the smoke curves of every optimizer, and show that a change leaves every bit of them.

    python scripts/smoke_curves.py record before.json      # before the change
    python scripts/smoke_curves.py compare before.json     # after it, on the same machine

Every optimizer of conf/optimizer/, and every variant of a sweep, trains the smoke task of Figure 4
with three workers in threads; LAMB and 0/1 Adam also with three processes over gloo. A curve holds
what the run recorded at each step, apart from times. Floating-point results depend on the processor
and on the version of PyTorch, so record and compare on one machine with one environment. Takes a
few minutes.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from onebit.lab.report.artifact import overrides_of, sweep_overrides

ROOT = Path(__file__).parents[1]
PROCESSES = ("onebit_lamb", "zero_one_adam")
LEFT_OUT = ("second", "commit")  # columns whose name contains one of these differ from run to run


def runs() -> list[tuple[str, str]]:
    """(optimizer, backend) of every run."""
    optimizers = [path.stem for path in (ROOT / "conf" / "optimizer").glob("*.yaml")]
    optimizers = sorted([*optimizers, *sweep_overrides()])
    return [(name, "threads") for name in optimizers] + [(name, "gloo") for name in PROCESSES]


def curve(optimizer: str, backend: str) -> list[dict[str, str]]:
    """Train, and return the rows of curve.csv without its times."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "experiment=figure_04",
            "profile=smoke",
            *overrides_of(optimizer),
            f"comm={backend}",
            "workers=3",
            "seed=1",
        ]
        options += ["record_every=1", "progress=false", f"output={folder}/run"]
        subprocess.run([sys.executable, "-m", "onebit.lab.train", *options], check=True, cwd=ROOT)
        with open(f"{folder}/run/curve.csv", newline="") as file:
            return [
                {
                    key: value
                    for key, value in row.items()
                    if not any(word in key for word in LEFT_OUT)
                }
                for row in csv.DictReader(file)
            ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    before = json.loads(options.file.read_text()) if options.action == "compare" else {}
    curves, differing = {}, []
    for optimizer, backend in runs():
        name = f"{optimizer} over {backend}"
        curves[name] = curve(optimizer, backend)
        if before and before.get(name) != curves[name]:
            differing.append(name)
        print(name, "differs" if name in differing else "ok", flush=True)
    if options.action == "record":
        options.file.write_text(json.dumps(curves))
    elif differing or before.keys() - curves.keys():
        raise SystemExit(
            f"these curves are not as recorded: "
            f"{', '.join(differing + sorted(before.keys() - curves.keys()))}"
        )


if __name__ == "__main__":
    main()
