from functools import partial

from onebit.allreduce import CompressedAllreduce
from onebit.compression import Quantize
from onebit.kernels.torch_ops import Terms
from onebit.optim.compressed_momentum import CompressedMomentumAdam
from onebit.optim.options import check_compressor, describe_compressor, option_names, reject_unknown


class QuantizedVarianceAdam(CompressedMomentumAdam):
    """Adam with n-bit variance compression: a baseline that needs 16 bits ("1-bit Adam", Figure 12).

        m   = C-allreduce(beta1 m + (1 - beta1) g_i)          1 bit, with worker and server error
        v_i = beta2 v + (1 - beta2) g_i^2                     v   = Q[mean_i Q[v_i]]        n bits, without errors
        x  <- (1 - lr weight_decay) x - lr m_hat / (sqrt(v_hat) + eps)

    with m_hat and v_hat as in `DistributedAdam`. Compressed from the first step. It is Adam on the mean of the *squared local* gradients, as
    nobody knows the mean gradient. Q keeps v >= 0. Where it rounds v to 0, x moves by m / eps: that is how few bits fail, so nothing is done
    about it; a larger eps bounds it.

    A step is five collectives: 16 bytes of agreement, then an all_to_all and an all_gather for each of m and v.

    Args: as `DistributedAdam`, and
        compressor: C, of the momentum; see `onebit.compression`. None: `Sign`; `Identity` sends it as it is.
        variance_compressor: Q; None: QSGD at 8 bits, `Quantize(bits=8, norm="l2", stochastic=True)`, which is right on average. One that is
            not should be close, as what it loses is lost.
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
        variance_compressor=None,
        bucket_cap_mb=None,
        overlap=False,
        communicator=None,
        **unknown,
    ):
        reject_unknown(unknown, option_names(type(self).__init__), type(self).__name__)
        qsgd = partial(Quantize, bits=8, norm="l2", stochastic=True)
        self.variance_compressor = check_compressor(
            variance_compressor or qsgd, "variance_compressor"
        )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            compressor=compressor,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        )

    def _describe(self):
        return f"{super()._describe()}, variance_compressor={describe_compressor(self.variance_compressor)}"

    def _build(self, moments):
        super()._build(moments)
        self._variance_allreduces = {
            part: CompressedAllreduce(
                self.communicator,
                part.layout,
                part.dtype,
                self.variance_compressor,
                feedback=False,
                rounds=self.steps,
                stream=len(self._parts) + i,
            )
            for i, part in enumerate(self._compressed)
        }

    def _outgoing(self, part, variance):
        views = part.layout.views(variance)
        return (self._variance_allreduces[part].compress(Terms(views)),)

    def _exchange(self, part, payload, variance_payload):
        return part.allreduce.exchange(payload), self._variance_allreduces[part].exchange(
            variance_payload
        )

    def _compressed_update(self, part, outcome):
        gathered, gathered_variance = outcome
        allreduce = self._variance_allreduces[part]
        allreduce.commit()
        part.variance.copy_(allreduce.decode(gathered_variance))
        self._move(part, gathered, self._corrected(part, part.variance.clone()))
