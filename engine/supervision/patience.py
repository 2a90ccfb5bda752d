"""Timeout policy for silent sites, after which the run continues without them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf

HEAL_S = 10.0
"""Least timeout in seconds, because most interruptions are shorter."""


class SitePatience:
    """Ski-rental rule: wait as long as one restart costs, then restart. This costs at most twice the optimum.

    The cost of a restart is the duration of the last start without its imports, which a restart does not repeat. If
    the run cannot continue without the site, or no start has been timed, the timeout is that of links.

    Attributes:
        is_importing: whether an attempt has begun whose ranks are not all known to be past their imports.
    """

    def __init__(self, link_s: float, goes_on_without: Callable[[Collection[str]], bool]) -> None:
        """Start without a measured restart.

        Args:
            link_s: seconds that a link between sites may stand still.
            goes_on_without: returns whether an attempt is possible without the hosts that are silent.
        """
        self._link_s, self._goes_on_without = link_s, goes_on_without
        self._restart_s = inf
        self._began: float | None = None
        self.is_importing = False
        self._answers: dict[frozenset[str], bool] = {}

    def began(self, now: float | None) -> None:
        """Note that an attempt has begun at ``now``, or at an unknown time."""
        self._began, self.is_importing = now, now is not None
        self._answers.clear()

    def imported(self, now: float | None) -> None:
        """Note that every rank is past its imports."""
        self._began, self.is_importing = now, False

    def came_to_step(self, now: float | None) -> None:
        """Note that the attempt has done its first step."""
        if now is not None and self._began is not None:
            self._restart_s = max(0.0, now - self._began)
        self._began = None

    def seconds(self, site: Collection[str]) -> float:
        """Return the timeout in seconds of these hosts, which are all of their site's."""
        least = max(HEAL_S, self._restart_s)
        return least if least < self._link_s and self._enough_without(frozenset(site)) else self._link_s

    def _enough_without(self, site: frozenset[str]) -> bool:
        if site not in self._answers:
            self._answers[site] = self._goes_on_without(site)
        return self._answers[site]
