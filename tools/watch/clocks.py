"""Clocks of a run's hosts, lined up by the transfers between them.

A tensor arrives after its send has begun, which bounds how far the receiver's clock can be ahead of the sender's.
Transfers in the other direction bound it from below. As in NTP the middle is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple


class Clock(NamedTuple):
    """A host's clock.

    Attributes:
        ahead_s: seconds by which it is ahead of the first host's, or 0 if nothing is known.
        bound_s: the largest error of ``ahead_s``, or infinity if nothing has passed between the hosts.
    """

    ahead_s: float
    bound_s: float


def line_up(hosts: Sequence[str], transfers: Iterable[tuple[str, str, float]]) -> dict[str, Clock]:
    """Return the clock of each host, by the way through other hosts with the least error.

    Args:
        transfers: sending and receiving host, and the seconds from the send's start on the one's clock to the arrival
            on the other's.
    """
    least_s: dict[tuple[str, str], float] = {}
    for here, there, seconds in transfers:
        least_s[here, there] = min(seconds, least_s.get((here, there), inf))
    neighbours: dict[str, list[str]] = defaultdict(list)
    for here, there in least_s:
        if here != there and (there, here) in least_s:
            neighbours[here].append(there)
    found: dict[str, Clock] = {}
    waiting = [(0.0, 0.0, hosts[0])] if hosts else []
    while waiting:
        bound_s, ahead_s, here = heappop(waiting)
        if here in found:
            continue
        found[here] = Clock(ahead_s, bound_s)
        for there in neighbours[here]:
            upper_s, lower_s = least_s[here, there], -least_s[there, here]
            error_s = max(0.0, (upper_s - lower_s) / 2)
            heappush(waiting, (bound_s + error_s, ahead_s + (upper_s + lower_s) / 2, there))
    return {host: found.get(host, Clock(0.0, inf)) for host in hosts}
