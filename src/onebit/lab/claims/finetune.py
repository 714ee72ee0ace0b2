"""Fine-tuning: SQuAD 1.1 and GLUE (Table 3), judged by the runs of Table 3.

The score of a run is its metric after the last step, in %: F1 on SQuAD, on GLUE the official metric of the task, where there are two the
accuracy (MRPC, QQP) or Spearman's correlation (STS-B). Differences are in points, paired by seed.

In Table 3 what differs is the pre-training, and Adam fine-tunes; a laptop cannot pre-train a BERT. Ours asks more: the fine-tuning itself
is done with 1-bit Adam, as the paper does on SQuAD, from the same pretrained weights.

MARGIN, how far apart two scores may be and still count as the same: in Table 3 those of 1-bit Adam, which the paper calls the same or
better, differ from Adam's by at most 1.7 points (CoLA, BERT-Large); those of LAMB with basic 1-bit compression, which the 1-bit LAMB paper
rejects, lie up to 6.9 points below LAMB's. 2 points let the first pass and stop the second.

SQUAD_MARGIN, at the paper's own scale: 1-bit Adam is 0.01 points from the F1 it is compared with, and in the 1-bit LAMB paper 1.5 points are
called a loss. Half a point lies between.

What a model is worth that was pre-trained with another optimizer, which is what both papers' Table 3 says, takes a cluster first to pre-train it:
its rules are for runs under results/runs/pretrained/paper, a folder for each optimizer of the pre-training, whose evaluation.csv has `glue`, the
mean score over the tasks of Table 3, and `squad_f1`. MEAN_MARGIN, in points of the mean: those of 1-bit Adam and of 1-bit LAMB are within 0.2 of
the uncompressed optimizer's, that of basic 1-bit compression lies 1.8 below LAMB's.
"""

from collections.abc import Callable
from math import inf

import pandas as pd

from ..results import PAPER, paper_number
from .claim import Claim, Statistic, finished, infinite_where_diverged

MARGIN = 0.02
SQUAD_MARGIN = 0.005
MEAN_MARGIN = 0.01
# Tasks that the laptop's runs say nothing of: the first two are not learned in so short a run (with Adam, at seed 0, accuracy 47 % on RTE and
# Matthews' correlation 0 on CoLA, so that any two optimizers would be alike), the data of the others could not be fetched.
ON_CLUSTER = {"rte": "RTE", "cola": "CoLA", "mrpc": "MRPC", "qnli": "QNLI", "qqp": "QQP", "mnli": "MNLI"}
# Of each experiment of Table 3, the metric that is compared.
METRICS = {
    "squad": "f1", "glue_rte": "accuracy", "glue_mrpc": "accuracy", "glue_cola": "matthews", "glue_sst2": "accuracy", "glue_qnli": "accuracy",
    "glue_qqp": "accuracy", "glue_mnli": "accuracy", "glue_stsb": "spearman",
}  # fmt: skip


def final_score(rows: pd.DataFrame, optimizer: str, metric: str) -> pd.Series:
    """The metric after the last step, in %, by seed, of the runs that finished."""
    if metric not in rows:  # nothing was evaluated
        return pd.Series(dtype=float)
    rows = finished(rows, optimizer)
    return rows[rows.step == rows.total_steps].set_index("seed")[metric].dropna().astype(float)


def diverged(rows: pd.DataFrame, optimizer: str) -> int:
    """How many of its runs did."""
    return rows[(rows.optimizer == optimizer) & (rows.status == "diverged")].seed.nunique()


def score_gap(optimizer: str, metric: str, reference: str = "adam") -> Statistic:
    """(the optimizer's score - the reference's) / 100, by seed; none where the reference diverged, minus infinity where only the other did."""

    def statistic(rows: pd.DataFrame) -> pd.Series:
        below = infinite_where_diverged(-final_score(rows, optimizer, metric), rows, optimizer)
        return (-below - final_score(rows, reference, metric)).dropna() / 100

    return statistic


def scores(optimizer: str, metric: str) -> Callable[[pd.DataFrame], str]:
    """The mean scores of an optimizer and of Adam, over the runs that finished, and how many did not."""

    def text(rows: pd.DataFrame) -> str:
        lost = diverged(rows, optimizer)
        means = [final_score(rows, name, metric).mean() for name in (optimizer, "adam")]
        return f"{metric} {means[0]:.1f}" + f" ({lost} diverged)" * bool(lost) + f", Adam {means[1]:.1f}"

    return text


def paper_scores(one: str, reference: str, kind: str, called: str = "Adam") -> Callable[[], str]:
    """Two numbers of the paper and what the first has more."""

    def text() -> str:
        score, other = paper_number(one), paper_number(reference)
        return f"{(score - other) / 100:+.1%} ({kind} {score:g}, {called} {other:g})"

    return text


def like_adam(name: str, statement: str, place: str, experiment: str, paper: Callable[[], str], *, profile="laptop", margin=MARGIN) -> Claim:
    metric = METRICS[experiment]
    rule = f"the difference from Adam's {metric.replace('_', ' ')}, in %, paired by seed, lies within ±{100 * margin:g} points"
    return Claim(name, statement, place, experiment, profile, score_gap("onebit_adam", metric), (-margin, margin), rule,
                 scores("onebit_adam", metric), paper, "+.1%")


