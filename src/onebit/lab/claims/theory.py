"""Sections 4 and 5: error feedback, and linear speedup. Judged by results/theory, whose rules stand in experiments/error_feedback.py and
linear_speedup.py and were written before their measurements; here each is put as one number per seed. Those of F5 and F6, which ask for -1/2 itself
and for a difference, were put so after them.

MARGIN, how far an exponent may be from the corollary's, and DOUBLE, TENFOLD, by how much f may end above that of the run that is not
compressed, are those of these rules.
"""

from collections.abc import Callable
from math import inf

import numpy as np
import pandas as pd

from onebit.lab.claims.claim import Claim

MARGIN = 0.05
DOUBLE, TENFOLD = 2.0, 10.0


def exponents(rows: pd.DataFrame, along: str, value: str = "error") -> pd.Series:
    """The slope of log(value) against log(along) by least squares, for each seed."""
    return rows.groupby("seed").apply(
        lambda own: np.polyfit(np.log(own[along]), np.log(own[value]), 1)[0], include_groups=False
    )


def chosen(rows: pd.DataFrame, part: str, setting: str, quantity: str) -> pd.DataFrame:
    """Of error_feedback.csv."""
    found = rows[
        (rows.part == part)
        & (rows.setting.astype(str) == str(setting))
        & (rows.quantity == quantity)
    ]
    return found[["step", "seed", "value"]]


def final(rows: pd.DataFrame, part: str, setting: str, quantity: str) -> pd.Series:
    """The value at the last step, by seed."""
    found = chosen(rows, part, setting, quantity)
    return found[found.step == found.step.max()].set_index("seed").value


def late_exponents(rows: pd.DataFrame, part: str, setting: str, quantity: str) -> pd.Series:
    """With which power of t a quantity grows from T / 10 to T, by seed."""
    found = chosen(rows, part, setting, quantity)
    return exponents(found[found.step >= found.step.max() / 10], "step", "value")


def above_exact(setting: str) -> Callable[[pd.DataFrame], pd.Series]:
    """SGD's f at the end over that of SGD that is not compressed, by seed."""
    return lambda rows: final(rows, "sums", setting, "f") / final(rows, "sums", "exact", "f")


def quadratic_share(rows: pd.DataFrame) -> pd.Series:
    """sum of (delta_{t-1} - delta_t)^2 over sum of g_t^2, by seed."""
    return final(rows, "terms", "naive", "quadratic") / final(
        rows, "terms", "naive", "squared gradient"
    )


def speedup_exponents(rows: pd.DataFrame, method: str = "onebit_adam") -> pd.Series:
    """With which power of the number of workers the error changes at the largest T, by seed."""
    return exponents(rows[(rows.method == method) & (rows.steps == rows.steps.max())], "workers")


def feedback(
    name: str,
    statement: str,
    section: str,
    statistic: Callable,
    accepts: tuple[float, float],
    rule: str,
    paper: str,
    style: str,
) -> Claim:
    return Claim(
        name,
        statement,
        section,
        "error_feedback",
        "measured",
        statistic,
        accepts,
        rule,
        lambda rows: "",
        lambda: paper,
        style,
        "theory",
    )


CLAIMS = (
    feedback(
        "F1",
        "Without error feedback the errors add up",
        "Section 4.1",
        lambda rows: late_exponents(rows, "sums", "none", "errors"),
        (0.5, inf),
        "the norm of their sum grows like t^0.5 or faster",
        "argued, no number",
        ".2f",
    ),
    feedback(
        "F2",
        "With error feedback the errors cancel, and SGD ends where uncompressed SGD does",
        "Section 4.1",
        above_exact("feedback"),
        (-inf, DOUBLE),
        f"f ends at most {DOUBLE:.0f} times as high, paired by seed",
        "argued, no number",
        ".2f",
    ),
    feedback(
        "F3",
        "Without error feedback SGD does not end there",
        "Section 4.1",
        above_exact("none"),
        (TENFOLD, inf),
        f"f ends at least {TENFOLD:.0f} times as high, paired by seed",
        "argued, no number",
        ".1f",
    ),
    feedback(
        "F4",
        "In Adam's variance the errors do not cancel: it takes in their square",
        "Section 4.2",
        quadratic_share,
        (1.0, inf),
        "summed over all steps the quadratic term is larger than the squared gradient",
        "argued, no number",
        ".2f",
    ),
    Claim(
        "F5",
        "The error falls with the square root of the number of workers: linear speedup",
        "Corollary 1; 1-bit LAMB, Corollary 1",
        "linear_speedup",
        "measured",
        speedup_exponents,
        (-0.5 - MARGIN, -0.5 + MARGIN),
        f"the exponent of the error in W lies within {MARGIN} of -1/2",
        lambda rows: "",
        lambda: "-1/2, proved for many steps",
        "+.3f",
        "theory",
    ),
    Claim(
        "F6",
        "The error falls with the workers as it does without compression",
        "Section 5",
        "linear_speedup",
        "measured",
        lambda rows: speedup_exponents(rows) - speedup_exponents(rows, "momentum_sgd"),
        (-MARGIN, MARGIN),
        f"the exponent of 1-bit Adam less that of momentum SGD lies within ±{MARGIN}, paired by seed",
        lambda rows: "",
        lambda: "the same, proved",
        "+.3f",
        "theory",
    ),
)
