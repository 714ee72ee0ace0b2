"""Waiting for what another process does."""

import time


def eventually(holds, seconds=120):
    """Whether the condition holds before the time is over."""
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
