"""How fast: Figures 5, 7 and 9 and Table 1 of the 1-bit Adam paper, Table 5 and Figures 3 and 7 of
the 1-bit LAMB paper.

Most claims need the papers' clusters, and runs of profile paper judge them. The speed of a stage is
the median, over the recorded steps in it, of seconds per step. The gain of the compressed stage is,
as in the papers, the warm-up's seconds per step over the compressed stage's in the same run.
NEAR: a gain counts as reached at this share of the paper's, as 3 of 3.4 times in claim C7.

What a slow network does to a step is also measured on a small scale: in results/speed/overlap.csv,
on two ranks over a shaped link, of the model whose layers leave the CPU idle, as if a GPU computed
them. The "interval" there is the median with the 10th and 90th percentile of the rounds. These
measurements were there before the rules, so the rules ask for half of the way, in logarithms, to
the paper's gain, or only for the direction.
"""

from collections.abc import Callable
from math import inf, sqrt

import numpy as np
import pandas as pd

from onebit.lab.claims import volume
from onebit.lab.claims.bert import hours_ratio
from onebit.lab.claims.claim import Claim
from onebit.lab.claims.statistics import Interval, Statistic, finished, ratio_by_seed
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
    """The statistic of the runs with this batch only."""
    return lambda rows: statistic(rows[rows["samples"] == batch * rows.step])


def paper_throughput(figure: str, curve: str, gpus: int) -> float:
    points = paper_curve(figure, curve)
    return float(points.y[np.isclose(points.x, gpus)].iloc[0])


def paper_onebit_adam() -> float:
    """1-bit Adam's samples per second over Ethernet in Figure 5b, on Figure 4's 64 GPUs."""
    return paper_throughput("fig5b", "1-bit Adam (Ethernet)", 64)


def paper_gain() -> float:
    """1-bit Adam's samples per second over Adam's in Figure 5b, both over Ethernet, at 64 GPUs."""
    return paper_onebit_adam() / paper_throughput("fig5b", "Adam (Ethernet)", 64)


def paper_ethernet_over_infiniband() -> float:
    """1-bit Adam's samples per second over Ethernet over Adam's over InfiniBand, at 64 GPUs."""
    return paper_onebit_adam() / paper_throughput("fig5b", "Adam (InfiniBand)", 64)


def adam_at_its_best() -> float:
    """Samples per second over Ethernet, whatever the number of GPUs."""
    points = paper_curve("fig5b", "Adam (Ethernet)")
    return float(points.y.max())


def nccl_over_mpi() -> float:
    """The throughput of 1-bit LAMB's compressed stage with NCCL over that with MPI, 256 GPUs."""
    return paper_number("onebit_lamb_nccl_throughput_8k") / paper_number(
        "onebit_lamb_mpi_throughput_8k"
    )


def paper_gain_at(mbit: float) -> float:
    """Figure 9, between two of its points on the logarithm of the bandwidth."""
    points = paper_curve("fig9", "throughput speedup")
    return float(np.interp(np.log(mbit), np.log(points.x), points.y))


# ---- measured


def link_row(rows: pd.DataFrame, contender: str, mbit: int) -> pd.Series:
    """The row of overlap.csv with a step's share of one of DistributedDataParallel with Adam."""
    return rows[
        (rows.contender == contender) & (rows.rate_mbit == mbit) & (rows.computed == "elsewhere")
    ].iloc[0]


def step_gain(mbit: int) -> Callable[[pd.DataFrame], Interval]:
    """A step of Adam over a compressed step of 1-bit Adam."""

    def statistic(rows: pd.DataFrame) -> Interval:
        row = link_row(rows, "no_overlap", mbit)
        return Interval(1 / row.ratio, 1 / row.ratio_high, 1 / row.ratio_low, int(row["rounds"]))

    return statistic


def slower_over_faster(rows: pd.DataFrame) -> Interval:
    """The gain at 200 Mbit/s over that at 1 Gbit/s."""
    slow, fast = (step_gain(mbit)(rows) for mbit in (200, 1000))
    return Interval(
        slow.mean / fast.mean, slow.low / fast.high, slow.high / fast.low, min(slow.n, fast.n)
    )


def exchange_share(rows: pd.DataFrame) -> Interval:
    """The share of a step with Adam that is not computation, at 1 Gbit/s."""
    row = link_row(rows, "compute", 1000)
    return Interval(1 - row.ratio, 1 - row.ratio_high, 1 - row.ratio_low, int(row["rounds"]))


def measured(
    name: str,
    statement: str,
    place: str,
    statistic: Callable,
    measures: str,
    accepts: tuple,
    rule: str,
    paper: Callable,
    style: str,
) -> Claim:
    return Claim(
        name=name,
        statement=statement,
        place=place,
        experiment="overlap",
        profile="measured",
        statistic=statistic,
        measures=measures,
        accepts=accepts,
        rule=rule,
        detail=lambda rows: "2 ranks, median of the rounds",
        paper=paper,
        style=style,
        folder="speed",
    )


