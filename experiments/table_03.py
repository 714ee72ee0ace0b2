"""Table 3: the scores of BERT on GLUE and SQuAD, fine-tuned with Adam and with 1-bit Adam."""

import pandas as pd

from onebit.lab.claims.finetune import METRICS
from onebit.lab.claims.statistics import diverged, final_score
from onebit.lab.report import table as tables
from onebit.lab.report.artifact import Table, main
from onebit.lab.runs.load import PAPER

OPTIMIZERS = ("adam", "onebit_adam")
TITLES = {
    "squad": "SQuAD 1.1",
    "rte": "RTE",
    "mrpc": "MRPC",
    "cola": "CoLA",
    "sst2": "SST-2",
    "qnli": "QNLI",
    "qqp": "QQP",
    "mnli": "MNLI",
    "stsb": "STS-B",
}
# The further metrics that the table shows.
MORE = {
    "squad": ("exact_match",),
    "glue_mrpc": ("f1",),
    "glue_qqp": ("f1",),
    "glue_mnli": ("accuracy_mismatched",),
    "glue_stsb": ("pearson",),
}
# The papers' columns, and how the ids of their numbers in results/paper/numbers.csv begin.
PAPERS = {
    "1-bit Adam paper, Base: Adam": "table_3_base_adam",
    "Base: 1-bit Adam": "table_3_base_onebit_adam",
    "Large: Adam": "table_3_large_adam",
    "Large: 1-bit Adam": "table_3_large_onebit_adam",
    "1-bit LAMB paper, Large: LAMB": "lamb_table_3_lamb",
    "Large: basic 1-bit": "lamb_table_3_lamb_basic_onebit",
    "Large: 1-bit LAMB": "lamb_table_3_onebit_lamb",
}
NOTE = (
    "In %. Ours: mean (lowest to highest seed, number of seeds) after the last step, of the runs "
    "that finished, on the public development sets; fine-tuned with the optimizer of the column. "
    "The papers: on GLUE the optimizer of the *pre-training* differs, and Adam fine-tunes, median "
    "of 10 and 32 runs; on SQuAD the optimizer of the fine-tuning differs, and Adam's number is "
    "Hugging Face's. For MRPC and QQP the papers' numbers are accuracies and for STS-B Spearman's "
    "correlation: the papers do not say so, but what they quote from Devlin et al. is. Claims T1 "
    "to T10 in CLAIMS.md say which of our rows tell the two optimizers apart."
)
PAPER_PLAN = (
    "papers      their own comparison (claims T11 to T15): train adam, onebit_adam, zero_one_adam\n"
    "            of experiment table_02, and lamb, onebit_lamb, lamb_basic_onebit of lamb; export\n"
    "            each with onebit.lab.export; fine-tune with Adam by the options of its --help.\n"
    "grid        the 1-bit Adam paper takes the best on GLUE of these, with Adam for all:\n"
    "            batch=8, 16 (and micro_batch=4 with 8), lr=1e-5, 3e-5, 5e-5, 8e-5"
)


def table(rows: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """A row for each task and metric: ours by optimizer, then the papers'."""
    papers = pd.read_csv(PAPER / "numbers.csv", index_col="id")["value"]
    lines = []
    for experiment in METRICS:
        task = experiment.removeprefix("glue_")
        lost = {optimizer: diverged(rows[experiment], optimizer) for optimizer in OPTIMIZERS}
        for metric in (METRICS[experiment], *MORE.get(experiment, ())):
            scores = {
                optimizer: final_score(rows[experiment], optimizer, metric)
                for optimizer in OPTIMIZERS
            }
            printed = {
                title: papers.get(number(prefix, task, metric)) for title, prefix in PAPERS.items()
            }
            lines.append(
                {"task": TITLES[task], "metric": metric.replace("_", " ")}
                | tables.ours(scores, lost)
                | printed
            )
    return pd.DataFrame(lines)


def number(prefix: str, task: str, metric: str) -> str:
    """The id of the paper's number, whether it is printed or not."""
    if task == "squad":
        return f"squad_{metric}_{prefix.removeprefix('table_3_large_')}"
    if metric == "accuracy_mismatched":
        return f"{prefix}_mnli_mm"
    return f"{prefix}_{task}" if metric == METRICS[f"glue_{task}"] else ""


ARTIFACT = Table(
    name="table_03",
    title="Table 3: the scores of BERT on GLUE and SQuAD, fine-tuned with Adam and with 1-bit Adam",
    trains=tuple(METRICS),
    smoke_trains=("squad", "glue_rte"),  # one of each kind, since all take minutes
    optimizers=OPTIMIZERS,
    table=table,
    note=NOTE,
    plan_notes={"paper": PAPER_PLAN},
)

if __name__ == "__main__":
    main(ARTIFACT)
