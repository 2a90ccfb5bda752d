"""A topology as commands for the router, ``ip`` and the kernel."""

from __future__ import annotations

from collections.abc import Callable

from weft.tools.netbed.topology import Topology


def router_input(topology: Topology) -> str:
    """Return the topology in the input format of ``router.c``; sites count from 1, as in addresses."""
    number = {site: i for i, site in enumerate(topology.sites, start=1)}
    lines = [f"bed {topology.name} {topology.mtu} {int(topology.queue_ms * 1e6)}"]
    lines += [f"site {site}" for site in topology.sites]
    for node in topology.nodes:
        host = topology.address(node.name).rpartition(".")[2]
        lines.append(f"node {node.name} {number[node.site]} {host} {node.uplink_mbps * 1e6}")
    for link in topology.links:
        a, b = (number[site] for site in link.sites)
        lines.append(f"path {a} {b} {int(link.latency_ms * 1e6)} {int(link.jitter_ms * 1e6)}")
    return "\n".join([*lines, "end", ""])


def site_commands(topology: Topology, site: str, netns: Callable[[str], str]) -> list[str]:
    """Return commands that create a site's bridge and its cables to all nodes, whose namespaces ``netns`` names."""
    commands = ["link set lo up", "link add lan type bridge", "link set lan up"]
    for i, name in enumerate(topology.members(site)):
        commands += [
            f"link add port{i} mtu {topology.mtu} type veth peer name lan0 mtu {topology.mtu} netns {netns(name)}",
            f"link set port{i} master lan up",
        ]
    return commands


def node_commands(topology: Topology, name: str) -> list[str]:
    """Return commands that give a node its address in the site's subnet, and a route through the line to all others."""
    address = topology.address(name)
    return [
        "link set lo up",
        f"address add {address}/24 dev lan0",
        "link set lan0 up",
        f"link set wan0 mtu {topology.mtu} txqueuelen 10000 up",
        f"route add 10.77.0.0/16 dev wan0 src {address} congctl {topology.congestion}",
    ]


def kernel_settings(topology: Topology) -> dict[str, str]:
    """Return the kernel settings of a node, by their names below ``/proc/sys/net``."""
    settings = {
        "ipv4/tcp_wmem": "4096 65536 33554432",
        "ipv4/tcp_no_metrics_save": "1",
        "ipv4/tcp_slow_start_after_idle": "0",  # as `weft doctor net` advises
    }
    if topology.window_kb:
        window = int(topology.window_kb * 1000)
        settings["ipv4/tcp_rmem"] = f"4096 {min(131072, window)} {window}"
    return settings
