"""Collectives in the background: one after another in a thread of their own, and on a GPU in a stream of their own."""

import queue
import threading
import weakref
from concurrent.futures import Future

import torch


class Inline:
    """Runs what it is given at once: nothing is in the background."""

    def submit(self, call, *args):
        """call(*args), now; the result waits in `result()`."""
        future = Future()
        future.set_result(call(*args))
        return future


class Background:
    """Runs what it is given in one thread, in the order in which it was given; tensors may come and go freely.

    Ranks that submit the same collectives in the same order need not submit them at the same time.

    Args:
        device: of the tensors.
    """

    def __init__(self, device):
        self._calls = queue.SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The thread must not hold this object, which ends it when nobody needs it any more. A daemon, so that a rank that waits in vain can be ended.
        threading.Thread(
            target=_work,
            args=(self._calls, torch.get_num_threads()),
            name="onebit exchange",
            daemon=True,
        ).start()
        weakref.finalize(self, self._calls.put, None)

    def submit(self, call, *args):
        """call(*args) in the background, on what the current stream has computed by now. `result()` waits for it and raises its error."""
        if self._stream is None:
            future = Future()
            self._calls.put((future, call, args))
            return future
        return _on_stream(self._calls, self._stream, call, args)


class _StreamFuture(Future):
    """A Future whose result the current stream may use."""

    def result(self, timeout=None):
        tensors, done = super().result(timeout)
        current = torch.cuda.current_stream(done.device)
        current.wait_event(done)
        for tensor in _tensors(tensors):
            tensor.record_stream(current)
        return tensors


def _on_stream(calls, stream, call, args):
    ready = torch.cuda.current_stream(stream.device).record_event()

    def on_stream():
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            for tensor in _tensors(args):
                tensor.record_stream(stream)
            return call(*args), stream.record_event()

    future = _StreamFuture()
    calls.put((future, on_stream, ()))
    return future


def _tensors(values):
    return [
        value
        for value in (values if isinstance(values, (tuple, list)) else [values])
        if isinstance(value, torch.Tensor)
    ]


def _work(calls, threads):
    torch.set_num_threads(threads)  # a new thread starts with a number of its own
    while (job := calls.get()) is not None:
        future, call, args = job
        try:
            future.set_result(call(*args))
        except BaseException as error:  # whatever it is, whoever waits must learn of it
            future.set_exception(error)
        del job, future, call, args  # nothing is kept alive while waiting
