"""1-bit LAMB beside LAMB and LAMB + basic 1-bit, in which v and c are frozen: runs of lamb.

The loss of a run is the mean training loss over the last 10% of its steps; the paper's Table 2 has
validation losses.

MARGIN is how far apart two losses may be and still count as the same. In Table 2, 1-bit LAMB's is
0.6% below LAMB's, which is said to be the same convergence, and that of basic 1-bit is 3.0% above,
which is said to fail. A margin of 1.5% lets the first pass and is half of the second.

FALLS is by how much a variance norm falls after T_w that is still moving: the factor 2 within which
Adam's is to stay (claim C6).

How far apart the tensors' coefficients are to lie is half of the way, in logarithms, that the
bounds 0.01 and 0.3 allow. At `workstation` tensors that lie on a bound, within CLIPPED of it, are
left out: they show the clip and not a level of their own. At `laptop` they were counted.

FOLLOWS is the rank correlation over the tensors between r and the fall of the variance norm, for
which the paper prints no number: what chance alone exceeds once in twenty times among 43 tensors,
1.645 / sqrt(42).

Statements on tensors leave out `statistics.UNSTEADY_TENSORS`.
"""

from collections.abc import Callable, Mapping
from math import inf, sqrt
from types import MappingProxyType
from typing import Any

import pandas as pd

from onebit.lab.claims import bert
from onebit.lab.claims.bert import losses
from onebit.lab.claims.claim import Claim
from onebit.lab.claims.statistics import (
    TAIL,
    by_steady_tensor,
    finished,
    loss_gap,
    of_finished,
    ratio_by_seed,
    volume_share,
)
from onebit.lab.runs.load import by_tensor, paper_number

MARGIN = 0.015
FALLS = 2.0
FOLLOWS = 0.25
CLIPPED = 0.01
LOSS = "difference of the loss, relative to LAMB's; lower is better"


def spread_allowed() -> float:
    """The square root of c_max / c_min."""
    return sqrt(paper_number("lamb_coefficient_max") / paper_number("lamb_coefficient_min"))


def tail(run: pd.DataFrame, quantity: str) -> pd.Series:
    """The mean of a quantity over the last TAIL of a run's steps, by tensor."""
    return by_steady_tensor(run[run.step > (1 - TAIL) * run.total_steps], quantity).mean()


def variance_fall(run: pd.DataFrame) -> pd.Series:
    """||v|| at T_w over its mean in the last TAIL of a run, by tensor."""
    since = by_steady_tensor(run[run.step >= run.warmup_steps], "variance").dropna()
    return since.iloc[0] / tail(run, "variance") if len(since) else pd.Series(dtype=float)


def by_seed(
    statistic: Callable[[pd.DataFrame], float], optimizer: str = "lamb"
) -> Callable[[pd.DataFrame], pd.Series]:
    """The statistic of each run of an optimizer that finished and was watched."""

    def of_rows(rows: pd.DataFrame) -> pd.Series:
        runs = (
            finished(rows, optimizer).groupby("seed")
            if len(by_tensor(rows, "variance").columns)
            else ()
        )
        return pd.Series({seed: statistic(run) for seed, run in runs}, dtype=float).dropna()

    return of_rows


def spread(run: pd.DataFrame) -> float:
    """The largest coefficient over the smallest, of the tensors' means at the end."""
    coefficients = tail(run, "coefficient")
    return coefficients.max() / coefficients.min()


def off_bounds(coefficients: pd.Series) -> pd.Series:
    """The coefficients that do not lie on c_min or c_max, within CLIPPED of it."""
    low, high = (paper_number(f"lamb_coefficient_{end}") for end in ("min", "max"))
    return coefficients[
        (coefficients > low * (1 + CLIPPED)) & (coefficients < high * (1 - CLIPPED))
    ]


def spread_off_bounds(run: pd.DataFrame) -> float:
    """As `spread`, of the tensors whose mean coefficient is not clipped; 1 if there are none."""
    coefficients = off_bounds(tail(run, "coefficient"))
    return coefficients.max() / coefficients.min() if len(coefficients) else 1.0


def ratio_follows_variance(rows: pd.DataFrame) -> pd.Series:
    """The rank correlation, over tensors, of 1-bit LAMB's mean r with the fall of LAMB's ||v||.

    By seed; 0 if one of the two is constant.
    """
    found = {}
    for seed, run in finished(rows, "onebit_lamb").groupby("seed"):
        lamb = finished(rows, "lamb")
        fall = variance_fall(lamb[lamb.seed == seed])
        ratio = by_steady_tensor(run[run.step > run.warmup_steps], "ratio").mean()
        if len(fall) and len(ratio):
            found[seed] = (
                ratio.corr(fall[ratio.index], method="spearman")
                if min(ratio.nunique(), fall.nunique()) > 1
                else 0.0
            )
    return pd.Series(found, dtype=float)


