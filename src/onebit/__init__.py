"""1-bit Adam and its family for PyTorch: Adam's convergence at a thirtieth of the traffic."""

from . import comm, compression, ddp
from .optim.adam import DistributedAdam
from .optim.double_squeeze import DoubleSqueeze
from .optim.ef_momentum_sgd import EFMomentumSGD
from .optim.lamb import Lamb
from .optim.lazy_variance import LazyVarianceAdam
from .optim.local_sgd import LocalSGD
from .optim.naive import NaiveOneBitAdam
from .optim.onebit_adam import OneBitAdam
from .optim.onebit_lamb import OneBitLamb
from .optim.quantized_variance import QuantizedVarianceAdam
from .optim.sgd import DistributedSGD
from .optim.warmup import FixedSteps, VarianceRatio
from .optim.zero_one_adam import ZeroOneAdam
from .parameters import broadcast_parameters

__version__ = "0.1.0"
__all__ = ["DistributedAdam", "DistributedSGD", "DoubleSqueeze", "EFMomentumSGD", "FixedSteps", "Lamb", "LazyVarianceAdam", "LocalSGD",
           "NaiveOneBitAdam", "OneBitAdam", "OneBitLamb", "QuantizedVarianceAdam", "VarianceRatio", "ZeroOneAdam", "broadcast_parameters", "comm",
           "compression", "ddp"]
