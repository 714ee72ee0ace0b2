from onebit.compression import Sign
from onebit.kernels.torch_ops import Terms
from onebit.optim.compressed import CompressedSteps
from onebit.optim.options import check_compressor
from onebit.optim.sgd import descend, with_weight_decay
from onebit.optim.steps import SteppingOptimizer, scaled


class DoubleSqueeze(CompressedSteps, SteppingOptimizer):
    """SGD on error-compensated compressed *gradients*, squeezed on the way to the server and on the way back (Tang et al., ICML 2019).

        x <- x - lr C-allreduce(g_i + weight_decay x)        see `onebit.allreduce.CompressedAllreduce`

    Compressed from the first step, without momentum. The worker and server errors are in units of the gradient. A step is three
    collectives: 16 bytes of agreement, then one all_to_all and one all_gather of n / 8 bytes together with one scale per tensor.

    Args:
        lr: learning rate.
        weight_decay: coupled, a part of what is compressed.
        max_grad_norm: bounds sqrt(mean_i ||g_i||^2), since the mean gradient is not known; it clips by one factor on all ranks.
        check_finite: skip a step, on all ranks, if a gradient on any rank is not finite.
        compressor: see `onebit.compression`; None: `Sign`.
        bucket_cap_mb, overlap: as `OneBitAdam`'s.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single worker.

    A group with compress=False is trained by SGD on the exact mean gradient.
    """

    vectors = {}
    sent_options = ("weight_decay",)

    def __init__(
        self,
        params,
        lr=1e-3,
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
            {"lr": lr, "weight_decay": weight_decay},
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
            unknown=unknown,
        )

    def _terms(self, part, factor):
        z = with_weight_decay(part, scaled(part.flat_gradient(), factor))
        return Terms(part.layout.views(z))

    def _compressed_update(self, part, gathered):
        descend(part, part.allreduce.decode(gathered))

    def _exact_update(self, part, g):
        descend(part, with_weight_decay(part, g))
