"""How long a site may be silent before the run goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf

HEAL_S = 10.0
"""Least seconds that links to a site have to heal: most interruptions are shorter."""


class SitePatience:
    """Waiting for a silent site costs what it lasts, going on without it costs a restart.

    Nobody knows how long it will last. Who waits for as long as a restart takes, and then restarts, loses at most
    twice what was possible. How long one takes is judged by the last start, less its imports, which a restart does
    without. Where the run cannot go on without the site, waiting is all that there is to do, and links have all the
    time that they may stand still.

    Attributes:
        is_importing: whether an attempt has begun whose ranks are not all known to be past their imports.
    """

    def __init__(self, link_s: float, goes_on_without: Callable[[Collection[str]], bool]) -> None:
        """No restart has been timed: links have all their time.

        Args:
            link_s: seconds that a link between sites may stand still.
            goes_on_without: whether what is left is enough for an attempt, from the hosts that are silent.
        """
        self._link_s, self._goes_on_without = link_s, goes_on_without
        self._restart_s = inf
        self._began: float | None = None
        self.is_importing = False
        self._answers: dict[frozenset[str], bool] = {}

    def began(self, now: float | None) -> None:
        """An attempt has begun; None if it is not known when."""
        self._began, self.is_importing = now, now is not None
        self._answers.clear()

    def imported(self, now: float | None) -> None:
        """Every rank of it is past its imports."""
        self._began, self.is_importing = now, False

    def came_to_step(self, now: float | None) -> None:
        """It has done its first step."""
        if now is not None and self._began is not None:
            self._restart_s = max(0.0, now - self._began)
        self._began = None

    def seconds(self, site: Collection[str]) -> float:
        """How long these hosts, all of their site, may be silent."""
        least = max(HEAL_S, self._restart_s)
        return least if least < self._link_s and self._enough_without(frozenset(site)) else self._link_s

    def _enough_without(self, site: frozenset[str]) -> bool:
        if site not in self._answers:
            self._answers[site] = self._goes_on_without(site)
        return self._answers[site]