def on_cluster(
    name: str,
    statement: str,
    place: str,
    experiment: str,
    statistic: Statistic,
    measures: str,
    least: float,
    rule: str,
    paper: Callable,
    style: str = ".1f",
) -> Claim:
    return Claim(
        name=name,
        statement=statement,
        place=place,
        experiment=experiment,
        profile="paper",
        statistic=statistic,
        measures=measures,
        accepts=(least, inf),
        rule=rule,
        detail=lambda rows: "",
        paper=paper,
        style=style,
    )


def counted(name: str, statement: str, experiment: str, number: str) -> Claim:
    """A claim on a volume, which needs no cluster to be counted; `number` is the paper's."""
    least = 0.98 * paper_number(number)
    return Claim(
        name=name,
        statement=statement,
        place="Abstract, Section 7.1",
        experiment=experiment,
        profile="counted",
        statistic=volume.reduction,
        measures="Adam's volume over 1-bit Adam's; higher is better",
        accepts=(least, inf),
        rule=(
            f"the bytes of the real messages, stage by stage, fall to 1/{least:.1f} or less "
            "(before: bytes counted at the wire of the whole run, which needs a cluster)"
        ),
        detail=volume.detail,
        paper=lambda: f"{paper_number(number)}x by the formula, at fp16",
        style=".2f",
        read=volume.reading(experiment),
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
        name=name,
        statement=f"Compressed, steps of {model} are several times as fast",
        place=place,
        experiment=experiment,
        statistic=statistic,
        measures="seconds per step of the warm-up over the compressed stage's; higher is better",
        least=NEAR * paper,
        rule=rule,
        paper=lambda: f"{paper:.3g}x{more}",
    )


