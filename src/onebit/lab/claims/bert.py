"""BERT pre-training: Figures 1, 2 and 4, judged by the runs of Figure 4.

The loss of a run is the mean training loss over the last 10% of its steps.

MARGIN, how far apart two losses may be and still count as the same: in the paper's Figure 4a the same statistic is
+2.2% for 1-bit Adam, which the paper calls the same convergence; in its Figure 1 it is +18.5% for naive 1-bit
gradients, which the paper calls a failure. 3% lets the first pass and is a sixth of the second.

NEAR_HAND_TUNED: the rule that is to choose T_w stops the paper's warm-up at 0.96 of the step that was found by hand; a third more, or a quarter
less, still lies within the 15% to 25% of the steps that the authors' tutorial advises, if 15% to 20% are chosen by hand. This
rule of ours was written when Figure 4's runs were there.

COMPRESSORS: those of momentum that the sweep has beside 1 bit. "Any" is judged by the worst of them.
"""

from collections.abc import Callable
from math import ceil, inf
from pathlib import Path

import pandas as pd

from onebit.lab.claims.claim import (
    Claim,
    finished,
    infinite_where_diverged,
    of_finished,
    paper_tails,
    relative_gap,
    tail_mean,
)
from onebit.lab.runs.load import at_common_seeds, paper_curve, paper_number
from onebit.lab.runs.metadata import read_run

MARGIN = 0.03
NEAR_HAND_TUNED = (0.75, 4 / 3)
COMPRESSORS = ("onebit_adam_2bit", "onebit_adam_4bit", "onebit_adam_8bit", "onebit_adam_topk")


def final_loss(rows: pd.DataFrame, optimizer: str) -> pd.Series:
    """Mean training loss over the last TAIL of the steps, by seed; infinite if the run diverged."""
    return infinite_where_diverged(tail_mean(rows, optimizer, "loss"), rows, optimizer)


def loss_gap(optimizer: str):
    """Of the loss from Adam's, relative to it."""
    return relative_gap(final_loss, optimizer)


def ratio_by_seed(
    rows: pd.DataFrame, column: str, exact: str = "adam", compressed: str = "onebit_adam"
) -> pd.Series:
    """One optimizer's total over the other's, over the seeds at which both finished."""
    one, other = (
        finished(rows, name).groupby("seed")[column].max().astype(float)
        for name in (exact, compressed)
    )
    return (one / other).dropna()


def volume_reduction(rows: pd.DataFrame) -> pd.Series:
    """Bytes that a rank sent with Adam, over those with 1-bit Adam, by seed."""
    return ratio_by_seed(rows, "bytes_sent")


def formula_reduction(rows: pd.DataFrame, bits: int = 32) -> float:
    """Adam's volume over 1-bit Adam's by the formula."""
    run = rows[rows.optimizer == "onebit_adam"].iloc[0]
    return 1 / volume_share(run.warmup_steps / run.total_steps, bits)


def volume_share(warmup_share: float, bits: int = 32) -> float:
    """w + (1 - w) / bits: 1-bit Adam's volume as a share of Adam's, w = T_w / T the share of warm-up steps."""
    return warmup_share + (1 - warmup_share) / bits


def volume_over_formula(rows: pd.DataFrame) -> pd.Series:
    """Measured volume reduction over the formula's at fp32, by seed."""
    reduction = volume_reduction(rows)
    return reduction if reduction.empty else reduction / formula_reduction(rows)


def variance_ratio_at_freeze(rows: pd.DataFrame) -> pd.Series:
    """Adam's ||v_t||_1 / ||v_{t - window}||_1 at t = T_w of 1-bit Adam, by seed."""
    warmup_steps = rows[rows.optimizer == "onebit_adam"].warmup_steps.max()
    adam = finished(rows, "adam")
    adam = adam[adam.step <= warmup_steps]
    return adam.groupby("seed").variance_ratio.last().dropna().astype(float)


def chosen_by_rule(run: pd.DataFrame, begin: int, first: int) -> float:
    """The first recorded step after `begin`, counted from there and not before `first`, at which a run's variance has settled; infinite if none."""
    low = paper_number("auto_rule_threshold")
    ratio = run.variance_ratio.astype(float)
    steps = run.step[(run.step >= begin + first) & (ratio >= low) & (ratio <= 1 / low)]
    return float(steps.iloc[0] - begin) if len(steps) else inf


def lr_warmup(phase: dict) -> int:
    """Steps of a run's phase, as in run.json, in which the learning rate rises."""
    return ceil(phase["lr"]["warmup"] / phase["lr"]["stretch"])


