"""Topologies: what is read, what is refused, and with which words."""

import pytest

from weft.conf.schema import ClusterConfig, LinkConfig, SiteConfig
from weft.tools.netbed.topology import Link, Node, Topology, from_mapping, load

TWO = {"sites": {"east": ["e0", "e1"], "west": 2}, "links": [{"sites": ["east", "west"], "latency_ms": 20}]}


def test_nodes_get_addresses_by_site():
    topology = from_mapping({**TWO, "uplink_mbps": 500, "uplinks": {"e1": 100}})
    assert [(n.name, n.site, n.uplink_mbps, topology.address(n.name)) for n in topology.nodes] == [
        ("e0", "east", 500.0, "10.77.1.1"),
        ("e1", "east", 100.0, "10.77.1.2"),
        ("west0", "west", 500.0, "10.77.2.1"),
        ("west1", "west", 500.0, "10.77.2.2"),
    ]
    assert topology.members("west") == ["west0", "west1"]
    assert topology.links == (Link(sites=("east", "west"), latency_ms=20.0),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sites": 3}, "sites: expected a mapping"),
        ({"links": []}, "links: give one for east-west"),
        ({"links": TWO["links"] * 2}, "stand once"),
        ({"links": [{"sites": ["east", "north"], "latency_ms": 1}]}, "two different sites"),
        ({"links": [{"sites": ["east", "west"]}]}, r"links\[0\]: latency_ms must be given"),
        ({"links": [{"sites": ["east", "west"], "latency_ms": 5, "jitter_ms": 6}]}, "jitter_ms=6"),
        ({"links": [{"sites": ["east", "west"], "latency_ms": "5"}]}, "expected a number"),
        ({"windowkb": 3}, "there is no field windowkb"),
        ({"uplinks": {"e9": 3}}, "there is no node e9"),
        ({"uplink_mbps": 0}, "uplink_mbps=0"),
        ({"mtu": 100}, "mtu=100"),
        ({"sites": {"east": ["e0"], "west": ["e0"]}}, "name e0: stands for two"),
        ({"sites": {"east": ["e 0"], "west": ["e1"]}}, "name 'e 0'"),
        ({"sites": {"east": 60, "west": 5}}, "65 nodes"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        from_mapping({**TWO, **change})


def test_a_file_that_is_no_topology_is_named(tmp_path):
    path = tmp_path / "bed.yaml"
    for text in ("a: [", "just text"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"bed\.yaml"):
            load(path)


def test_unknown_nodes_are_answered_with_the_known():
    topology = from_mapping(TWO)
    for ask in (topology.node, topology.address, topology.members):
        with pytest.raises(ValueError, match=r"no node.*e0, e1, west0, west1"):
            ask("e7")


def test_a_runs_cluster_is_a_topology():
    cluster = ClusterConfig(
        sites=[SiteConfig(name="east", ranks=2), SiteConfig(name="west", hosts=["h1"])],
        links=[LinkConfig(sites=["east", "west"], latency_ms=10, bandwidth_mbps=300)],
    )
    topology = Topology.of_cluster(cluster)
    assert topology.nodes[0] == Node(name="east0", site="east", uplink_mbps=300)
    assert [node.name for node in topology.nodes] == ["east0", "east1", "west0"]
