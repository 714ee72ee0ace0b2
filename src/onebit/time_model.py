"""How long a training step takes on a cluster: computation, and messages over its links.

A step of one method takes

    compute + max(exchange - hidden, 0)        [seconds]

where `hidden` is the computation behind which the exchange can run. The exchange follows from the
bytes of its messages, counted by the rules by which the optimizers send them, and from two kinds of
links: those inside a node, one for each rank, and those between nodes, one for each node. A ring
crosses the link of a node once, whatever the number of ranks in it; in an all_to_all every rank
sends to every rank of the other nodes over it. The links of both kinds work at the same time, so
the slower kind decides.

Nothing here is fitted to a measurement. `onebit.plan` answers questions with this model, and
`onebit.lab.bench.model` puts its predictions beside what the papers print.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onebit.layout import ROW_ALIGNMENT, Layout, round_up
from onebit.optim.step_sets import step_sets

SCALE_BYTES = 4  # a scale travels as float32
AGREEMENT_BYTES = 16  # a rank's squared norm and flags, gathered before anything is changed
BIT = 8  # bits in a byte


@dataclass(frozen=True)
class Link:
    """A link that carries `bandwidth` bits a second each way, `latency` seconds after the start."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, messages: int, nbytes: float) -> float:
        """How long `messages` messages of `nbytes` bytes each take, one after another."""
        return messages * (self.latency + BIT * nbytes / self.bandwidth)


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines with `per_node` ranks each.

    Attributes:
        inside: the link that every rank has to the ranks of its own node.
        between: the link that every node has to the other nodes.
    """

    nodes: int
    per_node: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.per_node < 1:
            raise ValueError(
                f"a cluster has at least one node and one rank in it, not {self.nodes} and "
                f"{self.per_node}"
            )

    @property
    def ranks(self) -> int:
        """W."""
        return self.nodes * self.per_node

    def with_bandwidth(self, bandwidth: float) -> "Cluster":
        """The same cluster with other links between its nodes, or inside if it has one node."""
        if self.nodes == 1:
            return replace(self, inside=replace(self.inside, bandwidth=bandwidth))
        return replace(self, between=replace(self.between, bandwidth=bandwidth))


# ---- collectives


def all_reduce_seconds(cluster: Cluster, nbytes: float) -> float:
    """A ring over all ranks: 2 (W - 1) rounds, in each of which every rank hands on nbytes / W."""
    return _ring_seconds(cluster, 2 * (cluster.ranks - 1), nbytes / cluster.ranks)


def all_gather_seconds(cluster: Cluster, nbytes: float) -> float:
    """A ring over all ranks: W - 1 rounds of nbytes, what one rank has to tell the others."""
    return _ring_seconds(cluster, cluster.ranks - 1, nbytes)


def all_to_all_seconds(cluster: Cluster, nbytes: float) -> float:
    """Every rank sends nbytes to every other rank; the ranks of a node share its link."""
    own, others = cluster.per_node - 1, cluster.ranks - cluster.per_node
    inside = cluster.inside.seconds(own, nbytes)
    return max(inside, cluster.between.seconds(others, cluster.per_node * nbytes))


def _ring_seconds(cluster: Cluster, rounds: int, nbytes: float) -> float:
    links = ([cluster.inside] if cluster.per_node > 1 else []) + (
        [cluster.between] if cluster.nodes > 1 else []
    )
    return max((link.seconds(rounds, nbytes) for link in links), default=0.0)


# ---- messages


def message_bytes(shapes: Iterable[Sequence[int]], ranks: int) -> int:
    """What one rank sends to another in each half of a compressed exchange.

    One bit for each element of a chunk, padding included, then one float32 scale for each piece of
    a tensor in it, then zeros up to a multiple of 16 bytes; all chunks are given room for as many
    pieces as the richest one has. These are the rules of `onebit.layout.Layout` and
    `onebit.compression.Sign`, without their tables, which are as long as the model.
    """
    layout = Layout(shapes, ranks)
    edges = np.array([*layout.starts, layout.used])  # the tail, if any, is a piece too
    chunks = layout.chunk * np.arange(ranks)
    # a piece begins where a chunk does, and where a tensor that is not empty begins inside one
    begins = np.unique(edges[edges < layout.size])
    inside = np.searchsorted(begins, chunks + layout.chunk) - np.searchsorted(
        begins, chunks, side="right"
    )
    scales = SCALE_BYTES * (1 + int(inside.max()))
    return round_up(layout.chunk // BIT + scales, ROW_ALIGNMENT)


def equal_tensors(parameters: int, tensors: int = 1) -> list[tuple[int]]:
    """Shapes of tensors that are as equal as they can be, `parameters` elements in all."""
    if not 0 < tensors <= parameters:
        raise ValueError(
            f"{parameters} parameters cannot be {tensors} tensors: ask for 1 to {parameters}"
        )
    size, more = divmod(parameters, tensors)
    return [(size + 1,)] * more + [(size,)] * (tensors - more)


# ---- exchanges


@dataclass(frozen=True)
class Model:
    """What is exchanged: `parameters` elements in all.

    Attributes:
        message: bytes of a compressed message, see `message_bytes`.
        gradient_bytes: of one element of an uncompressed gradient, 2 in half precision.
    """

    parameters: int
    message: int
    gradient_bytes: int = 2

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], ranks: int, gradient_bytes: int = 2) -> "Model":
        """A model whose tensors have these shapes, on `ranks` ranks."""
        parameters = sum(Layout(shapes, 1).numels)
        return cls(parameters, message_bytes(shapes, ranks), gradient_bytes)


def dense_seconds(cluster: Cluster, model: Model) -> float:
    """An all_reduce of all gradients."""
    return all_reduce_seconds(cluster, model.parameters * model.gradient_bytes)


def dense_bytes(cluster: Cluster, model: Model) -> float:
    """What leaves a rank for it."""
    share = 2 * (cluster.ranks - 1) / cluster.ranks
    return share * model.parameters * model.gradient_bytes


def compressed_seconds(cluster: Cluster, model: Model) -> float:
    """The ranks agree, send each other the bits of their chunks, and gather the averages."""
    agreement = all_gather_seconds(cluster, AGREEMENT_BYTES)
    there = all_to_all_seconds(cluster, model.message)
    return agreement + there + all_gather_seconds(cluster, model.message)


def compressed_bytes(cluster: Cluster, model: Model) -> float:
    """What leaves a rank for it."""
    return (cluster.ranks - 1) * (2 * model.message + AGREEMENT_BYTES)


# ---- methods


@dataclass(frozen=True)
class Stage:
    """A share of all steps, with what is exchanged in each of them."""

    share: float
    dense: bool
    compressed: bool


Method = tuple[Stage, ...]
ADAM: Method = (Stage(1.0, dense=True, compressed=False),)
COMPRESSED: Method = (Stage(1.0, dense=False, compressed=True),)


def onebit(warmup: float) -> Method:
    """1-bit Adam or 1-bit LAMB with this share of warm-up steps, T_w / T."""
    if not 0 <= warmup <= 1:
        raise ValueError(f"the share of warm-up steps lies between 0 and 1; it is {warmup}")
    warm = Stage(warmup, dense=True, compressed=False)
    return (warm, Stage(1 - warmup, dense=False, compressed=True))


def zero_one(steps: int, variance_freeze_step: int, **options: int) -> Method:
    """0/1 Adam over `steps` steps; options as those of `onebit.ZeroOneAdam`.

    A step that updates the variance averages the gradients without compression and syncs; of the
    others some sync, and the rest exchange nothing.
    """
    updates, syncs = step_sets(steps, variance_freeze_step=variance_freeze_step, **options)
    only = len(syncs - updates)
    return (
        Stage(len(updates) / steps, dense=True, compressed=True),
        Stage(only / steps, dense=False, compressed=True),
        Stage(1 - (len(updates) + only) / steps, dense=False, compressed=False),
    )


def step_seconds(
    method: Method,
    cluster: Cluster,
    model: Model,
    compute: float,
    *,
    compression: float = 0.0,
    hidden: float = 0.0,
) -> float:
    """The mean over all steps.

    Args:
        compute: seconds of a step in which nothing is exchanged.
        compression: seconds by which a compressed step computes longer.
        hidden: of `compute`, the part behind which the exchange of a dense step can run.
    """
    dense, compressed = dense_seconds(cluster, model), compressed_seconds(cluster, model)
    total = compute
    for stage in method:
        total += stage.share * stage.dense * max(dense - hidden, 0.0)
        total += stage.share * stage.compressed * (compression + compressed)
    return total


def step_bytes(method: Method, cluster: Cluster, model: Model) -> float:
    """What leaves a rank in a step, on average."""
    dense, compressed = dense_bytes(cluster, model), compressed_bytes(cluster, model)
    return sum(
        stage.share * (stage.dense * dense + stage.compressed * compressed) for stage in method
    )
