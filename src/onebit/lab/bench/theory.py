"""The problem of the experiments on the theory, whose noise and smoothness are known, and its runs.

They go through `onebit.reference`. All seeds run side by side: x is one long vector [seeds * d], in
which each seed has a scale of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from onebit import reference

BLOCK = 16  # steps whose noise is drawn at once


@dataclass(frozen=True)
class Problem:
    """A smooth non-convex function of d coordinates, whose minimum is 0, at x = 0.

        f(x) = sum_j L w^2 / 2 * u_j^2 / (1 + u_j^2)      u = Q x / w, Q a fixed rotation
        grad f = Q^T [L w u_j / (1 + u_j^2)^2]

    The rotation turns it so that none of its axes is a coordinate's. Its curvature along an axis
    lies between -L/4 (at |u_j| = 1) and L (at u_j = 0). It is non-convex where |u_j| > 1 / sqrt(3):
    the gradient dies out away from the minimum, as a saturated network's does. Runs start at |u_j|
    between 0.5 and 1.5. Each worker sees grad f plus noise of mean 0 and E||noise||^2 = sigma^2,
    independent over workers, steps and coordinates.

    Attributes:
        L: the smoothness, ||grad f(x) - grad f(y)|| <= L ||x - y||.
        width: w, how far the basin reaches.
        dimension: d.
        sigma: of the noise.
        rare: None: the noise is Gaussian. p: a coordinate's noise is large with probability p and
            otherwise small, of the other sign, as the gradient of a rare word is: its median is not
            0, and a sign sees the median.
        v_max: the preconditioner is 1 / sqrt(v), with v from 1 to v_max over the coordinates; v_min
            is 1.
    """

    L: float = 1.0
    width: float = 0.25
    dimension: int = 32
    sigma: float = 8.0
    rare: float | None = None
    v_max: float = 4.0

    @cached_property
    def rotation(self) -> np.ndarray:
        return np.linalg.qr(
            np.random.default_rng(0).standard_normal((self.dimension, self.dimension))
        )[0]

    @cached_property
    def v(self) -> np.ndarray:
        return np.geomspace(1, self.v_max, self.dimension)

    def value(self, x: np.ndarray) -> np.ndarray:
        """f of x [..., d]."""
        u = x @ self.rotation.T / self.width
        return self.L * self.width**2 / 2 * (u**2 / (1 + u**2)).sum(-1)

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """grad f of x [..., d]."""
        u = x @ self.rotation.T / self.width
        return self.L * self.width * u / (1 + u**2) ** 2 @ self.rotation

    def start(self, seed: int) -> np.ndarray:
        random = np.random.default_rng([seed, 0])
        u = random.uniform(0.5, 1.5, self.dimension) * random.choice([-1, 1], self.dimension)
        return self.width * u @ self.rotation

    def noise(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """shape [..., d]."""
        scale = self.sigma / np.sqrt(self.dimension)
        if self.rare is None:
            return scale * random.standard_normal(shape)
        odds = np.sqrt((1 - self.rare) / self.rare)
        return scale * np.where(random.random(shape) < self.rare, odds, -1 / odds)

    def learning_rate(self, workers: int, steps: int, eps: float) -> float:
        """Corollary 1, with v_min = 1."""
        return 1 / (
            4 * self.L + self.sigma * np.sqrt(steps / workers) + eps ** (2 / 3) * steps ** (1 / 3)
        )


# The problem of experiments/linear_speedup.py, and the number of workers at which T varies there.
SPEEDUP_PROBLEM = Problem(sigma=16.0)
SPEEDUP_WORKERS = 16


@dataclass
class Sample:
    """The workers' gradients, `reference`'s gradient(t, x) -> [n, seeds * d].

    Attributes:
        stream: another number, another noise.
        exact: [seeds, d], the gradient without noise of the last call.
        noisy: [n, seeds, d], what the workers saw.
    """

    problem: Problem
    workers: int
    seeds: tuple[int, ...]
    stream: int = 0
    exact: np.ndarray = field(init=False)
    noisy: np.ndarray = field(init=False)

    def __post_init__(self):
        self._randoms = [
            np.random.default_rng([seed, self.workers, self.stream, 1]) for seed in self.seeds
        ]

    def __call__(self, t: int, x: np.ndarray) -> np.ndarray:
        i = (t - 1) % BLOCK
        if i == 0:
            shape = (BLOCK, self.workers, self.problem.dimension)
            self._noise = np.stack(
                [self.problem.noise(random, shape) for random in self._randoms], axis=2
            )
        self.exact = self.problem.gradient(x.reshape(len(self.seeds), -1))
        self.noisy = self.exact + self._noise[i]
        return self.noisy.reshape(self.workers, -1)


def one_bit_by_seed(dimension: int) -> Callable:
    """The compressor `reference.one_bit` with one group for each seed: its d coordinates."""

    def C(x, groups, active):
        rows = x.reshape(*x.shape[:-1], -1, dimension)
        return reference.one_bit(rows, [slice(None)], np.ones(dimension, bool)).reshape(x.shape)

    return C


@dataclass(frozen=True)
class Step:
    """One step of all seeds, [seeds] or [seeds, d].

    Attributes:
        gradient: of f, without noise, where the step was taken.
        mean: the workers' mean gradient.
        error: mean_i delta_i + delta_bar, what all errors together withhold from x; Theorem 1's
        delta_t. state: the reference's, [seeds * d].
    """

    gradient: np.ndarray
    mean: np.ndarray
    error: np.ndarray
    state: reference.State

    def norm(self, v: np.ndarray | float = 1.0) -> np.ndarray:
        """||grad f||^2_V, V = diag(1 / v), of each seed."""
        return (self.gradient**2 / v).sum(-1)


def steps_of(
    algorithm: Callable, sample: Sample, count: int, *arguments, **options
) -> Iterator[Step]:
    """`count` steps of an algorithm of the reference.

    algorithm: (x, gradient, n, *arguments, **options) -> States.
    """
    seeds = len(sample.seeds)
    x = np.concatenate([sample.problem.start(seed) for seed in sample.seeds])
    for _, state in zip(range(count), algorithm(x, sample, sample.workers, *arguments, **options)):
        error = (state.delta.mean(0) + state.delta_bar).reshape(seeds, -1)
        yield Step(sample.exact, sample.noisy.mean(0), error, state)


def momentum_sgd(
    sample: Sample,
    steps: int,
    gamma: float,
    compressed: bool,
    beta: float = 0.9,
    reset_every: int | None = None,
) -> Iterator[Step]:
    """`reference.preconditioned_momentum_sgd` on the problem.

    Compressed, it is the second stage of 1-bit Adam.
    """
    problem = sample.problem
    C = one_bit_by_seed(problem.dimension) if compressed else reference.identity
    v = np.tile(problem.v, len(sample.seeds))
    yield from steps_of(
        reference.preconditioned_momentum_sgd,
        sample,
        steps,
        lambda t: gamma,
        ((), ()),
        v=v,
        beta=beta,
        C=C,
        reset_every=reset_every,
    )
