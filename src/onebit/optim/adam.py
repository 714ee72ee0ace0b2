from ..allreduce import CompressedAllreduce, ExactAllreduce
from ..kernels.torch_ops import total
from .agreement import agree, describe_options, squared_norm
from .base import DistributedOptimizer
from .options import check_flag


def advance_moments(m, v, g, beta1, beta2):
    """m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2, in place."""
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)


def adam_update(x, m, v, lr, eps, weight_decay, c1, c2):
    """x <- (1 - lr weight_decay) x - lr (m / c1) / (sqrt(v / c2) + eps), in place."""
    x.mul_(1 - lr * weight_decay)
    denominator = v.sqrt().div_(c2**0.5).add_(eps)
    x.addcdiv_(m, denominator, value=-lr / c1)


class DistributedAdam(DistributedOptimizer):
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
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single worker.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, *, bias_correction=True, max_grad_norm=None,
                 check_finite=True, communicator=None, **unknown):
        check_flag("bias_correction", bias_correction)
        self.bias_correction = bias_correction
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, max_grad_norm=max_grad_norm,
                         check_finite=check_finite, communicator=communicator, unknown=unknown)

    @property
    def phase(self):
        """"warmup" or "compressed": how the next step communicates."""
        return "warmup"

    def _describe(self):
        return f"{super()._describe()}, bias_correction={self.bias_correction}"

    def _take_step(self):
        return self._exact_step()

    def _exact_step(self):
        """Adam on the exact mean gradient. All ranks see the same bits, so that they clip and skip alike without asking."""
        means = [self._exact_mean(part, g) for part, g in zip(self._parts, self._collect())]
        factor = self._factor(squared_norm(means)) if self._needs_norm else 1.0
        if factor is None:
            return False
        self._step += 1
        for part, g in zip(self._parts, means):
            self._adam(part, g.mul_(factor))
        return True

    def _compressed_step(self):
        """One step in which the gradients of compressed groups are not averaged exactly; the ranks agree before anything is changed."""
        gradients = self._collect()
        factor, late = self._agree(gradients, self._count_late_gradients())
        if factor is None:
            return False
        if late:
            self._warn_of_late_gradients(late)
        self._step += 1
        for part, g in zip(self._parts, gradients):
            g.mul_(factor)
            if part is self._compressed:
                self._compressed_adam(part, g)
            else:
                self._adam(part, self._exact_mean(part, g))
        return True

    def _count_late_gradients(self):
        """Elements of this rank's gradients that belong to masked coordinates; nothing is masked unless a variance is frozen."""
        return 0

    def _make_allreduce(self, active=None):
        part = self._compressed
        self._allreduce = CompressedAllreduce(self.communicator, part.layout, part.worker_error, part.server_error, self.compressor, active)

    def _agree(self, gradients, late):
        """Before local gradients are averaged or anything is changed: their common clipping factor, and `late` over all ranks.

        The factor is that of sqrt(mean_i ||g_i||^2), an upper bound of the norm of the mean gradient; None: skip the step. Raises
        RuntimeError on all ranks if their options have come to differ.
        """
        if not self._needs_norm:
            return 1.0, 0
        trained = "".join(str(int(p.requires_grad)) for p in self._params())
        options = f"{self.steps}, {trained}, {[describe_options(group) for group in self.param_groups]}"
        agreement = agree(self.communicator, gradients, late, options)
        if not agreement.same_options:
            self._compare_ranks()
        return self._factor(agreement.squared_norm), agreement.late

    def _exact_mean(self, part, g):
        return ExactAllreduce(self.communicator, part.wire_dtype).allreduce(g)

    def _adam(self, part, g):
        """Lines 4 to 13 of plain Adam on the mean gradient g of one part."""
        for group, span in part.spans:
            advance_moments(part.momentum[span], part.variance[span], g[span], *group["betas"])
        self._update(part)

    def _update(self, part):
        for group, tensors in part.tensors:
            c1, c2 = self._corrections(part, group)
            for x, m, v in tensors:
                if x.requires_grad:
                    adam_update(x, m, v, float(group["lr"]), group["eps"], group["weight_decay"], c1, c2)

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
        corrected = [part.variance[span] / self._variance_correction(part, group) for part in self._parts for group, span in part.spans]
        return sum(map(total, corrected)), sum(total(v, square=True) for v in corrected) ** 0.5
