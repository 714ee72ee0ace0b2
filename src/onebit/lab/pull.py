"""Write the runs of a Weights & Biases project to files, as training has written them.

    python -m onebit.lab.pull ENTITY/onebit --group figure_04     what was logged online
    python -m onebit.lab.pull --offline results/runs              what wandb=offline has written

Each run goes into results/runs/<experiment>/<profile>/<optimizer>/seed-<n>. If it was fine-tuned
from weights of onebit.lab.export, it goes into results/runs/pretrained, where the claims look for
it. The files are curve.csv, evaluation.csv, tensors.csv and run.json, as `Recorder` writes them,
except that the tensors of a step are in alphabetical order, since W&B keeps no order. Runs that
have not ended are left out. A folder that holds a run is kept, unless --overwrite is given.
"""

import argparse
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onebit.lab.runs.load import RESULTS, run_folder
from onebit.lab.runs.metadata import ENDED, read_run
from onebit.lab.runs.recorder import COLUMNS, EVALUATION, IDENTITY, TENSORS, TRAFFIC, Table
from onebit.lab.runs.state_log import QUANTITIES

WHOLE = ("step", "samples", *TRAFFIC)
# A .wandb file is a header, then blocks of LevelDB's log format. A record lies in one block, or in
# parts in several.
HEADER, BLOCK, PART = b":W&B", 32768, struct.Struct("<IHB")
ONLY, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Logged:
    """What W&B knows of a run.

    facts: run.json as it was before the first step.
    summary: what was added at the end.
    history: {step: what was logged after it}.
    """

    facts: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    history: dict[int, dict] = field(default_factory=dict)


def online(api: Any, project: str, group: str | None) -> Iterator[Logged]:
    """The runs of a project, "entity/name". api: wandb.Api(), or an object like it."""
    for run in api.runs(project, filters={"group": group} if group else {}):
        yield Logged(
            dict(run.config), dict(run.summary), {row["step"]: row for row in run.scan_history()}
        )


def offline(root: Path) -> list[Logged]:
    """The runs whose .wandb files lie under `root`. The files of a resumed run are put together."""
    runs = {}
    for path in sorted(
        root.rglob("*.wandb"), key=lambda path: path.parent.name
    ):  # offline-run-<time>-<id>
        take_in(runs.setdefault(path.stem, Logged()), path)
    return list(runs.values())


def take_in(run: Logged, path: Path) -> None:
    """Add what a .wandb file says, in place of what is known of the same steps."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in messages(path.read_bytes()):
        record = Record.FromString(data)
        run.facts |= values(record.run.config.update) | values(record.config.update)
        run.summary |= values(record.summary.update)
        row = values(record.history.item)
        if row:
            run.history[row["step"]] = run.history.get(row["step"], {}) | row


def values(items: Iterable[Any]) -> dict:
    """The items as {name: value}, without those that W&B adds, such as _wandb and _step."""
    named = ((item.key or item.nested_key[0], item.value_json) for item in items)
    return {name: json.loads(value) for name, value in named if not name.startswith("_")}


def messages(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, without one that is incomplete because the run was killed.

    Raises:
        ValueError: this is no .wandb file.
    """
    if not data.startswith(HEADER):
        raise ValueError("this is no .wandb file")
    position, parts = PART.size, b""
    while position + PART.size <= len(data):
        if BLOCK - position % BLOCK < PART.size:
            position += BLOCK - position % BLOCK  # the rest of the block is padding
            continue
        _, length, kind = PART.unpack_from(data, position)
        start, position = position + PART.size, position + PART.size + length
        if position > len(data):
            return
        parts = (b"" if kind in (ONLY, FIRST) else parts) + data[start:position]
        if kind in (ONLY, LAST):
            yield parts


