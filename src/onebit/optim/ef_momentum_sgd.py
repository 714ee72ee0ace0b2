from onebit.compression import Sign
from onebit.kernels.torch_ops import Terms
from onebit.optim.compressed import CompressedSteps
from onebit.optim.options import check_compressor
from onebit.optim.sgd import DistributedSGD, descend, next_momentum
from onebit.optim.steps import scaled


class EFMomentumSGD(CompressedSteps, DistributedSGD):
    """Momentum SGD whose momentum is sent compressed, with error feedback: "EF Momentum SGD" of "1-bit Adam" (after Zheng et al., 2019).

        m_i = momentum m + (1 - dampening) (g_i + weight_decay x)
        m   = C-allreduce(m_i)        see `onebit.allreduce.CompressedAllreduce`
        x  <- x - lr m

    Compressed from the first step. As in line 6 of 1-bit Adam, m is the common momentum of the last step; with dampening = momentum =
    beta1 this is 1-bit Adam with v = 1. The worker and server errors are in units of the momentum. A step is three collectives, as
    `DoubleSqueeze`'s.

    Args: as `DistributedSGD`, and
        max_grad_norm: bounds sqrt(mean_i ||g_i||^2), since the mean gradient is not known; it clips by one factor on all ranks.
        compressor: see `onebit.compression`; None: `Sign`.
        bucket_cap_mb, overlap: as `OneBitAdam`'s.

    A group with compress=False is trained by `DistributedSGD`.
    """

    sent_options = ("momentum", "dampening", "weight_decay")

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0.9,
        dampening=0.0,
        weight_decay=0.0,
        *,
        max_grad_norm=None,
        check_finite=True,
        compressor=None,
        bucket_cap_mb=None,
        overlap=False,
        communicator=None,
        **unknown,
    ):
        self.compressor = check_compressor(compressor or Sign)
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
            **unknown,
        )

    def _terms(self, part, factor):
        z = next_momentum(part, scaled(part.flat_gradient(), factor))
        return Terms(part.layout.views(z))

    def _compressed_update(self, part, gathered):
        part.momentum.copy_(part.allreduce.decode(gathered))
        descend(part, part.momentum)
