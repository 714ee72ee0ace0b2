"""What stands below a figure: what was run here, and what the paper ran."""

import pandas as pd

from onebit.lab.report.style import POINTS
from onebit.lab.runs.load import paper_note, paper_number

# The paper's run that an experiment reproduces: its name, then its size, batch (None: not stated), steps and T_w in results/paper/numbers.csv.
PAPER_RUNS = {
    "figure_04": (
        "BERT-Large",
        "bert_large_parameters",
        "batch",
        "bert_large_128_steps",
        "bert_large_128_warmup",
    ),
    "figure_06": (
        "ResNet-18 on CIFAR-10",
        "resnet18_images",
        "resnet18_batch",
        "resnet18_steps",
        "resnet18_warmup",
    ),
    "figure_08": ("DCGAN on CelebA", "dcgan_images", None, "dcgan_steps", "dcgan_warmup"),
    "lamb": ("BERT-Large", "lamb_bert_large_parameters", "lamb_batch", "lamb_steps", "lamb_warmup"),
}
# Where the paper could not be read, what its caption says instead.
UNKNOWN_RUNS = {
    "zero_one_adam": "The 0/1 Adam paper: its runs could not be found; the schedule is that of its authors' BERT script, Figure 4's.",
    "zero_one_adam_gpt2": "The 0/1 Adam paper: the settings of its GPT-2 runs could not be found; the schedule is BERT-Large's.",
}
DIGITISED = ("figure_04", "figure_06", "figure_08")  # whose curves stand beside ours


def caption(rows: pd.DataFrame, records: list[dict]) -> str:
    """What was run, and what the paper ran: all from run.json, the rows and results/paper/numbers.csv."""
    first, seeds = records[0], rows[~rows.live.astype(bool)].seed.nunique()
    recorded = rows.groupby(["optimizer", "seed"]).size().max()
    point = (
        f"a point averages {1 / POINTS:.0%} of the steps"
        if recorded > POINTS
        else "each recorded step is a point"
    )
    frozen = [record for record in records if record["optimizer"] in ("onebit_adam", "onebit_lamb")]
    warmup = (
        f", T_w\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{frozen[0]['warmup_steps']:,}" if frozen else ""
    )
    return (
        f"Line: mean of n = {seeds} seed{'s' * (seeds != 1)}; band: lowest to highest seed; {point}. "
        f"Ours, profile {first['profile']}: {describe(first)}, {first['config']['batch']:,} samples a step, "
        f"{first['total_steps']:,} steps{warmup}. {evaluated(first)}{the_papers(first['experiment'])}"
    )


def the_papers(experiment: str) -> str:
    """What the paper ran."""
    if experiment in UNKNOWN_RUNS:
        return UNKNOWN_RUNS[experiment]
    name, size, batch, steps, warmup = PAPER_RUNS[experiment]
    of_batch = f"{paper_number(batch):,.0f} samples a step, " if batch else ""
    return (
        f"The paper ({'curves digitised' if experiment in DIGITISED else 'numbers printed'}): {name} ({paper_note(size)}), "
        f"{of_batch}{paper_number(steps):,.0f} steps, "
        f"T_w\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{paper_number(warmup):,.0f}."
    )


def evaluated(record: dict) -> str:
    """What the run was evaluated by, if it was: in the task's own words, or else the accuracy of images."""
    if "evaluated" in record:
        return f"{record['evaluated']} "
    if "test" not in record.get("data", ()):
        return ""
    return f"Accuracy: of the mean of the workers' models on {record['data']['test']['images']:,} test images; each evaluation is a point. "


def describe(record: dict) -> str:
    """The model, its data and the workers, from run.json: in the task's own words, or else those of BERT's configuration."""
    if "summary" in record:
        return f"{record['summary']}, {record['workers']} workers"
    model, phases = record["config"]["task"]["model"], record["config"]["phases"]
    lengths = " then ".join(str(phase["length"]) for phase in phases.values())
    return f"BERT of {model['num_hidden_layers']} layers, {model['hidden_size']} wide, {lengths} tokens, {record['workers']} workers"
