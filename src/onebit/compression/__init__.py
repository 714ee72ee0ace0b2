"""Compressors: what travels instead of a float vector. A new one is one file that keeps the contract in `base`."""

from onebit.compression.base import Compressor
from onebit.compression.identity import Identity
from onebit.compression.quantize import Quantize
from onebit.compression.sign import Sign
from onebit.compression.topk import TopK

__all__ = ["Compressor", "Identity", "Quantize", "Sign", "TopK"]
