"""Read results: the rows and records that runs have left, and the papers' curves and numbers."""

from pathlib import Path

import pandas as pd

from onebit.lab.runs.compare import require_alike
from onebit.lab.runs.metadata import ENDED, ROOT, read_run
from onebit.lab.runs.recorder import COLUMNS
from onebit.lab.runs.state_log import QUANTITIES

RESULTS = ROOT / "results"
PAPER = RESULTS / "paper"
PROFILES = ("smoke", "laptop", "workstation", "paper")
SEEDS = (1, 2, 3, 4)  # of the results
# The seed at which the model's size and the learning rate were chosen; it is not among the results.
TUNING_SEED = 0
# What every row of a run takes from its run.json.
FROM_RECORD = ("status", "warmup_steps", "total_steps", "folder")


def run_folder(root: Path, experiment: str, profile: str, optimizer: str, seed: int) -> Path:
    """Where one run keeps curve.csv and run.json."""
    return Path(root) / "runs" / experiment / profile / optimizer / f"seed-{seed}"


def load_records(
    root: Path, experiment: str, profile: str, optimizers: tuple[str, ...] | None = None
) -> list[dict]:
    """run.json of every run that has ended, finished or diverged, and its `folder`.

    The order is that of the folders' names. Runs of the tuning seed are left out.
    """
    records = []
    for folder in sorted((Path(root) / "runs" / experiment / profile).glob("*/seed-*")):
        record = read_run(folder)
        wanted = record.get("status") in ENDED and record["seed"] != TUNING_SEED
        if wanted and (optimizers is None or record["optimizer"] in optimizers):
            records.append({**record, "folder": folder})
    return records


def load_rows(records: list[dict], live: bool = False) -> pd.DataFrame:
    """The rows of all these runs, one for each row of curve.csv.

    Columns: those of curve.csv; the metrics of evaluation.csv and QUANTITY:TENSOR of tensors.csv,
    which are defined at the steps that these files have; `status`, `warmup_steps` and
    `total_steps` of run.json; the run's `folder`; and `live`. Without runs the frame is empty and
    lacks the metrics and quantities.
    """
    frames = []
    for record in records:
        rows = read_curve(record)
        for more in (read_evaluation(record["folder"]), read_tensors(record["folder"])):
            if more is not None:
                rows = rows.merge(more, on="step", how="left", validate="one_to_one")
        frames.append(rows.assign(live=live, **{key: record[key] for key in FROM_RECORD}))
    if not frames:
        return pd.DataFrame(columns=[*COLUMNS, "live", *FROM_RECORD])
    return pd.concat(frames, ignore_index=True)


def read_curve(record: dict) -> pd.DataFrame:
    """curve.csv of a run that has ended.

    Raises:
        ValueError: the file is missing, is broken, or stops before the run did.
    """
    path, end = record["folder"] / "curve.csv", record["final"]["step"]
    try:
        rows = pd.read_csv(path)
        complete = rows["step"].iloc[-1] == end
    except (OSError, ValueError, LookupError):
        complete = False
    if not complete:
        raise ValueError(
            f"{path} does not reach step {end}, where the run ended: restore the file, or remove "
            "its folder and train the run again."
        )
    return rows


def read_evaluation(folder: Path) -> pd.DataFrame | None:
    """evaluation.csv by step, with a column for each metric; None if there is no such file."""
    path = folder / "evaluation.csv"
    return (
        pd.read_csv(path).pivot(index="step", columns="metric", values="value")
        if path.exists()
        else None
    )


def read_tensors(folder: Path) -> pd.DataFrame | None:
    """tensors.csv by step, with a column QUANTITY:TENSOR for each that was recorded.

    None if there is no such file.
    """
    path = folder / "tensors.csv"
    if not path.exists():
        return None
    wide = (
        pd.read_csv(path)
        .pivot(index="step", columns="tensor", values=list(QUANTITIES))
        .dropna(axis="columns", how="all")
    )
    wide.columns = [":".join(names) for names in wide.columns]
    return wide


def by_tensor(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """The columns of a quantity, named by tensor; no columns if it was not recorded."""
    prefix = f"{quantity}:"
    chosen = rows[[name for name in rows if name.startswith(prefix)]]
    return chosen.rename(columns=lambda name: name.removeprefix(prefix))


def at_common_seeds(rows: pd.DataFrame, optimizers: tuple[str, ...]) -> pd.DataFrame:
    """The rows of these optimizers at the seeds that all of them have, if they have runs at all.

    Means over different seeds would differ by the seeds too.
    """
    rows = rows[rows.optimizer.isin(optimizers)]
    count = rows.groupby("seed").optimizer.nunique()
    return rows[rows.seed.isin(count.index[count == rows.optimizer.nunique()])]


def load(
    root: Path, experiment: str, profile: str, optimizers: tuple[str, ...] | None = None
) -> pd.DataFrame:
    """The rows of every run of this experiment that has ended.

    Raises:
        ValueError: the runs cannot be compared with each other.
    """
    records = load_records(root, experiment, profile, optimizers)
    require_alike(records)
    return load_rows(records)


def paper_curve(figure: str, curve: str) -> pd.DataFrame:
    """A digitised curve of the paper, columns x and y, whose units are in results/paper/README.md.

    Raises:
        ValueError: the figure has no such curve.
    """
    points = pd.read_csv(PAPER / f"{figure}.csv")
    chosen = points.loc[points.curve == curve, ["x", "y"]]
    if chosen.empty:
        raise ValueError(
            f"{figure}.csv has no curve {curve!r}; it has {', '.join(points.curve.unique())}."
        )
    return chosen.reset_index(drop=True)


def paper_curves(figure: str) -> tuple[str, ...]:
    """The names of the digitised curves of a figure."""
    return tuple(pd.read_csv(PAPER / f"{figure}.csv").curve.unique())


def paper_number(name: str) -> float:
    """A number of results/paper/numbers.csv."""
    numbers = pd.read_csv(PAPER / "numbers.csv", index_col="id")["value"]
    return float(numbers[name])


def paper_note(name: str) -> str:
    """What results/paper/numbers.csv notes beside a number."""
    return pd.read_csv(PAPER / "numbers.csv", index_col="id")["note"][name]
