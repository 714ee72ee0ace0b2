"""BERT pre-training: Figures 1, 2 and 4, judged by the runs of Figure 4.

The loss of a run is the mean training loss over the last 10% of its steps.

MARGIN is how far apart two losses may be and still count as the same. In the paper's Figure 4a the
same statistic is +2.2% for 1-bit Adam, which the paper calls the same convergence; in its Figure 1
it is +18.5% for naive 1-bit gradients, which the paper calls a failure. A margin of 3% lets the
first pass and is a sixth of the second.

NEAR_HAND_TUNED: the rule that is to choose T_w stops the paper's warm-up at 0.96 of the step that
was found by hand. A third more or a quarter less still lies within the 15% to 25% of the steps that
the authors' tutorial advises, if 15% to 20% are chosen by hand. We wrote this rule when the runs of
Figure 4 were there.

COMPRESSORS are the compressors of the momentum that the sweep has beside 1 bit. The paper's claim
says "any", so the worst of them decides.
"""

from collections.abc import Callable
from math import inf
from pathlib import Path

import pandas as pd

from onebit.lab.claims.claim import Claim
from onebit.lab.claims.statistics import (
    chosen_by_rule,
    final_loss,
    finished,
    loss_gap,
    lr_warmup,
    of_finished,
    paper_tails,
    ratio_by_seed,
    volume_share,
)
from onebit.lab.runs.load import at_common_seeds, paper_curve, paper_number
from onebit.lab.runs.metadata import read_run

MARGIN = 0.03
NEAR_HAND_TUNED = (0.75, 4 / 3)
LOSS = "difference of the loss, relative to Adam's; lower is better"
COMPRESSORS = ("onebit_adam_2bit", "onebit_adam_4bit", "onebit_adam_8bit", "onebit_adam_topk")


def volume_reduction(rows: pd.DataFrame) -> pd.Series:
    """Bytes that a rank sent with Adam, over those with 1-bit Adam, by seed."""
    return ratio_by_seed(rows, "bytes_sent")


def formula_reduction(rows: pd.DataFrame, bits: int = 32) -> float:
    """Adam's volume over 1-bit Adam's by the formula."""
    run = rows[rows.optimizer == "onebit_adam"].iloc[0]
    return 1 / volume_share(run.warmup_steps / run.total_steps, bits)


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


def rule_over_hand(rows: pd.DataFrame) -> pd.Series:
    """The step at which the rule ends the warm-up of an Adam run over T_w, by seed."""
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
    """The largest gap of COMPRESSORS from Adam's loss, by seed, over the seeds that all have."""
    return pd.concat([loss_gap(name)(rows) for name in COMPRESSORS], axis=1, join="inner").max(
        axis=1
    )


def variance_drift(rows: pd.DataFrame) -> pd.Series:
    """The largest factor between Adam's ||v||_2 at T_w and at any later step, by seed."""
    warmup_steps = rows[rows.optimizer == "onebit_adam"].warmup_steps.max()
    adam = finished(rows, "adam")
    adam = adam[adam.step >= warmup_steps]
    drift = {}
    for seed, run in adam.groupby("seed"):
        ratio = run.variance_l2.astype(float) / float(run.variance_l2.iloc[0])
        drift[seed] = max(ratio.max(), 1 / ratio.min())
    return pd.Series(drift, dtype=float)