def on_glue(name: str, task: str, title: str, metric: str, profile: str = "laptop") -> Claim:
    """The paper's numbers are those of BERT-Base."""
    if task == "stsb":
        paper = paper_scores("lamb_table_3_onebit_lamb_stsb", "lamb_table_3_lamb_stsb", metric, "LAMB")
    else:
        paper = paper_scores(f"table_3_base_onebit_adam_{task}", f"table_3_base_adam_{task}", metric)
    place = "1-bit LAMB, Table 3" if task == "stsb" else "Table 3"
    return like_adam(name, f"On {title}, fine-tuning with 1-bit Adam scores like fine-tuning with Adam", place, f"glue_{task}", paper,
                     profile=profile)


def paper_mean(prefix: str) -> float:
    """The mean over the tasks of a row of Table 3."""
    numbers = pd.read_csv(PAPER / "numbers.csv", index_col="id")["value"]
    tasks = [task for task in ("rte", "mrpc", "cola", "sst2", "qnli", "qqp", "mnli", "mnli_mm", "stsb") if f"{prefix}_{task}" in numbers]
    return float(numbers[[f"{prefix}_{task}" for task in tasks]].mean())


def pretrained(name: str, statement: str, place: str, pair: tuple[str, str], accepts: tuple[float, float], rule: str, paper: Callable[[], str],
               metric: str = "glue") -> Claim:
    """pair: the optimizers of the pre-training that are compared."""

    def detail(rows: pd.DataFrame) -> str:
        return ", ".join(f"{optimizer} {final_score(rows, optimizer, metric).mean():.1f}" for optimizer in pair)

    return Claim(name, statement, place, "pretrained", "paper", score_gap(pair[0], metric, pair[1]), accepts, rule, detail, paper, "+.1%")


def paper_means(one: str, other: str) -> Callable[[], str]:
    return lambda: f"{(paper_mean(one) - paper_mean(other)) / 100:+.1%} (mean {paper_mean(one):.1f}, {paper_mean(other):.1f})"


SAME_MEAN = f"the mean score on GLUE, in %, paired by seed, lies within ±{100 * MEAN_MARGIN:g} points of that after pre-training with "
ON_SQUAD = paper_scores("squad_f1_onebit_adam", "squad_f1_adam", "F1")

CLAIMS = (
    like_adam("T1", "Fine-tuned on SQuAD 1.1 with 1-bit Adam, BERT answers like one fine-tuned with Adam", "Section 7.1", "squad", ON_SQUAD),
    like_adam("T2", "Fine-tuned on SQuAD 1.1 with 1-bit Adam, BERT-Large answers like one fine-tuned with Adam", "Section 7.1", "squad", ON_SQUAD,
              profile="paper", margin=SQUAD_MARGIN),
    on_glue("T3", "sst2", "SST-2", "accuracy"),
    on_glue("T4", "stsb", "STS-B", "Spearman's correlation"),
    *(on_glue(f"T{number}", task, title, METRICS[f"glue_{task}"], "paper") for number, (task, title) in enumerate(ON_CLUSTER.items(), 5)),
    pretrained("T11", "Pre-trained with 1-bit Adam, BERT scores on GLUE like one pre-trained with Adam", "Table 3", ("onebit_adam", "adam"),
               (-MEAN_MARGIN, MEAN_MARGIN), SAME_MEAN + "Adam", paper_means("table_3_large_onebit_adam", "table_3_large_adam")),
    pretrained("T12", "Pre-trained with 0/1 Adam, BERT scores on GLUE like one pre-trained with Adam", "0/1 Adam, abstract",
               ("zero_one_adam", "adam"), (-MEAN_MARGIN, MEAN_MARGIN),
               SAME_MEAN + "Adam", lambda: "the same, no number found"),
    pretrained("T13", "Pre-trained with 1-bit LAMB, BERT scores on GLUE like one pre-trained with LAMB", "1-bit LAMB, Table 3",
               ("onebit_lamb", "lamb"),
               (-MEAN_MARGIN, MEAN_MARGIN), SAME_MEAN + "LAMB", paper_means("lamb_table_3_onebit_lamb", "lamb_table_3_lamb")),
    pretrained("T14", "Pre-trained with LAMB and basic 1-bit compression, BERT scores worse on GLUE", "1-bit LAMB, Table 3",
               ("lamb_basic_onebit", "lamb"),
               (-inf, -MEAN_MARGIN), f"the mean score on GLUE lies more than {100 * MEAN_MARGIN:g} points below LAMB's, paired by seed",
               paper_means("lamb_table_3_lamb_basic_onebit", "lamb_table_3_lamb")),
    pretrained("T15", "Pre-trained with 1-bit LAMB, BERT answers SQuAD 1.1 like one pre-trained with LAMB", "1-bit LAMB, Table 2",
               ("onebit_lamb", "lamb"), (-SQUAD_MARGIN, SQUAD_MARGIN),
               f"the difference in F1, in %, paired by seed, lies within ±{100 * SQUAD_MARGIN:g} points",
               lambda: f"{(paper_number('onebit_lamb_squad_f1') - paper_number('lamb_squad_f1')) / 100:+.1%} "
                       f"(F1 {paper_number('onebit_lamb_squad_f1'):.1f}, LAMB {paper_number('lamb_squad_f1'):.1f})", "squad_f1"),
)
