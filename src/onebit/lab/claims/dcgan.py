"""DCGAN: Figure 8, whose curves the paper calls alike. It prints no score of the images.

Compared are the means over the last 10% of the steps, as ratios: of each player's loss, and of the sliced Wasserstein distance between
generated and held-out images (`onebit.lab.tasks.dcgan`), since a player's loss says as much of the other player as of itself.

MARGINS: at the end of the paper's Figure 8a 1-bit Adam's discriminator has a loss 6% below Adam's, and its generator one 31% above. Both
pass as alike in the paper, so they must here: 10% and 40%. No number of the paper says what a distance may be; a quarter is our choice.
"""

from collections.abc import Callable
from math import inf

import pandas as pd

from onebit.lab.claims.claim import (
    Claim,
    infinite_where_diverged,
    paper_tails,
    relative_gap,
    tail_mean,
)

MARGINS = {"loss_discriminator": 0.10, "loss_generator": 0.40, "sliced_wasserstein": 0.25}


def final(metric: str) -> Callable[[pd.DataFrame, str], pd.Series]:
    """Mean of a metric over the last TAIL of the steps, by seed; infinite if the run diverged."""
    return lambda rows, optimizer: infinite_where_diverged(
        tail_mean(rows, optimizer, metric), rows, optimizer
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
        accepts=(least, MARGINS[metric]),
        rule=rule,
        detail=means(metric, called),
        paper=paper,
        style="+.1%",
    )


def like(name: str, statement: str, player: str) -> Claim:
    metric = f"loss_{player.lower()}"
    margin = MARGINS[metric]
    return claim(
        name,
        statement,
        "Figure 8a, Section 7.3",
        metric,
        "loss",
        -margin,
        f"the difference from the loss with Adam, paired by seed, lies within ±{margin:.0%} of it",
        paper_loss(player),
    )


CLAIMS = (
    like(
        "C20",
        "A DCGAN's discriminator has the same loss with 1-bit Adam as with Adam",
        "Discriminator",
    ),
    like("C21", "A DCGAN's generator has the same loss with 1-bit Adam as with Adam", "Generator"),
    claim(
        "C22",
        "The images of a DCGAN trained with 1-bit Adam are as good as with Adam",
        "Figures 8b and 8c, Section 7.3",
        "sliced_wasserstein",
        "distance",
        -inf,
        f"their distance from held-out images lies at most {MARGINS['sliced_wasserstein']:.0%} above that with Adam, paired by seed",
        lambda: "shown, without a score",
    ),
)
