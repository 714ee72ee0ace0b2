"""How many bytes an optimizer sends and receives."""

from dataclasses import dataclass, fields

from onebit.comm import Communicator


@dataclass(frozen=True, repr=False)
class Traffic:
    """What this rank sent and received.

    Attributes:
        bytes_sent, bytes_received: bytes that left and reached this rank.
        calls: collectives.
        exact_bytes: what an exact all_reduce of the gradients in their own dtype would have sent
            in the same steps.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    calls: int = 0
    exact_bytes: int = 0

    @property
    def compression_ratio(self) -> float:
        """exact_bytes / bytes_sent; 1 with a single rank, infinite if nothing was sent."""
        if not self.bytes_sent:
            return 1.0 if not self.exact_bytes else float("inf")
        return self.exact_bytes / self.bytes_sent

    def plus(self, other: "Traffic") -> "Traffic":
        """The traffic of both."""
        return type(self)(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.calls + other.calls,
            self.exact_bytes + other.exact_bytes,
        )

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        last_step = values.pop("last_step", None)
        text = [f"{name}={value}" for name, value in values.items()]
        text.append(f"compression_ratio={self.compression_ratio:.4g}")
        if last_step is not None:
            text.append(f"last_step={last_step!r}")
        return f"{type(self).__name__}({', '.join(text)})"


@dataclass(frozen=True, repr=False)
class Communication(Traffic):
    """A snapshot of an optimizer's traffic since it was made; `last_step` is that of one step."""

    last_step: Traffic = Traffic()


class Meter:
    """Counts the traffic of steps on a communicator. `open` and `close` mark a step's ends.

    Attributes:
        last, total: `Traffic` of the last step, and of all steps.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.last = self.total = Traffic()
        self._communicator = communicator
        self._before: tuple[int, int, int] | None = None

    def open(self) -> None:
        """A step's first exchange begins, perhaps during backward; further calls do nothing."""
        if self._before is None:
            self._before = self._counters()

    def close(self, exact_bytes: int) -> None:
        """The step has ended; an exact all_reduce would have sent `exact_bytes` in it."""
        before = self._before or self._counters()
        sent, received, calls = (now - then for now, then in zip(self._counters(), before))
        self.last = Traffic(sent, received, calls, exact_bytes)
        self.total = self.total.plus(self.last)
        self._before = None

    def _counters(self) -> tuple[int, int, int]:
        return (
            self._communicator.bytes_sent,
            self._communicator.bytes_received,
            self._communicator.calls,
        )
