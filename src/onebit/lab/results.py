"""Reading results: the rows and records that the runs left, and the paper's own curves and numbers."""

from pathlib import Path

import pandas as pd

from .record import COLUMNS, ENDED, INCIDENTAL, ROOT, read_run

RESULTS = ROOT / "results"
PAPER = RESULTS / "paper"
PROFILES = ("smoke", "laptop", "paper")
SEEDS = (1, 2, 3, 4)  # of the results
TUNING_SEED = 0  # it served to choose the model's size and the learning rate, so it is none of the results
OWN = {"seed", "optimizer", "method"}  # options in which runs that are compared may differ


def run_folder(root: Path, experiment: str, profile: str, optimizer: str, seed: int) -> Path:
    """Where one run keeps curve.csv and run.json."""
    return Path(root) / "runs" / experiment / profile / optimizer / f"seed-{seed}"


def load_records(root: Path, experiment: str, profile: str, optimizers: tuple[str, ...] | None = None) -> list[dict]:
    """run.json of every run that ended, finished or diverged, with its `folder`; in the order of the folders' names.

    Runs of the tuning seed are left out.
    """
    records = []
    for folder in sorted((Path(root) / "runs" / experiment / profile).glob("*/seed-*")):
        record = read_run(folder)
        wanted = record.get("status") in ENDED and record["seed"] != TUNING_SEED
        if wanted and (optimizers is None or record["optimizer"] in optimizers):
            records.append({**record, "folder": folder})
    return records


def require_alike(records: list[dict], apart_from: tuple[str, ...] = ()) -> None:
    """ValueError if two runs differ in more than the seed and the optimizer: in another option, the workers or the text."""
    first_of = {}
    for record in records:
        for other in (records[0], first_of.setdefault(record["optimizer"], record)):
            names = [name for name in differing(record, other) if name not in apart_from]
            if names:
                one, two = (str(r.get("folder", "the run to come")) for r in (other, record))
                raise ValueError(f"These runs differ in {', '.join(names)}, so they cannot be compared: {one}, {two}.")


def differing(one: dict, two: dict) -> list[str]:
    """What stands in the way of comparing two runs. Of the optimizers' own options only common ones can differ."""
    a, b = ({k: v for k, v in r["config"].items() if k not in OWN.union(INCIDENTAL)} for r in (one, two))
    a["workers"], b["workers"] = one["workers"], two["workers"]
    names = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
    a, b = (r["config"].get("optimizer", {}) for r in (one, two))
    names += [f"optimizer.{name}" for name in a.keys() & b.keys() - {"_target_"} if a[name] != b[name]]
    if one["optimizer"] == two["optimizer"]:
        names += [f"optimizer.{name}" for name in a.keys() ^ b.keys()]
    text = [r.get("corpus_sha256") for r in (one, two)]
    return sorted(names) + ["corpus_sha256"] * (None not in text and text[0] != text[1])


def load_rows(records: list[dict], live: bool = False) -> pd.DataFrame:
    """The rows of curve.csv of all these runs.

    Columns: those of curve.csv, then from run.json `status`, `warmup_steps` and `total_steps`, then `live`.
    No runs: an empty frame with the same columns.
    """
    frames = []
    for record in records:
        rows = pd.read_csv(record["folder"] / "curve.csv")
        frames.append(rows.assign(live=live, **{key: record[key] for key in ("status", "warmup_steps", "total_steps")}))
    if not frames:
        return pd.DataFrame(columns=[*COLUMNS, "live", "status", "warmup_steps", "total_steps"])
    return pd.concat(frames, ignore_index=True)


def load(root: Path, experiment: str, profile: str, optimizers: tuple[str, ...] | None = None) -> pd.DataFrame:
    """The rows of every run of this experiment that ended; ValueError if they cannot be compared with each other."""
    records = load_records(root, experiment, profile, optimizers)
    require_alike(records)
    return load_rows(records)


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


def paper_note(name: str) -> str:
    """What results/paper/numbers.csv notes beside a number."""
    return pd.read_csv(PAPER / "numbers.csv", index_col="id")["note"][name]
