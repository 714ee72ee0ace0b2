import torch

from onebit.allreduce import CompressedAllreduce
from onebit.kernels.torch_ops import Terms, block_sums, root_mean_squares, square_root
from onebit.layout import ALIGNMENT, Layout
from onebit.optim.lamb import LayerwiseRates, in_pieces, spread
from onebit.optim.onebit_adam import OneBitAdam
from onebit.optim.options import (
    check_bounds,
    check_choice,
    check_fraction,
    check_number,
    option_names,
    reject_unknown,
)


def scaling_coefficients(own):
    """The mean of the tensors' momentum scales over each one's own; 1 for a tensor without momentum, which the mean leaves out."""
    moving = [scale for scale in own if scale]
    return [sum(moving) / len(moving) / scale if scale else 1.0 for scale in own]


def next_ratio(largest, last, threshold, bounds):
    """Algorithm 1 after line 17: clip to last (1 -+ r_threshold), then to (r_min, r_max); -inf, no element at all, changes nothing."""
    if largest == -torch.inf:
        return last
    near = min(max(largest, (1 - threshold) * last), (1 + threshold) * last)
    low, high = bounds
    return min(max(near, low), high)


class OneBitLamb(LayerwiseRates, OneBitAdam):
    """1-bit LAMB (Li et al., HiPC 2022, Algorithm 1): LAMB for T_w steps, then 1-bit momentum under a frozen variance and scaled coefficients.

    Warm-up, steps 1 to T_w: `Lamb`, and for each tensor c_avg <- beta3 c_avg + (1 - beta3) c. Then v is frozen as v_Tw, v_fresh = v_Tw, r = 1,
    and with m_i as in `OneBitAdam`

        m_t     = C-allreduce(scaling m_i) / scaling
        g       = (m_t - beta1 m_{t-1}) / (1 - beta1)                     what all ranks' gradients were, but for the compression
        v_fresh <- beta2 v_fresh + (1 - beta2) g^2
        r       <- max(v_Tw / v_fresh), clipped to r (1 -+ r_threshold) and then to (r_min, r_max)        line 17, for each tensor
        c       = r c_avg
        x      <- x - lr c (m_hat / (sqrt(v_Tw) + eps) + weight_decay x)

    The worker and server errors are in units of scaling times the momentum. Traffic and masks are `OneBitAdam`'s; what is masked takes no part in r
    and in scaling. Fresh variance, momentum and a flat copy of the gradient are stored as they are: 12 bytes an element more than `OneBitAdam`.
    `restart_warmup` goes on from v_Tw and c_avg, and the next freeze makes scaling, v_fresh and r anew: v_fresh holds the noise of compression.

    `optimizer.state[p]` has v_fresh as "exp_avg_sq_fresh" and, without unit, c of the last step as "coefficient", c_avg as "coefficient_average", r
    as "ratio", and "scaling".

    Args: as `OneBitAdam`, and
        coefficient_bounds: (c_min, c_max), of LAMB's c; they hold in the warm-up only.
        coefficient_beta: beta3, in [0, 1). The average starts from 0, so a warm-up shorter than 1 / (1 - beta3) steps is warned of.
        ratio_bounds: (r_min, r_max); (1, 1) gives "LAMB + basic 1-bit", in which c is frozen too.
        ratio_threshold: r_threshold, how much r may change in one step, as a fraction.
        ratio_of: "variance", v_Tw / v_fresh (Algorithm 1), or "root", (sqrt(v_Tw) + eps) / (sqrt(v_fresh) + eps) (the authors' code).
        scale: "tensor": one scale per tensor, scaling = 1. "fused": one scale for all, as in the paper, which then needs scaling = the mean
            over the tensors of rms(m) / the tensor's own at the freeze.
    """

    more_vectors = {"fresh_variance": "exp_avg_sq_fresh"}
    numbers = LayerwiseRates.numbers | {"coefficient_average": 0.0, "ratio": 1.0, "scaling": 1.0}

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        warmup=None,
        coefficient_bounds=(0.01, 0.3),
        coefficient_beta=0.9,
        ratio_bounds=(0.5, 4.0),
        ratio_threshold=0.1,
        ratio_of="variance",
        scale="tensor",
        bias_correction=True,
        max_grad_norm=None,
        check_finite=True,
        variance_floor=0.0,
        compressor=None,
        bucket_cap_mb=None,
        overlap=False,
        communicator=None,
        **unknown,
    ):
        reject_unknown(unknown, option_names(OneBitLamb.__init__), type(self).__name__)
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
        self._averaged_steps = 0  # how many coefficients are in the average
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
            compressor=compressor,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        )

    def _describe(self):
        return (
            f"{super()._describe()}, coefficient_beta={self.coefficient_beta}, ratio_bounds={tuple(self.ratio_bounds)}, "
            f"ratio_threshold={self.ratio_threshold}, ratio_of={self.ratio_of}, scale={self.scale}"
        )

    # ---- a step

    def _count_step(self):
        super()._count_step()
        self._averaged_steps += not self._holds_errors

    def _exact_update(self, part, g):
        super()._exact_update(part, g)
        average = (
            self.coefficient_beta * part.coefficient_average
            + (1 - self.coefficient_beta) * part.coefficient
        )
        part.coefficient_average.copy_(average)

    def _terms(self, part, factor):
        z = part.flat_gradient()
        weights = part.per_tensor(lambda group: (1 - group["betas"][0]) * factor)
        betas = part.per_tensor(lambda group: group["betas"][0])
        numbers = [spread(part, values) for values in (weights, betas, part.scaling.tolist())]
        for g, m, weight, beta, scaling in in_pieces([z, part.momentum], numbers):
            g.mul_(weight).add_(m * beta).mul_(scaling)
        return Terms(part.allreduce.layout.views(z))

    def _compressed_update(self, part, gathered):
        received = part.allreduce.decode(gathered)
        largest = self._follow_variance(part, received)
        part.ratio.copy_(
            torch.tensor(
                [
                    next_ratio(new, last, self.ratio_threshold, self.ratio_bounds)
                    for new, last in zip(largest, part.ratio.tolist())
                ],
                dtype=torch.float64,
            )
        )
        part.coefficient.copy_(part.ratio * part.coefficient_average)
        self._adam(part, received.zero_(), part.trained(), betas=(1.0, 1.0))  # x; m and v stay

    def _follow_variance(self, part, received):
        """m_t and v_fresh from the received, scaled momentum; returns the largest v_Tw / v_fresh of each tensor, -inf if nothing is active."""
        numbers = [
            spread(part, values)
            for values in (
                part.scaling.tolist(),
                *(part.per_tensor(lambda group, i=i: group["betas"][i]) for i in (0, 1)),
                self._epsilons(part),
            )
        ]
        largest = []
        for z, m, v, v_fresh, scaling, beta1, beta2, eps in in_pieces(
            [received, part.momentum, part.variance, part.fresh_variance], numbers
        ):
            g = (z.div_(scaling) - beta1 * m) / (1 - beta1)
            v_fresh.mul_(beta2).add_((1 - beta2) * g * g)
            m.copy_(z)
            ratio = (
                v / v_fresh
                if self.ratio_of == "variance"
                else (square_root(v) + eps) / (square_root(v_fresh) + eps)
            )
            largest.append(torch.where(v > 0, ratio, -torch.inf).amax(1))
        return torch.segment_reduce(
            torch.cat(largest), "max", lengths=part.layout.lengths // ALIGNMENT
        ).tolist()[: len(part.params)]

    # ---- between the phases

    def _freeze(self):
        self._check_average()
        super()._freeze()
        for part in self._compressed:
            part.fresh_variance.copy_(part.variance)
            part.ratio.fill_(1)
            if self.scale == "fused":
                active = torch.where(part.partition.active, part.momentum, 0)
                own = root_mean_squares(part.partition, block_sums(part.partition, active)).tolist()
                part.scaling.copy_(
                    torch.tensor(scaling_coefficients(own[: len(part.params)]), dtype=torch.float64)
                )

    def _check_average(self):
        """Without coefficients in the average nothing would move any more."""
        if not self._averaged_steps:
            raise RuntimeError(
                f"the warm-up is over after {self.steps} steps, none of which was LAMB's, so that there is no coefficient to go on "
                "with: after loading another optimizer's state call restart_warmup(steps), or give a longer warmup"
            )
        wanted = round(1 / (1 - self.coefficient_beta))
        if self._averaged_steps < wanted:
            self._warn(
                f"only {self._averaged_steps} coefficients are in the average, which starts from 0 and has a memory of {wanted} steps: the "
                "steps will be too small. Give a longer warmup, or a smaller coefficient_beta"
            )

    def _make_allreduce(self, part, active=None):
        if self.scale == "tensor":
            return super()._make_allreduce(part, active)
        fused = Layout([(part.layout.used,)], self.communicator.size, part.device)
        allreduce = CompressedAllreduce(
            self.communicator,
            fused,
            part.dtype,
            self.compressor,
            active,
            in_place=not self.overlap,
            rounds=self.steps,
            stream=self._parts.index(part),
        )
        part.hold_errors(allreduce, part.layout.worker_partition(active))

    def _total_error(self, part):
        return (
            super()._total_error(part).view(-1, ALIGNMENT) / spread(part, part.scaling.tolist())
        ).view(-1)

    # ---- checkpoints

    def _check_kind(self, facts):
        """In the compressed phase nothing goes without the average of coefficients, nor with errors of another scaling."""
        super()._check_kind(facts)
        if not facts.get("holds_errors"):
            return
        if "scale" not in facts:
            raise ValueError(
                f"this checkpoint was saved in the compressed phase of onebit.{facts.get('kind')}, which has no coefficients: load it "
                "there, call restart_warmup(steps) and save it, then load it here with a longer warmup"
            )
        if facts["scale"] != self.scale:
            raise ValueError(
                f"this checkpoint's compression errors are those of scale={facts['scale']!r}: set scale as it was, and "
                "restart_warmup(steps) before it is saved if it is to change"
            )

    def _facts(self):
        return super()._facts() | {"scale": self.scale, "averaged_steps": self._averaged_steps}

    def _take_facts(self, facts):
        self._averaged_steps = facts.get("averaged_steps", 0)
        super()._take_facts(facts)
