"""Which hosts an attempt takes: for any hosts that are away, the most replicas there can be, with the least moved."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.conf import load
from weft.conf.batch import check_world
from weft.conf.checks import check
from weft.conf.hosts import world_size
from weft.conf.schema import ClusterConfig, LinkConfig, SiteConfig
from weft.conf.sites import ranks_per_site
from weft.engine.supervision.driver.hosts import choose_hosts, config_for, hostfile_text


@cache
def base():
    """Any complete configuration; composing one takes a tenth of a second."""
    return load(["model.arch=llama", "pipeline.schedule=1f1b", "pipeline.placement=straight"])


def job(folder, sites, *, spares=(), stages, microbatches=12, cell=1, links=(), routes=()):
    """The configuration of a run on ``sites``: slots by host, by site."""
    hostfile = Path(folder) / "hosts"
    hostfile.write_text(hostfile_text({host: count for hosts in sites.values() for host, count in hosts.items()}))
    cluster = ClusterConfig(
        sites=[SiteConfig(name=name, hosts=list(hosts)) for name, hosts in sites.items()] if len(sites) > 1 else [],
        links=[LinkConfig(sites=list(ends)) for ends in links],
        hostfile=str(hostfile),
        master_addr=next(iter(next(iter(sites.values())))),
        spares=list(spares),
        routes=[list(route) for route in routes],
    )
    config = base()
    config = replace(
        config,
        cluster=cluster,
        pipeline=replace(config.pipeline, stages=stages, microbatches=microbatches),
        comm=replace(config.comm, cell=cell),
    )
    check(config)
    return config


@st.composite
def jobs(draw):
    """Slots by host by site, spares, stages; replicas are what the hosts that work make."""
    replicas = draw(st.integers(1, 4))
    sites, spares, total = {}, [], 0
    for index in range(draw(st.integers(1, 3))):
        stages = draw(st.integers(1, 3))
        total += stages
        left, hosts = stages * replicas, {}
        while left:
            hosts[f"s{index}h{len(hosts)}"] = count = draw(st.integers(1, left))
            left -= count
        for number in range(draw(st.integers(0, 2))):
            hosts[f"s{index}x{number}"] = draw(st.integers(1, 4))
            spares.append(f"s{index}x{number}")
        sites[f"site{index}"] = hosts
    away = draw(st.sets(st.sampled_from([host for hosts in sites.values() for host in hosts])))
    return sites, spares, total, replicas, away


@settings(max_examples=150)
@given(jobs(), st.sampled_from([1, 5, 6, 12]))
def test_any_hosts_that_are_away(case, microbatches):
    sites, spares, stages, replicas, away = case
    with TemporaryDirectory() as folder:
        config = job(folder, sites, spares=spares, stages=stages, microbatches=microbatches)
        whole = choose_hosts(config)
        assert whole.replicas == replicas
        assert set(whole.slots).isdisjoint(spares)
        free = [sum(count for host, count in hosts.items() if host not in away) for hosts in sites.values()]
        best = max(
            (
                number
                for number in range(1, replicas + 1)
                if sum(count // number for count in free) >= stages and microbatches * replicas % number == 0
            ),
            default=0,
        )
        if not best:
            with pytest.raises(ValueError, match="no hosts to go on with"):
                choose_hosts(config, away=away)
            return
        chosen = choose_hosts(config, away=away, current=whole.slots)
        assert chosen.replicas == best
        assert set(chosen.slots).isdisjoint(away)
        slots = {host: count for hosts in sites.values() for host, count in hosts.items()}
        assert all(0 < count <= slots[host] for host, count in chosen.slots.items())
        assert chosen.microbatches * chosen.replicas == microbatches * replicas
        for name, share in chosen.sites.items():
            hosts = chosen.hosts_of[name if len(sites) > 1 else ""]
            assert sum(chosen.slots[host] for host in hosts) == share * best
            assert set(hosts) <= set(sites[name] if len(sites) > 1 else slots)
        assert set(chosen.waiting) == set(slots) - away - set(chosen.slots)

        file = Path(folder) / "next"
        file.write_text(hostfile_text(chosen.slots))
        following = config_for(config, chosen, file)
        check(following)
        check_world(following, world_size(following.cluster))
        assert following.train.batch_size == config.train.microbatch_size * microbatches * replicas
        if len(sites) > 1:
            assert ranks_per_site(following) == tuple(chosen.sites.values())

        back = choose_hosts(config, current=chosen.slots)  # every host has returned
        assert back.replicas == replicas
        assert set(back.waiting) == set(slots) - set(back.slots)
        if chosen.replicas == replicas and chosen.sites == whole.sites:
            assert back.slots == chosen.slots  # who stands in stays: nothing moves for a host that returns


@settings(max_examples=100)
@given(jobs(), st.data())
def test_a_spare_takes_the_place_and_the_others_keep_their_ranks(case, data):
    sites, _, stages, _, _ = case
    sites = {name: {host: count for host, count in hosts.items() if "h" in host} for name, hosts in sites.items()}
    name = data.draw(st.sampled_from(sorted(sites)))
    lost = data.draw(st.sampled_from(sorted(sites[name])))
    spares = {site: f"{site}spare" for site in sites}
    sites[name][spares[name]] = sites[name][lost] + data.draw(st.integers(0, 2))
    with TemporaryDirectory() as folder:
        config = job(folder, sites, spares=[spares[name]], stages=stages)
        whole = choose_hosts(config)
        chosen = choose_hosts(config, away={lost}, current=whole.slots)
        place = {lost: spares[name]}
        assert list(chosen.slots.items()) == [(place.get(host, host), count) for host, count in whole.slots.items()]
        assert chosen.waiting == ()


def test_one_replica_less_keeps_the_batch_where_it_divides(tmp_path):
    sites = {"east": {"e0": 3, "e1": 1}, "west": {"w0": 2, "w1": 2}}
    config = job(tmp_path, sites, stages=2, microbatches=6)
    assert choose_hosts(config, away={"w1"}).microbatches == 12  # 3 replicas would need slots, 2 have them
    assert choose_hosts(config, away={"e1"}).replicas == 3
    odd = replace(config, pipeline=replace(config.pipeline, microbatches=5))
    chosen = choose_hosts(odd, away={"e1"})
    assert chosen.replicas == 2 and chosen.microbatches == 10
    assert "4 replicas of 2 stages: too few slots" in chosen.refused[0]
    assert "train.batch_size=20: not a multiple of" in chosen.refused[1]


def test_a_whole_site_away(tmp_path):
    sites = {"east": {"e0": 2, "e1": 2}, "west": {"w0": 2, "w1": 2}}
    config = job(tmp_path, sites, stages=4, links=[("east", "west")], cell=2)
    chosen = choose_hosts(config, away={"e0", "e1"})
    assert chosen.sites == {"west": 4} and chosen.replicas == 1 and chosen.microbatches == 24
    following = config_for(config, chosen, tmp_path / "next")
    assert following.cluster.master_addr == "w0" and following.comm.cell == 1
    assert [site.name for site in following.cluster.sites] == ["west"] and following.cluster.links == []
    with pytest.raises(ValueError, match="1 replicas of 4 stages: too few slots are left \\(east: 0, west: 2\\)"):
        choose_hosts(config, away={"e0", "e1", "w1"})


def test_one_machine_is_all_or_nothing():
    config = load(["model.arch=llama", "cluster.ranks=4", "pipeline.stages=2"])
    chosen = choose_hosts(config)
    assert chosen.slots == {"localhost": 4} and config_for(config, chosen, Path("unused")) is config
    with pytest.raises(ValueError, match="no hosts to go on with"):
        choose_hosts(config, away={"localhost"})


def test_a_site_that_fails_leaves_the_other_routes(tmp_path):
    """Each route keeps as many replicas as the others; one without room for them is left out, and the batch stays."""
    sites = {"a": {"a0": 2}, "b": {"b0": 2}, "c": {"c0": 4}, "d": {"d0": 2, "d1": 2}}
    config = job(tmp_path, sites, stages=2, routes=[["a", "b"], ["c"], ["d"]], links=[("a", "b"), ("a", "c")])
    assert ranks_per_site(config) == (1, 1, 2, 2)
    whole = choose_hosts(config)
    assert whole.replicas == 6 and whole.microbatches == 12 and config_for(config, whole, tmp_path / "h") is not config

    def after(*away):
        chosen = choose_hosts(config, away=away)
        (tmp_path / "next").write_text(hostfile_text(chosen.slots))
        new = config_for(config, chosen, tmp_path / "next")
        check(new)
        check_world(new, world_size(new.cluster))
        assert chosen.replicas * chosen.microbatches == 6 * 12
        return chosen, new

    chosen, new = after("c0")
    assert chosen.replicas == 4 and list(chosen.sites) == ["a", "b", "d"]
    assert new.cluster.routes == [["a", "b"], ["d"]] and [link.sites for link in new.cluster.links] == [["a", "b"]]
    chosen, new = after("a0", "c0")
    assert chosen.replicas == 2 and new.cluster.routes == [] and list(chosen.sites) == ["d"]
    chosen, new = after("d0")  # three routes of one replica, or two of two: the most replicas
    assert chosen.replicas == 4 and new.cluster.routes == [["a", "b"], ["c"]]
