import torch

from onebit.kernels.torch_ops import per_block, square_root
from onebit.layout import ALIGNMENT
from onebit.optim.adam import DistributedAdam
from onebit.optim.options import check_bounds

PIECE = (
    2**12
)  # rows of ALIGNMENT elements; what is computed of so many stays in a core's second cache


def spread(part, values):
    """One float per tensor of a part -> T [size / ALIGNMENT, 1], a number for each row of ALIGNMENT elements; 1 for the tail."""
    return per_block(
        torch.tensor([*values, 1.0], dtype=part.dtype, device=part.device), part.layout.lengths
    )


def in_pieces(vectors, numbers):
    """Vectors [size], as rows, together with what `spread` made, some rows at a time: whole ones would need as much memory for each result."""
    return zip(*(x.split(PIECE) for x in [*(x.view(-1, ALIGNMENT) for x in vectors), *numbers]))


def direction(x, m, v, c1, root, eps, weight_decay):
    """u = (m / c1) / (root sqrt(v) + eps) + weight_decay x"""
    return m / c1 / (square_root(v) * root + eps) + weight_decay * x


def trust_ratio(x_norm, u_norm, bounds):
    """clip(||x|| / ||u||, c_min, c_max); 1 if a norm is 0."""
    low, high = bounds
    return min(max(x_norm / u_norm, low), high) if x_norm and u_norm else 1.0


class LayerwiseRates:
    """What makes LAMB of Adam: each tensor's learning rate is multiplied by its `coefficient`.

    To be mixed into `DistributedAdam` or a subclass, which gives everything else. Wants `coefficient_bounds` to be set.
    """

    numbers = {"coefficient": 1.0}  # c of the last step

    def _describe(self):
        return f"{super()._describe()}, coefficient_bounds={tuple(self.coefficient_bounds)}"

    def _exact_update(self, part, g):
        """One step of LAMB on the mean gradient g of one part, which is overwritten."""
        self._adam(part, g, [None] * len(part.params))  # m and v; x stays
        part.coefficient.copy_(torch.tensor(self._trust_ratios(part, g), dtype=torch.float64))
        self._adam(part, g.zero_(), part.trained(), betas=(1.0, 1.0))  # x; m and v stay

    def _trust_ratios(self, part, memory):
        """c of each tensor, from norms that are summed in one order on all ranks. x and u are laid out in `memory`, T [size]."""
        corrections = [self._corrections(part, group) for group in part.groups]
        numbers = [
            spread(part, values)
            for values in (
                [c1 for c1, _ in corrections],
                [c2**-0.5 for _, c2 in corrections],
                self._epsilons(part),
                part.per_tensor(lambda group: group["weight_decay"]),
            )
        ]
        x_norms = self._norms(part, part.flat(part.params, out=memory))
        for x, *rest in in_pieces([memory, part.momentum, part.variance], numbers):
            x.copy_(direction(x, *rest))
        return [
            trust_ratio(*norms, self.coefficient_bounds)
            for norms in zip(x_norms, self._norms(part, memory))
        ]

    def _norms(self, part, x):
        return square_root(part.tensor_sums(x, square=True)).tolist()[: len(part.params)]

    def _epsilons(self, part):
        """eps of each parameter, but above 0, so that a coordinate without gradient, whose m and v are 0, gives 0 rather than 0 / 0."""
        return part.per_tensor(lambda group: max(float(group["eps"]), torch.finfo(part.dtype).tiny))

    def _numbers(self, part):
        """As Adam's, with lr c for lr: (1 - lr c weight_decay, lr c / c1, eps) for each parameter."""
        rates = [float(group["lr"]) * c for group, c in zip(part.groups, part.coefficient.tolist())]
        return (
            [1 - rate * group["weight_decay"] for group, rate in zip(part.groups, rates)],
            [rate / self._corrections(part, group)[0] for group, rate in zip(part.groups, rates)],
            self._epsilons(part),
        )


class Lamb(LayerwiseRates, DistributedAdam):
    """LAMB (You et al., ICLR 2020) as "1-bit LAMB" (Li et al., HiPC 2022, equation 1) uses it, on the mean gradient of all ranks.

        g = mean_i g_i        m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
        u = m_hat / (sqrt(v_hat) + eps) + weight_decay x
        c = clip(||x|| / ||u||, c_min, c_max)        for each tensor; 1 if a norm is 0
        x <- x - lr c u

    with m_hat, v_hat as in `DistributedAdam`. The bounds are on the whole ratio, where You et al. bound ||x||. One all_reduce a step.
    `optimizer.state[p]["coefficient"]` is c of the last step, without unit.

    Args: as `DistributedAdam`, and
        coefficient_bounds: (c_min, c_max); (1, 1) gives Adam.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        coefficient_bounds=(0.01, 0.3),
        bias_correction=True,
        max_grad_norm=None,
        check_finite=True,
        bucket_cap_mb=None,
        overlap=False,
        communicator=None,
        **unknown,
    ):
        check_bounds("coefficient_bounds", coefficient_bounds)
        self.coefficient_bounds = coefficient_bounds
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
            **unknown,
        )
