"""Collectives in the background: in their own thread, and on a GPU in their own stream."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import torch


class Inline:
    """Runs what it is given at once: nothing is in the background."""

    def submit(self, call: Callable, *args: Any) -> Future:
        """call(*args), now. The result waits in `result()`; an error is raised here."""
        future: Future = Future()
        future.set_result(call(*args))
        return future


class Background:
    """Runs what it is given in one thread, in the order in which it was given.

    Ranks must submit the same collectives in the same order, but not at the same time. The caller
    may free the tensors that it passes. The thread ends with this object.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None

    def _start(self) -> threading.Thread:
        """Start the thread, at the first call, and again in a forked child, which lacks it."""
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        # The thread holds the queue only and not this object, whose end stops it. It is a daemon,
        # so that a rank which waits in vain can be ended.
        self._thread = threading.Thread(
            target=_work,
            args=(self._calls, torch.get_num_threads()),
            name="onebit exchange",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)
        return self._thread

    def submit(self, call: Callable, *args: Any) -> Future:
        """call(*args) in the background, on what the current stream has computed by now.

        `result()` waits for the result and raises the error, if there was one.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            thread = self._start()
        if self._stream is None:
            future: Future = _ThreadFuture(thread)
            self._calls.put((future, call, args))
            return future
        return _on_stream(self._calls, thread, self._stream, call, args)


class _ThreadFuture(Future):
    """A Future that fails once the thread that would complete it is gone."""

    def __init__(self, thread: threading.Thread):
        super().__init__()
        self._thread = thread

    def result(self, timeout=None):
        while timeout is None and not self.done() and self._thread.is_alive():
            wait([self], timeout=1)
        if timeout is None and not self.done():
            raise RuntimeError(
                "the thread that ran this exchange is gone: the process was forked between "
                "backward and step(). Fork before backward or after step()"
            )
        return super().result(timeout)


class _StreamFuture(_ThreadFuture):
    """A Future whose result the current stream may use."""

    def result(self, timeout=None):
        tensors, done = super().result(timeout)
        current = torch.cuda.current_stream(done.device)
        current.wait_event(done)
        for tensor in _tensors(tensors):
            tensor.record_stream(current)
        return tensors


def results(futures: list[Future]) -> list:
    """Their results. If one fails, its error comes once nothing is under way any more."""
    for future in futures:
        with suppress(Exception):
            future.result()
    return [future.result() for future in futures]


def _on_stream(calls, thread, stream, call, args):
    ready = torch.cuda.current_stream(stream.device).record_event()

    def on_stream():
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            for tensor in _tensors(args):
                tensor.record_stream(stream)
            return call(*args), stream.record_event()

    future = _StreamFuture(thread)
    calls.put((future, on_stream, ()))
    return future


def _tensors(values):
    return [
        value
        for value in (values if isinstance(values, (tuple, list)) else [values])
        if isinstance(value, torch.Tensor)
    ]


def _work(calls, threads):
    torch.set_num_threads(threads)  # torch gives a new thread a number of threads of its own
    while (job := calls.get()) is not None:
        future, call, args = job
        try:
            future.set_result(call(*args))
        except BaseException as error:  # of whatever kind: it belongs to whoever waits
            future.set_exception(error)
        del job, future, call, args  # keep nothing alive while waiting for the next call
