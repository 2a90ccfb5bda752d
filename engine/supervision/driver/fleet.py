"""The driver's state of a run's hosts: their agents, the last reports, and the excluded hosts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

CONNECT_S = 30.0
"""Timeout for an agent to start and connect to the driver, until one has been measured, in seconds."""
LEAST_CONNECT_S = 5.0
LONGER = 3.0
"""Ratio of that timeout to the slowest start so far."""
PROBES = 20
"""Most unreachable hosts on which agents are started at once. If more are due, the longest waiting come first."""
BROKEN_S = 300.0
"""Longest interval between these starts on a host whose agents end before ranks can start."""
AWAY_S = 60.0
"""Seconds until an agent is started again on a host that is shutting down, which takes a minute or two."""
YIELDS_S = 3.0
"""Seconds that a host's agent, if it is alive, has to reconnect before an additional agent replaces it."""


@dataclass
class Host:
    """The driver's state of one host and of its agent.

    Attributes:
        generation: number of the host's own agent.
        newest: highest number of an agent that was started.
        has_additional: True if the newest agent was started in addition to the host's own, which may be alive.
        starting: whether this driver has started the agent and has no connection from it yet.
        connected: whether its agent has a connection.
        exited: whether its agent's process is known to have ended.
        ready: whether ranks can start there at once, because the imports are done.
        since: time at which the agent was started.
        attempt: the attempt whose ranks it has, or None before its first report.
        codes: by rank of that attempt, the exit code, or None while the rank runs.
        leaving: whether its agent has received a signal to end.
    """

    generation: int = 0
    newest: int = 0
    has_additional: bool = False
    starting: bool = False
    connected: bool = False
    exited: bool = False
    ready: bool = False
    reported_at: float = 0.0
    since: float = 0.0
    attempt: int | None = None
    codes: dict[int, int | None] = field(default_factory=dict)
    standby: dict[int, str] = field(default_factory=dict)
    """Ranks on standby, with the reason for which they left the attempt."""
    leaving: bool = False

    @property
    def yields_s(self) -> float:
        """Seconds that an additional agent waits for the host's own to reconnect, or 0 without an additional one."""
        return YIELDS_S if self.has_additional else 0.0

    @property
    def is_broken(self) -> bool:
        """True if the agent has reported, but its imports have never finished."""
        return self.attempt is not None and not self.ready

    @property
    def is_unseen(self) -> bool:
        """True if an earlier driver recorded the agent, and this driver has not heard from it."""
        unreported = self.attempt is None and not (self.connected or self.exited)
        return bool(self.generation) and unreported and not (self.starting or self.has_additional)

    def has_stopped(self, attempt: int) -> bool:
        """True if no rank of the host takes part in an attempt any more."""
        running = [rank for rank, code in self.codes.items() if code is None and rank not in self.standby]
        return self.attempt is not None and not (self.attempt == attempt and running)


@dataclass(frozen=True)
class _Unreachable:
    """A host that is excluded because it could not be reached.

    Attributes:
        at: time at which this was detected, or at which an agent was last started there.
        wait_s: seconds from then to the next start.
    """

    at: float
    wait_s: float


