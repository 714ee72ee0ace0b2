"""ResNet on CIFAR-10: Figures 6 and 10 to 13, judged by the runs of Figure 6.

The accuracy of a run is the mean test accuracy over the last 10% of its steps; its error is 100%
less that. Errors are compared as ratios, since a small network on a part of the data errs several
times as often as the paper's.

MARGIN is how far apart two errors may be and still count as the same. At the end of the paper's
Figures 6 and 10, 1-bit Adam's error is 3% below Adam's, Local SGD's and SGD's 9% below, and all are
said to work; the naive method's, which is said to fail, is 21% above it, and the errors of those
that Figures 12 and 13 reject are 18%, 23% and 30% above. A margin of 10% lets the first group pass
and stops the second.

Where a method is to fall behind, some seeds fall very far, and the mean of ratios says little. At
`workstation` the logarithms of the ratios are averaged.

SOME is the share of the way from chance, 10%, to Adam's accuracy below which a run has learned
nothing that would last: one half. In the paper's Figure 12 the methods that are called not
convergent end at chance. A run that diverged ends there.
"""

from collections.abc import Callable
from math import inf, log

import pandas as pd

from onebit.lab.claims.claim import Claim
from onebit.lab.claims.statistics import (
    Statistic,
    infinite_where_diverged,
    log_ratio,
    of_finished,
    paper_tails,
    relative_gap,
    tail_mean,
)
from onebit.lab.runs.load import paper_curve, paper_number

MARGIN = 0.10
SOME = 0.5
CHANCE = 10.0  # %, of 10 classes


def final_error(rows: pd.DataFrame, optimizer: str) -> pd.Series:
    """100% less the mean test accuracy over the last TAIL of the steps, by seed.

    Infinite if the run diverged.
    """
    return infinite_where_diverged(
        100 - tail_mean(rows, optimizer, "test_accuracy"), rows, optimizer
    )


def error_relative_to(called: str) -> str:
    """What `error_gap` measures, in words."""
    return f"difference of the test error, relative to {called}'s; lower is better"


def error_gap(optimizer: str, reference: str = "adam") -> Statistic:
    """The difference of the error from the reference's, relative to it."""
    return relative_gap(final_error, optimizer, reference)


def progress(optimizer: str) -> Statistic:
    """(accuracy - chance) / (Adam's accuracy - chance), by seed.

    0 if the run diverged; a seed at which Adam diverged gives no number.
    """

    def above_chance(rows: pd.DataFrame, name: str) -> pd.Series:
        return 100 - CHANCE - final_error(rows, name)

    return lambda rows: (
        above_chance(rows, optimizer).clip(lower=0)
        / above_chance(rows, "adam").replace(-inf, float("nan"))
    ).dropna()


def accuracies(*optimizers: str) -> Callable[[pd.DataFrame], str]:
    """The mean accuracies, over the runs that finished."""

    def text(rows: pd.DataFrame) -> str:
        return "accuracy " + ", ".join(f"{name} {mean_accuracy(rows, name)}" for name in optimizers)

    return text


def mean_accuracy(rows: pd.DataFrame, optimizer: str) -> str:
    error = final_error(rows, optimizer)
    diverged = int((error == inf).sum())
    if diverged == len(error):
        return "diverged at every seed"
    return f"{100 - error[error < inf].mean():.1f}%" + f" ({diverged} of {len(error)} diverged)" * (
        diverged > 0
    )


def paper_accuracy(figure: str, curve: str, reference: str = "Adam") -> Callable[[], str]:
    """The same statistic on two curves of the paper."""

    def text() -> str:
        one, two = (paper_tails(figure, name)[0] for name in (curve, reference))
        return f"{(100 - one) / (100 - two) - 1:+.0%} (accuracy {one:.1f}%, {reference} {two:.1f}%)"

    return text


def paper_progress(accuracy: Callable[[], float]) -> Callable[[], str]:
    """The progress of an accuracy of the paper's Figure 12."""

    def text() -> str:
        adam = paper_tails("fig12b", "Adam")[0]
        share = max(0, accuracy() - CHANCE) / (adam - CHANCE)
        return f"{share:.2f} (accuracy {accuracy():.1f}%, Adam {adam:.1f}%)"

    return text


def like(optimizer: str) -> dict:
    return {
        "statistic": error_gap(optimizer),
        "measures": error_relative_to("Adam"),
        "accepts": (-MARGIN, MARGIN),
        "style": "+.1%",
        "detail": accuracies(optimizer, "adam"),
        "rule": (
            "the difference from Adam's test error, paired by seed, lies within "
            f"±{MARGIN:.0%} of it"
        ),
    }


def works(optimizer: str) -> dict:
    return {
        "statistic": error_gap(optimizer),
        "measures": error_relative_to("Adam"),
        "accepts": (-inf, MARGIN),
        "style": "+.1%",
        "detail": accuracies(optimizer, "adam"),
        "rule": f"its test error lies at most {MARGIN:.0%} above Adam's, paired by seed",
    }


