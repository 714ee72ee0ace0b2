"""Compressors: what travels instead of a vector of floats.

A new compressor is one file with a subclass of `Compressor`, whose docstrings are its contract.
Optimizers take the class, or `functools.partial(Class, option=...)`, as their `compressor`.
"""

from onebit.compression.base import Compressor
from onebit.compression.identity import Identity
from onebit.compression.quantize import Quantize
from onebit.compression.sign import Sign
from onebit.compression.topk import TopK

__all__ = ["Compressor", "Identity", "Quantize", "Sign", "TopK"]
