"""Reading results: the rows and records that the runs left, and the paper's own curves and numbers."""

from pathlib import Path

import pandas as pd

from .record import ROOT, read_run

RESULTS = ROOT / "results"
PAPER = RESULTS / "paper"
ENDED = ("finished", "diverged")


def run_folder(root: Path, experiment: str, profile: str, optimizer: str, seed: int) -> Path:
    """Where one run keeps curve.csv and run.json."""
    return Path(root) / "runs" / experiment / profile / optimizer / f"seed-{seed}"


def load_records(root: Path, experiment: str, profile: str, optimizers: tuple[str, ...] | None = None) -> list[dict]:
    """run.json of every run that ended, finished or diverged, with its `folder`; in the order of the folders' names."""
    records = []
    for folder in sorted((Path(root) / "runs" / experiment / profile).glob("*/seed-*")):
        record = read_run(folder)
        if record.get("status") in ENDED and (optimizers is None or record["optimizer"] in optimizers):
            records.append({**record, "folder": folder})
    return records


def load_rows(records: list[dict], live: bool = False) -> pd.DataFrame:
    """The rows of curve.csv of all these runs.

    Columns: those of curve.csv, then from run.json `status`, `warmup_steps` and `total_steps`, then `live`.
    No runs: an empty frame with the columns that every statistic asks for.
    """
    frames = []
    for record in records:
        rows = pd.read_csv(record["folder"] / "curve.csv")
        frames.append(rows.assign(live=live, **{key: record[key] for key in ("status", "warmup_steps", "total_steps")}))
    if not frames:
        return pd.DataFrame(columns=["optimizer", "seed", "step", "samples", "seconds", "loss", "phase", "variance_l1",
                                     "variance_l2", "variance_ratio", "bytes_sent", "commit", "live", "status",
                                     "warmup_steps", "total_steps"])
    return pd.concat(frames, ignore_index=True)


def load(root: Path, experiment: str, profile: str, optimizers: tuple[str, ...] | None = None) -> pd.DataFrame:
    """The rows of every run of this experiment that ended."""
    return load_rows(load_records(root, experiment, profile, optimizers))


def paper_curve(figure: str, curve: str) -> pd.DataFrame:
    """One digitised curve of the paper, columns x and y; units in results/paper/README.md."""
    points = pd.read_csv(PAPER / f"{figure}.csv")
    chosen = points.loc[points.curve == curve, ["x", "y"]]
    if chosen.empty:
        raise ValueError(f"{figure}.csv has no curve {curve!r}; it has {', '.join(points.curve.unique())}")
    return chosen.reset_index(drop=True)


def paper_number(name: str) -> float:
    """One number of results/paper/numbers.csv."""
    numbers = pd.read_csv(PAPER / "numbers.csv", index_col="id")["value"]
    return float(numbers[name])
