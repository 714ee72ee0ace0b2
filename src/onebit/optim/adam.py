from onebit.kernels.torch_ops import Terms
from onebit.optim.options import check_flag
from onebit.optim.steps import SteppingOptimizer


class DistributedAdam(SteppingOptimizer):
    """Adam with decoupled weight decay on the mean gradient of all ranks: the uncompressed baseline.

        g = mean_i g_i        m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
        x <- (1 - lr weight_decay) x - lr m_hat / (sqrt(v_hat) + eps)

    with m_hat = m / (1 - beta1^t), v_hat = v / (1 - beta2^t), or m and v themselves if bias_correction is False (as in the papers).
    One all_reduce a step. With one rank it equals torch.optim.AdamW (Loshchilov and Hutter, 2019), but that a gradient that is None counts
    as zero here, where torch leaves the parameter alone.

    Args:
        lr, betas, eps, weight_decay: as torch.optim.AdamW's; weight decay is decoupled and 0 by default.
        bias_correction: whether m and v are corrected for starting at zero.
        max_grad_norm: clip the mean gradient to this l2 norm.
        check_finite: skip a step, on all ranks, if the gradient is not finite.
        bucket_cap_mb: exchange the gradients in buckets of at most so many MB, one while the next is prepared; None: all at once.
        overlap: exchange a bucket as soon as backward has made its gradients, see `onebit.optim.overlap.Overlap`; buckets of 25 MB unless
            bucket_cap_mb says otherwise. Then max_grad_norm must be None.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single worker.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        bias_correction=True,
        max_grad_norm=None,
        check_finite=True,
        bucket_cap_mb=None,
        overlap=False,
        communicator=None,
        **unknown,
    ):
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
            unknown=unknown,
        )

    def _describe(self):
        return f"{super()._describe()}, bias_correction={self.bias_correction}"

    def _exact_update(self, part, g):
        """Lines 4 to 13 of plain Adam on the mean gradient g of one part."""
        self._adam(part, g, part.trained())

    def _adam(self, part, g, parameters, betas=None):
        """One step of Adam; `betas`: those of all groups, instead of their own."""
        beta1s, beta2s = (
            part.per_tensor(lambda group, i=i: (betas or group["betas"])[i]) for i in (0, 1)
        )
        roots = part.per_tensor(lambda group: self._corrections(part, group)[1] ** -0.5)
        part.kernels.adam(
            part.partition,
            parameters,
            g,
            part.momentum,
            part.variance,
            beta1s,
            beta2s,
            *self._numbers(part),
            roots,
        )

    def _terms(self, part, factor):
        """Line 6: m_i = beta1 m + (1 - beta1) factor g_i. Until it is packed, m is stored as it is."""
        weights = part.per_tensor(lambda group: (1 - group["betas"][0]) * factor)
        betas = part.per_tensor(lambda group: group["betas"][0])
        if part.packed is not None:
            return Terms(part.gradients(), weights, part.packed, betas)
        z, momentum = part.flat_gradient(), part.momentum
        for group, span in part.spans:
            z[span].mul_((1 - group["betas"][0]) * factor).add_(momentum[span] * group["betas"][0])
        return Terms(part.layout.views(z))

    def _numbers(self, part):
        """(decays, steps, epsilons) of line 13 for each parameter: 1 - lr weight_decay, lr / c1 and eps."""
        return (
            part.per_tensor(lambda group: 1 - float(group["lr"]) * group["weight_decay"]),
            part.per_tensor(lambda group: float(group["lr"]) / self._corrections(part, group)[0]),
            part.per_tensor(lambda group: group["eps"]),
        )

    def _corrections(self, part, group):
        """(c1, c2): 1 - beta1^t and 1 - beta2^t, or 1."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - group["betas"][0] ** self.steps, self._variance_correction(part, group)

    def _variance_correction(self, part, group):
        """What v must be divided by to correct it for starting at zero."""
        return 1 - group["betas"][1] ** self.steps if self.steps else 1.0

    def variance_norms(self):
        """(||v||_1, ||v||_2) of the bias-corrected variance over all parameters: what shows whether it may be frozen."""
        l1, l2_squared = (
            sum(self._variance_sum(part, power) for part in self._parts) for power in (1, 2)
        )
        return l1, l2_squared**0.5

    def _variance_sum(self, part, power=1):
        """The sum of a part's bias-corrected variance, or of its squares."""
        corrections = part.per_tensor(lambda group: self._variance_correction(part, group))
        return sum(
            s / c**power
            for s, c in zip(
                part.tensor_sums(part.variance, square=power == 2).tolist(), corrections
            )
        )
