"""The difference between the monotonic clocks of two hosts, from round trips of messages."""

from __future__ import annotations

from collections import deque

TRIPS = 100
"""Number of round trips kept. With ten each second, clocks drift by less than a millisecond meanwhile."""


class ClockOffset:
    """Another host's clock, minus this host's.

    An offset is wrong by at most half of its round trip, so the shortest of the last round trips counts.

    Attributes:
        ns: the difference in nanoseconds.
    """

    def __init__(self) -> None:
        self.ns = 0
        self._trips: deque[tuple[int, int]] = deque(maxlen=TRIPS)

    def add(self, sent_ns: int, received_ns: int, replied_ns: int, returned_ns: int) -> None:
        """Learn from a round trip.

        Args:
            sent_ns, returned_ns: this host's clock when a request was sent, and when its reply came.
            received_ns, replied_ns: the other host's clock when it received the request, and when it replied.
        """
        trip_ns = returned_ns - sent_ns - (replied_ns - received_ns)
        self._trips.append((trip_ns, (received_ns - sent_ns + replied_ns - returned_ns) // 2))
        self.ns = min(self._trips)[1]

    def here_s(self, there_s: float) -> float:
        """Return a time of the other host, in seconds, by this host's clock."""
        return there_s - self.ns / 1e9