def behind(optimizer: str) -> dict:
    return {
        "statistic": of_finished(error_gap(optimizer)),
        "measures": error_relative_to("Adam"),
        "accepts": (MARGIN, inf),
        "style": "+.1%",
        "detail": accuracies(optimizer, "adam"),
        "rule": f"its test error lies more than {MARGIN:.0%} above Adam's, paired by seed",
        "at_workstation": {
            "statistic": of_finished(log_ratio(error_gap(optimizer))),
            "measures": "natural logarithm of its test error over Adam's; lower is better",
            "accepts": (log(1 + MARGIN), inf),
            "style": "+.3f",
            "rule": (
                "the mean logarithm of its test error over Adam's, paired by seed, is above "
                f"log {1 + MARGIN:.1f} = {log(1 + MARGIN):.3f}"
            ),
        },
    }


def ahead(optimizer: str, reference: str = "onebit_adam", called: str = "1-bit Adam") -> dict:
    return {
        "statistic": error_gap(optimizer, reference),
        "measures": error_relative_to(called),
        "accepts": (-inf, -MARGIN),
        "style": "+.1%",
        "detail": accuracies(optimizer, reference),
        "rule": f"its test error lies more than {MARGIN:.0%} below {called}'s, paired by seed",
    }


def lost(optimizer: str) -> dict:
    return {
        "statistic": progress(optimizer),
        "measures": "share of the way from chance to Adam's accuracy; higher is better",
        "accepts": (-inf, SOME),
        "style": ".2f",
        "detail": accuracies(optimizer, "adam"),
        "rule": (
            f"it ends less than {SOME:.0%} of the way from chance to Adam's accuracy, paired by "
            "seed"
        ),
    }


def claim(name: str, statement: str, place: str, judged: dict, paper: Callable[[], str]) -> Claim:
    return Claim(
        name=name,
        statement=statement,
        place=place,
        experiment="figure_06",
        profile="laptop",
        paper=paper,
        **judged,
    )


CLAIMS = (
    claim(
        name="C8",
        statement="On ResNet-18, 1-bit Adam generalises like Adam",
        place="Figures 6b and 10b, Section 7.2",
        judged=like("onebit_adam"),
        paper=paper_accuracy("fig6b", "1-bit Adam"),
    ),
    claim(
        name="C9",
        statement=(
            "On ResNet-18, Adam with the variance frozen, but nothing compressed, generalises "
            "like Adam"
        ),
        place="Figure 6b, Section 7.2",
        judged=like("onebit_adam_32bit"),
        paper=paper_accuracy("fig6b", "1-bit Adam (32-bits)"),
    ),
    claim(
        name="C10",
        statement="On ResNet-18, Adam on naively compressed 1-bit gradients falls behind",
        place="Figure 6b, Section 7.2",
        judged=behind("naive_onebit_adam"),
        paper=paper_accuracy("fig6b", "Adam (1-bit Naive)"),
    ),
    claim(
        name="C11",
        statement="DoubleSqueeze works on ResNet-18",
        place="Figure 10b, Supplement",
        judged=works("double_squeeze"),
        paper=paper_accuracy("fig10b", "DoubleSqueeze"),
    ),
    claim(
        name="C12",
        statement="Local SGD works on ResNet-18",
        place="Figure 10b, Supplement",
        judged=works("local_sgd"),
        paper=paper_accuracy("fig10b", "Local SGD"),
    ),
    claim(
        name="C13",
        statement="On ResNet-18, EF momentum SGD does better than 1-bit Adam",
        place="Figure 11b, Supplement",
        judged=ahead("ef_momentum_sgd"),
        paper=paper_accuracy("fig11b", "EF Momentum SGD", "1-bit Adam"),
    ),
    claim(
        name="C14",
        statement="On ResNet-18, local SGD with momentum does better than 1-bit Adam",
        place="Figure 11b, Supplement",
        judged=ahead("local_momentum_sgd"),
        paper=paper_accuracy("fig11b", "Local SGD with Momentum", "1-bit Adam"),
    ),
    claim(
        name="C15",
        statement="With a variance sent in 4 bits Adam does not converge",
        place="Figure 12b, Supplement",
        judged=lost("adam_variance_4bit"),
        paper=paper_progress(lambda: paper_number("figure_12_4bit_accuracy")),
    ),
    claim(
        name="C16",
        statement="With a variance sent in 8 bits Adam does not converge",
        place="Figure 12b, Supplement",
        judged=lost("adam_variance_8bit"),
        paper=paper_progress(lambda: paper_curve("fig12b", "8-bit variance").y.iloc[-1]),
    ),
    claim(
        name="C17",
        statement="With a variance sent in 16 bits Adam falls behind",
        place="Figure 12b, Supplement",
        judged=behind("adam_variance_16bit"),
        paper=paper_accuracy("fig12b", "16-bit variance"),
    ),
    claim(
        name="C18",
        statement="With a variance that is averaged every 3 steps Adam falls behind",
        place="Figure 13b, Supplement",
        judged=behind("lazy_variance_3"),
        paper=paper_accuracy("fig13b", "lazy variance tau=3"),
    ),
    claim(
        name="C19",
        statement="With a variance that is averaged every 5 steps Adam falls behind",
        place="Figure 13b, Supplement",
        judged=behind("lazy_variance_5"),
        paper=paper_accuracy("fig13b", "lazy variance tau=5"),
    ),
    claim(
        name="C27",
        statement="On ResNet-18, uncompressed momentum SGD does better than Adam",
        place="Figure 11b, Supplement",
        judged=ahead("momentum_sgd", "adam", "Adam"),
        paper=paper_accuracy("fig11b", "Momentum SGD"),
    ),
)