def rule_over_hand(rows: pd.DataFrame) -> pd.Series:
    """The step at which the rule ends the warm-up of an Adam run, over T_w, by seed."""
    warmup_steps, found = rows[rows.optimizer == "onebit_adam"].warmup_steps.max(), {}
    for seed, run in finished(rows, "adam").groupby("seed"):
        config = read_run(Path(run.folder.iloc[0]))["config"]
        (phase,) = config["phases"].values()
        found[seed] = (
            chosen_by_rule(run, 0, max(lr_warmup(phase), round(1 / (1 - config["beta2"]))))
            / warmup_steps
        )
    return pd.Series(found, dtype=float).dropna()


def worst_gap(rows: pd.DataFrame) -> pd.Series:
    """The largest of the gaps of COMPRESSORS from Adam's loss, by seed, over the seeds that all have."""
    return pd.concat([loss_gap(name)(rows) for name in COMPRESSORS], axis=1, join="inner").max(
        axis=1
    )


def variance_drift(rows: pd.DataFrame) -> pd.Series:
    """The largest factor by which Adam's ||v||_2 differs from its value at T_w, at any step after it, by seed."""
    warmup_steps = rows[rows.optimizer == "onebit_adam"].warmup_steps.max()
    adam = finished(rows, "adam")
    adam = adam[adam.step >= warmup_steps]
    drift = {}
    for seed, run in adam.groupby("seed"):
        ratio = run.variance_l2.astype(float) / float(run.variance_l2.iloc[0])
        drift[seed] = max(ratio.max(), 1 / ratio.min())
    return pd.Series(drift, dtype=float)


def paper_variance_drift() -> float:
    """The same of the paper's curve of Figure 2, from T_w = 23K on."""
    points = paper_curve("fig2", "variance norm (vanilla Adam)")
    after = points[points.x * 1000 >= paper_number("bert_large_128_warmup")].y
    return max(after.max() / after.iloc[0], after.iloc[0] / after.min())


def hours_ratio(rows: pd.DataFrame) -> pd.Series:
    """Adam's wall-clock time over 1-bit Adam's, by seed."""
    return ratio_by_seed(rows, "seconds")


def losses(
    optimizer: str, reference: str = "adam", called: str = "Adam"
) -> Callable[[pd.DataFrame], str]:
    """The mean losses of an optimizer and of the reference, over the same seeds."""

    def text(rows: pd.DataFrame) -> str:
        rows = at_common_seeds(rows, (optimizer, reference))
        return f"loss {mean_loss(rows, optimizer)}, {called} {mean_loss(rows, reference)}"

    return text


def compressor_losses(rows: pd.DataFrame) -> str:
    """The mean losses of COMPRESSORS and of Adam, over the same seeds."""
    rows = at_common_seeds(rows, (*COMPRESSORS, "adam"))
    return (
        "; ".join(
            f"{name.removeprefix('onebit_adam_')} {mean_loss(rows, name)}" for name in COMPRESSORS
        )
        + f"; Adam {mean_loss(rows, 'adam')}"
    )


def mean_loss(rows: pd.DataFrame, optimizer: str) -> str:
    """The mean over the runs that finished, and how many did not."""
    loss = final_loss(rows, optimizer)
    diverged = int((loss == inf).sum())
    if diverged == len(loss):
        return "diverged at every seed"
    return f"{loss[loss < inf].mean():.3f}" + f" ({diverged} of {len(loss)} diverged)" * (
        diverged > 0
    )


def paper_losses(figure: str, curve: str) -> Callable[[], str]:
    """The same statistic on two curves of the paper."""

    def text() -> str:
        compared, adam = paper_tails(figure, curve)
        return f"{compared / adam - 1:+.1%} (loss {compared:.2f}, Adam {adam:.2f})"

    return text


def frozen_accuracies() -> str:
    """Figure 6 has no loss to compare on a linear scale, but test accuracies."""
    compared, adam = paper_tails("fig6b", "1-bit Adam (32-bits)")
    return f"ResNet-18 on CIFAR-10: accuracy {compared:.1f}%, Adam {adam:.1f}%"


def warmup_detail(rows: pd.DataFrame) -> str:
    """T_w and its share of the run."""
    run = rows[rows.optimizer == "onebit_adam"].iloc[0]
    return f"T_w = step {run.warmup_steps:,} of {run.total_steps:,}"


WITHIN = f"the difference from Adam's loss, paired by seed, lies within ±{MARGIN:.0%}"

