"""The order in which a run sees its samples: one epoch after the other."""

from functools import lru_cache

import numpy as np


def samples(seed: int, start: int, size: int, count: int) -> np.ndarray:
    """The numbers of `size` samples from place `start` on.

    The places are those of all epochs, one after the other. Each epoch is a permutation of the
    `count` samples, a function of (seed, epoch), so that an epoch has each sample once.
    """
    epochs, within = np.divmod(start + np.arange(size), count)
    chosen = np.empty(size, np.int64)
    for epoch in np.unique(epochs):
        chosen[epochs == epoch] = _permutation(seed, int(epoch), count)[within[epochs == epoch]]
    return chosen


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    return np.random.default_rng(sequence).permutation(count)
