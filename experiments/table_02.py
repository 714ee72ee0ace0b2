"""Table 2: 1-bit Adam pre-trains BERT in as many steps as Adam.

The first 7 to 15 % of these steps are warm-up.
"""

from pathlib import Path

import pandas as pd

from onebit.lab.claims.statistics import chosen_by_rule, diverged, finished, lr_warmup
from onebit.lab.config import composed
from onebit.lab.report import table as tables
from onebit.lab.report.artifact import Table, main
from onebit.lab.runs.load import paper_number
from onebit.lab.runs.metadata import read_run

MODELS = {"table_02_base": ("BERT-Base", "bert_base"), "table_02": ("BERT-Large", "bert_large")}
RULE = "T_w by the rule, % of the steps"
NOTE = (
    "Steps in thousands. Configured: what `profile=paper` trains, from conf/. By the rule: where "
    "the rule of Section 7.1 ends the warm-up in our runs of Adam, in % of the phase's steps: the "
    "first recorded step after the learning rate's warm-up, and after 1 / (1 - beta2) steps of the "
    "phase, at which ||v||_1 lies within 4 % of its value 1 / (1 - beta2) steps before; mean "
    "(lowest to highest seed, number of seeds). A seed at which it does not is left out."
)


def table(rows: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """A row for each model and sequence length."""
    lines = []
    for experiment, (title, number) in MODELS.items():
        config = composed([f"experiment={experiment}", "profile=paper"])
        for name, phase in config.phases.items():
            steps, warmup = (
                paper_number(f"{number}_{phase.length}_{what}") for what in ("steps", "warmup")
            )
            is_printed = (number, name) == ("bert_large", "seq128")
            ours = rows[experiment]
            if experiment == "table_02" and chosen(ours, name).empty:
                ours = rows["figure_04"]
            found = chosen(ours, name)
            values = (found.mean(), found.min(), found.max(), len(found), diverged(ours, "adam"))
            lines.append(
                {
                    "model": title,
                    "length": phase.length,
                    "paper: steps": steps / 1e3,
                    "paper: T_w": warmup / 1e3,
                    "paper: batch": paper_number("batch"),
                    "configured: steps": phase.steps / 1e3,
                    "configured: T_w": phase.warmup / 1e3,
                    "configured: batch": config.batch,
                    "T_w, % of the steps": round(100 * phase.warmup / phase.steps, 1),
                    "paper: by the rule, %": papers_choice(steps) if is_printed else None,
                    **dict(zip((RULE + part for part in tables.PARTS), values, strict=True)),
                }
            )
    return pd.DataFrame(lines)


def papers_choice(steps: float) -> float:
    """Where the rule stops the paper's warm-up, in % of the steps."""
    return round(100 * paper_number("auto_rule_step") / steps, 1)


def chosen(rows: pd.DataFrame, name: str) -> pd.Series:
    """Where the rule ends the warm-up of a phase in runs of Adam, in % of its steps, by seed."""
    found = {}
    for seed, run in finished(rows, "adam").groupby("seed"):
        config = read_run(Path(run.folder.iloc[0]))["config"]
        phases = list(config["phases"])
        if name not in phases:
            continue
        begin, phase = (
            sum(config["phases"][before]["steps"] for before in phases[: phases.index(name)]),
            config["phases"][name],
        )
        run = run[run.step <= begin + phase["steps"]]
        step = chosen_by_rule(run, begin, max(lr_warmup(phase), round(1 / (1 - config["beta2"]))))
        if step <= phase["steps"]:
            found[seed] = 100 * step / phase["steps"]
    return pd.Series(found, dtype=float)


ARTIFACT = Table(
    name="table_02",
    title=(
        "Table 2: 1-bit Adam pre-trains BERT in as many steps as Adam, of which the first 7 to 15 "
        "% are warm-up."
    ),
    trains=tuple(MODELS),
    reads=(*MODELS, "figure_04"),  # which has BERT-Large's first phase alone
    optimizers=("adam", "onebit_adam"),
    table=table,
    note=NOTE,
    needs_runs=False,
)

if __name__ == "__main__":
    main(ARTIFACT)
