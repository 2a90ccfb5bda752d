"""Which sites are silent, in one pass over all hosts."""

import random
from itertools import chain, pairwise

import pytest

from weft.engine.supervision.driver.fleet import BROKEN_S, PROBES, Fleet, Host

SILENCE_S = 5.0
NOW = 1000.0


def fleet_of(sites, heard, exited=()):
    fleet = Fleet(lambda name, generation: None, lambda event, **fields: None, lambda text: None, sites=sites)
    for name, at in heard.items():
        fleet.hosts[name] = Host(connected=True, reported_at=at, exited=name in exited, attempt=1)
    return fleet


class Names(dict):
    """Host names that count how often they are gone through, and looked up."""

    passes = lookups = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()

    def __contains__(self, name):
        self.lookups += 1
        return super().__contains__(name)


@pytest.mark.parametrize("seed", range(40))
def test_a_site_is_silent_if_each_of_its_hosts_that_are_used_is(seed):
    rng = random.Random(seed)
    sites = [[f"{site}{number}" for number in range(rng.randrange(1, 4))] for site in "abc"[: rng.randrange(1, 4)]]
    everyone = [*chain(*sites)]
    heard = {name: NOW - rng.choice([0.0, 2.4, 2.5, 2.6, 5.0, 5.1, 60.0]) for name in everyone}
    exited = [name for name in everyone if rng.random() < 0.1]
    names = dict.fromkeys(rng.sample(everyone, rng.randrange(1, len(everyone) + 1)), 1)

    def is_silent(site):
        used = [name for name in site if name in names]
        quiet = [NOW - heard[name] for name in used]
        return (
            len(sites) > 1
            and bool(used)
            and max(quiet) > SILENCE_S
            and min(quiet) > SILENCE_S / 2
            and not set(used) & set(exited)
        )

    found = fleet_of(sites, heard, exited).silent_sites(names, SILENCE_S, NOW)
    assert found == {tuple(site) for site in sites if is_silent(site)}


def test_a_host_on_which_imports_fail_is_tried_ever_less_often():
    started = []
    fleet = Fleet(lambda name, generation: started.append(now), lambda event, **fields: None, lambda text: None)
    fleet.evict("broken", "no agent could be started or reached")
    for now in range(0, 3600, 2):
        fleet.follow({}, float(now))
        if started and now - started[-1] == 2:
            host = fleet.accept("broken", len(started))
            fleet.saw_connection("broken", float(now))
            host.attempt, host.connected = 0, False
    between = [after - before for before, after in pairwise(started)]
    assert between[:4] == [30, 60, 120, 240] and between[-1] == BROKEN_S and max(between) == BROKEN_S
    assert fleet.away


@pytest.mark.parametrize(("away", "tries"), [(1, 167), (50, 167), (1000, 10)])
def test_hosts_that_could_not_be_reached_are_tried_no_more_often_than_a_driver_can(away, tries):
    """Each as often as the others, and never many at once, because the driver does nothing else meanwhile."""
    started = []
    fleet = Fleet(
        lambda name, generation: started.append((name, generation)), lambda event, **fields: None, lambda text: None
    )
    fleet.start_missing(["near"], 0.0)
    fleet.saw_connection("near", 1.0)
    for number in range(away):
        fleet.evict(f"host{number}", "silent")
    for now in range(0, 1000, 2):
        before = len(started)
        fleet.follow({}, float(now))
        assert len(started) - before <= PROBES
    assert len(set(started)) == len(started)
    for number in range(away):
        assert sum(name == f"host{number}" for name, _ in started) == pytest.approx(tries, rel=0.05, abs=1)


@pytest.mark.parametrize("quiet", ["nobody", "a site", "one host of each"])
def test_thousands_of_hosts_are_gone_through_once(quiet):
    sites = [[f"{site}{number}" for number in range(1000)] for site in range(4)]
    heard = dict.fromkeys(chain(*sites), NOW)
    if quiet == "a site":
        heard |= dict.fromkeys(sites[2], NOW - 60.0)
    elif quiet == "one host of each":
        heard |= dict.fromkeys([site[-1] for site in sites], NOW - 60.0)
    fleet, names = fleet_of(sites, heard), Names.fromkeys(heard, 1)
    lost = fleet.lost(names, SILENCE_S, NOW, site_timeout=lambda site: 30.0)
    assert (lost or ("", ""))[:2] == {
        "nobody": ("", ""), "a site": ("host", "20"), "one host of each": ("host", "0999"),
    }[quiet]  # fmt: skip
    assert names.passes <= 2 and names.lookups <= len(names)
