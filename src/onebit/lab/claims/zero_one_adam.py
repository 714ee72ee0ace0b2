"""0/1 Adam beside Adam and 1-bit Adam: judged by the runs of experiment zero_one_adam, on BERT, and zero_one_adam_gpt2.

The paper itself could not be read: its numbers are those of the abstract, "up to" whichever of its tasks gives the most.

MARGIN, how far apart two losses may be and still count as the same: BERT's, for the same reason, on both tasks; no loss of 0/1 Adam's is known.

LESS_VOLUME and FEWER_ROUNDS: at the authors' settings for BERT the steps that update the variance and that sync are known by arithmetic, and
with them the saving against 1-bit Adam at float16: 84 % of the volume and 48 % of the rounds (Large), 80 % and 40 % (Base). The smaller run's
rounds are the bound: 40 %. Of the volume it is 75 %, and not 80 %: how often the variance is updated at the start, 16 times at each
distance, does not shrink with a run, so that a short run sends more.

SETTLED: in the picture, the variance's change at 1-bit Adam's T_w is 1/47 of its peak; a tenth is less than half of that way, in logarithms.

Half of the gain of "up to twice as fast" is 1.5.
"""

from collections.abc import Callable
from math import inf

import pandas as pd

from onebit.lab.claims import bert, resnet
from onebit.lab.claims.bert import MARGIN, ratio_by_seed
from onebit.lab.claims.claim import (
    Claim,
    finished,
    infinite_where_diverged,
    relative_gap,
    tail_mean,
)
from onebit.lab.runs.load import by_tensor, paper_curve, paper_number

LESS_VOLUME = 0.75
FEWER_ROUNDS = 0.40
SETTLED = 0.1
BLOCKS = 50  # of steps, over which the change of the variance is averaged


def validation_loss(rows: pd.DataFrame, optimizer: str) -> pd.Series:
    """Mean validation loss over the last TAIL of the steps, by seed; infinite if the run diverged."""
    return infinite_where_diverged(tail_mean(rows, optimizer, "validation_loss"), rows, optimizer)


def saved(column: str) -> Callable[[pd.DataFrame], pd.Series]:
    """The share of 1-bit Adam's total that 0/1 Adam does without, by seed."""
    return lambda rows: 1 - 1 / ratio_by_seed(rows, column, "onebit_adam", "zero_one_adam")


def settled(rows: pd.DataFrame) -> pd.Series:
    """||v_t - v_{t-1}|| of Adam in the last block of steps up to 1-bit Adam's T_w, over the largest of all blocks, by seed."""
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
    return f"{at_freeze / points.y.max():.2f} at step {paper_number('bert_large_128_warmup'):,.0f} (read by eye)"


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
        return f"up to {most:.0f}%; by the authors' script {large:.0f}% (BERT-Large), {base:.0f}% (Base)"

    return text


CLAIMS = (
    Claim(
        "Z1",
        "0/1 Adam converges like Adam on BERT, sample for sample",
        "0/1 Adam, abstract",
        "zero_one_adam",
        "laptop",
        bert.loss_gap("zero_one_adam"),
        (-MARGIN, MARGIN),
        bert.WITHIN,
        bert.losses("zero_one_adam"),
        lambda: "the same, no number found",
        "+.1%",
    ),
    Claim(
        "Z2",
        "0/1 Adam converges like Adam on GPT-2",
        "0/1 Adam, abstract",
        "zero_one_adam_gpt2",
        "laptop",
        relative_gap(validation_loss, "zero_one_adam"),
        (-MARGIN, MARGIN),
        f"the difference from Adam's validation loss, paired by seed, lies within ±{MARGIN:.0%}",
        validation_losses,
        lambda: "the same, no number found",
        "+.1%",
    ),
    Claim(
        "Z3",
        "0/1 Adam sends far less than 1-bit Adam",
        "0/1 Adam, abstract",
        "zero_one_adam",
        "laptop",
        saved("bytes_sent"),
        (LESS_VOLUME, inf),
        f"at least {LESS_VOLUME:.0%} fewer bytes, counted at the wire",
        totals("bytes_sent", " MB", 1e6),
        paper_saved("volume"),
        ".0%",
    ),
    Claim(
        "Z4",
        "0/1 Adam communicates less often than 1-bit Adam",
        "0/1 Adam, abstract",
        "zero_one_adam",
        "laptop",
        saved("calls"),
        (FEWER_ROUNDS, inf),
        f"at least {FEWER_ROUNDS:.0%} fewer collectives",
        totals("calls", " collectives"),
        paper_saved("rounds"),
        ".0%",
    ),
    Claim(
        "Z5",
        "Adam's variance changes ever less, long before 1-bit Adam freezes it",
        "0/1 Adam, figure of ||v_t - v_{t-1}||",
        "zero_one_adam",
        "laptop",
        settled,
        (-inf, SETTLED),
        f"the change at T_w is less than {SETTLED} of its peak",
        bert.warmup_detail,
        paper_settled,
        ".3f",
    ),
    Claim(
        "Z6",
        "On a slow network 0/1 Adam trains up to twice as fast as 1-bit Adam",
        "0/1 Adam, abstract",
        "zero_one_adam",
        "paper",
        lambda rows: ratio_by_seed(rows, "seconds", "onebit_adam", "zero_one_adam"),
        (1.5, inf),
        "at least 1.5 times faster than 1-bit Adam, over Ethernet",
        lambda rows: f"{finished(rows, 'zero_one_adam').seconds.max() / 3600:.1f} h",
        lambda: (
            f"up to {paper_number('zero_one_speedup_up_to'):.0f}x, up to {paper_number('zero_one_gpus'):.0f} GPUs"
        ),
        ".1f",
    ),
    Claim(
        "Z7",
        "On ImageNet 0/1 Adam generalises like Adam",
        "0/1 Adam, abstract",
        "imagenet_resnet18",
        "paper",
        resnet.error_gap("zero_one_adam"),
        (-resnet.MARGIN, resnet.MARGIN),
        f"the difference from Adam's test error, paired by seed, lies within ±{resnet.MARGIN:.0%} of it",
        resnet.accuracies("zero_one_adam", "adam"),
        lambda: "the same, no number found",
        "+.1%",
    ),
)
