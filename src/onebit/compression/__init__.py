"""Compressors: what travels instead of a float vector. A new one is one file that keeps the contract in `base`."""

from onebit.compression.__init__.base import Compressor
from onebit.compression.__init__.identity import Identity
from onebit.compression.__init__.quantize import Quantize
from onebit.compression.__init__.sign import Sign
from onebit.compression.__init__.topk import TopK

__all__ = ["Compressor", "Identity", "Quantize", "Sign", "TopK"]
