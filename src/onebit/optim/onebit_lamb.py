"""1-bit LAMB."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onebit.comm import Communicator
from onebit.kernels.torch_ops import (
    Terms,
    block_sums,
    lamb_fresh_variance,
    lamb_ratio,
    root_mean_squares,
)
from onebit.layout import ALIGNMENT, Layout
from onebit.optim.bucket import Bucket, Group
from onebit.optim.freeze import Policy
from onebit.optim.lamb import Lamb, Numbers, descend, in_pieces, lamb_step, spread
from onebit.optim.onebit_adam import OneBitAdam, WarmupRun
from onebit.optim.run_state import Option
from onebit.optim.validation import check_bounds, check_choice, check_fraction, check_number


@dataclass(eq=False)
class LambRun(WarmupRun):
    """Attributes:
    averaged_steps: how many coefficients are in the average.
    """

    averaged_steps: int = 0


class OneBitLamb(OneBitAdam):
    """1-bit LAMB (Li et al., HiPC 2022, Algorithm 1).

    It is LAMB for T_w steps; then the momentum is sent as signs, under a frozen variance and scaled
    coefficients.

    Warm-up, steps 1 to T_w: `Lamb`, and for each tensor c_avg <- beta3 c_avg + (1 - beta3) c. Then
    v is frozen as v_Tw, v_fresh = v_Tw, r = 1, and with m_i as in `OneBitAdam`

        m_t     = C-allreduce(scaling m_i) / scaling
        g       = (m_t - beta1 m_{t-1}) / (1 - beta1)
        v_fresh <- beta2 v_fresh + (1 - beta2) g^2
        r       <- max(v_Tw / v_fresh), clipped to r (1 -+ r_threshold), then to (r_min, r_max)
        c       = r c_avg
        x      <- x - lr c (m_hat / (sqrt(v_Tw) + eps) + weight_decay x)

    where the last fraction is brought into the bounds of Adam's own step, see `bound_steps`, and g
    is what all ranks' gradients were, except for the compression. r (line 17) is computed for each
    tensor. The worker and server errors are in units of scaling times the
    momentum. Traffic and masks are `OneBitAdam`'s; what is masked takes no part in r and in
    scaling. Fresh variance, momentum and a flat copy of the gradient are stored as vectors: 12
    bytes an element more than `OneBitAdam`. `restart_warmup` goes on from v_Tw and c_avg, and the
    next freeze makes scaling, v_fresh and r anew, since v_fresh holds the noise of compression.

    `optimizer.state[p]` has v_fresh as "exp_avg_sq_fresh" and, without unit, c of the last step as
    "coefficient", c_avg as "coefficient_average", r as "ratio", and "scaling".

    Args: as `OneBitAdam`, and
        coefficient_bounds: (c_min, c_max), of LAMB's c; they hold in the warm-up only.
        coefficient_beta: beta3, in [0, 1). The average starts from 0, so that a warm-up shorter
            than 1 / (1 - beta3) steps is warned of.
        ratio_bounds: (r_min, r_max); (1, 1) gives "LAMB + basic 1-bit", in which c is frozen too.
        ratio_threshold: r_threshold, how much r may change in one step, as a fraction.
        ratio_of: "variance", v_Tw / v_fresh (Algorithm 1), or "root",
            (sqrt(v_Tw) + eps) / (sqrt(v_fresh) + eps) (the authors' code).
        scale: "tensor": one scale per tensor, scaling = 1. "fused": one scale for all, as in the
            paper, which then needs scaling = the mean over the tensors of rms(m) / the tensor's own
            at the freeze.
    """

    run_state = LambRun
    more_vectors = {"fresh_variance": "exp_avg_sq_fresh"}
    tensor_scalars = Lamb.tensor_scalars | {
        "coefficient_average": 0.0,
        "ratio": 1.0,
        "scaling": 1.0,
    }

    coefficient_bounds: tuple[float, float] = Option()
    coefficient_beta: float = Option()
    ratio_bounds: tuple[float, float] = Option()
    ratio_threshold: float = Option()
    ratio_of: str = Option()
    scale: str = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup: int | Policy,
        coefficient_bounds: tuple[float, float] = (0.01, 0.3),
        coefficient_beta: float = 0.9,
        ratio_bounds: tuple[float, float] = (0.5, 4.0),
        ratio_threshold: float = 0.1,
        ratio_of: str = "variance",
        scale: str = "tensor",
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        variance_floor: float = 0.0,
        bound_steps: bool = True,
        compressor: Any = None,
        bucket_cap_mb: float | None = None,
        overlap: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        check_bounds("coefficient_bounds", coefficient_bounds)
        check_fraction("coefficient_beta", coefficient_beta)
        check_bounds("ratio_bounds", ratio_bounds)
        check_number("ratio_threshold", ratio_threshold, 0)
        check_choice("ratio_of", ratio_of, ("variance", "root"))
        check_choice("scale", scale, ("tensor", "fused"))
        self.coefficient_bounds = coefficient_bounds
        self.coefficient_beta = coefficient_beta
        self.ratio_bounds = ratio_bounds
        self.ratio_threshold = ratio_threshold
        self.ratio_of = ratio_of
        self.scale = scale
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            warmup=warmup,
            bias_correction=bias_correction,
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            variance_floor=variance_floor,
            bound_steps=bound_steps,
            compressor=compressor,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        )

    # ---- a step

    def _count_step(self) -> None:
        super()._count_step()
        self._run.averaged_steps += not self._is_compressing

    def _exact_update(self, bucket: Bucket, g: torch.Tensor) -> None:
        """One step of LAMB, and c_avg <- beta3 c_avg + (1 - beta3) c."""
        lamb_step(bucket, g, Numbers.of(self, bucket), self.coefficient_bounds)
        average = (
            self.coefficient_beta * bucket.coefficient_average
            + (1 - self.coefficient_beta) * bucket.coefficient
        )
        bucket.coefficient_average.copy_(average)

    def _terms(self, bucket: Bucket, factor: float) -> Terms:
        """scaling m_i, where m_i = beta1 m + (1 - beta1) factor g_i."""
        z = bucket.flat_gradient()
        weights = bucket.per_tensor(lambda group: (1 - group["betas"][0]) * factor)
        betas = bucket.per_tensor(lambda group: group["betas"][0])
        values = (weights, betas, bucket.scaling.tolist())
        for g, m, weight, beta, scaling in in_pieces(bucket, [z, bucket.momentum], values):
            g.mul_(weight).add_(m * beta).mul_(scaling)
        return bucket.terms(z)

    def _compressed_update(self, bucket: Bucket, outcome: torch.Tensor) -> None:
        """Algorithm 1 from line 13: m_t and v_fresh, then r, c and x."""
        numbers = Numbers.of(self, bucket)
        received = bucket.allreduce.decode(outcome)
        largest = self._follow_variance(bucket, received, numbers)
        ratios = [
            next_ratio(new, last, self.ratio_threshold, self.ratio_bounds)
            for new, last in zip(largest, bucket.ratio.tolist())
        ]
        bucket.ratio.copy_(torch.tensor(ratios, dtype=torch.float64, device="cpu"))
        bucket.coefficient.copy_(bucket.ratio * bucket.coefficient_average)
        rates = bucket.coefficient.tolist()
        rates = [lr * c / c1 for lr, c, c1 in zip(numbers.lrs, rates, numbers.c1s)]
        self._run.bounded.append(descend(bucket, received, numbers, self._limits(bucket, rates)))

    def _follow_variance(
        self, bucket: Bucket, received: torch.Tensor, numbers: Numbers
    ) -> list[float]:
        """m_t and v_fresh from the received, scaled momentum, float [layout.size].

        Returns the largest v_Tw / v_fresh of each tensor, -inf if nothing is active.
        """
        vectors = [received, bucket.momentum, bucket.variance, bucket.fresh_variance]
        values = (bucket.scaling.tolist(), numbers.beta1s, numbers.beta2s, numbers.epsilons)
        largest = []
        for z, m, v, v_fresh, scaling, beta1, beta2, eps in in_pieces(bucket, vectors, values):
            lamb_fresh_variance(z, m, v_fresh, scaling, beta1, beta2)
            largest.append(lamb_ratio(v, v_fresh, eps, self.ratio_of).amax(1))
        lengths = bucket.layout.lengths // ALIGNMENT
        of_each = torch.segment_reduce(torch.cat(largest), "max", lengths=lengths)
        return of_each.tolist()[: len(bucket.params)]

    # ---- between the phases

    def _freeze(self) -> None:
        """Besides v: v_fresh = v_Tw, r = 1 and, for one scale for all, scaling."""
        self._check_average()
        super()._freeze()
        for bucket in self._compressed:
            bucket.fresh_variance.copy_(bucket.variance)
            bucket.ratio.fill_(1)
            if self.scale == "fused":
                active = torch.where(bucket.partition.active, bucket.momentum, 0)
                sums = block_sums(bucket.partition, active)
                own = root_mean_squares(bucket.partition, sums).tolist()
                scaling = scaling_coefficients(own[: len(bucket.params)])
                bucket.scaling.copy_(torch.tensor(scaling, dtype=torch.float64, device="cpu"))

    def _check_average(self) -> None:
        """Without coefficients in the average nothing would move any more."""
        averaged = self._run.averaged_steps
        if not averaged:
            raise RuntimeError(
                f"the warm-up is over after {self.steps} steps, none of which was LAMB's, so that "
                "there is no coefficient to go on with: after loading another optimizer's state "
                "call restart_warmup(steps), or give a longer warmup"
            )
        wanted = round(1 / (1 - self.coefficient_beta))
        if averaged < wanted:
            self._warn(
                f"only {averaged} coefficients are in the average, which starts from 0 and has a "
                f"memory of {wanted} steps: the steps will be too small. Give a longer warmup, or "
                "a smaller coefficient_beta"
            )

    def _make_allreduce(self, bucket: Bucket, active: torch.Tensor | None = None) -> None:
        """With one scale for all, the whole bucket is one tensor to the compressor."""
        if self.scale == "tensor":
            super()._make_allreduce(bucket, active)
            return
        fused = Layout([(bucket.layout.used,)], self.communicator.size, bucket.device)
        allreduce = self._allreduce(bucket, fused, active)
        bucket.hold_errors(allreduce, bucket.layout.worker_partition(active))

    def _total_error(self, bucket: Bucket) -> torch.Tensor:
        error = super()._total_error(bucket).view(-1, ALIGNMENT)
        return (error / spread(bucket, bucket.scaling.tolist())).view(-1)

    # ---- checkpoints

    def _check_facts(self, facts: dict[str, Any], groups: list[Group]) -> None:
        """In the compressed phase nothing goes without the average of coefficients, nor with errors
        of another scaling."""
        super()._check_facts(facts, groups)
        if not facts.get("holds_errors"):
            return
        if "scale" not in facts:
            raise ValueError(
                "this checkpoint was saved in the compressed phase of "
                f"onebit.{facts.get('kind')}, which has no coefficients: load it there, call "
                "restart_warmup(steps) and save it, then load it here with a longer warmup"
            )
        if facts["scale"] != self.scale:
            raise ValueError(
                f"this checkpoint's compression errors are those of scale={facts['scale']!r}: set "
                "scale as it was, and call restart_warmup(steps) before it is saved if it is to "
                "change"
            )

    def _facts(self) -> dict[str, Any]:
        own = {"scale": self.scale, "averaged_steps": self._run.averaged_steps}
        return super()._facts() | own

    def _take_facts(self, facts: dict[str, Any]) -> None:
        self._run.averaged_steps = facts.get("averaged_steps", 0)
        super()._take_facts(facts)


def scaling_coefficients(own: Sequence[float]) -> list[float]:
    """The mean of the tensors' momentum scales over each one's own.

    1 for a tensor without momentum, which the mean leaves out.
    """
    moving = [scale for scale in own if scale]
    return [sum(moving) / len(moving) / scale if scale else 1.0 for scale in own]


def next_ratio(largest: float, last: float, threshold: float, bounds: tuple[float, float]) -> float:
    """Algorithm 1 after line 17: clip to last (1 -+ r_threshold), then to (r_min, r_max).

    -inf, which is what a tensor without active elements has, changes nothing.
    """
    if largest == -torch.inf:
        return last
    near = min(max(largest, (1 - threshold) * last), (1 + threshold) * last)
    low, high = bounds
    return min(max(near, low), high)
