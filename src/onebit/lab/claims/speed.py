"""How fast: Figures 5, 7 and 9 and Table 1 of the 1-bit Adam paper, Table 5 and Figures 3 and 7 of the 1-bit LAMB paper.

Most need the papers' clusters, and are judged by runs of profile paper: the speed of a stage is the median over the recorded steps in it of
seconds per step, and the gain of the compressed stage, as in the papers, that of the warm-up over that of the compressed stage of the same
run. NEAR: a gain counts as reached at this share of the paper's, as 3 of 3.4 times in claim C7.

What a slow network does to a step is measured on a small scale too: in results/speed/overlap.csv, on two ranks over a shaped link, of the
model whose layers leave the CPU idle, as if a GPU computed them. Its "interval" is the median, 10th and 90th percentile of the rounds. These
measurements were there before the rules: so the rules ask for half of the way, in logarithms, to the paper's gain, or only for the direction.
"""

from collections.abc import Callable
from math import inf, sqrt

import numpy as np
import pandas as pd

from onebit.lab.claims.bert import hours_ratio, ratio_by_seed, volume_reduction
from onebit.lab.claims.claim import Claim, Interval, Statistic, finished
from onebit.lab.runs.load import paper_curve, paper_number

NEAR = 0.8


def per_step(run: pd.DataFrame, phase: str) -> float:
    """The median of seconds per step in a phase of a run; nan if it has none."""
    return (run.seconds.diff() / run.step.diff())[
        (run.phase == phase) & (run.phase.shift() == phase)
    ].median()


def stage_gain(optimizer: str) -> Statistic:
    """Seconds per step in the warm-up over those in the compressed stage, by seed."""

    def statistic(rows: pd.DataFrame) -> pd.Series:
        runs = finished(rows, optimizer).groupby("seed")
        return pd.Series(
            {seed: per_step(run, "warmup") / per_step(run, "compressed") for seed, run in runs},
            dtype=float,
        ).dropna()

    return statistic


def throughput(rows: pd.DataFrame, optimizer: str = "onebit_adam") -> pd.Series:
    """Samples per second of the compressed stage, by seed."""
    runs = finished(rows, optimizer).groupby("seed")
    return pd.Series(
        {
            seed: run["samples"].iloc[0] / run.step.iloc[0] / per_step(run, "compressed")
            for seed, run in runs
        },
        dtype=float,
    ).dropna()


def at_batch(batch: int, statistic: Statistic) -> Statistic:
    """Of runs with this batch only."""
    return lambda rows: statistic(rows[rows["samples"] == batch * rows.step])


def paper_throughput(figure: str, curve: str, gpus: int) -> float:
    points = paper_curve(figure, curve)
    return float(points.y[np.isclose(points.x, gpus)].iloc[0])


def paper_gain() -> float:
    """Figure 5b at 64 GPUs, those of Figure 4."""
    return paper_throughput("fig5b", "1-bit Adam (Ethernet)", 64) / paper_throughput(
        "fig5b", "Adam (Ethernet)", 64
    )


def adam_at_its_best() -> float:
    """Samples per second over Ethernet, whatever the number of GPUs."""
    points = paper_curve("fig5b", "Adam (Ethernet)")
    return float(points.y.max())


def nccl_over_mpi() -> float:
    """Throughput of 1-bit LAMB's compressed stage on 256 GPUs over Ethernet with the one backend, over that with the other."""
    return paper_number("onebit_lamb_nccl_throughput_8k") / paper_number(
        "onebit_lamb_mpi_throughput_8k"
    )


def paper_gain_at(mbit: float) -> float:
    """Figure 9, between two of its points on the logarithm of the bandwidth."""
    points = paper_curve("fig9", "throughput speedup")
    return float(np.interp(np.log(mbit), np.log(points.x), points.y))


# ---- measured


def ratio(rows: pd.DataFrame, contender: str, mbit: int) -> pd.Series:
    """The row of overlap.csv: a step of the contender as a share of one of DistributedDataParallel with Adam."""
    return rows[
        (rows.contender == contender) & (rows.rate_mbit == mbit) & (rows.computed == "elsewhere")
    ].iloc[0]


def step_gain(mbit: int) -> Callable[[pd.DataFrame], Interval]:
    """A step of Adam over a compressed step of 1-bit Adam."""

    def statistic(rows: pd.DataFrame) -> Interval:
        row = ratio(rows, "no_overlap", mbit)
        return Interval(1 / row.ratio, 1 / row.ratio_high, 1 / row.ratio_low, int(row["rounds"]))

    return statistic


def slower_over_faster(rows: pd.DataFrame) -> Interval:
    """The gain at 200 Mbit/s over that at 1 Gbit/s."""
    slow, fast = (step_gain(mbit)(rows) for mbit in (200, 1000))
    return Interval(
        slow.mean / fast.mean, slow.low / fast.high, slow.high / fast.low, min(slow.n, fast.n)
    )


