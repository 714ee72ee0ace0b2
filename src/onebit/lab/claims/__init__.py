"""The papers' claims and the rule for each.

A claim is judged by one statistic, a number per seed, and by the range that it has to lie in:

    reproduced        the statistic's 95% t-interval over the seeds lies inside the range
    not reproduced    the interval lies outside the range
    partly            it lies across a border, so the runs show neither
    not judged        there are fewer than three seeds
    needs a cluster   the statistic needs the paper's own hardware, and nobody has added such runs

The rules were written before the runs, except those of `judge.WRITTEN_AFTER`. Two optimizers are
compared seed by seed, since a seed fixes the initial weights and the order of the data.

A run can diverge. A seed at which Adam diverged gives no number, so n is smaller by one. Where only
1-bit Adam diverged, it is infinitely far behind. Naive 1-bit gradients, and whatever else is
expected to fall behind, are judged by the runs that finished, and the detail says how many did not:
one run that diverges must not decide alone. If they diverged at every seed, they have fallen
behind. Volumes, times and variances are those of runs that finished.

Each experiment has a module, which says what its margins are and why. `statistics` has what the
experiments, figures and tables share.
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
from onebit.lab.claims.claim import Claim, rows_of, statistic_by_seed

__all__ = ["CLAIMS", "Claim", "rows_of", "statistic_by_seed"]

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
