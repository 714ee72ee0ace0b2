"""1-bit Adam and its family for PyTorch: Adam's convergence at a thirtieth of the traffic."""

from . import comm, compression
from .optim.adam import DistributedAdam
from .optim.naive import NaiveOneBitAdam
from .optim.onebit_adam import OneBitAdam
from .optim.warmup import FixedSteps, VarianceRatio
from .optim.zero_one_adam import ZeroOneAdam
from .parameters import broadcast_parameters

__version__ = "0.1.0"
__all__ = ["DistributedAdam", "FixedSteps", "NaiveOneBitAdam", "OneBitAdam", "VarianceRatio", "ZeroOneAdam", "broadcast_parameters", "comm",
           "compression"]
