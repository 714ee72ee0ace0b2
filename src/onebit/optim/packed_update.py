"""Adam's step with a momentum that is still packed, as it came from the compressed allreduce."""

from torch import Tensor

from onebit.compression import Compressor, Sign
from onebit.kernels.torch_ops import Numbers, Tensors, Terms, apply_moves, combine


def packed_update(
    compressor: Compressor,
    parameters: Tensors,
    variance: Tensor,
    payload: Tensor,
    decays: Numbers,
    rates: Numbers,
    epsilons: Numbers,
    limits: Numbers,
) -> Tensor:
    """x <- decay x - (rate m) / (sqrt(v) + eps) in place, where m is what `payload` stands for.

    Arguments and result as those of `onebit.kernels.torch_ops.update`, which does it in one pass if
    the payload is signs.
    """
    partition = compressor.partition
    if isinstance(compressor, Sign):
        numbers = decays, rates, epsilons, limits
        return compressor.kernels.update(partition, parameters, variance, payload, *numbers)
    rate_times_m = Terms([None] * len(parameters), momentum=payload, betas=rates)
    moves = combine(partition, rate_times_m, compressor.dtype, compressor.decompress)
    return apply_moves(partition, parameters, variance, moves, decays, epsilons, limits)
