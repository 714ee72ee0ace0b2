"""The bound of a compressed step: it gives back the defence that a frozen variance takes away."""

import math
from collections.abc import Sequence

from onebit.optim.adam import DistributedAdam
from onebit.optim.bucket import Bucket
from onebit.optim.run_state import Option


def largest_step(beta1: float, beta2: float) -> float:
    """How many learning rates Adam moves a coordinate by at most: Kingma and Ba, section 2.1.

        max(1, (1 - beta1) / sqrt(1 - beta2))

    It is 3.16 for beta1 = 0.9 and beta2 = 0.999. Adam reaches it where a gradient comes after many
    that were zero, such as an outlier: however large it is, v grows with its square.
    """
    return max(1.0, (1 - beta1) / math.sqrt(1 - beta2))


class BoundedSteps(DistributedAdam):
    """What optimizers with a frozen variance share: |m_hat| / (sqrt(v) + eps) <= `largest_step`.

    Once v is frozen, it does not grow with the gradient, so that one outlier, or noise on a
    coordinate that had next to no gradient before, could move a parameter without limit. With
    `bound_steps` the step is clipped where Adam's own would end. Momentum, errors and messages
    stay as they are, and with them the law that nothing is lost.
    """

    bound_steps: bool = Option()

    @property
    def bounded_share(self) -> float:
        """The share of the compressed groups' coordinates whose last step was bounded."""
        counted = sum(int(count) for count in self._run.bounded)
        return counted / sum(sum(bucket.layout.numels) for bucket in self._compressed)

    def _count_step(self) -> None:
        super()._count_step()
        self._run.bounded = []

    def _limits(self, bucket: Bucket, rates: Sequence[float]) -> list[float]:
        """How far a step of these rates may move each tensor, where a rate is lr / c1."""
        if not self.bound_steps:
            return [math.inf] * len(rates)
        steps = bucket.per_tensor(
            lambda group: largest_step(*group["betas"]) * self._corrections(bucket, group)[0]
        )
        return [rate * step for rate, step in zip(rates, steps)]
