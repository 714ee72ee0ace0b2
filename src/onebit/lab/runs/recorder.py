"""What a run leaves behind: curve.csv, evaluation.csv, tensors.csv and run.json.

If it is asked to, a run records the same in Weights & Biases.
"""

import csv
import json
import math
import os
import secrets
import time
from pathlib import Path

from onebit.lab.runs.machine import machine
from onebit.lab.runs.metadata import commit, read_run
from onebit.lab.runs.state_log import QUANTITIES

IDENTITY = ("experiment", "profile", "optimizer", "seed", "commit")
VARIANCE = ("variance_l1", "variance_l2", "variance_ratio")
TRAFFIC = ("bytes_sent", "bytes_received", "calls")
# curve.csv has a row for every step that is recorded.
COLUMNS = (
    *IDENTITY,
    *("step", "samples", "seconds", "loss", "lr", "phase"),
    *VARIANCE,
    *TRAFFIC,
)
# evaluation.csv has a row for each metric of an evaluation. If there are several players, it also
# has one for each player's loss, loss_NAME; their sum is the loss of curve.csv.
EVALUATION = (*IDENTITY, "step", "samples", "metric", "value")
# tensors.csv has a row for each tensor whose state in the optimizer is watched.
TENSORS = (*IDENTITY, "step", "samples", "tensor", *QUANTITIES)


