"""What stands below a figure: what was run here, and what the paper ran."""

from dataclasses import dataclass

import pandas as pd

from onebit.lab.claims.bert import MARGIN
from onebit.lab.claims.statistics import LEVEL, TAIL
from onebit.lab.report.style import POINTS
from onebit.lab.runs.load import paper_note, paper_number


@dataclass(frozen=True)
class PaperRun:
    """The paper's run that an experiment reproduces.

    Attributes:
        name: what was trained.
        size, batch, steps, warmup: ids of results/paper/numbers.csv; batch None: not stated.
    """

    name: str
    size: str
    batch: str | None
    steps: str
    warmup: str


PAPER_RUNS = {
    "figure_04": PaperRun(
        "BERT-Large",
        "bert_large_parameters",
        "batch",
        "bert_large_128_steps",
        "bert_large_128_warmup",
    ),
    "figure_06": PaperRun(
        "ResNet-18 on CIFAR-10",
        "resnet18_images",
        "resnet18_batch",
        "resnet18_steps",
        "resnet18_warmup",
    ),
    "figure_08": PaperRun("DCGAN on CelebA", "dcgan_images", None, "dcgan_steps", "dcgan_warmup"),
    "lamb": PaperRun(
        "BERT-Large", "lamb_bert_large_parameters", "lamb_batch", "lamb_steps", "lamb_warmup"
    ),
}
# What the caption says where the paper could not be read.
UNKNOWN_RUNS = {
    "zero_one_adam": (
        "The 0/1 Adam paper: its runs could not be found; the schedule is that of its authors' "
        "BERT script, Figure 4's."
    ),
    "zero_one_adam_gpt2": (
        "The 0/1 Adam paper: the settings of its GPT-2 runs could not be found; the schedule is "
        "BERT-Large's."
    ),
}
DIGITISED = ("figure_04", "figure_06", "figure_08")  # whose curves stand beside ours


def of_figure(rows: pd.DataFrame, records: list[dict]) -> str:
    """What was run and what the paper ran, from run.json, the rows and results/paper."""
    first, seeds = records[0], rows[~rows.live.astype(bool)].seed.nunique()
    recorded = rows.groupby(["optimizer", "seed"]).size().max()
    point = (
        f"a point averages {1 / POINTS:.0%} of the steps"
        if recorded > POINTS
        else "each recorded step is a point"
    )
    frozen = [record for record in records if record["optimizer"] in ("onebit_adam", "onebit_lamb")]
    warmup = f", {equals('T_w', frozen[0]['warmup_steps'])}" if frozen else ""
    return (
        f"Line: mean of n = {seeds} seed{'s' * (seeds != 1)}; band: lowest to highest seed; "
        f"{point}. Ours, profile {first['profile']}: {describe(first)}, "
        f"{first['config']['batch']:,} samples a step, {first['total_steps']:,} steps{warmup}. "
        f"{evaluated(first)}{the_papers(first['experiment'])}"
    )


def of_sweep(records: list[dict]) -> str:
    """What was run and what a sweep shows."""
    first = records[0]
    return (
        "Only seeds that all variants have are shown. First panel: the loss as a difference from "
        "Adam's, paired by seed; line: mean over the seeds, band: lowest to highest seed. "
        f"Other panels: the mean loss of the last {TAIL:.0%} of the steps, its difference "
        "from Adam's, paired by seed; a dot is a seed, the bar is the mean with its "
        f"{LEVEL:.0%} interval, and grey is what claim C1 counts as no difference "
        f"(±{MARGIN:.0%}). Runs that diverged are counted in the legend only. Profile "
        f"{first['profile']}: {describe(first)}, {first['config']['batch']:,} samples a step, "
        f"{first['total_steps']:,} steps; all but the option shown is as in Figure 4. The papers "
        "do not show this."
    )


def equals(name: str, number: float) -> str:
    """'T_w = 23,000', on one line."""
    return f"{name}\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{number:,.0f}"


def the_papers(experiment: str) -> str:
    """What the paper ran."""
    if experiment in UNKNOWN_RUNS:
        return UNKNOWN_RUNS[experiment]
    run = PAPER_RUNS[experiment]
    batch = f"{paper_number(run.batch):,.0f} samples a step, " if run.batch else ""
    shown = "curves digitised" if experiment in DIGITISED else "numbers printed"
    return (
        f"The paper ({shown}): {run.name} ({paper_note(run.size)}), {batch}"
        f"{paper_number(run.steps):,.0f} steps, {equals('T_w', paper_number(run.warmup))}."
    )


def evaluated(record: dict) -> str:
    """How the run was evaluated, in the task's own words, or as the accuracy on images."""
    if "evaluated" in record:
        return f"{record['evaluated']} "
    if "test" not in record.get("data", ()):
        return ""
    return (
        "Accuracy: of the mean of the workers' models on "
        f"{record['data']['test']['images']:,} test images; each evaluation is a point. "
    )


def describe(record: dict) -> str:
    """The model, its data and the workers, from run.json."""
    if "summary" in record:
        return f"{record['summary']}, {record['workers']} workers"
    model, phases = record["config"]["task"]["model"], record["config"]["phases"]
    lengths = " then ".join(str(phase["length"]) for phase in phases.values())
    return (
        f"BERT of {model['num_hidden_layers']} layers, {model['hidden_size']} wide, {lengths} "
        f"tokens, {record['workers']} workers"
    )