def write(run: Logged, root: Path, overwrite: bool = False) -> str:
    """Write a run's files under root/runs; returns a line that says what was done.

    Raises:
        ValueError: W&B does not have all rows of the run.
    """
    if not {*IDENTITY, "config"} <= run.facts.keys():
        return "left out: a run that onebit.lab has not trained"
    identity = {name: run.facts[name] for name in IDENTITY}
    folder = folder_of(run.facts, root)
    status = run.summary.get("status")
    if status not in ENDED:
        return f"left out: {folder} has not ended"
    if read_run(folder) and not overwrite:
        return f"kept: {folder} holds a run (--overwrite replaces it)"
    rows = curve_rows(run)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "curve.csv", COLUMNS, [identity | row for row in rows])
    save(folder / "evaluation.csv", EVALUATION, [identity | row for row in evaluation_rows(run)])
    save(folder / "tensors.csv", TENSORS, [identity | row for row in tensor_rows(run)])
    record = run.facts | {"status": status, "final": dict(run.summary["final"])}
    (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    return f"written: {folder}, {len(rows)} rows"


def folder_of(facts: dict, root: Path) -> Path:
    """Where a run's files go.

    Runs that fine-tune what was pre-trained here are told apart by what has pre-trained it.
    """
    experiment, profile, optimizer, seed = (facts[name] for name in IDENTITY[:4])
    before = facts.get("pretraining")
    if before:
        return run_folder(root, "pretrained", profile, before["optimizer"], seed) / experiment
    return run_folder(root, experiment, profile, optimizer, seed)


def curve_rows(run: Logged) -> list[dict]:
    """The rows of curve.csv, without the columns that identify the run."""
    rows = [
        {name: cell(name, row[name]) for name in COLUMNS[5:]}
        for _, row in sorted(run.history.items())
        if "loss" in row
    ]
    first = run.facts["config"]["record_every"]
    if not rows or rows[0]["step"] > min(first, run.facts["total_steps"]):
        raise ValueError(
            f"W&B knows this run only from step {rows[0]['step'] if rows else 'none'} on, since it "
            "was resumed with another wandb= than it was started with: use the files that the run "
            "has written itself"
        )
    return rows


def evaluation_rows(run: Logged) -> list[dict]:
    """The rows of evaluation.csv, the players' losses first.

    They are what was logged besides the columns of curve.csv, W&B's own and those by tensor.
    """
    return [
        {"step": step, "samples": row["samples"], "metric": name, "value": float(value)}
        for step, row in sorted(run.history.items())
        for name, value in sorted(row.items(), key=lambda item: (item[0][:5] != "loss_", item[0]))
        if name not in COLUMNS and not name.startswith("_") and "/" not in name
    ]


def tensor_rows(run: Logged) -> list[dict]:
    """The rows of tensors.csv, which were logged as quantity/tensor."""
    rows = []
    for step, row in sorted(run.history.items()):
        tensors = {}
        for name, value in row.items():
            quantity, _, tensor = name.partition("/")
            if tensor and quantity in QUANTITIES:
                tensors.setdefault(tensor, {})[quantity] = float(value)
        rows += [
            {"step": step, "samples": row["samples"], "tensor": tensor} | tensors[tensor]
            for tensor in sorted(tensors)
        ]
    return rows


def cell(name: str, value: Any) -> Any:
    """The value as it was before JSON, which does not distinguish 4.0 from 4.

    The online service also writes "NaN" for nan.
    """
    if value is None or name == "phase":
        return value
    return int(value) if name in WHOLE else float(value)


def save(path: Path, columns: tuple[str, ...], rows: list[dict]) -> None:
    """Write a CSV file; none if there are no rows."""
    table = Table(path, columns)
    table.start(0)
    for row in rows:
        table.write(row)
    table.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the runs of a Weights & Biases project to files, as training does."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("project", nargs="?", help="ENTITY/PROJECT; needs `wandb login`")
    source.add_argument(
        "--offline", type=Path, metavar="DIR", help="a folder under which wandb=offline has written"
    )
    parser.add_argument("--group", help="only the runs of this experiment, e.g. figure_04")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder that holds runs/")
    parser.add_argument("--overwrite", action="store_true", help="replace runs that have files")
    options = parser.parse_args()
    if options.offline:
        runs = offline(options.offline)
    else:
        import wandb

        runs = online(wandb.Api(), options.project, options.group)
    failed = 0
    for run in runs:
        if options.group and run.facts.get("experiment") != options.group:
            continue
        try:
            print(write(run, options.results, options.overwrite))
        except ValueError as error:
            failed += 1
            print(
                f"failed: {run.facts.get('experiment')}, {run.facts.get('optimizer')}, "
                f"seed {run.facts.get('seed')}: {error}"
            )
    raise SystemExit(min(failed, 1))


if __name__ == "__main__":
    main()
