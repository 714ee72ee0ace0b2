"""0/1 Adam beside Adam and 1-bit Adam: judged by the runs of zero_one_adam, on BERT, and of
zero_one_adam_gpt2.

The paper itself could not be read: its numbers are those of the abstract, which says "up to" of
whichever of its tasks gives the most.

MARGIN, how far apart two losses may be and still count as the same, is BERT's for the same reason
on both tasks; no loss of 0/1 Adam's is known.

LESS_VOLUME and FEWER_ROUNDS: at the authors' settings for BERT, arithmetic tells the steps that
update the variance and the steps that sync, and with them the saving against 1-bit Adam at float16:
84% of the volume and 48% of the rounds (Large), 80% and 40% (Base). The rounds of the smaller run
are the bound: 40%. For the volume the bound is 75% instead of 80%, because the number of variance
updates at the start, 16 at each distance, does not shrink with a run: a short run sends more.

A round is a step in which the ranks exchange gradients or momenta. At `laptop` collectives were
counted instead, of which the few bytes on which the ranks agree are one: with these a compressed
step has three and an exact one two, so that 1-bit Adam seems to communicate more often than Adam.

SETTLED: in the paper's picture the variance's change at 1-bit Adam's T_w is 1/47 of its peak; a
tenth is less than half of that way, in logarithms.

Half of the gain of "up to twice as fast" is 1.5.
"""

from collections.abc import Callable
from dataclasses import fields
from math import inf
from pathlib import Path

import pandas as pd

from onebit.lab.claims import bert, resnet
from onebit.lab.claims.bert import MARGIN
from onebit.lab.claims.claim import Claim
from onebit.lab.claims.statistics import (
    finished,
    infinite_where_diverged,
    loss_gap,
    ratio_by_seed,
    relative_gap,
    saved,
    tail_mean,
)
from onebit.lab.runs.load import by_tensor, paper_curve, paper_number
from onebit.lab.runs.metadata import read_run
from onebit.optim.step_sets import StepSets, step_sets

LESS_VOLUME = 0.75
FEWER_ROUNDS = 0.40
SETTLED = 0.1
BLOCKS = 50  # of steps, over which the change of the variance is averaged


