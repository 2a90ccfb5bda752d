"""The hosts of a run as its driver knows them: their agents, what these said last, and who is left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

CONNECT_S = 30.0
"""Seconds that a host has to start an agent, and the agent to reach the driver, while it is not known how many do."""
LEAST_CONNECT_S = 5.0
LONGER = 3.0
"""Times as long as the slowest host took so far that another agent may take."""
PROBES = 20
"""Attempts at once to start agents on hosts that could not be reached; where more are due, they take turns."""
BROKEN_S = 300.0
"""Longest time between them where agents start and end before a rank could."""
AWAY_S = 60.0
"""Seconds until an agent is started again on a host that was asked to end: machines have a minute or two to go."""
YIELDS_S = 3.0
"""Seconds that a host's agent, if it is alive, has to come back before one that was started alongside it comes."""


@dataclass
class Host:
    """The driver's state of a host.

    Attributes:
        generation: of its agent.
        newest: the highest that an agent was started with.
        beside: True if it was started in addition to the agent of the host, which may be alive.
        starting: whether it was started by this driver and has not had a connection yet.
        connected: whether its agent has a connection.
        exited: whether its agent's process is known to have ended.
        ready: whether ranks can start there at once, because what they import is imported.
        heard: when it was last heard of.
        since: when the agent was started.
        attempt: whose ranks it has; None before it has said so.
        codes: exit codes of these ranks, None of those that run.
        parked: those of them that have left the attempt and keep their process, and why.
        leaving: whether a signal has asked its agent to end.
    """

    generation: int = 0
    newest: int = 0
    beside: bool = False
    starting: bool = False
    connected: bool = False
    exited: bool = False
    ready: bool = False
    heard: float = 0.0
    since: float = 0.0
    attempt: int | None = None
    codes: dict[int, int | None] = field(default_factory=dict)
    parked: dict[int, str] = field(default_factory=dict)
    leaving: bool = False

    @property
    def yields_s(self) -> float:
        """Seconds that the agent which was started last leaves the host's own to come back; 0 if it is the host's."""
        return YIELDS_S if self.beside else 0.0

    @property
    def is_broken(self) -> bool:
        """True if its agent has been heard, and never said that ranks can start."""
        return self.attempt is not None and not self.ready

    def has_stopped(self, attempt: int) -> bool:
        """True if no rank takes part in an attempt any more."""
        running = [rank for rank, code in self.codes.items() if code is None and rank not in self.parked]
        return self.attempt is not None and not (self.attempt == attempt and running)


@dataclass(frozen=True)
class _Unreachable:
    """A host that is left out because it could not be reached.

    Attributes:
        at: when that was seen, or an agent was started there the last time.
        wait_s: from then to the next start.
    """

    at: float
    wait_s: float


