"""A cluster file is read as it is written, or refused with the field, its value and what to do."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.planner.planned import cluster, site
from weft.pipeline.hardware import EFFICIENCY, GPU_KINDS
from weft.pipeline.planner.cluster import BITS_IN_FLIGHT, MOST_BYTES, Link, load_cluster

TWO = "sites: [{name: a, hosts: 1, gpus_per_host: 2, gpu: A100}, {name: b, hosts: 1, gpus_per_host: 2, gpu: A100}]\n"
ONE = "sites: [{name: a, hosts: 1, gpus_per_host: 2, gpu: A100}]\n"
LINK = "links: [{sites: [a, b], bandwidth_mbps: 5000}]\n"


def load(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


def test_everything_is_read_in_its_unit(tmp_path):
    made = load(
        tmp_path,
        """
        efficiency: 0.5
        sites:
          - {name: east, hosts: 75, gpus_per_host: 8, gpu: H100, price: 2.5, network_gbps: 3200, region: us}
          - {name: west, hosts: 0, gpus_per_host: 4, gpu: A100}
          - {name: 7, hosts: 3, gpus_per_host: 1, gpu: A100}
        links:
          - {sites: [west, east], latency_ms: 30, bandwidth_mbps: 5e3, pair_mbps: 300, egress_price: 0.02}
          - {sites: [7, west], bandwidth_mbps: 1}
        """.replace("[7, west]", "['7', west]"),
    )
    east, west, seven = made.sites
    assert (east.name, east.hosts, east.gpus_per_host, east.gpu, east.price, east.network_bps, east.region) == (
        *("east", 75, 8, GPU_KINDS["H100"], 2.5, 3.2e12, "us"),
    )
    assert (west.price, west.network_bps, west.region, west.gpus) == (0.0, 4e11, "", 0)
    assert (seven.name, east.gpus, made.efficiency) == ("7", 600, 0.5)
    assert made.links == {
        (0, 1): Link(latency_s=0.03, bandwidth_bps=5e9, pair_bps=3e8, egress_price=0.02),
        (1, 2): Link(latency_s=0.0, bandwidth_bps=1e6),
    }
    assert made.link(1, 0) == made.link(0, 1) == made.links[0, 1] and made.link(0, 2) is None
    assert made.link(2, 1).pair_bps == math.inf
    assert load(tmp_path, ONE).efficiency == EFFICIENCY and load(tmp_path, ONE).links == {}
    assert load(tmp_path, ONE + "efficiency: 1\n").efficiency == 1.0


def test_a_link_of_several_sites_is_one_between_every_two(tmp_path):
    names = "abcd"
    entries = ", ".join(f"{{name: {name}, hosts: 1, gpus_per_host: 1, gpu: A100}}" for name in names)
    made = load(
        tmp_path,
        f"sites: [{entries}]\nlinks: [{{sites: [d, b, a], bandwidth_mbps: 2}}, {{sites: [c, d], bandwidth_mbps: 3}}]\n",
    )
    assert {pair: link.bandwidth_bps for pair, link in made.links.items()} == {
        **dict.fromkeys([(0, 1), (0, 3), (1, 3)], 2e6),
        (2, 3): 3e6,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file: expected a table"),
        ("a: 1", "field 'a' is not known"),
        ("sites: []", "sites: missing; list at least one site"),
        ("sites: 3", "sites: missing; list at least one site"),
        ("links: []", "sites: missing; list at least one site"),
        ("sites: [3]", "sites[0]: expected a table"),
        (ONE.replace("hosts: 1", "hosts: 0"), "no site has a GPU; give at least one site a host"),
        (ONE.replace("hosts: 1", "hosts: -1"), "sites[0].hosts=-1"),
        (ONE.replace("hosts: 1", "hosts: 1000001"), "sites[0].hosts=1000001"),
        (ONE.replace("hosts: 1", "hosts: true"), "sites[0].hosts=True"),
        (ONE.replace("gpus_per_host: 2", "gpus_per_host: 0"), "sites[0].gpus_per_host=0"),
        (ONE.replace("gpus_per_host: 2", "gpus_per_host: 1025"), "sites[0].gpus_per_host=1025"),
        (ONE.replace("gpu: A100", "gpu: B17"), "sites[0].gpu"),
        (ONE.replace("name: a", "name: 'a b'"), "sites[0].name='a b': expected a word"),
        (ONE.replace("name: a", "name: ''"), "sites[0].name='': expected a word"),
        (ONE.replace("name: a", 'name: "\\e[2Ja"'), "sites[0].name='\\x1b[2Ja': expected a word"),
        (ONE.replace("name: a", "name: -oProxyCommand=x"), "sites[0].name='-oProxyCommand=x': expected a word"),
        (ONE.replace("name: a", "name: '#a'"), "sites[0].name='#a': expected a word"),
        (ONE.replace("name: a", "name: site/a"), "sites[0].name='site/a': expected a word"),
        (ONE.replace("name: a", f"name: {51 * 'a'}"), "aaa': expected a word of at most 50"),
        (ONE.replace("name: a", "name: null"), "sites[0].name=None: expected a word"),
        (ONE.replace("hosts", "host"), "field 'host' is not known"),
        *(
            (ONE.replace(f"{field}: ", "price: 1, region: ", 1), f"sites[0].{field}: missing")
            for field in ("name", "gpu")
        ),
        (ONE.replace("hosts: 1, ", ""), "sites[0].hosts: missing"),
        (ONE.replace("gpus_per_host: 2, ", ""), "sites[0].gpus_per_host: missing"),
        (ONE.replace("gpu: A100", "gpu: A100, price: -1"), "sites[0].price=-1"),
        (ONE.replace("gpu: A100", "gpu: A100, network_gbps: 0"), "sites[0].network_gbps=0"),
        (ONE + "efficiency: 0", "efficiency=0"),
        (ONE + "efficiency: 1.01", "efficiency=1.01: a share of the peak, at most 1"),
        (ONE + "links: 3", "links=3: expected a list"),
        (TWO.replace("name: b", "name: a"), "sites.name=a: 2 sites have this name"),
        (TWO, "site a has no link, so no pipeline can go through it and others; add `- {sites: [b, a]"),
        (
            TWO.replace("]\n", ", {name: c, hosts: 1, gpus_per_host: 1, gpu: A100}]\n") + LINK,
            "site c has no link, so no pipeline can go through it and others; add `- {sites: [a, c]",
        ),
        (TWO + LINK.replace("[a, b]", "[a]"), "links[0].sites=['a']: expected the names of two or more"),
        (TWO + LINK.replace("[a, b]", "[a, a]"), "links[0].sites=['a', 'a']: expected the names of two or more"),
        (TWO + LINK.replace("[a, b]", "ab"), "links[0].sites='ab': expected the names of two or more"),
        (TWO + LINK.replace("[a, b]", "[a, c]"), "there is no site c; sites has a, b"),
        (TWO + LINK.replace(", bandwidth_mbps: 5000", ""), "links[0].bandwidth_mbps: missing"),
        (TWO + LINK.replace("5000", "0"), "links[0].bandwidth_mbps=0"),
        (TWO + LINK.replace("5000", "1, latency_ms: -1"), "links[0].latency_ms=-1"),
        (TWO + LINK.replace("5000", "1, pair_mbps: 0"), "links[0].pair_mbps=0"),
        (TWO + LINK.replace("5000", "1, egress_price: .inf"), "links[0].egress_price=inf"),
        (
            TWO + LINK.replace("5000}", "1}, {sites: [b, a], bandwidth_mbps: 2}"),
            "links[1]: a and b have a link already",
        ),
        ("#" * (MOST_BYTES + 1), "more than 1 MiB"),
        ("sites: [", "cluster file"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, text, said):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    assert f"cluster file {tmp_path / 'cluster.yaml'}: " in str(caught.value)
    assert said in str(caught.value)


def test_least_and_most_numbers_are_taken(tmp_path):
    text = TWO.replace("hosts: 1, gpus_per_host: 2", "hosts: 1000000, gpus_per_host: 1024", 1)
    text = text.replace("hosts: 1, gpus", "hosts: 0, gpus") + LINK.replace("5000", "1e-3, pair_mbps: .inf")
    first, second = load(tmp_path, text).sites
    slow = load(tmp_path, TWO + LINK.replace("5000", "0.5, latency_ms: 0, pair_mbps: 0.25, egress_price: 0")).link(0, 1)
    assert load(tmp_path, ONE.replace("A100", "A100, network_gbps: 0.5")).sites[0].network_bps == 5e8
    assert (slow.bandwidth_bps, slow.pair_bps, slow.latency_s, slow.egress_price) == (5e5, 2.5e5, 0.0, 0.0)
    assert (first.hosts, first.gpus_per_host, second.hosts) == (10**6, 1024, 0)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 30))
def test_groups_share_a_host_or_take_whole_ones(hosts, gpus_per_host, gpus):
    """As many as can be laid out one after the other."""
    some, laid = site("a", hosts=hosts, gpus_per_host=gpus_per_host), 0
    free = [gpus_per_host] * hosts
    while True:
        if gpus <= gpus_per_host:
            taken = [(number, gpus) for number, left in enumerate(free) if left >= gpus][:1]
        else:
            whole = [number for number, left in enumerate(free) if left == gpus_per_host]
            taken = [(number, gpus_per_host) for number in whole[: math.ceil(gpus / gpus_per_host)]]
        if sum(count for _, count in taken) < gpus:
            break
        laid += 1
        for number, count in taken:
            free[number] -= count
    assert some.units(gpus) == laid


@pytest.mark.parametrize(
    ("latency_s", "bandwidth_bps", "pair_bps", "connections"),
    [
        (0.0, 5e9, math.inf, 1),
        (0.01, BITS_IN_FLIGHT / 0.01, math.inf, 1),
        (0.01, BITS_IN_FLIGHT / 0.01 * 1.01, math.inf, 2),
        (0.04, 5e9, math.inf, math.ceil(5e9 * 0.04 / BITS_IN_FLIGHT)),
        (0.04, 5e9, 1e9, math.ceil(1e9 * 0.04 / BITS_IN_FLIGHT)),
        (0.04, 1e9, 5e9, math.ceil(1e9 * 0.04 / BITS_IN_FLIGHT)),
    ],
)
def test_as_many_connections_as_fill_a_link(latency_s, bandwidth_bps, pair_bps, connections):
    link = Link(latency_s=latency_s, bandwidth_bps=bandwidth_bps, pair_bps=pair_bps)
    assert link.connections == connections


def test_a_changed_cluster_differs_there_alone():
    made = cluster(site("a"), site("b"), site("c"))
    assert [made.number(name, "home") for name in "abc"] == [0, 1, 2]
    with pytest.raises(ValueError, match="home=d: there is no such site; the cluster has a, b, c"):
        made.number("d", "home")
    more = made.with_site(1, hosts=9)
    assert [one.hosts for one in more.sites] == [2, 9, 2] and more.links == made.links
    slower = made.with_link(2, 0, latency_s=5.0)
    assert {pair for pair, link in slower.links.items() if link != made.links[pair]} == {(0, 2)}
    assert slower.link(0, 2).latency_s == 5.0 and slower.sites == made.sites
    assert all(here < there for here, there in made.links)
