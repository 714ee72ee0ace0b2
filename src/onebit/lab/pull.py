"""Bring the runs of a Weights & Biases project back to files, as training has written them: scripts/pull_wandb.

    scripts/pull_wandb ENTITY/onebit --group figure_04     what was logged online
    scripts/pull_wandb --offline results/runs              what wandb=offline has left under a folder

Each run goes into results/runs/<experiment>/<profile>/<optimizer>/seed-<n>, or, if it was fine-tuned from weights of scripts/export_weights,
into results/runs/pretrained, where the claims look for it: curve.csv, evaluation.csv, tensors.csv and run.json, as `Recorder` writes them; only
the tensors of a step are in alphabetical order, since W&B keeps none. Runs that have not ended are left out; a folder that holds a run is kept,
unless --overwrite is given.
"""

import argparse
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onebit.lab.runs.load import RESULTS, run_folder
from onebit.lab.runs.metadata import ENDED, read_run
from onebit.lab.runs.recorder import COLUMNS, EVALUATION, TENSORS, TRAFFIC, Table
from onebit.lab.runs.state_log import QUANTITIES

WHOLE = ("step", "samples", *TRAFFIC)
IDENTITY = COLUMNS[:5]
# A .wandb file: a header, then blocks of LevelDB's log format, in which a record lies whole or in parts.
HEADER, BLOCK, PART = b":W&B", 32768, struct.Struct("<IHB")
ONLY, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Logged:
    """What W&B knows of a run: run.json before the first step, what was added at the end, {step: what was logged after it}."""

    facts: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    history: dict[int, dict] = field(default_factory=dict)


def online(api, project: str, group: str | None) -> Iterator[Logged]:
    """The runs of a project, "entity/name". api: wandb.Api(), or what behaves like it."""
    for run in api.runs(project, filters={"group": group} if group else {}):
        yield Logged(
            dict(run.config), dict(run.summary), {row["step"]: row for row in run.scan_history()}
        )


def offline(root: Path) -> list[Logged]:
    """The runs whose .wandb files lie under `root`; the stretches of a run that was resumed are put together."""
    runs = {}
    for path in sorted(
        root.rglob("*.wandb"), key=lambda path: path.parent.name
    ):  # offline-run-<time>-<id>
        take_in(runs.setdefault(path.stem, Logged()), path)
    return list(runs.values())


def take_in(run: Logged, path: Path) -> None:
    """Add what a .wandb file says; of a step that was logged before, it replaces it."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in messages(path.read_bytes()):
        record = Record.FromString(data)
        run.facts |= values(record.run.config.update) | values(record.config.update)
        run.summary |= values(record.summary.update)
        row = values(record.history.item)
        if row:
            run.history[row["step"]] = run.history.get(row["step"], {}) | row


def values(items) -> dict:
    """Without those that W&B adds, such as _wandb and _step."""
    named = ((item.key or item.nested_key[0], item.value_json) for item in items)
    return {name: json.loads(value) for name, value in named if not name.startswith("_")}


def messages(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file; those that were not wholly written, when the run was killed, are left out."""
    if not data.startswith(HEADER):
        raise ValueError("this is no .wandb file")
    position, parts = PART.size, b""
    while position + PART.size <= len(data):
        if BLOCK - position % BLOCK < PART.size:
            position += BLOCK - position % BLOCK  # the rest of a block is padding
            continue
        _, length, kind = PART.unpack_from(data, position)
        start, position = position + PART.size, position + PART.size + length
        if position > len(data):
            return
        parts = (b"" if kind in (ONLY, FIRST) else parts) + data[start:position]
        if kind in (ONLY, LAST):
            yield parts


def write(run: Logged, root: Path, overwrite: bool = False) -> str:
    """Write a run's files under root/runs; says in a line what was done. ValueError if its history has not all rows."""
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
    """Where a run's files go: fine-tuning of what was pre-trained here is told apart by what has pre-trained it."""
    experiment, profile, optimizer, seed = (facts[name] for name in IDENTITY[:4])
    before = facts.get("pretraining")
    if before:
        return run_folder(root, "pretrained", profile, before["optimizer"], seed) / experiment
    return run_folder(root, experiment, profile, optimizer, seed)


def curve_rows(run: Logged) -> list[dict]:
    """The rows of curve.csv, but for what identifies the run."""
    rows = [
        {name: cell(name, row[name]) for name in COLUMNS[5:]}
        for _, row in sorted(run.history.items())
        if "loss" in row
    ]
    first = run.facts["config"]["record_every"]
    if not rows or rows[0]["step"] > min(first, run.facts["total_steps"]):
        raise ValueError(
            f"W&B knows this run from step {rows[0]['step'] if rows else 'none'} on only, since it was resumed with another wandb= than "
            "it was started with: take the files that it wrote itself"
        )
    return rows


def evaluation_rows(run: Logged) -> list[dict]:
    """The rows of evaluation.csv: whatever else was logged, but for W&B's own and what is logged by tensor; the players' losses first."""
    return [
        {"step": step, "samples": row["samples"], "metric": name, "value": float(value)}
        for step, row in sorted(run.history.items())
        for name, value in sorted(row.items(), key=lambda item: (item[0][:5] != "loss_", item[0]))
        if name not in COLUMNS and not name.startswith("_") and "/" not in name
    ]


def tensor_rows(run: Logged) -> list[dict]:
    """The rows of tensors.csv: what was logged as quantity/tensor."""
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


def cell(name: str, value):
    """As it was before JSON, which knows no difference of 4.0 and 4; the online service says "NaN" for nan."""
    if value is None or name == "phase":
        return value
    return int(value) if name in WHOLE else float(value)


def save(path: Path, columns: tuple[str, ...], rows: list[dict]) -> None:
    table = Table(path, columns)
    table.start(0)
    for row in rows:
        table.write(row)
    table.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bring the runs of a Weights & Biases project back to files, as training has written them."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("project", nargs="?", help="ENTITY/PROJECT; needs `wandb login`")
    source.add_argument(
        "--offline", type=Path, metavar="DIR", help="a folder under which wandb=offline has written"
    )
    parser.add_argument("--group", help="only the runs of this experiment, e.g. figure_04")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder that holds runs/")
    parser.add_argument("--overwrite", action="store_true", help="replace runs that are there")
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
                f"failed: {run.facts.get('experiment')}, {run.facts.get('optimizer')}, seed {run.facts.get('seed')}: {error}"
            )
    raise SystemExit(min(failed, 1))


if __name__ == "__main__":
    main()