CLAIMS = (
    Claim(
        "C1",
        "1-bit Adam converges like Adam, sample for sample",
        "Figure 4a, Section 7.1",
        "figure_04",
        "laptop",
        loss_gap("onebit_adam"),
        (-MARGIN, MARGIN),
        WITHIN,
        losses("onebit_adam"),
        paper_losses("fig4a", "1-bit Adam"),
        "+.1%",
    ),
    Claim(
        "C2",
        "Adam with the variance frozen, but nothing compressed, converges like Adam too",
        "Figure 6, Section 7.2",
        "figure_04",
        "laptop",
        loss_gap("onebit_adam_32bit"),
        (-MARGIN, MARGIN),
        WITHIN,
        losses("onebit_adam_32bit"),
        frozen_accuracies,
        "+.1%",
    ),
    Claim(
        "C3",
        "Adam on naively compressed 1-bit gradients falls behind",
        "Figure 1, Section 3.2; 0/1 Adam, abstract",
        "figure_04",
        "laptop",
        of_finished(loss_gap("naive_onebit_adam")),
        (MARGIN, inf),
        f"its loss lies more than {MARGIN:.0%} above Adam's, paired by seed",
        losses("naive_onebit_adam"),
        paper_losses("fig1", "Adam w/ basic gradient compression"),
        "+.1%",
    ),
    Claim(
        "C4",
        "The volume falls to w + (1 - w)/32 of Adam's, w the share of warm-up steps",
        "Section 7.1",
        "figure_04",
        "laptop",
        volume_over_formula,
        (0.98, 1.02),
        "bytes counted at the wire give the formula's reduction at fp32 within 2%",
        lambda rows: (
            f"{volume_reduction(rows).mean():.2f}x measured, {formula_reduction(rows):.2f}x by the formula"
        ),
        lambda: (
            f"up to {paper_number('volume_reduction_up_to'):.0f}x at fp16; the formula gives "
            f"{paper_number('volume_reduction_large_128')}x for BERT-Large"
        ),
        ".3f",
    ),
    Claim(
        "C5",
        "Adam's variance has settled by T_w",
        "Figure 2, Sections 3.3 and 7.1",
        "figure_04",
        "laptop",
        variance_ratio_at_freeze,
        (0.96, 1 / 0.96),
        "the ratio of ||v||_1 to its value 1/(1 - beta2) steps before lies in [0.96, 1/0.96] at T_w",
        warmup_detail,
        lambda: (
            f"{paper_number('auto_rule_threshold')} at step {paper_number('auto_rule_step'):,.0f}; "
            f"T_w = {paper_number('bert_large_128_warmup'):,.0f}"
        ),
        ".3f",
    ),
    Claim(
        "C6",
        "After T_w Adam's variance stays about where it was",
        "Figure 2, Section 3.3",
        "figure_04",
        "laptop",
        variance_drift,
        (1.0, 2.0),
        "at no step after T_w does ||v||_2 differ from its value at T_w by more than a factor of 2",
        warmup_detail,
        lambda: f"{paper_variance_drift():.2f}",
        ".2f",
    ),
    Claim(
        "C7",
        "On a slow network 1-bit Adam trains BERT-Large several times faster",
        "Figure 4b, Section 7.1",
        "figure_04",
        "paper",
        hours_ratio,
        (3.0, inf),
        "at least 3 times faster than Adam on 64 GPUs over Ethernet",
        lambda rows: f"{rows[rows.optimizer == 'onebit_adam'].seconds.max() / 3600:.1f} h",
        lambda: (
            f"{paper_number('wall_clock_speedup')}x ({paper_number('adam_hours')} h to "
            f"{paper_number('onebit_adam_hours')} h)"
        ),
        ".1f",
    ),
    Claim(
        "C23",
        "A rule finds T_w by itself: freeze when the ratio of ||v||_1 has reached 0.96, after the learning rate's warm-up",
        "Section 7.1",
        "figure_04",
        "laptop",
        rule_over_hand,
        NEAR_HAND_TUNED,
        f"it stops Adam's run between {NEAR_HAND_TUNED[0]:.2f} and {NEAR_HAND_TUNED[1]:.2f} times T_w",
        warmup_detail,
        lambda: (
            f"{paper_number('auto_rule_step') / paper_number('bert_large_128_warmup'):.2f} (step {paper_number('auto_rule_step'):,.0f}, "
            f"T_w = {paper_number('bert_large_128_warmup'):,.0f})"
        ),
        ".2f",
    ),
    Claim(
        "C24",
        "1-bit Adam is robust to the compressor",
        "Section 8",
        "figure_04",
        "laptop",
        worst_gap,
        (-inf, MARGIN),
        f"with 2, 4 and 8 bits and with the top 1/64, the worst loss lies at most {MARGIN:.0%} above Adam's, paired by seed",
        compressor_losses,
        lambda: "said, not shown",
        "+.2%",
    ),
    Claim(
        "C25",
        "1-bit Adam converges like Adam over both sequence lengths of BERT-Large",
        "Table 2, Section 7.1",
        "table_02",
        "paper",
        loss_gap("onebit_adam"),
        (-MARGIN, MARGIN),
        WITHIN,
        losses("onebit_adam"),
        lambda: "the same steps",
        "+.1%",
    ),
    Claim(
        "C26",
        "1-bit Adam converges like Adam over both sequence lengths of BERT-Base",
        "Table 2, Section 7.1",
        "table_02_base",
        "paper",
        loss_gap("onebit_adam"),
        (-MARGIN, MARGIN),
        WITHIN,
        losses("onebit_adam"),
        lambda: 'the same steps; "the same", not plotted',
        "+.1%",
    ),
)