class Table:
    """A CSV file that grows row by row. The file is made with the first row."""

    def __init__(self, path: Path, columns: tuple[str, ...]):
        self.path = path
        self.columns = columns
        self.count = 0  # the number of rows
        self.file = None

    def start(self, count: int) -> None:
        """Keep the first `count` rows of the file, and cut off the others."""
        self.count = count
        if not count:
            return self.path.unlink(missing_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("\n".join(self.path.read_text().splitlines()[: 1 + count]) + "\n")
        os.replace(partial, self.path)

    def write(self, row: dict) -> None:
        """Append a row, {column: value}."""
        if self.file is None:
            self.file = open(self.path, "a", buffering=1, newline="")
            self.writer = csv.DictWriter(self.file, self.columns, lineterminator="\n")
            if not self.count:
                self.writer.writeheader()
        self.writer.writerow(row)
        self.count += 1

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Recorder:
    """The records of a run, in `folder`.

    Args:
        facts: what goes into run.json. Experiment, profile, optimizer and seed also go into rows.
        wandb: "disabled", "offline" or "online".
    """

    def __init__(self, folder: Path, facts: dict, wandb: str):
        self.folder = folder
        self.wandb = wandb
        self.facts = {**facts, "commit": commit(), "environment": machine()}
        self.identity = {name: self.facts[name] for name in IDENTITY}
        columns = {"curve": COLUMNS, "evaluation": EVALUATION, "tensors": TENSORS}
        self.tables = {
            name: Table(folder / f"{name}.csv", names) for name, names in columns.items()
        }
        self.norms = {}  # ||v_t||_1 by step t
        # The traffic and the seconds of the run until it was interrupted for the last time.
        self.before = dict.fromkeys((*TRAFFIC, "seconds"), 0)

    def start(self, state: dict | None) -> None:
        """Begin, or continue from `state`: rows that were recorded after it are cut off."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if state is not None:
            self.norms, self.before = state["norms"], state["before"]
        self._choose_wandb_id(continues=state is not None)
        rows = state["rows"] if state is not None else {}
        for name, table in self.tables.items():
            table.start(rows.get(name, 0))  # a checkpoint may be older than a table
        self._write_facts("running", {})
        self.started = time.monotonic()
        self.curves = self._start_wandb()

    def row(
        self,
        optimizers: list,
        losses: dict[str, float],
        *,
        step: int,
        samples: int,
        lr: float,
        phase: str,
    ) -> None:
        """Record the step that the optimizers have just taken, or skipped.

        Args:
            optimizers: one for each player.
            losses: {player: loss}.
        """
        curves = {
            "step": step,
            "samples": samples,
            "seconds": round(self._seconds(), 3),
            "loss": sum(losses.values()),
            "lr": float(f"{lr:.6g}"),
            "phase": phase,
            **self._variance(optimizers, step),
            **self.traffic(optimizers),
        }
        self.tables["curve"].write(self.identity | curves)
        if self.curves is not None:
            self.curves.log(curves, step=step)
        if len(losses) > 1:
            self.evaluation(
                {f"loss_{name}": loss for name, loss in losses.items()}, step=step, samples=samples
            )

    def evaluation(self, metrics: dict[str, float], *, step: int, samples: int) -> None:
        """Record the metrics of the model after `step`, or the players' losses in it."""
        metrics = {metric: float(f"{value:.6g}") for metric, value in sorted(metrics.items())}
        for metric, value in metrics.items():
            self.tables["evaluation"].write(
                self.identity | {"step": step, "samples": samples, "metric": metric, "value": value}
            )
        if self.curves is not None:
            self.curves.log(metrics, step=step)

    def tensors(self, rows: list[dict], *, step: int, samples: int) -> None:
        """Record rows of tensors.csv, which say what the optimizers' state was after `step`."""
        for row in rows:
            self.tables["tensors"].write(self.identity | {"step": step, "samples": samples} | row)
        if self.curves is not None and rows:
            self.curves.log(
                {
                    f"{name}/{row['tensor']}": value
                    for row in rows
                    for name, value in row.items()
                    if name != "tensor"
                },
                step=step,
            )

    def finish(self, status: str, step: int, optimizers: list) -> None:
        """End the records, with a status of `metadata.ENDED`."""
        skipped = step - min(optimizer.steps for optimizer in optimizers)
        final = {
            "step": step,
            "skipped_steps": skipped,
            "seconds": round(self._seconds(), 3),
            **self.traffic(optimizers),
        }
        self._write_facts(status, final)
        for table in self.tables.values():
            table.close()
        if self.curves is not None:
            self.curves.summary.update({"status": status, "final": final})
            self.curves.finish()

    def state_dict(self, optimizers: list) -> dict:
        """What `start` needs in order to continue from here."""
        before = self.traffic(optimizers) | {"seconds": self._seconds()}
        return {
            "rows": {name: table.count for name, table in self.tables.items()},
            "norms": self.norms,
            "before": before,
        }

    def _variance(self, optimizers: list, step: int) -> dict:
        """The norms of the variance, as one vector over all players' parameters, and their ratio.

        The ratio is that of the l1 norm to the one 1 / (1 - beta2) steps before. The values are
        None if the optimizers have no variance.
        """
        if "variance" not in optimizers[0].vectors:
            return dict.fromkeys(VARIANCE)
        each_l1, each_l2 = zip(
            *(optimizer.variance_norms() for optimizer in optimizers), strict=True
        )
        l1, l2 = sum(each_l1), math.hypot(*each_l2)
        window = round(1 / (1 - optimizers[0].param_groups[0]["betas"][1]))
        earlier = self.norms.get(step - window)
        self.norms = {t: norm for t, norm in self.norms.items() if t > step - window} | {step: l1}
        ratio = float(f"{l1 / earlier:.6g}") if earlier else None
        return dict(zip(VARIANCE, (float(f"{l1:.6g}"), float(f"{l2:.6g}"), ratio), strict=True))

    def _seconds(self) -> float:
        return self.before["seconds"] + time.monotonic() - self.started

    def traffic(self, optimizers: list) -> dict[str, int]:
        """What the whole run has sent and received, before it was interrupted and since."""
        return {
            name: self.before[name]
            + sum(getattr(optimizer.communication, name) for optimizer in optimizers)
            for name in TRAFFIC
        }

    def _write_facts(self, status: str, final: dict) -> None:
        partial = self.folder / "run.json.partial"
        partial.write_text(
            json.dumps(self.facts | {"status": status, "final": final}, indent=1) + "\n"
        )
        os.replace(partial, self.folder / "run.json")

    def _choose_wandb_id(self, continues: bool) -> None:
        """Choose the run's name in W&B, where a run that continues is still the same run.

        Of a step that is taken twice, W&B keeps the first record, which has the same bits.
        """
        known = read_run(self.folder).get("wandb_id") if continues else None
        if known or self.wandb != "disabled":
            self.facts["wandb_id"] = known or secrets.token_hex(8)

    def _start_wandb(self):
        if self.wandb == "disabled":
            return None
        import wandb

        facts = self.facts
        return wandb.init(
            project="onebit",
            id=facts["wandb_id"],
            resume="allow" if self.wandb == "online" else None,
            group=facts["experiment"],
            name=f"{facts['optimizer']}-{facts['profile']}-seed-{facts['seed']}",
            config=facts,
            mode=self.wandb,
            dir=self.folder,
        )