def exchange_share(rows: pd.DataFrame) -> Interval:
    """What of a step with Adam is not computation, at 1 Gbit/s."""
    row = ratio(rows, "compute", 1000)
    return Interval(1 - row.ratio, 1 - row.ratio_high, 1 - row.ratio_low, int(row["rounds"]))


def measured(
    name: str,
    statement: str,
    place: str,
    statistic: Callable,
    accepts: tuple,
    rule: str,
    paper: Callable,
    style: str,
) -> Claim:
    return Claim(
        name,
        statement,
        place,
        "overlap",
        "measured",
        statistic,
        accepts,
        rule,
        lambda rows: "2 ranks, median of the rounds",
        paper,
        style,
        "speed",
    )


def on_cluster(
    name: str,
    statement: str,
    place: str,
    experiment: str,
    statistic: Statistic,
    least: float,
    rule: str,
    paper: Callable,
    style: str = ".1f",
) -> Claim:
    return Claim(
        name,
        statement,
        place,
        experiment,
        "paper",
        statistic,
        (least, inf),
        rule,
        lambda rows: "",
        paper,
        style,
    )


def gains(
    name: str,
    model: str,
    place: str,
    experiment: str,
    statistic: Statistic,
    paper: float,
    where: str,
    more: str = "",
) -> Claim:
    rule = (
        f"the compressed stage is at least {NEAR * paper:.1f} times as fast as the warm-up, {where}"
    )
    return on_cluster(
        name,
        f"Compressed, steps of {model} are several times as fast",
        place,
        experiment,
        statistic,
        NEAR * paper,
        rule,
        lambda: f"{paper:.3g}x{more}",
    )