def volume_over_formula(rows: pd.DataFrame) -> pd.Series:
    """Measured volume reduction over the formula's at fp32, by seed."""
    reduction = ratio_by_seed(rows, "bytes_sent", "lamb", "onebit_lamb")
    return reduction if reduction.empty else reduction * share(rows)


def share(rows: pd.DataFrame) -> float:
    """1-bit LAMB's volume as a share of LAMB's, by the formula."""
    run = rows[rows.optimizer == "onebit_lamb"].iloc[0]
    return volume_share(run.warmup_steps / run.total_steps)


def paper_losses(optimizer: str) -> Callable[[], str]:
    """The losses of Table 2 and their difference."""

    def text() -> str:
        compared, lamb = (paper_number(f"{name}_validation_loss") for name in (optimizer, "lamb"))
        return f"{compared / lamb - 1:+.1%} (validation loss {compared:.3f}, LAMB {lamb:.3f})"

    return text


def paper_losses_16k() -> str:
    adam, lamb = (paper_number(f"{name}_16k_validation_loss") for name in ("onebit_adam", "lamb"))
    return (
        f"{adam / lamb - 1:+.1%} (validation loss {adam:.3f}, LAMB {lamb:.3f}, batch 16K); "
        f"F1 on SQuAD {paper_number('onebit_adam_16k_squad_f1'):.1f}, "
        f"LAMB {paper_number('lamb_16k_squad_f1'):.1f}"
    )


def falls_detail(rows: pd.DataFrame) -> str:
    falls = pd.concat([variance_fall(run) for _, run in finished(rows, "lamb").groupby("seed")])
    return f"between {falls.min():.2g} and {falls.max():.2g} by tensor"


def spread_detail(rows: pd.DataFrame) -> str:
    means = pd.concat(
        [tail(run, "coefficient") for _, run in finished(rows, "lamb").groupby("seed")]
    )
    return (
        f"c from {means.min():.3f} to {means.max():.3f}; {len(means) - len(off_bounds(means))} of "
        f"{len(means)} lie on a bound of the clip"
    )


def claim(
    name: str,
    statement: str,
    place: str,
    statistic: Callable,
    measures: str,
    accepts: tuple[float, float],
    rule: str,
    detail: Callable,
    paper: Callable,
    style: str,
    profile: str = "laptop",
    experiment: str = "lamb",
    at_workstation: Mapping[str, Any] = MappingProxyType({}),
) -> Claim:
    return Claim(
        name=name,
        statement=statement,
        place=f"1-bit LAMB, {place}",
        experiment=experiment,
        profile=profile,
        statistic=statistic,
        measures=measures,
        accepts=accepts,
        rule=rule,
        detail=detail,
        paper=paper,
        style=style,
        at_workstation=at_workstation,
    )


