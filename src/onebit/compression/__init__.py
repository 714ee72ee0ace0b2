"""Compressors: what travels instead of a float vector. A new one is one file that keeps the contract in `base`."""

from .base import Compressor
from .identity import Identity
from .quantize import Quantize
from .sign import Sign
from .topk import TopK

__all__ = ["Compressor", "Identity", "Quantize", "Sign", "TopK"]