class Fleet:
    """All hosts that a run has used.

    Attributes:
        hosts: the state of each host, by name.
        away: the reason for each excluded host, by name.
    """

    def __init__(
        self,
        start_agent: Callable[[str, int], None],
        record: Callable[..., None],
        say: Callable[[str], None],
        *,
        sites: Sequence[Collection[str]] = (),
    ) -> None:
        """Create a fleet without hosts.

        Args:
            sites: the hosts of each site, or empty for a single site.
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
        """Apply an event of the journal."""
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
                host.newest, host.has_additional = event["generation"], True
            case "evict":
                self.away[event["host"]] = event["reason"]
            case "readmit":
                self.away.pop(event["host"], None)

    # Agents

    def of_agent(self, name: str, generation: int) -> Host | None:
        """Return the host of this agent, or None if the host has another agent or is not in this run."""
        host = self.hosts.get(name)
        return host if host is not None and host.generation == generation else None

    def is_additional(self, name: str, generation: int) -> bool:
        """True if this agent was started in addition to the host's own agent, and the latter has not reported since."""
        host = self.hosts.get(name)
        return host is not None and host.has_additional and host.newest == generation

    def accept(self, name: str, generation: int) -> Host | None:
        """Return the host of an agent that reports, like `of_agent`. The first of two agents becomes its own."""
        host = self.hosts.get(name)
        if host is not None and host.has_additional and generation in (host.generation, host.newest):
            if generation == host.newest:
                self.hosts[name] = Host(generation, generation)
            else:
                host.has_additional = host.exited = False
            self._record("agent", host=name, generation=generation)
        return self.of_agent(name, generation)

    def saw_connection(self, name: str, now: float) -> None:
        """Note that a host's agent has connected."""
        host = self.hosts[name]
        if host.starting:
            self._connected_s, host.starting = max(self._connected_s, now - host.since), False
        host.connected, host.reported_at = True, now

    @property
    def connect_s(self) -> float:
        """Timeout in seconds for an agent to start and to connect to the driver."""
        if not self._connected_s:
            return CONNECT_S
        return min(CONNECT_S, max(LEAST_CONNECT_S, LONGER * self._connected_s))

    def start_missing(self, names: Iterable[str], now: float) -> None:
        """Start agents on those hosts in ``names`` that have none."""
        for name in names:
            host = self.hosts.setdefault(name, Host())
            if not host.generation or (host.exited and not host.connected):
                self._start(name, now)

    def _start(self, name: str, now: float) -> None:
        generation = self.hosts[name].newest + 1
        self.hosts[name] = Host(generation, generation, starting=True, since=now, reported_at=now)
        self._record("agent", host=name, generation=generation)
        self._start_agent(name, generation)

    def _probe(self, name: str) -> None:
        """Start an additional agent on an unreachable host, whose own agent reconnects if only the network was cut."""
        host = self.hosts[name]
        host.newest, host.has_additional = host.newest + 1, True
        self._record("probe", host=name, generation=host.newest)
        self._start_agent(name, host.newest)

    def replace_unseen(self, names: Iterable[str], now: float) -> None:
        """Start additional agents on hosts whose agents have not reconnected to this driver.

        A driver records an agent before it starts it, and the previous driver may have been killed in between. If the
        recorded agent lives, the additional one ends as soon as that one reports.
        """
        hosts = ((name, self.hosts[name]) for name in names if name not in self.away)
        due = [name for name, host in hosts if host.is_unseen and now - host.reported_at > LEAST_CONNECT_S]
        probing = sum(host.has_additional and not host.connected for host in self.hosts.values())
        for name in due[: max(0, PROBES - probing)]:
            self.hosts[name].since = now
            self._probe(name)

    def give_up(self, name: str) -> None:
        """Treat a host's agent as ended."""
        self.hosts[name].connected, self.hosts[name].exited = False, True

    def let_go(self, name: str, now: float) -> None:
        """Exclude a host that is shutting down, and try it again after `AWAY_S`."""
        self.hosts[name].connected = False
        self._unreachable[name] = _Unreachable(now, AWAY_S)
        self.evict(name, "a signal has asked its agent to end")

    def lose_site(self, name: str, names: Collection[str], silence_s: float, now: float) -> None:
        """Exclude all hosts of a host's site if the whole site is silent. A host that reports again is readmitted."""
        site = self._site_of.get(name, ())
        for silent in site if site in self.silent_sites(names, silence_s, now) else ():
            if silent in names:
                self.hosts[silent].connected = False
                self._unreachable[silent] = _Unreachable(now, self.connect_s)
                self.evict(silent, "its whole site is silent")

    def attach(self, now: float) -> None:
        """Restart the timeouts of all agents, in a new driver."""
        for host in self.hosts.values():
            host.reported_at = host.since = now
            host.starting = False

    def lost(
        self, names: Collection[str], silence_s: float, now: float, site_timeout: Callable[[Collection[str]], float]
    ) -> tuple[str, str, str] | None:
        """Return the kind ("agent" or "host"), name and evidence of the first host without an agent, or None.

        The callable ``site_timeout`` returns the timeout of a silent site, in seconds, from its hosts.
        """
        silent_sites = None
        for name in names:
            host = self.hosts[name]
            if not host.connected and host.exited:
                return "agent", name, "its agent has ended"
            silent_s = now - host.reported_at
            if silent_s > (CONNECT_S if host.attempt is None else silence_s):
                alone = f"no sign of its agent for {silent_s:.1f} s"
                if silent_sites is None:
                    silent_sites = self.silent_sites(names, silence_s, now)
                site = self._site_of.get(name, ())
                site = site if site in silent_sites else ()
                if not site and now - self._last_silent(name) <= silence_s:
                    continue  # other hosts of its site report again, so it will reconnect soon
                if not site:
                    return "host", name, alone
                if silent_s > site_timeout(site):
                    return "host", name, f"{alone}, nor of any of its site: {', '.join(site)}"
        return None

    def silent_sites(self, names: Collection[str], silence_s: float, now: float) -> set[tuple[str, ...]]:
        """Return the silent sites. The driver cannot distinguish whether they or the links to them have failed."""
        quiet = {self._site_of.get(name, ()) for name in names if now - self.hosts[name].reported_at > silence_s}
        found = set()
        for site in quiet - {()}:
            used = (self.hosts[host] for host in site if host in names)
            if not any(host.exited or now - host.reported_at <= silence_s / 2 for host in used):
                found.add(site)
                self._silent_at[site] = now
        return found

    def _last_silent(self, name: str) -> float:
        return max((at for site, at in self._silent_at.items() if name in site), default=-inf)

    def is_out_of_touch(self, names: Iterable[str], limit: float) -> bool:
        """True if a host has no connection, or has not reported since ``limit``."""
        return any(not self.hosts[name].connected or self.hosts[name].reported_at < limit for name in names)

    def have_stopped(self, names: Iterable[str], attempt: int, silence_s: float, now: float) -> bool:
        """True if no rank of an attempt runs any more, as far as is known.

        A host that does not answer gets another agent. A host on which no agent starts in time is excluded.
        """
        done = True
        for name in names:
            host = self.hosts[name]
            if name in self._unreachable and name in self.away:
                continue
            if host.connected and now - host.reported_at > silence_s:
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

    # Excluded hosts

    def evict(self, name: str, reason: str) -> None:
        """Exclude a host from later attempts."""
        if name not in self.away:
            self.away[name] = reason
            self._record("evict", host=name, reason=reason)
            self._say(f"host {name} is left out: {reason}")

    def readmit(self, name: str) -> None:
        """End the exclusion of a host."""
        if self.away.pop(name, None) is not None:
            self._unreachable.pop(name, None)
            self._record("readmit", host=name, reason="it answers again")
            self._say(f"host {name} is back")

    def follow(self, denied: Mapping[str, str], now: float) -> None:
        """Exclude denied hosts, and try unreachable hosts again.

        An unreachable host is readmitted when its imports are done. So a run does not wait for them, and does not
        restart for a host on which they fail.
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
            self._probe(name)

    def _last_probe(self, name: str) -> _Unreachable:
        return self._unreachable.get(name, _Unreachable(-inf, 0.0))