CLAIMS = (
    measured(
        name="S1",
        statement="On a slow network most of a step of Adam is the exchange of gradients",
        place="Table 1, Section 3.1; 1-bit LAMB, Table 5",
        statistic=exchange_share,
        measures="share of a step that is not computation",
        accepts=(0.5, inf),
        rule="at 1 Gbit/s at least half of a step is not computation",
        paper=lambda: (
            f"{paper_number('exchange_share_ethernet'):.0f}% on Ethernet, "
            f"{paper_number('exchange_share_infiniband'):.0f}% on InfiniBand, at most; "
            f"{paper_number('lamb_exchange_share_ethernet'):.0f}% for LAMB"
        ),
        style=".0%",
    ),
    measured(
        name="S2",
        statement="At 1 Gbit/s a compressed step is several times as fast as one of Adam",
        place="Figure 9, Supplement",
        statistic=step_gain(1000),
        measures="time of a step of Adam over that of a compressed step; higher is better",
        accepts=(sqrt(paper_number("figure_9_gain_1000")), inf),
        rule=(
            f"at least {sqrt(paper_number('figure_9_gain_1000')):.1f} times, half of the paper's "
            "gain in logarithms"
        ),
        paper=lambda: f"{paper_number('figure_9_gain_1000')}x on 256 GPUs",
        style=".1f",
    ),
    measured(
        name="S3",
        statement="The slower the network, the larger the gain",
        place="Figure 9, Supplement; 1-bit LAMB, Figure 3",
        statistic=slower_over_faster,
        measures="gain at 200 Mbit/s over the gain at 1 Gbit/s; above 1 it grows",
        accepts=(1.0, inf),
        rule="the gain at 200 Mbit/s is larger than that at 1 Gbit/s",
        paper=lambda: (
            f"{paper_gain_at(200) / paper_gain_at(1000):.1f} times as large; up to "
            f"{paper_number('figure_9_gain_50')}x at 50 Mbit/s; of 1-bit LAMB at most "
            f"{paper_number('onebit_lamb_stage_speedup_infiniband')}x on InfiniBand"
        ),
        style=".1f",
    ),
    gains(
        name="S4",
        model="BERT-Large",
        place="Figure 5a, Section 7.1",
        experiment="figure_04",
        statistic=at_batch(1024, stage_gain("onebit_adam")),
        paper=paper_number("throughput_gain_64_gpus"),
        where="on 64 GPUs over Ethernet with batch=1024, 16 a GPU",
    ),
    gains(
        name="S5",
        model="BERT-Large with the batch of 4,096",
        place="Figure 5b, Section 7.1",
        experiment="figure_04",
        statistic=at_batch(4096, stage_gain("onebit_adam")),
        paper=paper_gain(),
        where="on 64 GPUs over Ethernet",
    ),
    on_cluster(
        name="S6",
        statement="With more GPUs 1-bit Adam goes on where Adam over Ethernet has stopped gaining",
        place="Figure 5b, Section 7.1",
        experiment="figure_04",
        statistic=at_batch(4096, lambda rows: throughput(rows) / adam_at_its_best()),
        measures="samples/s over those of the paper's Adam; higher is better",
        least=2.0,
        rule=(
            "its compressed stage on 64 GPUs processes at least twice the "
            f"{adam_at_its_best():,.0f} samples/s that the paper's Adam has at best"
        ),
        paper=lambda: f"{paper_onebit_adam() / adam_at_its_best():.1f} times",
    ),
    on_cluster(
        name="S7",
        statement="1-bit Adam over Ethernet is about as fast as Adam over InfiniBand",
        place="Figure 5b, Section 7.1",
        experiment="figure_04",
        statistic=at_batch(
            4096, lambda rows: throughput(rows) / paper_throughput("fig5b", "Adam (InfiniBand)", 64)
        ),
        measures="samples/s over those of the paper's Adam; higher is better",
        least=0.75,
        rule=(
            "its compressed stage on 64 GPUs over Ethernet processes at least three quarters of "
            "the samples/s of the paper's Adam over InfiniBand"
        ),
        paper=lambda: f"{paper_ethernet_over_infiniband():.2f}",
        style=".2f",
    ),
    gains(
        name="S8",
        model="SQuAD fine-tuning",
        place="Figure 5c, Section 7.1",
        experiment="squad",
        statistic=stage_gain("onebit_adam"),
        paper=paper_number("throughput_gain_squad"),
        where="on 32 GPUs over Ethernet",
    ),
    on_cluster(
        name="S9",
        statement="SQuAD fine-tuning takes a fraction of Adam's time, from beginning to end",
        place="Abstract, Section 7.1",
        experiment="squad",
        statistic=hours_ratio,
        measures="Adam's time over 1-bit Adam's; higher is better",
        least=NEAR * paper_number("squad_gain_up_to"),
        rule=(
            f"Adam takes at least {NEAR * paper_number('squad_gain_up_to'):.1f} times as long, "
            "on 32 GPUs"
        ),
        paper=lambda: f"up to {paper_number('squad_gain_up_to')}x",
    ),
    gains(
        name="S10",
        model="ResNet-152 on ImageNet",
        place="Figure 7, Section 7.2",
        experiment="imagenet",
        statistic=stage_gain("onebit_adam"),
        paper=paper_number("figure_7_gain_10_gbit"),
        where="over 10 Gbit/s Ethernet",
        more=f"; {paper_number('figure_7_gain_1_gbit')}x over 1 Gbit/s",
    ),
    gains(
        name="S11",
        model="1-bit LAMB on BERT-Large",
        place="1-bit LAMB, Figure 3",
        experiment="lamb",
        statistic=stage_gain("onebit_lamb"),
        paper=paper_number("onebit_lamb_stage_speedup_64k"),
        where="with a batch of 65,536 on 256 GPUs over Ethernet",
    ),
    gains(
        name="S14",
        model="1-bit LAMB on BERT-Large with a batch of 8,192",
        place="1-bit LAMB, Figure 3",
        experiment="lamb",
        statistic=at_batch(8192, stage_gain("onebit_lamb")),
        paper=paper_number("onebit_lamb_stage_speedup"),
        where="with batch=8192 on 256 GPUs over Ethernet",
    ),
    on_cluster(
        name="S15",
        statement="With a batch of 8,192 1-bit LAMB takes a fraction of LAMB's time",
        place="1-bit LAMB, p. 9",
        experiment="lamb",
        statistic=at_batch(
            8192, lambda rows: ratio_by_seed(rows, "seconds", "lamb", "onebit_lamb")
        ),
        measures="LAMB's time over 1-bit LAMB's; higher is better",
        least=NEAR * paper_number("onebit_lamb_speedup_8k"),
        rule=(
            f"LAMB takes at least {NEAR * paper_number('onebit_lamb_speedup_8k'):.1f} times as "
            "long, with batch=8192 on 256 GPUs over Ethernet"
        ),
        paper=lambda: f"{paper_number('onebit_lamb_speedup_8k')}x",
    ),
    on_cluster(
        name="S16",
        statement="Over Ethernet NCCL is faster than MPI as a backend of 1-bit LAMB",
        place="1-bit LAMB, Figure 7",
        experiment="lamb",
        statistic=at_batch(
            8192,
            lambda rows: (
                throughput(rows, "onebit_lamb") / paper_number("onebit_lamb_mpi_throughput_8k")
            ),
        ),
        measures="samples/s over those of the paper's MPI; higher is better",
        least=sqrt(nccl_over_mpi()),
        rule=(
            "its compressed stage, with NCCL and batch=8192 on 256 GPUs, processes at least "
            f"{sqrt(nccl_over_mpi()):.2f} times the "
            f"{paper_number('onebit_lamb_mpi_throughput_8k'):,.0f} samples/s of the paper's MPI, "
            "half of the gain in logarithms"
        ),
        paper=lambda: f"{nccl_over_mpi():.2f} times",
        style=".2f",
    ),
    counted(
        name="S12",
        statement="The volume of BERT-Large falls about fivefold",
        experiment="figure_04",
        number="volume_reduction_large_128",
    ),
    counted(
        name="S13",
        statement="The volume of BERT-Base falls about fivefold, over both sequence lengths",
        experiment="table_02_base",
        number="volume_reduction_base",
    ),
)