CLAIMS = (
    claim(
        name="L1",
        statement="1-bit LAMB converges like LAMB, sample for sample",
        place="Figure 2, Table 2",
        statistic=loss_gap("onebit_lamb", "lamb"),
        measures=LOSS,
        accepts=(-MARGIN, MARGIN),
        rule=f"the difference from LAMB's loss, paired by seed, lies within ±{MARGIN:.1%}",
        detail=losses("onebit_lamb", "lamb", "LAMB"),
        paper=paper_losses("onebit_lamb"),
        style="+.1%",
    ),
    claim(
        name="L2",
        statement="LAMB + basic 1-bit, with v and c frozen, falls behind",
        place="Table 2",
        statistic=of_finished(loss_gap("lamb_basic_onebit", "lamb")),
        measures=LOSS,
        accepts=(MARGIN, inf),
        rule=f"its loss lies more than {MARGIN:.1%} above LAMB's, paired by seed",
        detail=losses("lamb_basic_onebit", "lamb", "LAMB"),
        paper=paper_losses("lamb_basic_onebit"),
        style="+.1%",
    ),
    claim(
        name="L3",
        statement="LAMB's variance norms keep falling after T_w",
        place="Figures 1, 4 and 5",
        statistic=by_seed(lambda run: variance_fall(run).median()),
        measures="factor by which the median ||v|| falls; above 1 it falls",
        accepts=(FALLS, inf),
        rule=(
            "from T_w to the end the median over the tensors falls by more than a factor of "
            f"{FALLS:.0f}"
        ),
        detail=falls_detail,
        paper=lambda: f"up to {paper_number('lamb_variance_fall_up_to'):.0f}x over the run",
        style=".2f",
    ),
    claim(
        name="L4",
        statement="LAMB's coefficients settle at levels of their own, tensor by tensor",
        place="Figures 1, 4 and 5",
        statistic=by_seed(spread),
        measures="largest coefficient over the smallest; 1 is equal",
        accepts=(spread_allowed(), inf),
        rule=f"at the end the largest is more than {spread_allowed():.1f} times the smallest",
        detail=spread_detail,
        paper=lambda: (
            f"levels between {paper_number('lamb_coefficient_min')} and "
            f"{paper_number('lamb_coefficient_max')}"
        ),
        style=".1f",
        at_workstation={
            "statistic": by_seed(spread_off_bounds),
            "measures": "largest coefficient over the smallest, off the clip's bounds; 1 is equal",
            "rule": (
                "at the end, among the tensors that do not lie on a bound of the clip, the largest "
                f"is more than {spread_allowed():.1f} times the smallest"
            ),
        },
    ),
    claim(
        name="L5",
        statement="1-bit LAMB's ratios are larger where the variance is less stable",
        place="Figure 6",
        statistic=ratio_follows_variance,
        measures="rank correlation, from -1 to 1",
        accepts=(FOLLOWS, inf),
        rule=(
            "over the tensors the rank correlation of r with the fall of LAMB's variance norm is "
            f"above {FOLLOWS}"
        ),
        detail=lambda rows: "",
        paper=lambda: "larger for embeddings and the layers' weights",
        style="+.2f",
    ),
    claim(
        name="L6",
        statement="The volume falls to w + (1 - w)/32 of LAMB's, w the share of warm-up steps",
        place="p. 8",
        statistic=volume_over_formula,
        measures="measured reduction of the volume over the formula's; 1 is equal",
        accepts=(0.98, 1.02),
        rule="bytes counted at the wire give the formula's reduction at fp32 within 2%",
        detail=lambda rows: f"{1 / share(rows):.2f}x by the formula",
        paper=lambda: f"{paper_number('onebit_lamb_volume_reduction')}x at fp16",
        style=".3f",
    ),
    claim(
        name="L7",
        statement="On a slow network 1-bit LAMB trains BERT-Large about twice as fast",
        place="Table 4",
        statistic=lambda rows: ratio_by_seed(rows, "seconds", "lamb", "onebit_lamb"),
        measures="LAMB's time over 1-bit LAMB's; higher is better",
        accepts=(2.0, inf),
        rule="at least 2 times faster than LAMB on 256 GPUs over Ethernet",
        detail=lambda rows: f"{finished(rows, 'onebit_lamb').seconds.max() / 60:.0f} min",
        paper=lambda: (
            f"{paper_number('onebit_lamb_speedup')}x ({paper_number('lamb_minutes'):.0f} min to "
            f"{paper_number('onebit_lamb_minutes'):.0f} min)"
        ),
        style=".1f",
        profile="paper",
    ),
    claim(
        name="L8",
        statement="In batches as large as LAMB's 1-bit Adam, like Adam, ends above LAMB",
        place="Table 1",
        statistic=of_finished(loss_gap("onebit_adam", "lamb")),
        measures=LOSS,
        accepts=(MARGIN, inf),
        rule=(
            "with a learning rate of its own its loss lies more than "
            f"{MARGIN:.1%} above LAMB's, paired by seed"
        ),
        detail=losses("onebit_adam", "lamb", "LAMB"),
        paper=paper_losses_16k,
        style="+.1%",
        profile="workstation",
        experiment="lamb_16k",
    ),
    Claim(
        name="L9",
        statement=(
            "One scale for all tensors is enough if their momenta are scaled alike at the freeze"
        ),
        place="1-bit LAMB, p. 17",
        experiment="figure_04",
        profile="laptop",
        statistic=loss_gap("onebit_adam_fused", "onebit_adam"),
        measures="difference of the loss, relative to 1-bit Adam's; lower is better",
        accepts=(-bert.MARGIN, bert.MARGIN),
        rule=(
            "the difference from the loss of 1-bit Adam with a scale for each tensor, paired by "
            f"seed, lies within ±{bert.MARGIN:.0%}"
        ),
        detail=losses("onebit_adam_fused", "onebit_adam", "a scale for each tensor"),
        paper=lambda: "said, no number",
        style="+.1%",
    ),
)