def with_rounds(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `rounds`: in how many steps so far the ranks have exchanged.

    0/1 Adam's follow from its options. All other optimizers here exchange in every step.
    """
    rows = rows.assign(rounds=rows.step)
    sparse = rows[rows.optimizer.str.startswith("zero_one_adam")]
    for folder, run in sparse.groupby("folder"):
        options = read_run(Path(folder))["config"]["optimizer"]
        total = int(run.total_steps.iloc[0])
        _, syncs = step_sets(total, **{one.name: options[one.name] for one in fields(StepSets)})
        so_far = pd.Series(range(1, total + 1)).isin(syncs).cumsum()
        rows.loc[run.index, "rounds"] = so_far[run.step - 1].to_numpy()
    return rows


def validation_loss(rows: pd.DataFrame, optimizer: str) -> pd.Series:
    """The mean validation loss over the last TAIL of the steps; infinite if it diverged."""
    return infinite_where_diverged(tail_mean(rows, optimizer, "validation_loss"), rows, optimizer)


def settled(rows: pd.DataFrame) -> pd.Series:
    """How much of the variance's largest change is left at 1-bit Adam's T_w, by seed.

    It is ||v_t - v_{t-1}|| of Adam in the last block of steps up to T_w over that of the largest
    block.
    """
    warmup = rows[rows.optimizer == "onebit_adam"].warmup_steps.max()
    shares = {}
    for seed, run in finished(rows, "adam").groupby("seed"):
        change = by_tensor(run, "variance_change").get("all", pd.Series(dtype=float)).dropna()
        blocks = change.groupby(
            (warmup - run.step[change.index]) // (run.total_steps.iloc[0] / BLOCKS)
        ).mean()
        until = blocks[blocks.index >= 0]  # block 0 ends at T_w
        if len(until):
            shares[seed] = until.iloc[0] / blocks.max()
    return pd.Series(shares, dtype=float)


def paper_settled() -> str:
    points = paper_curve("zero_one_adam_variance", "||v_t - v_{t-1}||")
    at_freeze = points.y[points.x * 1000 <= paper_number("bert_large_128_warmup")].iloc[-1]
    step = paper_number("bert_large_128_warmup")
    return f"{at_freeze / points.y.max():.2f} at step {step:,.0f} (read by eye)"


def totals(column: str, unit: str, scale: float = 1) -> Callable[[pd.DataFrame], str]:
    """The mean totals, over the runs that finished."""

    def text(rows: pd.DataFrame) -> str:
        zero_one, onebit = (
            finished(rows, name).groupby("seed")[column].max().mean() / scale
            for name in ("zero_one_adam", "onebit_adam")
        )
        return f"{zero_one:,.0f}{unit}, 1-bit Adam {onebit:,.0f}{unit}"

    return text


def validation_losses(rows: pd.DataFrame) -> str:
    zero_one, adam = (validation_loss(rows, name) for name in ("zero_one_adam", "adam"))
    return f"validation loss {zero_one.mean():.3f}, Adam {adam.mean():.3f}"


def paper_saved(what: str) -> Callable[[], str]:
    """The abstract's number, and what the authors' script comes to."""

    def text() -> str:
        most, large, base = (
            paper_number(f"zero_one_{what}_saved{run}") for run in ("", "_large", "_base")
        )
        return (
            f"up to {most:.0f}%; by the authors' script {large:.0f}% (BERT-Large), "
            f"{base:.0f}% (Base)"
        )

    return text


CLAIMS = (
    Claim(
        name="Z1",
        statement="0/1 Adam converges like Adam on BERT, sample for sample",
        place="0/1 Adam, abstract",
        experiment="zero_one_adam",
        profile="laptop",
        statistic=loss_gap("zero_one_adam"),
        measures=bert.LOSS,
        accepts=(-MARGIN, MARGIN),
        rule=bert.WITHIN,
        detail=bert.losses("zero_one_adam"),
        paper=lambda: "the same, no number found",
        style="+.1%",
    ),
    Claim(
        name="Z2",
        statement="0/1 Adam converges like Adam on GPT-2",
        place="0/1 Adam, abstract",
        experiment="zero_one_adam_gpt2",
        profile="laptop",
        statistic=relative_gap(validation_loss, "zero_one_adam"),
        measures="difference of the validation loss, relative to Adam's; lower is better",
        accepts=(-MARGIN, MARGIN),
        rule=(
            f"the difference from Adam's validation loss, paired by seed, lies within ±{MARGIN:.0%}"
        ),
        detail=validation_losses,
        paper=lambda: "the same, no number found",
        style="+.1%",
    ),
    Claim(
        name="Z3",
        statement="0/1 Adam sends far less than 1-bit Adam",
        place="0/1 Adam, abstract",
        experiment="zero_one_adam",
        profile="laptop",
        statistic=saved("bytes_sent"),
        measures="share of 1-bit Adam's bytes that is saved; higher is better",
        accepts=(LESS_VOLUME, inf),
        rule=f"at least {LESS_VOLUME:.0%} fewer bytes, counted at the wire",
        detail=totals("bytes_sent", " MB", 1e6),
        paper=paper_saved("volume"),
        style=".0%",
    ),
    Claim(
        name="Z4",
        statement="0/1 Adam communicates less often than 1-bit Adam",
        place="0/1 Adam, abstract",
        experiment="zero_one_adam",
        profile="laptop",
        statistic=saved("calls"),
        measures="share of 1-bit Adam's collectives that is saved; higher is better",
        accepts=(FEWER_ROUNDS, inf),
        rule=f"at least {FEWER_ROUNDS:.0%} fewer collectives",
        detail=totals("calls", " collectives"),
        paper=paper_saved("rounds"),
        style=".0%",
        at_workstation={
            "statistic": lambda rows: saved("rounds")(with_rounds(rows)),
            "measures": "share of 1-bit Adam's rounds that is saved; higher is better",
            "rule": f"at least {FEWER_ROUNDS:.0%} fewer rounds, steps with an exchange",
            "detail": lambda rows: totals("rounds", " rounds")(with_rounds(rows)),
        },
    ),
    Claim(
        name="Z5",
        statement="Adam's variance changes ever less, long before 1-bit Adam freezes it",
        place="0/1 Adam, figure of ||v_t - v_{t-1}||",
        experiment="zero_one_adam",
        profile="laptop",
        statistic=settled,
        measures="change of v at T_w over its largest change; lower is steadier",
        accepts=(-inf, SETTLED),
        rule=f"the change at T_w is less than {SETTLED} of its peak",
        detail=bert.warmup_detail,
        paper=paper_settled,
        style=".3f",
    ),
    Claim(
        name="Z6",
        statement="On a slow network 0/1 Adam trains up to twice as fast as 1-bit Adam",
        place="0/1 Adam, abstract",
        experiment="zero_one_adam",
        profile="paper",
        statistic=lambda rows: ratio_by_seed(rows, "seconds", "onebit_adam", "zero_one_adam"),
        measures="1-bit Adam's time over 0/1 Adam's; higher is better",
        accepts=(1.5, inf),
        rule="at least 1.5 times faster than 1-bit Adam, over Ethernet",
        detail=lambda rows: f"{finished(rows, 'zero_one_adam').seconds.max() / 3600:.1f} h",
        paper=lambda: (
            f"up to {paper_number('zero_one_speedup_up_to'):.0f}x, up to "
            f"{paper_number('zero_one_gpus'):.0f} GPUs"
        ),
        style=".1f",
    ),
    Claim(
        name="Z7",
        statement="On ImageNet 0/1 Adam generalises like Adam",
        place="0/1 Adam, abstract",
        experiment="imagenet_resnet18",
        profile="paper",
        statistic=resnet.error_gap("zero_one_adam"),
        measures=resnet.error_relative_to("Adam"),
        accepts=(-resnet.MARGIN, resnet.MARGIN),
        rule=(
            "the difference from Adam's test error, paired by seed, lies within "
            f"±{resnet.MARGIN:.0%} of it"
        ),
        detail=resnet.accuracies("zero_one_adam", "adam"),
        paper=lambda: "the same, no number found",
        style="+.1%",
    ),
)
