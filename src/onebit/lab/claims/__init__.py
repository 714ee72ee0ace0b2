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

Claims that two cores can test are judged by runs of two profiles. `laptop` was first; its small
BERT is still on its first plateau at T_w, so that the papers' premise, a variance that has settled,
does not hold there. `workstation` is the papers' regime. The verdict of a claim is that of the
larger profile which has been run, and the report shows the other one beside it. These rules for
`workstation` were written on 2026-12-01, before its first run:

- The statistic and the range of a claim are those of `laptop`, with five exceptions, which were
  written after the first runs of figure_04 had begun and before any run of the experiments that
  they judge: in L4 only tensors off the bounds of the clip count; C10, C17, C18 and C19 average
  logarithms of ratios; C20 to C22 compare medians; Z4 counts rounds and not collectives. The old
  rule and its verdict stand beside.
- A claim is judged by at least WORKSTATION_SEEDS seeds. Planned are 6, and 8 for LAMB. For losses
  whose paired difference has the standard deviation s = 0.6 %, as at `laptop`, the half-width of
  the interval is 2.48 s = 1.5 % at n = 3, 1.05 s = 0.6 % at n = 6 and 0.84 s = 0.5 % at n = 8; an
  equality within 3 % can then be shown if the true difference is at most 2.4 % at n = 6.
- The report gives the least detectable difference, which a two-sided test at 5 % finds with a
  power of 80 %: (t_{0.975, n-1} + t_{0.8, n-1}) s / sqrt(n).
- 0/1 Adam updates its variance until T_w, and 64 times at each distance. With the numbers of its
  authors' script (`zero_one_adam_script`) it freezes a variance that still grows; those runs are
  shown, and judge no claim.

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
