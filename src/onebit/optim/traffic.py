from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """What this rank sent and received.

    Attributes:
        bytes_sent, bytes_received: bytes that left and reached this rank.
        calls: collectives.
        exact_bytes: what an exact all_reduce of the gradients in their own dtype would have sent in the same steps.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    calls: int = 0
    exact_bytes: int = 0

    @property
    def compression_ratio(self):
        """exact_bytes / bytes_sent; 1 with a single rank, infinite for steps that send nothing."""
        if not self.bytes_sent:
            return 1.0 if not self.exact_bytes else float("inf")
        return self.exact_bytes / self.bytes_sent

    def plus(self, other):
        return type(self)(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.calls + other.calls,
            self.exact_bytes + other.exact_bytes,
        )


@dataclass(frozen=True)
class Communication(Traffic):
    """A snapshot of an optimizer's traffic since it was made; `last_step` is the same for the last step alone."""

    last_step: Traffic = Traffic()


class Meter:
    """Counts the traffic of steps on a communicator, of which `open` and `close` tell the ends.

    Attributes:
        last, total: `Traffic` of the last step, and of all.
    """

    def __init__(self, communicator):
        self.last = self.total = Traffic()
        self._communicator = communicator
        self._before = None

    def open(self):
        """A step's first exchange begins, perhaps during backward; further calls change nothing."""
        if self._before is None:
            self._before = self._counters()

    def close(self, exact_bytes):
        self.last = Traffic(
            *(now - then for now, then in zip(self._counters(), self._before)), exact_bytes
        )
        self.total = self.total.plus(self.last)
        self._before = None

    def _counters(self):
        return (
            self._communicator.bytes_sent,
            self._communicator.bytes_received,
            self._communicator.calls,
        )
