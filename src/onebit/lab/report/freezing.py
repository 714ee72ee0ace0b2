"""When freezing the variance fails: the loss at the end against how v grew after the freeze.

Every committed run that freezes its variance is a point, whatever its task. v is that of the Adam
run of the same seed, which goes on to see the gradients that the frozen variance no longer does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import sqrt
from pathlib import Path

import pandas as pd

from onebit.lab.claims.statistics import TAIL, final_loss, finished
from onebit.lab.report.artifact import Artifact
from onebit.lab.report.figure import Drawing, write
from onebit.lab.runs.compare import require_alike
from onebit.lab.runs.load import PROFILES, RESULTS, load_records, load_rows
from onebit.lab.runs.metadata import read_run
from onebit.optim.step_sets import StepSets, step_sets

# Optimizers that compress nothing or one bit with a frozen variance, and the sweep over T_w.
FROZEN = (
    "onebit_adam",
    "onebit_adam_32bit",
    "onebit_adam_warmup_5",
    "onebit_adam_warmup_10",
    "onebit_adam_warmup_25",
    "onebit_adam_warmup_50",
    "zero_one_adam",
    "zero_one_adam_script",
)
# {experiment: what the figure calls it}. zero_one_adam's 1-bit Adam is figure_04's again.
TASKS = {
    "figure_04": "BERT",
    "zero_one_adam": "BERT",
    "zero_one_adam_gpt2": "GPT-2",
    "figure_06": "ResNet",
    "figure_08": "DCGAN",
    "squad": "SQuAD",
    "glue_sst2": "SST-2",
    "glue_stsb": "STS-B",
}
JUDGED = ("laptop", "workstation")  # profiles
# A gradient's norm so near to its limit, as a share of it, is clipped in most steps.
CLIPPED = 0.9
# In no run at `laptop` whose gradients are not clipped did a smaller growth cost more than 3 % of
# the loss.
HARMLESS_GROWTH = 2.0
# In each of them in which v grew more, it cost less than 3 % if v had been updated for this many
# times 1 / (1 - beta2) steps, and more than 3 % if not.
ENOUGH_MEMORIES = 7.0


def frozen_runs(root: Path = RESULTS) -> pd.DataFrame:
    """A row for each run under `root` that freezes its variance and whose Adam finished.

    Columns: task, profile, optimizer, seed; `gap`, of the final training loss, relative to Adam's;
    `growth`, see `growth`; `memories`, the updates that v averages over 1 / (1 - beta2);
    `clipped`, whether clipping keeps ||v||_1 constant, so that its growth says nothing.
    """
    found = [
        row
        for experiment in TASKS
        for profile in JUDGED
        for row in of_experiment(root, experiment, profile)
    ]
    return pd.DataFrame(found)


def of_experiment(root: Path, experiment: str, profile: str) -> list[dict]:
    """The rows of `frozen_runs` of one experiment and profile."""
    own = tuple(
        name for name in FROZEN if experiment != "zero_one_adam" or name.startswith("zero_one_adam")
    )
    records = load_records(root, experiment, profile, ("adam", *own))
    require_alike(records)
    if not records:
        return []
    rows = load_rows(records)
    adams = {seed: run.set_index("step") for seed, run in finished(rows, "adam").groupby("seed")}
    gaps = {name: final_loss(rows, name) / final_loss(rows, "adam") - 1 for name in own}
    return [
        {"task": TASKS[experiment], "profile": profile}
        | {"optimizer": record["optimizer"], "seed": record["seed"]}
        | {"gap": gaps[record["optimizer"]][record["seed"]]}
        | of_variance(adams[record["seed"]], record)
        for record in records
        if record["optimizer"] in own and record["seed"] in adams
    ]


def of_variance(adam: pd.DataFrame, record: dict) -> dict:
    """What the variance of Adam's run says of a run that froze it."""
    config = read_run(record["folder"])["config"]
    options, frozen_at = config["optimizer"], record["warmup_steps"]
    updates = frozen_at
    if "variance_freeze_step" in options:
        frozen_at = options["variance_freeze_step"]
        sets = {one.name: options[one.name] for one in fields(StepSets)}
        updates = len(step_sets(record["total_steps"], **sets)[0])
    norm = adam.variance_l1.astype(float).dropna()
    limit = config.get("max_grad_norm")
    return {
        "growth": growth(norm, frozen_at),
        "memories": updates * (1 - config["beta2"]),
        "clipped": limit is not None
        and sqrt(norm[norm.index >= frozen_at].max()) > CLIPPED * limit,
    }


def growth(norm: pd.Series, frozen_at: int) -> float:
    """The largest factor by which ||v||_1 grows after the freeze, in means over TAIL of the run.

    norm: ||v||_1 by step.
    """
    after = norm[norm.index > frozen_at]
    last = norm.index[-1]
    blocks = after.groupby((last - after.index) // (TAIL * last)).mean()
    return float(blocks.max() / norm[norm.index <= frozen_at].iloc[-1])


@dataclass(frozen=True, kw_only=True)
class FreezingFigure(Artifact):
    """A figure of all runs that freeze their variance; it trains none.

    Attributes:
        plot: rows of `frozen_runs` -> the drawing.
        note: what the caption says.
    """

    plot: Callable[[pd.DataFrame], Drawing]
    note: str
    optimizers: tuple[str, ...] = ()
    plan_notes: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(
            PROFILES, "It trains nothing: it is drawn from the runs of the other figures."
        )
    )

    @property
    def experiments(self) -> tuple[str, ...]:
        return ()

    def draw(self, profile: str, root: Path, live_root: Path | None = None) -> tuple[Drawing, str]:
        """The drawing and its caption; the runs of JUDGED are in it, whatever `profile` says."""
        rows = frozen_runs(root)
        if rows.empty:
            raise self.no_runs("laptop", root)
        return self.plot(rows), self.note

    def save(self, profile: str, root: Path, live_root: Path | None = None) -> Path:
        """Draw figures/<name>.png and .pdf; returns the former."""
        drawing, text = self.draw(profile, root)
        return write(drawing, text, (live_root or root) / "figures" / self.name)
