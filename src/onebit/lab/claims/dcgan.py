"""DCGAN: Figure 8, whose curves the paper calls alike. It prints no score of the images.

Means over the last 10% of the steps are compared, as ratios: of each player's loss, and of the
sliced Wasserstein distance between generated and held-out images (`onebit.lab.tasks.dcgan`), since
a player's loss says as much about the other player as about itself.

MARGINS: at the end of the paper's Figure 8a 1-bit Adam's discriminator has a loss 6% below Adam's,
and its generator one 31% above. The paper calls both alike, so both must pass here: 10% and 40%. No
number of the paper says how large a distance may be; a quarter is our choice.

The players' losses have spikes, which a mean over few steps follows. At `workstation` the median
over the last MEDIAN_TAIL of the steps is compared.
"""

from collections.abc import Callable
from math import inf

import pandas as pd

from onebit.lab.claims.claim import Claim
from onebit.lab.claims.statistics import (
    infinite_where_diverged,
    paper_tails,
    relative_gap,
    tail_mean,
    tail_median,
)

MARGINS = {"loss_discriminator": 0.10, "loss_generator": 0.40, "sliced_wasserstein": 0.25}
MEDIAN_TAIL = 0.3


def final(metric: str) -> Callable[[pd.DataFrame, str], pd.Series]:
    """The mean of a metric over the last TAIL of the steps, by seed; infinite if it diverged."""
    return lambda rows, optimizer: infinite_where_diverged(
        tail_mean(rows, optimizer, metric), rows, optimizer
    )


def middle(metric: str) -> Callable[[pd.DataFrame, str], pd.Series]:
    """The median of a metric over the last MEDIAN_TAIL, by seed; infinite if it diverged."""
    return lambda rows, optimizer: infinite_where_diverged(
        tail_median(rows, optimizer, metric, MEDIAN_TAIL), rows, optimizer
    )


def means(metric: str, called: str) -> Callable[[pd.DataFrame], str]:
    """The means over the runs that finished."""

    def text(rows: pd.DataFrame) -> str:
        ours, adams = (final(metric)(rows, optimizer) for optimizer in ("onebit_adam", "adam"))
        diverged = int((ours == inf).sum())
        return (
            f"{called} {ours[ours < inf].mean():.3f}"
            + f" ({diverged} of {len(ours)} diverged)" * (diverged > 0)
            + f", Adam {adams[adams < inf].mean():.3f}"
        )

    return text


def paper_loss(player: str) -> Callable[[], str]:
    def text() -> str:
        one, other = paper_tails("fig8a", f"{player} (1-bit Adam)", f"{player} (Adam)")
        return f"{one / other - 1:+.0%} (loss {one:.2f}, Adam {other:.2f})"

    return text


def claim(
    name: str,
    statement: str,
    place: str,
    metric: str,
    called: str,
    better: str,
    least: float,
    rule: str,
    paper: Callable[[], str],
) -> Claim:
    return Claim(
        name=name,
        statement=statement,
        place=place,
        experiment="figure_08",
        profile="laptop",
        statistic=relative_gap(final(metric), "onebit_adam"),
        measures=f"difference of the {called}, relative to that with Adam; {better}",
        accepts=(least, MARGINS[metric]),
        rule=rule,
        detail=means(metric, called),
        paper=paper,
        style="+.1%",
        at_workstation={
            "statistic": relative_gap(middle(metric), "onebit_adam"),
            "measures": (
                f"difference of the median {called}, relative to that with Adam; {better}"
            ),
            "rule": f"over the medians of the last {MEDIAN_TAIL:.0%} of the steps, {rule}",
        },
    )


def like(name: str, statement: str, player: str) -> Claim:
    metric = f"loss_{player.lower()}"
    margin = MARGINS[metric]
    return claim(
        name=name,
        statement=statement,
        place="Figure 8a, Section 7.3",
        metric=metric,
        called="loss",
        better="0 is equal",
        least=-margin,
        rule=(
            "the difference from the loss with Adam, paired by seed, lies within "
            f"±{margin:.0%} of it"
        ),
        paper=paper_loss(player),
    )


CLAIMS = (
    like(
        "C20",
        "A DCGAN's discriminator has the same loss with 1-bit Adam as with Adam",
        "Discriminator",
    ),
    like("C21", "A DCGAN's generator has the same loss with 1-bit Adam as with Adam", "Generator"),
    claim(
        name="C22",
        statement="The images of a DCGAN trained with 1-bit Adam are as good as with Adam",
        place="Figures 8b and 8c, Section 7.3",
        metric="sliced_wasserstein",
        called="distance",
        better="lower is better",
        least=-inf,
        rule=(
            "their distance from held-out images lies at most "
            f"{MARGINS['sliced_wasserstein']:.0%} above that with Adam, paired by seed"
        ),
        paper=lambda: "shown, without a score",
    ),
)
