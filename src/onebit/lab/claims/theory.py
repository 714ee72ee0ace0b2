"""Sections 4 and 5: error feedback and linear speedup, judged by results/theory.

The rules of the two experiments were written before their measurements and stand in the docstrings
of experiments/error_feedback.py and experiments/linear_speedup.py. This file judges them: as CLAIMS
of the papers, each with one number per seed, and in full as the tables that the experiments print,
`error_feedback_rules` and `linear_speedup_rules`. The rules of F5 and F6, which ask for -1/2 itself
and for a difference, were put in that form after the measurements.

MARGIN is how far an exponent may be from the corollary's. DOUBLE and TENFOLD are by how much f may
end above that of the run that is not compressed. LIMIT is the time of a core, in seconds, that a
run may take.
"""

from collections.abc import Callable
from math import inf

import pandas as pd

from onebit.lab.claims.claim import Claim
from onebit.lab.claims.statistics import Interval, mean_interval
from onebit.lab.claims.theory_statistics import (
    chosen,
    exponent,
    exponents,
    final,
    late_exponents,
    overlap,
    quadratic_share,
)

MARGIN = 0.05
DOUBLE, TENFOLD = 2.0, 10.0
LIMIT = 300.0
METHODS = {
    "onebit_adam": "1-bit Adam",
    "momentum_sgd": "momentum SGD",
    "momentum_sgd_own": "momentum SGD, own rate",
    "no_feedback": "1-bit, no feedback",
}


def above_exact(setting: str) -> Callable[[pd.DataFrame], pd.Series]:
    """SGD's f at the end over that of SGD that is not compressed, by seed."""
    return lambda rows: final(rows, "sums", setting, "f") / final(rows, "sums", "exact", "f")


def speedup_exponents(rows: pd.DataFrame, method: str = "onebit_adam") -> pd.Series:
    """The power of the number of workers with which the error changes at the largest T, by seed."""
    return exponents(rows[(rows.method == method) & (rows.steps == rows.steps.max())], "workers")


# ---- the experiments' rules in full