CLAIMS = (
    measured(
        "S1",
        "On a slow network most of a step of Adam is the exchange of gradients",
        "Table 1, Section 3.1; 1-bit LAMB, Table 5",
        exchange_share,
        (0.5, inf),
        "at 1 Gbit/s at least half of a step is not computation",
        lambda: (
            f"{paper_number('exchange_share_ethernet'):.0f}% on Ethernet, {paper_number('exchange_share_infiniband'):.0f}% on InfiniBand, "
            f"at most; {paper_number('lamb_exchange_share_ethernet'):.0f}% for LAMB"
        ),
        ".0%",
    ),
    measured(
        "S2",
        "At 1 Gbit/s a compressed step is several times as fast as one of Adam",
        "Figure 9, Supplement",
        step_gain(1000),
        (sqrt(paper_number("figure_9_gain_1000")), inf),
        f"at least {sqrt(paper_number('figure_9_gain_1000')):.1f} times, half of the paper's gain in logarithms",
        lambda: f"{paper_number('figure_9_gain_1000')}x on 256 GPUs",
        ".1f",
    ),
    measured(
        "S3",
        "The slower the network, the larger the gain",
        "Figure 9, Supplement; 1-bit LAMB, Figure 3",
        slower_over_faster,
        (1.0, inf),
        "the gain at 200 Mbit/s is larger than that at 1 Gbit/s",
        lambda: (
            f"{paper_gain_at(200) / paper_gain_at(1000):.1f} times as large; up to {paper_number('figure_9_gain_50')}x at 50 Mbit/s; "
            f"of 1-bit LAMB at most {paper_number('onebit_lamb_stage_speedup_infiniband')}x on InfiniBand"
        ),
        ".1f",
    ),
    gains(
        "S4",
        "BERT-Large",
        "Figure 5a, Section 7.1",
        "figure_04",
        at_batch(1024, stage_gain("onebit_adam")),
        paper_number("throughput_gain_64_gpus"),
        "on 64 GPUs over Ethernet with batch=1024, 16 a GPU",
    ),
    gains(
        "S5",
        "BERT-Large with the batch of 4,096",
        "Figure 5b, Section 7.1",
        "figure_04",
        at_batch(4096, stage_gain("onebit_adam")),
        paper_gain(),
        "on 64 GPUs over Ethernet",
    ),
    on_cluster(
        "S6",
        "With more GPUs 1-bit Adam goes on where Adam over Ethernet has stopped gaining",
        "Figure 5b, Section 7.1",
        "figure_04",
        at_batch(4096, lambda rows: throughput(rows) / adam_at_its_best()),
        2.0,
        f"its compressed stage on 64 GPUs processes at least twice the {adam_at_its_best():,.0f} samples/s that the paper's Adam has at best",
        lambda: (
            f"{paper_throughput('fig5b', '1-bit Adam (Ethernet)', 64) / adam_at_its_best():.1f} times"
        ),
    ),
    on_cluster(
        "S7",
        "1-bit Adam over Ethernet is about as fast as Adam over InfiniBand",
        "Figure 5b, Section 7.1",
        "figure_04",
        at_batch(
            4096, lambda rows: throughput(rows) / paper_throughput("fig5b", "Adam (InfiniBand)", 64)
        ),
        0.75,
        "its compressed stage on 64 GPUs over Ethernet processes at least three quarters of the samples/s of the paper's Adam over InfiniBand",
        lambda: (
            f"{paper_throughput('fig5b', '1-bit Adam (Ethernet)', 64) / paper_throughput('fig5b', 'Adam (InfiniBand)', 64):.2f}"
        ),
        ".2f",
    ),
    gains(
        "S8",
        "SQuAD fine-tuning",
        "Figure 5c, Section 7.1",
        "squad",
        stage_gain("onebit_adam"),
        paper_number("throughput_gain_squad"),
        "on 32 GPUs over Ethernet",
    ),
    on_cluster(
        "S9",
        "SQuAD fine-tuning takes a fraction of Adam's time, from beginning to end",
        "Abstract, Section 7.1",
        "squad",
        hours_ratio,
        NEAR * paper_number("squad_gain_up_to"),
        f"Adam takes at least {NEAR * paper_number('squad_gain_up_to'):.1f} times as long, on 32 GPUs",
        lambda: f"up to {paper_number('squad_gain_up_to')}x",
    ),
    gains(
        "S10",
        "ResNet-152 on ImageNet",
        "Figure 7, Section 7.2",
        "imagenet",
        stage_gain("onebit_adam"),
        paper_number("figure_7_gain_10_gbit"),
        "over 10 Gbit/s Ethernet",
        f"; {paper_number('figure_7_gain_1_gbit')}x over 1 Gbit/s",
    ),
    gains(
        "S11",
        "1-bit LAMB on BERT-Large",
        "1-bit LAMB, Figure 3",
        "lamb",
        stage_gain("onebit_lamb"),
        paper_number("onebit_lamb_stage_speedup_64k"),
        "with a batch of 65,536 on 256 GPUs over Ethernet",
    ),
    gains(
        "S14",
        "1-bit LAMB on BERT-Large with a batch of 8,192",
        "1-bit LAMB, Figure 3",
        "lamb",
        at_batch(8192, stage_gain("onebit_lamb")),
        paper_number("onebit_lamb_stage_speedup"),
        "with batch=8192 on 256 GPUs over Ethernet",
    ),
    on_cluster(
        "S15",
        "With a batch of 8,192 1-bit LAMB takes a fraction of LAMB's time",
        "1-bit LAMB, p. 9",
        "lamb",
        at_batch(8192, lambda rows: ratio_by_seed(rows, "seconds", "lamb", "onebit_lamb")),
        NEAR * paper_number("onebit_lamb_speedup_8k"),
        f"LAMB takes at least {NEAR * paper_number('onebit_lamb_speedup_8k'):.1f} times as long, with batch=8192 on 256 GPUs over Ethernet",
        lambda: f"{paper_number('onebit_lamb_speedup_8k')}x",
    ),
    on_cluster(
        "S16",
        "Over Ethernet NCCL is faster than MPI as a backend of 1-bit LAMB",
        "1-bit LAMB, Figure 7",
        "lamb",
        at_batch(
            8192,
            lambda rows: (
                throughput(rows, "onebit_lamb") / paper_number("onebit_lamb_mpi_throughput_8k")
            ),
        ),
        sqrt(nccl_over_mpi()),
        f"its compressed stage, with NCCL and batch=8192 on 256 GPUs, processes at least {sqrt(nccl_over_mpi()):.2f} times the "
        f"{paper_number('onebit_lamb_mpi_throughput_8k'):,.0f} samples/s of the paper's MPI, half of the gain in logarithms",
        lambda: f"{nccl_over_mpi():.2f} times",
        ".2f",
    ),
    on_cluster(
        "S12",
        "The volume of BERT-Large falls about fivefold",
        "Abstract, Section 7.1",
        "figure_04",
        volume_reduction,
        0.98 * paper_number("volume_reduction_large_128"),
        f"bytes counted at the wire fall to 1/{0.98 * paper_number('volume_reduction_large_128'):.1f} or less",
        lambda: f"{paper_number('volume_reduction_large_128')}x by the formula, at fp16",
    ),
    on_cluster(
        "S13",
        "The volume of BERT-Base falls about fivefold, over both sequence lengths",
        "Abstract, Section 7.1",
        "table_02_base",
        volume_reduction,
        0.98 * paper_number("volume_reduction_base"),
        f"bytes counted at the wire fall to 1/{0.98 * paper_number('volume_reduction_base'):.1f} or less",
        lambda: f"{paper_number('volume_reduction_base')}x by the formula, at fp16",
    ),
)