def paper_variance_drift() -> float:
    """The same statistic on the paper's curve of Figure 2, from T_w = 23K on."""
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
        name="C1",
        statement="1-bit Adam converges like Adam, sample for sample",
        place="Figure 4a, Section 7.1",
        experiment="figure_04",
        profile="laptop",
        statistic=loss_gap("onebit_adam"),
        measures=LOSS,
        accepts=(-MARGIN, MARGIN),
        rule=WITHIN,
        detail=losses("onebit_adam"),
        paper=paper_losses("fig4a", "1-bit Adam"),
        style="+.1%",
    ),
    Claim(
        name="C2",
        statement="Adam with the variance frozen, but nothing compressed, converges like Adam too",
        place="Figure 6, Section 7.2",
        experiment="figure_04",
        profile="laptop",
        statistic=loss_gap("onebit_adam_32bit"),
        measures=LOSS,
        accepts=(-MARGIN, MARGIN),
        rule=WITHIN,
        detail=losses("onebit_adam_32bit"),
        paper=frozen_accuracies,
        style="+.1%",
    ),
    Claim(
        name="C3",
        statement="Adam on naively compressed 1-bit gradients falls behind",
        place="Figure 1, Section 3.2; 0/1 Adam, abstract",
        experiment="figure_04",
        profile="laptop",
        statistic=of_finished(loss_gap("naive_onebit_adam")),
        measures=LOSS,
        accepts=(MARGIN, inf),
        rule=f"its loss lies more than {MARGIN:.0%} above Adam's, paired by seed",
        detail=losses("naive_onebit_adam"),
        paper=paper_losses("fig1", "Adam w/ basic gradient compression"),
        style="+.1%",
    ),
    Claim(
        name="C4",
        statement="The volume falls to w + (1 - w)/32 of Adam's, w the share of warm-up steps",
        place="Section 7.1",
        experiment="figure_04",
        profile="laptop",
        statistic=volume_over_formula,
        measures="measured reduction of the volume over the formula's; 1 is equal",
        accepts=(0.98, 1.02),
        rule="bytes counted at the wire give the formula's reduction at fp32 within 2%",
        detail=lambda rows: (
            f"{volume_reduction(rows).mean():.2f}x measured, "
            f"{formula_reduction(rows):.2f}x by the formula"
        ),
        paper=lambda: (
            f"up to {paper_number('volume_reduction_up_to'):.0f}x at fp16; the formula gives "
            f"{paper_number('volume_reduction_large_128')}x for BERT-Large"
        ),
        style=".3f",
    ),
    Claim(
        name="C5",
        statement="Adam's variance has settled by T_w",
        place="Figure 2, Sections 3.3 and 7.1",
        experiment="figure_04",
        profile="laptop",
        statistic=variance_ratio_at_freeze,
        measures="ratio of ||v||_1 to its earlier value; 1 is steady",
        accepts=(0.96, 1 / 0.96),
        rule=(
            "the ratio of ||v||_1 to its value 1/(1 - beta2) steps before lies in [0.96, 1/0.96] "
            "at T_w"
        ),
        detail=warmup_detail,
        paper=lambda: (
            f"{paper_number('auto_rule_threshold')} at step {paper_number('auto_rule_step'):,.0f}; "
            f"T_w = {paper_number('bert_large_128_warmup'):,.0f}"
        ),
        style=".3f",
    ),
    Claim(
        name="C6",
        statement="After T_w Adam's variance stays about where it was",
        place="Figure 2, Section 3.3",
        experiment="figure_04",
        profile="laptop",
        statistic=variance_drift,
        measures="largest factor of change of ||v||_2; 1 is steady",
        accepts=(1.0, 2.0),
        rule=(
            "at no step after T_w does ||v||_2 differ from its value at T_w by more than a factor "
            "of 2"
        ),
        detail=warmup_detail,
        paper=lambda: f"{paper_variance_drift():.2f}",
        style=".2f",
    ),
    Claim(
        name="C7",
        statement="On a slow network 1-bit Adam trains BERT-Large several times faster",
        place="Figure 4b, Section 7.1",
        experiment="figure_04",
        profile="paper",
        statistic=hours_ratio,
        measures="Adam's time over 1-bit Adam's; higher is better",
        accepts=(3.0, inf),
        rule="at least 3 times faster than Adam on 64 GPUs over Ethernet",
        detail=lambda rows: f"{rows[rows.optimizer == 'onebit_adam'].seconds.max() / 3600:.1f} h",
        paper=lambda: (
            f"{paper_number('wall_clock_speedup')}x ({paper_number('adam_hours')} h to "
            f"{paper_number('onebit_adam_hours')} h)"
        ),
        style=".1f",
    ),
    Claim(
        name="C23",
        statement=(
            "A rule finds T_w by itself: freeze when the ratio of ||v||_1 has reached 0.96, after "
            "the learning rate's warm-up"
        ),
        place="Section 7.1",
        experiment="figure_04",
        profile="laptop",
        statistic=rule_over_hand,
        measures="step that the rule finds over T_w; 1 is equal",
        accepts=NEAR_HAND_TUNED,
        rule=(
            f"it stops Adam's run between {NEAR_HAND_TUNED[0]:.2f} and {NEAR_HAND_TUNED[1]:.2f} "
            "times T_w"
        ),
        detail=warmup_detail,
        paper=lambda: (
            f"{paper_number('auto_rule_step') / paper_number('bert_large_128_warmup'):.2f} "
            f"(step {paper_number('auto_rule_step'):,.0f}, "
            f"T_w = {paper_number('bert_large_128_warmup'):,.0f})"
        ),
        style=".2f",
    ),
    Claim(
        name="C24",
        statement="1-bit Adam is robust to the compressor",
        place="Section 8",
        experiment="figure_04",
        profile="laptop",
        statistic=worst_gap,
        measures=LOSS,
        accepts=(-inf, MARGIN),
        rule=(
            "with 2, 4 and 8 bits and with the top 1/64, the worst loss lies at most "
            f"{MARGIN:.0%} above Adam's, paired by seed"
        ),
        detail=compressor_losses,
        paper=lambda: "said, not shown",
        style="+.2%",
    ),
    Claim(
        name="C25",
        statement="1-bit Adam converges like Adam over both sequence lengths of BERT-Large",
        place="Table 2, Section 7.1",
        experiment="table_02",
        profile="paper",
        statistic=loss_gap("onebit_adam"),
        measures=LOSS,
        accepts=(-MARGIN, MARGIN),
        rule=WITHIN,
        detail=losses("onebit_adam"),
        paper=lambda: "the same steps",
        style="+.1%",
    ),
    Claim(
        name="C26",
        statement="1-bit Adam converges like Adam over both sequence lengths of BERT-Base",
        place="Table 2, Section 7.1",
        experiment="table_02_base",
        profile="paper",
        statistic=loss_gap("onebit_adam"),
        measures=LOSS,
        accepts=(-MARGIN, MARGIN),
        rule=WITHIN,
        detail=losses("onebit_adam"),
        paper=lambda: 'the same steps; "the same", not plotted',
        style="+.1%",
    ),
)
