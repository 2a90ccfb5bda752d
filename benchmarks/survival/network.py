"""Faults of the network between hosts, and hosts that stay away, for `benchmarks survive` on a netbed."""

from __future__ import annotations

import re
from collections import Counter
from time import sleep

from benchmarks.survival.faults import Fault, Inflicted
from benchmarks.survival.hosts import HOSTS, SITES, BedHosts
from benchmarks.survival.run import SupervisedRun, now

_SLOW_S = 60.0


def _hosts(run: SupervisedRun) -> BedHosts:
    assert isinstance(run.hosts, BedHosts)
    return run.hosts


def _kill_connection(run: SupervisedRun) -> Inflicted:
    """Close one TCP connection between two hosts at different sites, of the pair with most connections."""
    bed = _hosts(run).bed
    for near in HOSTS[:2]:
        for far in HOSTS[2:]:
            seen = bed.run(near, ["ss", "-tnH", "dst", bed.address(far)], capture_output=True, text=True).stdout
            pairs = re.findall(r"\S+:(\d+)\s+\S+:(\d+)\s*$", seen, re.MULTILINE)
            if len(pairs) > 1:
                port, _ = Counter(remote for _, remote in pairs).most_common(1)[0]
                local = next(local for local, remote in pairs if remote == port)
                bed.run(near, ["ss", "-K", "-tnH", "sport", f"= :{local}"], check=True, capture_output=True)
                return Inflicted()
    raise RuntimeError("no host has connections to another site")


def _slow_down(run: SupervisedRun) -> Inflicted:
    sleep(_SLOW_S / 2)  # the usual rate has to be measured first
    begun = Inflicted()
    _hosts(run).bed.slow(*SITES, by=10.0, for_s=_SLOW_S)
    sleep(_SLOW_S)
    return Inflicted(at_s=begun.at_s, healed_s=now())


def _cut(run: SupervisedRun, for_s: float) -> Inflicted:
    """Cut the line between sites; wait for the end of a short cut."""
    begun = Inflicted({"between": SITES})
    _hosts(run).bed.cut(*SITES, for_s=for_s)
    if for_s > 10.0:
        return begun
    sleep(for_s)
    return Inflicted(at_s=begun.at_s, healed_s=now())


def _switch_off(run: SupervisedRun, *hosts: str) -> Inflicted:
    begun = Inflicted({"host": hosts[0]} if len(hosts) == 1 else {"site": hosts[0][:-1]})
    _hosts(run).switch_off(*hosts, run_folder=run.folder)
    return begun


def _return(run: SupervisedRun) -> Inflicted:
    _hosts(run).switch_on()
    return Inflicted()


def _heal(run: SupervisedRun) -> Inflicted:
    """Wait until the line heals by itself."""
    run.wait_for(lambda: not _hosts(run).bed.status().faults, "the line to heal")
    return Inflicted()


def _switch_off_for_a_while(run: SupervisedRun, *hosts: str) -> Inflicted:
    """Switch off hosts that the run needs, until it reports that it waits for them."""
    begun = _switch_off(run, *hosts)
    run.wait_for(lambda: "waiting for hosts" in run.tail(), "the run to wait for hosts")
    sleep(2.0)
    _hosts(run).switch_on()
    return Inflicted(begun.blamed, begun.at_s, now())


LINES = (
    Fault("one connection of a hop killed", _kill_connection),
    Fault(f"the link between sites at a tenth for {_SLOW_S:g} s", _slow_down, alert="slow_link"),
    Fault("the WAN cut for 5 s", lambda run: _cut(run, 5.0)),
)
WEST = HOSTS[2:]
AWAY = (
    Fault("the WAN cut for 50 s", lambda run: _cut(run, 50.0), rounds=True),
    Fault("and it heals", _heal, grows=True, rounds=True),
    Fault("a host switched off for good", lambda run: _switch_off(run, WEST[1]), rounds=True),
    Fault("and it comes back", _return, grows=True, rounds=True),
    Fault("a whole site switched off; it fits into the other", lambda run: _switch_off(run, *WEST), rounds=True),
    Fault("and the site comes back", _return, grows=True, rounds=True),
    Fault("the WAN cut for good", lambda run: _cut(run, 1e6), rounds=True),
    Fault("and it heals after all", _return, grows=True, rounds=True),
)
WAITS = (
    Fault(
        "a whole site switched off; it does not fit, until it is back", lambda run: _switch_off_for_a_while(run, *WEST)
    ),
)
