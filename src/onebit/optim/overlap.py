"""Exchanges that begin during backward."""

import weakref
from contextlib import contextmanager
from functools import partial

import torch

STUCK = (
    "If a backward was interrupted or its step left out, make a new optimizer, load this one's state_dict() into it, and drop this one, on all "
    "ranks"
)


class Overlap:
    """Begins a bucket's exchange as soon as backward has accumulated the gradients of all its parameters.

    Buckets begin in one order on all ranks, that in which backward fills them if it goes through the parameters from last to first; a
    bucket that lacks a gradient, since a parameter was not used, begins in step(), and so do those after it. Nothing is started before the
    first step, at which the ranks compare what they have.

    An exchange works on a copy of the compression errors, which counts once the step knows that all gradients are finite. So until
    step() a gradient whose bucket has left must stay as it is; if it changed, step() raises.
    """

    def __init__(self, optimizer):
        self._optimizer = weakref.ref(optimizer)
        self._parts = optimizer._parts
        self._paused = False
        self._hooks = {}
        self._hook = torch.compiler.disable(
            _arrived
        )  # here rather than at import, since it loads the compiler
        self._forget()

    def remove(self):
        for hook in self._hooks.values():
            hook.remove()

    def _forget(self):
        """Wait for all gradients anew."""
        self._started = []  # for each part whose exchange has begun, in order: (future, measured, versions of its gradients, options sent)
        self._missing = None  # for each part the parameters whose gradients are to come; known when the first one comes
        for i, part in enumerate(self._parts):
            for p in part.params:
                if (
                    p.requires_grad and p not in self._hooks
                ):  # a bucket with a parameter without hook begins in step()
                    self._hooks[p] = p.register_post_accumulate_grad_hook(
                        partial(self._hook, weakref.ref(self), i)
                    )

    @property
    def is_under_way(self):
        return bool(self._started)

    @contextmanager
    def paused(self):
        """Inside, backward only accumulates."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def arrived(self, i, p):
        """Backward has accumulated the gradient of p, which belongs to part i."""
        if self._paused or not self._optimizer()._may_start_early():
            return
        if i < len(self._started):
            raise RuntimeError(
                "a gradient was accumulated after its bucket had left to be averaged. With gradient accumulation, run all but "
                "the last backward inside `with optimizer.no_sync():`; if checkpointing runs a part of backward twice "
                f"(use_reentrant=True), set overlap=False. {STUCK}"
            )
        if self._missing is None:
            self._missing = [{p for p in part.params if p.requires_grad} for part in self._parts]
        self._missing[i].discard(p)
        while len(self._started) < len(self._parts) and not self._missing[len(self._started)]:
            self._start()

    def exchanges(self):
        """A future for each part. Those that had not begun begin now."""
        self._check_unchanged()
        while len(self._started) < len(self._parts):
            self._start()
        started = self._started
        self._forget()
        self._measured = [measured for _, measured, _, _ in started]
        return [future for future, _, _, _ in started]

    def measured(self):
        """What `measure` gave for each part's gradients when they left."""
        return self._measured

    def _start(self):
        part = self._parts[len(self._started)]
        future, measured = self._optimizer()._start_early(part)
        self._started.append((future, measured, _versions(part), self._sent_options(part)))

    def _sent_options(self, part):
        """The options that an exchange has already used."""
        return [[group[name] for name in self._optimizer().sent_options] for group, _ in part.spans]

    def _check_unchanged(self):
        for part, (_, _, versions, options) in zip(self._parts, self._started):
            if options != self._sent_options(part):
                raise RuntimeError(
                    f"{', '.join(self._optimizer().sent_options)} changed between backward and step(), while what they make was being "
                    "averaged: change them after step()"
                )
            for p, before, now in zip(part.params, versions, _versions(part)):
                if before != now:
                    names = dict(zip(self._optimizer()._params(), self._optimizer()._names()))
                    raise RuntimeError(
                        f"the gradient of {names[p]} changed after its bucket had left to be averaged during backward, so that the "
                        "change would be lost. Change gradients in hooks that run before they are accumulated "
                        "(Tensor.register_hook), or set overlap=False; clip with the optimizer's max_grad_norm, which needs "
                        f"overlap=False too. {STUCK}"
                    )


def _arrived(overlap, i, p):
    """The hook. The optimizer may be gone while its hooks are still there."""
    if overlap() is not None:
        overlap().arrived(i, p)


def _versions(part):
    """What changes when somebody writes into a gradient or replaces it."""
    return [None if g is None else (g.data_ptr(), g._version) for g in part.gradients()]
