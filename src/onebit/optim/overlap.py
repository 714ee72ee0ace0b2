"""Exchanges that begin during backward."""

import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from onebit.optim.bucket import Bucket

if TYPE_CHECKING:
    from onebit.optim.optimizer import DistributedOptimizer

STUCK = (
    "If a backward was interrupted or its step left out, make a new optimizer, load this one's "
    "state_dict() into it, and drop this one, on all ranks"
)


class Overlap:
    """Begins a bucket's exchange as soon as backward has accumulated all its gradients.

    Buckets begin in one order on all ranks, in which backward fills them if it goes through the
    parameters from last to first. A bucket that lacks a gradient, since a parameter was not used,
    begins in step(), and so do those after it. Nothing begins before the first step, at which the
    ranks compare what they have.

    An exchange works on a copy of the compression errors, which counts once the step knows that
    all gradients are finite. So until step() a gradient whose bucket has left must stay as it is;
    if it changed, step() raises.
    """

    def __init__(self, optimizer: "DistributedOptimizer") -> None:
        self._optimizer: Any = weakref.ref(optimizer)
        self._buckets = optimizer._run.buckets
        self._paused = False
        self._hooks: dict[torch.nn.Parameter, Any] = {}
        # disabled here rather than at import, since that loads the compiler
        self._hook = torch.compiler.disable(_arrived)
        self._forget()

    def remove(self) -> None:
        """Listen to no gradient any more."""
        for hook in self._hooks.values():
            hook.remove()

    def _forget(self) -> None:
        """Wait for all gradients anew."""
        # for each bucket whose exchange has begun, in order:
        # (future, measured, versions of its gradients, options sent)
        self._started: list[tuple[Future, torch.Tensor, list, list]] = []
        # for each bucket the parameters whose gradients are to come; known when the first comes
        self._missing: list[set[torch.nn.Parameter]] | None = None
        for i, bucket in enumerate(self._buckets):
            for p in bucket.params:
                # a bucket with a parameter without hook begins in step()
                if p.requires_grad and p not in self._hooks:
                    hook = partial(self._hook, weakref.ref(self), i)
                    self._hooks[p] = p.register_post_accumulate_grad_hook(hook)

    @property
    def is_under_way(self) -> bool:
        """Whether an exchange has begun."""
        return bool(self._started)

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError if an exchange is under way, which `what` would disturb."""
        if self.is_under_way:
            raise RuntimeError(
                f"{what} between backward and step(), while gradients are being averaged: do it "
                f"after step(). {STUCK}"
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward only accumulates."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def arrived(self, i: int, p: torch.nn.Parameter) -> None:
        """Backward has accumulated the gradient of p, which belongs to bucket i."""
        if self._paused or not self._optimizer()._may_start_early():
            return
        if i < len(self._started):
            raise RuntimeError(
                "a gradient was accumulated after its bucket had left to be averaged. With "
                "gradient accumulation, run all but the last backward inside "
                "`with optimizer.no_sync():`; if checkpointing runs a part of backward twice "
                f"(use_reentrant=True), set overlap=False. {STUCK}"
            )
        missing = self._missing or [
            {p for p in bucket.params if p.requires_grad} for bucket in self._buckets
        ]
        self._missing = missing
        missing[i].discard(p)
        while len(self._started) < len(self._buckets) and not missing[len(self._started)]:
            self._start()

    def exchanges(self) -> list[Future]:
        """A future for each bucket. Those that had not begun begin now."""
        self._check_unchanged()
        while len(self._started) < len(self._buckets):
            self._start()
        started = self._started
        self._forget()
        self._measured = [measured for _, measured, _, _ in started]
        return [future for future, _, _, _ in started]

    def measured(self) -> list[torch.Tensor]:
        """What was measured of each bucket's gradients when they left."""
        return self._measured

    def _start(self) -> None:
        bucket = self._buckets[len(self._started)]
        future, measured = self._optimizer()._start_early(bucket)
        options = self._sent_options(bucket)
        self._started.append((future, measured, _versions(bucket), options))

    def _sent_options(self, bucket: Bucket) -> list[list[Any]]:
        """The options that an exchange has already used."""
        names = self._optimizer().sent_options
        return [[group[name] for name in names] for group, _ in bucket.spans]

    def _check_unchanged(self) -> None:
        for bucket, (_, _, versions, options) in zip(self._buckets, self._started):
            if options != self._sent_options(bucket):
                raise RuntimeError(
                    f"{', '.join(self._optimizer().sent_options)} changed between backward and "
                    "step(), while what they make was being averaged: change them after step()"
                )
            for p, before, now in zip(bucket.params, versions, _versions(bucket)):
                if before != now:
                    names = dict(zip(self._optimizer()._params(), self._optimizer()._names()))
                    raise RuntimeError(
                        f"the gradient of {names[p]} changed after its bucket had left to be "
                        "averaged during backward, so that the change would be lost. Change "
                        "gradients in hooks that run before they are accumulated "
                        "(Tensor.register_hook), or set overlap=False; clip with the optimizer's "
                        f"max_grad_norm, which needs overlap=False too. {STUCK}"
                    )


def _arrived(overlap: weakref.ref, i: int, p: torch.nn.Parameter) -> None:
    """The hook. The optimizer may be gone while its hooks are still there."""
    listening = overlap()
    if listening is not None:
        listening.arrived(i, p)


def _versions(bucket: Bucket) -> list[tuple[int, int] | None]:
    """What changes when somebody writes into a gradient or replaces it."""
    return [None if g is None else (g.data_ptr(), g._version) for g in bucket.gradients()]
