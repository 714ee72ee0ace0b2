"""1-bit Adam and its family for PyTorch: Adam's convergence at a thirtieth of the traffic."""

from onebit.__init__ import comm, compression, ddp
from onebit.__init__.optim.adam import DistributedAdam
from onebit.__init__.optim.double_squeeze import DoubleSqueeze
from onebit.__init__.optim.ef_momentum_sgd import EFMomentumSGD
from onebit.__init__.optim.lamb import Lamb
from onebit.__init__.optim.lazy_variance import LazyVarianceAdam
from onebit.__init__.optim.local_sgd import LocalSGD
from onebit.__init__.optim.naive import NaiveOneBitAdam
from onebit.__init__.optim.onebit_adam import OneBitAdam
from onebit.__init__.optim.onebit_lamb import OneBitLamb
from onebit.__init__.optim.quantized_variance import QuantizedVarianceAdam
from onebit.__init__.optim.sgd import DistributedSGD
from onebit.__init__.optim.warmup import FixedSteps, VarianceRatio
from onebit.__init__.optim.zero_one_adam import ZeroOneAdam
from onebit.__init__.parameters import broadcast_parameters

__version__ = "0.1.0"
__all__ = [
    "DistributedAdam",
    "DistributedSGD",
    "DoubleSqueeze",
    "EFMomentumSGD",
    "FixedSteps",
    "Lamb",
    "LazyVarianceAdam",
    "LocalSGD",
    "NaiveOneBitAdam",
    "OneBitAdam",
    "OneBitLamb",
    "QuantizedVarianceAdam",
    "VarianceRatio",
    "ZeroOneAdam",
    "broadcast_parameters",
    "comm",
    "compression",
    "ddp",
]
