"""Reading results: the rows and records that the runs left, and the paper's own curves and numbers."""

from pathlib import Path

import pandas as pd

from onebit.lab.runs.metadata import ENDED, INCIDENTAL, ROOT, by_class_name, read_run, without
from onebit.lab.runs.recorder import COLUMNS
from onebit.lab.runs.state_log import QUANTITIES

RESULTS = ROOT / "results"
PAPER = RESULTS / "paper"
PROFILES = ("smoke", "laptop", "paper")
SEEDS = (1, 2, 3, 4)  # of the results
TUNING_SEED = (
    0  # it served to choose the model's size and the learning rate, so it is none of the results
)
FROM_RECORD = (
    "status",
    "warmup_steps",
    "total_steps",
    "folder",
)  # what every row of a run is told of it
OWN = {"seed", "optimizer", "method"}  # options in which runs that are compared may differ


def run_folder(root: Path, experiment: str, profile: str, optimizer: str, seed: int) -> Path:
    """Where one run keeps curve.csv and run.json."""
    return Path(root) / "runs" / experiment / profile / optimizer / f"seed-{seed}"


def load_records(
    root: Path, experiment: str, profile: str, optimizers: tuple[str, ...] | None = None
) -> list[dict]:
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
                raise ValueError(
                    f"These runs differ in {', '.join(names)}, so they cannot be compared: {one}, {two}."
                )


def differing(one: dict, two: dict) -> list[str]:
    """What stands in the way of comparing two runs. Of the optimizers' own options only common ones can differ.

    Where one divides by the root of a variance, or scales a step by the norm of the weights, and the other does not, their learning rates
    have different units, and so has weight decay.
    """
    same_units = units(one) == units(two)
    a, b = (options_of(r, with_rate=same_units) for r in (one, two))
    names = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
    if same_units:
        a, b = (by_class_name(r["config"].get("optimizer", {})) for r in (one, two))
        names += [
            f"optimizer.{name}" for name in a.keys() & b.keys() - {"_target_"} if a[name] != b[name]
        ]
        if one["optimizer"] == two["optimizer"]:
            names += [f"optimizer.{name}" for name in a.keys() ^ b.keys()]
    known = ((name, one.get(name), two.get(name)) for name in ("corpus_sha256", "data"))
    return sorted(names) + [
        name for name, *values in known if None not in values and values[0] != values[1]
    ]


def options_of(record: dict, with_rate: bool) -> dict:
    """The options in which runs that are compared must agree, with or without the learning rate's peak."""
    options = {
        name: value
        for name, value in by_class_name(without(record["config"], INCIDENTAL)).items()
        if name not in OWN
    } | {"workers": record["workers"]}
    if not with_rate:
        del options["lr"]
        options["phases"] = {
            name: phase | {"lr": phase["lr"] | {"peak": None}}
            for name, phase in options["phases"].items()
        }
    return options


def units(record: dict) -> tuple[bool, bool]:
    """What decides the units of a learning rate: whether there is a variance, and a coefficient that is not always 1."""
    options = record["config"].get("optimizer", {})
    return "betas" in options, options.get("coefficient_bounds", [1.0, 1.0]) != [1.0, 1.0]


def load_rows(records: list[dict], live: bool = False) -> pd.DataFrame:
    """The rows of curve.csv of all these runs.

    Columns: those of curve.csv, then the metrics of evaluation.csv, and QUANTITY:TENSOR of tensors.csv, defined at the steps that these
    have, then from run.json `status`, `warmup_steps` and `total_steps`, the run's `folder`, then `live`. No runs: an empty frame with the
    same columns, but for the metrics and quantities.
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
    """curve.csv of a run that ended. ValueError if it is broken or stops before the run did."""
    path, end = record["folder"] / "curve.csv", record["final"]["step"]
    try:
        rows = pd.read_csv(path)
        complete = rows["step"].iloc[-1] == end
    except (OSError, ValueError, LookupError):
        complete = False
    if not complete:
        raise ValueError(
            f"{path} does not go on to step {end}, where the run ended: bring it back, or remove its folder and train the run again."
        )
    return rows


def read_evaluation(folder: Path) -> pd.DataFrame | None:
    """evaluation.csv with a column for each metric, by step; None if there is none."""
    path = folder / "evaluation.csv"
    return (
        pd.read_csv(path).pivot(index="step", columns="metric", values="value")
        if path.exists()
        else None
    )


def read_tensors(folder: Path) -> pd.DataFrame | None:
    """tensors.csv with a column QUANTITY:TENSOR for each that was recorded, by step; None if there is none."""
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
    """The columns of a quantity, named by tensor; none where it was not recorded."""
    prefix = f"{quantity}:"
    chosen = rows[[name for name in rows if name.startswith(prefix)]]
    return chosen.rename(columns=lambda name: name.removeprefix(prefix))


def at_common_seeds(rows: pd.DataFrame, optimizers: tuple[str, ...]) -> pd.DataFrame:
    """The rows of these optimizers at the seeds of all that have runs: means over unlike seeds differ by the seeds too."""
    rows = rows[rows.optimizer.isin(optimizers)]
    count = rows.groupby("seed").optimizer.nunique()
    return rows[rows.seed.isin(count.index[count == rows.optimizer.nunique()])]


def load(
    root: Path, experiment: str, profile: str, optimizers: tuple[str, ...] | None = None
) -> pd.DataFrame:
    """The rows of every run of this experiment that ended; ValueError if they cannot be compared with each other."""
    records = load_records(root, experiment, profile, optimizers)
    require_alike(records)
    return load_rows(records)


def paper_curve(figure: str, curve: str) -> pd.DataFrame:
    """One digitised curve of the paper, columns x and y; units in results/paper/README.md."""
    points = pd.read_csv(PAPER / f"{figure}.csv")
    chosen = points.loc[points.curve == curve, ["x", "y"]]
    if chosen.empty:
        raise ValueError(
            f"{figure}.csv has no curve {curve!r}; it has {', '.join(points.curve.unique())}"
        )
    return chosen.reset_index(drop=True)


def paper_curves(figure: str) -> tuple[str, ...]:
    """The names of the curves that are digitised."""
    return tuple(pd.read_csv(PAPER / f"{figure}.csv").curve.unique())


def paper_number(name: str) -> float:
    """One number of results/paper/numbers.csv."""
    numbers = pd.read_csv(PAPER / "numbers.csv", index_col="id")["value"]
    return float(numbers[name])


def paper_note(name: str) -> str:
    """What results/paper/numbers.csv notes beside a number."""
    return pd.read_csv(PAPER / "numbers.csv", index_col="id")["note"][name]