def error_feedback_rules(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each rule of experiments/error_feedback.py and whether it holds."""
    lost = mean_interval(late_exponents(rows, "sums", "none", "errors").to_numpy())
    kept = chosen(rows, "sums", "feedback", "errors")
    early = kept.step < kept.step.max() / 10
    growth = kept[~early].value.max() / kept[early].value.max()
    f = {name: final(rows, "sums", name, "f").mean() for name in ("exact", "feedback", "none")}
    share = mean_interval(quadratic_share(rows).to_numpy())
    squares = mean_interval(late_exponents(rows, "terms", "naive", "quadratic").to_numpy())
    every, tenth, never = (
        mean_interval(final(rows, "resets", k, "f").to_numpy()) for k in (1, 10, "never")
    )
    lines = [
        ("sum of errors, no feedback: grows like t to the", lost.shown(".3f"), "0.5 or more",
         lost.low >= 0.5),
        ("error with feedback: largest after T/10 over largest before", f"{growth:.2f}",
         "2 or less", growth <= DOUBLE),
        ("f at the end, feedback over not compressed", f"{f['feedback'] / f['exact']:.2f}",
         "2 or less", f["feedback"] <= DOUBLE * f["exact"]),
        ("f at the end, no feedback over not compressed", f"{f['none'] / f['exact']:.1f}",
         "10 or more", f["none"] >= TENFOLD * f["exact"]),
        ("quadratic term over squared gradient", share.shown(".2f"), "above 1", share.low > 1),
        ("quadratic term: grows like t to the", squares.shown(".3f"), "0.9 to 1.1",
         0.9 <= squares.low and squares.high <= 1.1),
        ("f, errors forgotten every step, above every 10 steps", every.shown(".4f"),
         tenth.shown(".4f"), every.low > tenth.high),
        ("f, errors forgotten every 10 steps, above never", tenth.shown(".4f"),
         never.shown(".4f"), tenth.low > never.high),
    ]  # fmt: skip
    return rule_table(lines)


def linear_speedup_rules(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each exponent and rule of experiments/linear_speedup.py."""
    lines = []
    for along, name in (("workers", "W"), ("steps", "T")):
        for method, label in METHODS.items():
            found = exponent(rows, method, along)
            bound = exponent(rows, method, along, "bound").mean
            holds = abs(found.mean - bound) <= MARGIN if method == "onebit_adam" else None
            lines.append(
                (
                    f"{label}: exponent in {name}",
                    found.shown(".4f"),
                    f"{bound:.4f}, the bound's",
                    holds,
                )
            )
    onebit, sgd = (exponent(rows, method, "workers") for method in ("onebit_adam", "momentum_sgd"))
    lines.append(
        (
            "1-bit Adam's exponent in W - momentum SGD's",
            exponent_difference(rows).shown(".4f"),
            "their intervals overlap",
            overlap(onebit, sgd),
        )
    )
    slowest = rows.seconds.max()
    lines.append(
        (
            "longest run, time of a core",
            f"{slowest:.0f} s",
            f"{LIMIT:.0f} s or less",
            slowest <= LIMIT,
        )
    )
    return rule_table(lines)


def exponent_difference(rows: pd.DataFrame) -> Interval:
    """The exponent of 1-bit Adam in W less that of momentum SGD, paired by seed."""
    difference = speedup_exponents(rows) - speedup_exponents(rows, "momentum_sgd")
    return mean_interval(difference.to_numpy())


def rule_table(lines: list[tuple[str, str, str, bool | None]]) -> pd.DataFrame:
    """(what, found, rule, whether it holds, None: no rule) as a table."""
    words = {True: "yes", False: "NO", None: ""}
    return pd.DataFrame(
        [
            {
                "what": what,
                "found": found,
                "rule": rule,
                "holds": words[None if holds is None else bool(holds)],
            }
            for what, found, rule, holds in lines
        ]
    )


# ---- the claims


def feedback(
    name: str,
    statement: str,
    section: str,
    statistic: Callable,
    measures: str,
    accepts: tuple[float, float],
    rule: str,
    style: str = ".2f",
) -> Claim:
    return Claim(
        name=name,
        statement=statement,
        place=section,
        experiment="error_feedback",
        profile="measured",
        statistic=statistic,
        measures=measures,
        accepts=accepts,
        rule=rule,
        paper=lambda: "argued, no number",
        style=style,
        folder="theory",
    )


def speedup(
    name: str,
    statement: str,
    place: str,
    statistic: Callable,
    measures: str,
    accepts: tuple[float, float],
    rule: str,
    paper: str,
) -> Claim:
    return Claim(
        name=name,
        statement=statement,
        place=place,
        experiment="linear_speedup",
        profile="measured",
        statistic=statistic,
        measures=measures,
        accepts=accepts,
        rule=rule,
        paper=lambda: paper,
        style="+.3f",
        folder="theory",
    )


F_AT_END = "f at the end over that of SGD without compression; 1 is equal"

CLAIMS = (
    feedback(
        name="F1",
        statement="Without error feedback the errors add up",
        section="Section 4.1",
        statistic=lambda rows: late_exponents(rows, "sums", "none", "errors"),
        measures="power of t with which the norm of the sum grows",
        accepts=(0.5, inf),
        rule="the norm of their sum grows like t^0.5 or faster",
    ),
    feedback(
        name="F2",
        statement=(
            "With error feedback the errors cancel, and SGD ends where uncompressed SGD does"
        ),
        section="Section 4.1",
        statistic=above_exact("feedback"),
        measures=F_AT_END,
        accepts=(-inf, DOUBLE),
        rule=f"f ends at most {DOUBLE:.0f} times as high, paired by seed",
    ),
    feedback(
        name="F3",
        statement="Without error feedback SGD does not end there",
        section="Section 4.1",
        statistic=above_exact("none"),
        measures=F_AT_END,
        accepts=(TENFOLD, inf),
        rule=f"f ends at least {TENFOLD:.0f} times as high, paired by seed",
        style=".1f",
    ),
    feedback(
        name="F4",
        statement="In Adam's variance the errors do not cancel: it takes in their square",
        section="Section 4.2",
        statistic=quadratic_share,
        measures="quadratic term over squared gradient",
        accepts=(1.0, inf),
        rule="summed over all steps the quadratic term is larger than the squared gradient",
    ),
    speedup(
        name="F5",
        statement="The error falls with the square root of the number of workers: linear speedup",
        place="Corollary 1; 1-bit LAMB, Corollary 1",
        statistic=speedup_exponents,
        measures="exponent of the error in W",
        accepts=(-0.5 - MARGIN, -0.5 + MARGIN),
        rule=f"the exponent of the error in W lies within {MARGIN} of -1/2",
        paper="-1/2, proved for many steps",
    ),
    speedup(
        name="F6",
        statement="The error falls with the workers as it does without compression",
        place="Section 5",
        statistic=lambda rows: speedup_exponents(rows) - speedup_exponents(rows, "momentum_sgd"),
        measures="difference of two exponents; 0 is equal",
        accepts=(-MARGIN, MARGIN),
        rule=(
            "the exponent of 1-bit Adam less that of momentum SGD lies within "
            f"±{MARGIN}, paired by seed"
        ),
        paper="the same, proved",
    ),
)