class Fleet:
    """All hosts that a run has had to do with.

    Attributes:
        hosts: by name.
        away: why a host is left out, by name.
    """

    def __init__(
        self,
        start_agent: Callable[[str, int], None],
        record: Callable[..., None],
        say: Callable[[str], None],
        *,
        sites: Sequence[Collection[str]] = (),
    ) -> None:
        """No host yet.

        Args:
            sites: the hosts of each; empty where there is one.
        """
        self._start_agent, self._record, self._say = start_agent, record, say
        self._site_of = {host: tuple(site) for site in sites for host in site} if len(sites) > 1 else {}
        self._connected_s = 0.0
        self._silent_at: dict[tuple[str, ...], float] = {}
        self.hosts: dict[str, Host] = {}
        self.away: dict[str, str] = {}
        self._unreachable: dict[str, _Unreachable] = {}

    # The journal

    def replay(self, event: Mapping[str, Any]) -> None:
        """Take an event of the journal."""
        match event["event"]:
            case "launch":
                self.away.clear()
                for host in self.hosts.values():
                    host.exited = True
            case "agent":
                known = self.hosts.get(event["host"], Host()).newest
                self.hosts[event["host"]] = Host(event["generation"], max(event["generation"], known))
            case "probe":
                host = self.hosts.setdefault(event["host"], Host())
                host.newest, host.beside = event["generation"], True
            case "evict":
                self.away[event["host"]] = event["reason"]
            case "readmit":
                self.away.pop(event["host"], None)

    # Agents

    def of_agent(self, name: str, generation: int) -> Host | None:
        """The host whose agent this is; None if it has another, or is none of this run."""
        host = self.hosts.get(name)
        return host if host is not None and host.generation == generation else None

    def is_beside(self, name: str, generation: int) -> bool:
        """True if this is an agent that was started alongside the host's, of which nothing has been heard since."""
        host = self.hosts.get(name)
        return host is not None and host.beside and host.newest == generation

    def accept(self, name: str, generation: int) -> Host | None:
        """As `of_agent`, of an agent that is heard: of two that may be a host's, it is the first."""
        host = self.hosts.get(name)
        if host is not None and host.beside and generation in (host.generation, host.newest):
            if generation == host.newest:
                self.hosts[name] = Host(generation, generation)
            else:
                host.beside = host.exited = False
            self._record("agent", host=name, generation=generation)
        return self.of_agent(name, generation)

    def saw_connection(self, name: str, now: float) -> None:
        """A host's agent has a connection."""
        host = self.hosts[name]
        if host.starting:
            self._connected_s, host.starting = max(self._connected_s, now - host.since), False
        host.connected, host.heard = True, now

    @property
    def connect_s(self) -> float:
        """Seconds that a host has to start an agent, and the agent to reach the driver."""
        if not self._connected_s:
            return CONNECT_S
        return min(CONNECT_S, max(LEAST_CONNECT_S, LONGER * self._connected_s))

    def start_missing(self, names: Iterable[str], now: float) -> None:
        """Start agents on the hosts that have none."""
        for name in names:
            host = self.hosts.setdefault(name, Host())
            if not host.generation or (host.exited and not host.connected):
                self._start(name, now)

    def _start(self, name: str, now: float) -> None:
        generation = self.hosts[name].newest + 1
        self.hosts[name] = Host(generation, generation, starting=True, since=now, heard=now)
        self._record("agent", host=name, generation=generation)
        self._start_agent(name, generation)

    def _probe(self, name: str, now: float) -> None:
        """Start an agent on a host that could not be reached, whose own comes back if only the way to it was cut."""
        host = self.hosts[name]
        host.newest, host.beside = host.newest + 1, True
        self._record("probe", host=name, generation=host.newest)
        self._start_agent(name, host.newest)

    def give_up(self, name: str) -> None:
        """Its agent counts as ended, whatever may be left of it."""
        self.hosts[name].connected, self.hosts[name].exited = False, True

    def let_go(self, name: str, now: float) -> None:
        """Leave out a host that goes away by itself, and look for it again when it has had the time to."""
        self.hosts[name].connected = False
        self._unreachable[name] = _Unreachable(now, AWAY_S)
        self.evict(name, "a signal has asked its agent to end")

    def lose_site(self, name: str, names: Collection[str], silence_s: float, now: float) -> None:
        """Leave out all hosts of a host's site, if none of it is heard; one that is heard again comes back."""
        site = self._site_of.get(name, ())
        for silent in site if site in self.silent_sites(names, silence_s, now) else ():
            if silent in names:
                self.hosts[silent].connected = False
                self._unreachable[silent] = _Unreachable(now, self.connect_s)
                self.evict(silent, "its whole site is silent")

    def attach(self, now: float) -> None:
        """A new driver waits for the agents that there are, from now on."""
        for host in self.hosts.values():
            host.heard = host.since = now
            host.starting = False

    def lost(
        self, names: Collection[str], silence_s: float, now: float, patience: Callable[[Collection[str]], float]
    ) -> tuple[str, str, str] | None:
        """The first host that has no agent any more: agent or host, its name, and the evidence.

        Args:
            patience: seconds that a site of which nobody is heard has, from its hosts.
        """
        silent_sites = None
        for name in names:
            host = self.hosts[name]
            if not host.connected and host.exited:
                return "agent", name, "its agent has ended"
            silent_s = now - host.heard
            if silent_s > (CONNECT_S if host.attempt is None else silence_s):
                alone = f"no sign of its agent for {silent_s:.1f} s"
                if silent_sites is None:
                    silent_sites = self.silent_sites(names, silence_s, now)
                site = self._site_of.get(name, ())
                site = site if site in silent_sites else ()
                if not site and now - self._last_silent(name) <= silence_s:
                    continue  # others of its site are heard again, and its own connection is about to be
                if not site:
                    return "host", name, alone
                if silent_s > patience(site):
                    return "host", name, f"{alone}, nor of any of its site: {', '.join(site)}"
        return None

    def silent_sites(self, names: Collection[str], silence_s: float, now: float) -> set[tuple[str, ...]]:
        """Return the silent sites: it cannot be determined from here if they or the links to them have failed."""
        quiet = {self._site_of.get(name, ()) for name in names if now - self.hosts[name].heard > silence_s}
        found = set()
        for site in quiet - {()}:
            used = (self.hosts[host] for host in site if host in names)
            if not any(host.exited or now - host.heard <= silence_s / 2 for host in used):
                found.add(site)
                self._silent_at[site] = now
        return found

    def _last_silent(self, name: str) -> float:
        """When nobody of a host's site was heard the last time."""
        return max((at for site, at in self._silent_at.items() if name in site), default=-inf)

    def is_out_of_touch(self, names: Iterable[str], limit: float) -> bool:
        """True if a host has no connection, or has not been heard of since ``limit``."""
        return any(not self.hosts[name].connected or self.hosts[name].heard < limit for name in names)

    def have_stopped(self, names: Iterable[str], attempt: int, silence_s: float, now: float) -> bool:
        """True if no rank of an attempt is left, as far as can be known.

        A host that does not answer gets another agent; one on which none starts in time is left out.
        """
        done = True
        for name in names:
            host = self.hosts[name]
            if name in self._unreachable and name in self.away:
                continue
            if host.connected and now - host.heard > silence_s:
                self.give_up(name)
                self.start_missing([name], now)
                done = False
            elif host.connected:
                done &= host.has_stopped(attempt)
            elif now - host.since > self.connect_s:
                self._unreachable[name] = _Unreachable(now, self.connect_s)
                self.evict(name, "no agent could be started or reached")
            else:
                done = False
        return done

    # Who is left out

    def evict(self, name: str, reason: str) -> None:
        """Leave a host out of the attempts to come."""
        if name not in self.away:
            self.away[name] = reason
            self._record("evict", host=name, reason=reason)
            self._say(f"host {name} is left out: {reason}")

    def readmit(self, name: str) -> None:
        """Take a host into account again."""
        if self.away.pop(name, None) is not None:
            self._unreachable.pop(name, None)
            self._record("readmit", host=name, reason="it answers again")
            self._say(f"host {name} is back")

    def follow(self, denied: Mapping[str, str], now: float) -> None:
        """Leave out who is denied; try those again that are not, and could not be reached.

        A host is back when ranks can start there: a run that trains does not wait for their imports, and never stops
        for a host on which they fail.
        """
        for name, reason in denied.items():
            self.evict(name, reason)
        due = list[str]()
        for name in [name for name in self.away if name not in denied]:
            host = self.hosts[name] = self.hosts.get(name) or Host()
            last = self._last_probe(name)
            if host.connected and host.ready and not host.leaving:
                self.readmit(name)
            elif not host.connected and now - last.at >= last.wait_s:
                due.append(name)
        for name in sorted(due, key=lambda name: self._last_probe(name).at)[:PROBES]:
            wait_s = min(BROKEN_S, 2 * self._last_probe(name).wait_s) if self.hosts[name].is_broken else 0.0
            self._unreachable[name] = _Unreachable(now, max(self.connect_s, wait_s))
            self._probe(name, now)

    def _last_probe(self, name: str) -> _Unreachable:
        return self._unreachable.get(name, _Unreachable(-inf, 0.0))
