"""Adam, uncompressed: the baseline, and the warm-up of the others."""

from collections.abc import Iterable

import torch

from onebit.comm import Communicator
from onebit.kernels.torch_ops import Terms
from onebit.optim.bucket import Bucket, Group
from onebit.optim.optimizer import DistributedOptimizer
from onebit.optim.run_state import Option
from onebit.optim.validation import check_flag


class DistributedAdam(DistributedOptimizer):
    """Adam with decoupled weight decay on the mean gradient of all ranks: the baseline.

        g = mean_i g_i        m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
        x <- (1 - lr weight_decay) x - lr m_hat / (sqrt(v_hat) + eps)

    with m_hat = m / (1 - beta1^t), v_hat = v / (1 - beta2^t), or m and v themselves if
    bias_correction is False (as in the papers). One all_reduce a step. With one rank it equals
    torch.optim.AdamW (Loshchilov and Hutter, 2019), except that a gradient that is None counts as
    zero here, where torch leaves the parameter alone; both leave alone what has never had a
    gradient. m is in units of the gradient, v in their square.

    Args:
        params: parameters, named parameters, or groups of them.
        lr, betas, eps, weight_decay: as torch.optim.AdamW's; weight decay is decoupled and 0 by
            default. Each may differ between groups and is read at every step.
        bias_correction: whether m and v are corrected for starting at zero.
        max_grad_norm: clip the mean gradient to this l2 norm; None: do not clip.
        check_finite: skip a step, on all ranks, if the gradient is not finite.
        bucket_cap_mb: exchange the gradients in buckets of at most so many MB, one while the next
            is prepared; None: all at once.
        overlap: exchange a bucket as soon as backward has made its gradients, see
            `onebit.optim.overlap.Overlap`; buckets hold 25 MB unless bucket_cap_mb says otherwise.
            Then max_grad_norm must be None.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single
            worker.

    Raises TypeError or ValueError, with the remedy, if an option or a parameter is wrong.
    """

    bias_correction: bool = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        bucket_cap_mb: float | None = None,
        overlap: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        check_flag("bias_correction", bias_correction)
        self.bias_correction = bias_correction
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        )

    # ---- the contract of subclasses, beside that of `DistributedOptimizer`

    def _variance_correction(self, bucket: Bucket, group: Group) -> float:
        """What v must be divided by to correct it for starting at zero.

        A subclass that does not update v at every step counts its updates.
        """
        return 1 - group["betas"][1] ** self.steps if self.steps else 1.0

    # ---- a step

    def _exact_update(self, bucket: Bucket, g: torch.Tensor) -> None:
        """One step of Adam on the mean gradient g of one bucket."""
        beta1s = bucket.per_tensor(lambda group: group["betas"][0])
        beta2s = bucket.per_tensor(lambda group: group["betas"][1])
        decays, rates, epsilons = self._update_factors(bucket)
        roots = bucket.per_tensor(lambda group: self._corrections(bucket, group)[1] ** -0.5)
        bucket.kernels.adam(
            bucket.partition,
            bucket.trained(),
            g,
            bucket.momentum,
            bucket.variance,
            beta1s,
            beta2s,
            decays,
            rates,
            epsilons,
            roots,
        )

    def _terms(self, bucket: Bucket, factor: float) -> Terms:
        """m_i = beta1 m + (1 - beta1) factor g_i (1-bit Adam, line 6)."""
        weights = bucket.per_tensor(lambda group: (1 - group["betas"][0]) * factor)
        betas = bucket.per_tensor(lambda group: group["betas"][0])
        if bucket.packed is not None:
            return Terms(bucket.gradients(), weights, bucket.packed, betas)
        z, momentum = bucket.flat_gradient(), bucket.momentum
        for group, span in bucket.spans:
            beta1 = group["betas"][0]
            z[span].mul_((1 - beta1) * factor).add_(momentum[span] * beta1)
        return bucket.terms(z)

    def _update_factors(self, bucket: Bucket) -> tuple[list[float], list[float], list[float]]:
        """(decays, rates, epsilons): 1 - lr weight_decay, lr / c1 and eps for each parameter."""
        return (
            bucket.per_tensor(lambda group: 1 - float(group["lr"]) * group["weight_decay"]),
            bucket.per_tensor(
                lambda group: float(group["lr"]) / self._corrections(bucket, group)[0]
            ),
            bucket.per_tensor(lambda group: group["eps"]),
        )

    def _corrections(self, bucket: Bucket, group: Group) -> tuple[float, float]:
        """(c1, c2), what m and v must be divided by; (1, 1) without bias correction."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - group["betas"][0] ** self.steps, self._variance_correction(bucket, group)

    # ---- the variance

    def variance_norms(self) -> tuple[float, float]:
        """(||v||_1, ||v||_2) of the bias-corrected variance over all parameters.

        They show whether it may be frozen.
        """
        l1, l2_squared = (
            sum(self._variance_sum(bucket, power) for bucket in self._run.buckets)
            for power in (1, 2)
        )
        return l1, l2_squared**0.5

    def _variance_sum(self, bucket: Bucket, power: int = 1) -> float:
        """The sum of a bucket's bias-corrected variance, or of its squares."""
        corrections = bucket.per_tensor(lambda group: self._variance_correction(bucket, group))
        sums = bucket.tensor_sums(bucket.variance, square=power == 2).tolist()
        return sum(s / c**power for s, c in zip(sums, corrections))
