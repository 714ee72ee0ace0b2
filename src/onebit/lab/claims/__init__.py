"""The papers' claims, and the rule for each, written before the runs.

A claim is judged by one statistic, a number per seed, and the range that the statistic has to lie in:

    reproduced        its 95% t-interval over the seeds lies inside the range
    not reproduced    the interval lies outside the range
    partly            it lies across a border, so the runs show neither
    not judged        fewer than three seeds
    needs a cluster   the statistic needs the paper's own hardware, and nobody has added such runs

Two optimizers are compared seed by seed, since a seed fixes the initial weights and the order of the data.

A run can diverge. A seed at which Adam did gives no number, so n is smaller by it. Where only 1-bit Adam did, it is
infinitely far behind. Naive 1-bit gradients, and whatever else is to fall behind, are judged by the runs that finished, and the
detail says how many did not: one run that diverges must not decide alone. If they diverged at every seed, they have fallen behind.
Volumes, times and variances are those of runs that finished.

A module for each experiment says what its margins are, and why.
"""

from onebit.lab.claims import (
    bert,
    dcgan,
    finetune,
    lamb,
    resnet,
    speed,
    theory,
    zero_one_adam,
)
from onebit.lab.claims.claim import TAIL, Claim, Interval, rows_of, statistic_by_seed

__all__ = ["CLAIMS", "TAIL", "Claim", "Interval", "rows_of", "statistic_by_seed"]

CLAIMS = (
    *bert.CLAIMS,
    *resnet.CLAIMS,
    *dcgan.CLAIMS,
    *finetune.CLAIMS,
    *zero_one_adam.CLAIMS,
    *lamb.CLAIMS,
    *theory.CLAIMS,
    *speed.CLAIMS,
)
