from onebit.compression import Sign
from onebit.kernels.torch_ops import Terms
from onebit.optim.adam import DistributedAdam
from onebit.optim.compressed import CompressedSteps
from onebit.optim.options import check_compressor


class NaiveOneBitAdam(CompressedSteps, DistributedAdam):
    """Adam on error-compensated 1-bit *gradients*: the baseline that falls behind ("1-bit Adam", section 3.2 and Figures 1 and 6).

        g = C-allreduce(g_i)        then Adam as `DistributedAdam`: both m and v follow the compressed gradient

    Compressed from the first step. Section 4.2 of the paper says why it fails: v takes in (delta_{t-1} - delta_t)^2, which does not
    cancel over the steps.

    Args: as `DistributedAdam`, and
        compressor: see `onebit.compression`; None: `Sign`.
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

    def _terms(self, part, factor):
        return Terms(part.gradients(), [factor] * len(part.params))

    def _compressed_update(self, part, gathered):
        self._exact_update(part, part.allreduce.decode(gathered))
