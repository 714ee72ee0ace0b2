"""What a wire can have carried: results that it cannot are refused, since something else did.

Two libraries that find each other by another way, such as shared memory between the namespaces of
one machine, would report the speed of that.
"""

from onebit.lab.bench.network.hosts import Cluster, burst


def least_seconds(nbytes: float, rate_mbit: float | None) -> float:
    """The shortest time in which these bytes can leave a host; headers would only add to it."""
    if rate_mbit is None:
        return 0.0
    return 8 * max(nbytes - burst(rate_mbit), 0.0) / (1e6 * rate_mbit)


def require_possible(what: str, seconds: float, nbytes: float, rate_mbit: float | None) -> None:
    """RuntimeError if these bytes cannot have left a host in this time."""
    least = least_seconds(nbytes, rate_mbit)
    if seconds < least:
        raise RuntimeError(
            f"{what} took {seconds:.4g} s, but its {nbytes:,.0f} bytes need at least {least:.4g} s "
            f"at {rate_mbit:g} Mbit/s: they did not pass the limited link, so this is no result. "
            "Check that the ranks use its interface alone."
        )


def require_carried(cluster: Cluster, before: list[int], promised: float) -> list[int]:
    """Bytes that each host has sent since `before`; RuntimeError if one sent less than promised."""
    sent = [now - then for now, then in zip(cluster.sent(), before, strict=True)]
    if min(sent) < promised:
        raise RuntimeError(
            f"the interfaces of the hosts carried {sent} bytes, but the ranks count "
            f"{promised:,.0f} to leave each host: some went another way, so this is no result. "
            "Check that the ranks use these interfaces alone."
        )
    return sent
