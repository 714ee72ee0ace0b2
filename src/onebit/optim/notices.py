"""What an optimizer tells its user: warnings that point to the user's own line, and log lines."""

import logging
import os
import sys
import warnings
from pathlib import Path

import torch

LOGGER = logging.getLogger("onebit")
_INSIDE = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
)


def warn(message: str) -> None:
    """Issue a UserWarning at the innermost line that belongs to neither onebit nor PyTorch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
