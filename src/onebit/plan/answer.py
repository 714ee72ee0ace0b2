"""The question that a plan answers, and its answer: pure functions of numbers."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from onebit.time_model import (
    ADAM,
    Cluster,
    Method,
    Model,
    equal_tensors,
    onebit,
    step_bytes,
    step_seconds,
    zero_one,
)

PAYS = 1.05  # a change of optimizer pays if training becomes at least so many times as fast
SLOWEST, FASTEST = 1e5, 1e13  # bits a second, between which the break-even is looked for
DAY = 24.0  # hours
RIVAL = "AdamW"
ZERO_ONE_FREEZE = 0.1  # of the steps, the usual share of the learning rate's warm-up


@dataclass(frozen=True)
class Question:
    """A training run on a cluster.

    Attributes:
        parameters, tensors: of the model; the tensors are taken to be of equal size.
        cluster: where it runs, a rank for each GPU.
        compute: seconds of forward, backward and update of one step of Adam.
        hidden: the share of `compute` behind which DistributedDataParallel hides its all_reduce.
        compression: seconds by which a compressed step computes longer than one of Adam.
        gradient_bytes: of an element of an uncompressed gradient.
        warmup: T_w / T, the share of warm-up steps of OneBitAdam and OneBitLamb.
        steps: T, which decides how often ZeroOneAdam updates its variance and syncs.
    """

    parameters: int
    cluster: Cluster
    compute: float
    tensors: int = 400
    hidden: float = 2 / 3
    compression: float = 0.0
    gradient_bytes: int = 2
    warmup: float = 0.15
    steps: int = 100_000

    @cached_property
    def model(self) -> Model:
        """The messages of a step."""
        shapes = equal_tensors(self.parameters, min(self.tensors, self.parameters))
        return Model.of(shapes, self.cluster.ranks, self.gradient_bytes)

    @cached_property
    def methods(self) -> dict[str, Method]:
        """Name of the optimizer -> what it exchanges in which share of the steps."""
        one = onebit(self.warmup)
        freeze = max(int(ZERO_ONE_FREEZE * self.steps), 1)
        return {
            RIVAL: ADAM,
            "OneBitAdam": one,
            "OneBitLamb": one,
            "ZeroOneAdam": zero_one(self.steps, freeze),
        }

    def at(self, bandwidth: float) -> "Question":
        """The same with other links between the nodes, or inside if there is one node."""
        asked = replace(self, cluster=self.cluster.with_bandwidth(bandwidth))
        asked.__dict__["model"] = self.model  # neither depends on the links
        asked.__dict__["methods"] = self.methods
        return asked


@dataclass(frozen=True)
class Answer:
    """What one optimizer makes of the question.

    Attributes:
        seconds: of a step, on average over the run.
        nbytes: that leave a GPU in a step, on average.
        speedup: how many times as fast as AdamW under DistributedDataParallel.
        hours_saved: of 24 hours of AdamW.
        bytes_saved: by all GPUs together, over the steps that AdamW makes in 24 hours.
        pays_below: bits a second; see `pays_below`.
    """

    optimizer: str
    seconds: float
    nbytes: float
    speedup: float
    hours_saved: float
    bytes_saved: float
    pays_below: float

    @property
    def pays(self) -> bool:
        """Whether the change from AdamW is worth while."""
        return self.speedup >= PAYS


def seconds_of(question: Question, optimizer: str) -> float:
    """A step on average. Only DistributedDataParallel hides an exchange behind backward."""
    hidden = question.hidden * question.compute if optimizer == RIVAL else 0.0
    return step_seconds(
        question.methods[optimizer],
        question.cluster,
        question.model,
        question.compute,
        compression=question.compression,
        hidden=hidden,
    )


def speedup(question: Question, optimizer: str) -> float:
    """AdamW's time over this optimizer's."""
    return seconds_of(question, RIVAL) / seconds_of(question, optimizer)


def pays_below(question: Question, optimizer: str) -> float:
    """The bandwidth up to which the optimizer is PAYS times as fast as AdamW.

    0 if it is at no bandwidth from 100 kbit/s on, infinite if it is up to 10 Tbit/s.
    """

    def pays(bandwidth):
        return speedup(question.at(bandwidth), optimizer) >= PAYS

    low, high = SLOWEST, FASTEST
    if not pays(low):
        return 0.0
    if pays(high):
        return inf
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def answers(question: Question) -> list[Answer]:
    """One for each optimizer, AdamW first."""
    cluster, model, methods = question.cluster, question.model, question.methods
    rival_seconds = seconds_of(question, RIVAL)
    rival_bytes = step_bytes(methods[RIVAL], cluster, model)
    steps_a_day = DAY * 3600 / rival_seconds
    found = []
    for name, method in methods.items():
        seconds, nbytes = seconds_of(question, name), step_bytes(method, cluster, model)
        found.append(
            Answer(
                name,
                seconds,
                nbytes,
                rival_seconds / seconds,
                DAY * (1 - seconds / rival_seconds),
                (rival_bytes - nbytes) * cluster.ranks * steps_a_day,
                0.0 if name == RIVAL else pays_below(question, name),
            )
        )
    return found
