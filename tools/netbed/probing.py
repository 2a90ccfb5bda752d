"""`weft doctor net`: probe the link between two hosts, or the links between idle nodes of a bed."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Collection, Mapping
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.comm.key import WanKey
from weft.comm.links import LinkProfile
from weft.comm.native import cache_folder
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.library import load
from weft.comm.wan.probe import ProfileCache, probe_both
from weft.pipeline import limits
from weft.tools.netbed.bed import NetBed
from weft.tools.netbed.job import Job
from weft.tools.netbed.topology import Topology
from weft.tools.netbed.topology import load as load_topology

MOST_PORT = 65535
_KEY = WanKey(b"the key of a bed that no other process can reach")


def probe_nodes(
    bed: NetBed, near: str, far: str, *, settings: Mapping[str, Any] | None = None, **effort: Any
) -> tuple[LinkProfile, LinkProfile]:
    """Return the link profiles from ``near`` to ``far`` and back.

    Args:
        settings: arguments of `WanEndpoint` for both endpoints.
        effort: arguments of `weft.comm.wan.probe.probe_both`.

    Raises:
        ChannelError: the link failed.
    """
    args = (dict(settings or {}), effort)
    with (
        Job(bed, far, _answer, bed.address(far), *args) as answering,
        Job(bed, near, _start, bed.address(near), answering.receive(), *args) as starting,
    ):
        found = starting.result(timeout_s=300.0)
        answering.send("end")
    return found


def _start(
    send: Callable, receive: Callable, bind: str, address: tuple[str, int], settings: dict, effort: dict
) -> tuple[LinkProfile, LinkProfile]:
    with WanEndpoint(rank=0, bind=bind, key=_KEY, connections=effort["most"], tls=False, **settings) as endpoint:
        endpoint.link(1, address=address)
        return probe_both(endpoint, 1, first=True, **effort)


def _answer(send: Callable, receive: Callable, bind: str, settings: dict, effort: dict) -> None:
    with WanEndpoint(rank=1, bind=bind, key=_KEY, tls=False, **settings) as endpoint:
        endpoint.link(0)
        send(endpoint.address)
        probe_both(endpoint, 0, first=False, **effort)
        receive()


def run(args: argparse.Namespace) -> int:
    """Run `weft doctor net`.

    Raises:
        ValueError: an option has no usable value.
    """
    limits.count(args.port, "--port", least=0, most=MOST_PORT)
    limits.number(args.seconds, "--seconds", above=0.0)
    load()  # compile before anything is timed
    profiles = _probe_bed(args) if args.netbed else _probe_hosts(args)
    Console().print(profile_table(profiles))
    for name, profile in profiles.items():
        rates = ", ".join(f"{rate / 1e6:.0f} with {count}" for count, rate in profile.rates_bps)
        print(f"{name}: Mbit/s {rates}")
    if not args.netbed:
        for hint in hints(profiles.values(), Path("/proc/sys/net/ipv4")):
            print(f"hint: {hint}")
    return 0


def _probe_hosts(args: argparse.Namespace) -> Mapping[str, LinkProfile]:
    """Probe the link between this host and one other, by their real addresses."""
    settings = {"connections": args.most, "congestion": args.congestion, "port": args.port}
    first, peer = bool(args.peer), _peer_address(args.peer) if args.peer else None
    rank = 0 if first else 1
    with WanEndpoint(rank=rank, bind=args.bind, key=WanKey.from_environment(), **settings) as endpoint:
        if not first:
            host, port = endpoint.address
            print(f"waiting for: weft doctor net --bind ADDRESS --peer {host}:{port}", flush=True)
        else:
            print(f"trying to reach {args.peer}", flush=True)
        endpoint.link(1 - rank, address=peer)
        there, back = probe_both(endpoint, 1 - rank, first=first, most=args.most, seconds=args.seconds)
    return {"to the peer": there, "from the peer": back}


def _peer_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MOST_PORT:
        raise ValueError(f"--peer={text}: expected ADDRESS:PORT, as the other site's doctor prints it")
    return host.strip("[]"), int(port)


def _probe_bed(args: argparse.Namespace) -> Mapping[str, LinkProfile]:
    """Probe the first nodes of every pair of sites; the results are cached by the topology's hash."""
    topology = load_topology(args.netbed)
    cache = ProfileCache(bed_cache(topology))
    wanted = [f"{a} -> {b}" for a, b in permutations(topology.sites, 2)]
    found = dict(cache.read())
    if found.keys() >= {*wanted}:
        print(f"from {cache.path}; `weft doctor cache --clear {cache.path.stem}` has it probed again")
        return {name: found[name] for name in wanted}
    with NetBed.up(topology) as bed:
        for a, b in combinations(topology.sites, 2):
            near, far = topology.members(a)[0], topology.members(b)[0]
            there, back = probe_nodes(bed, near, far, most=args.most, seconds=args.seconds)
            found |= {f"{a} -> {b}": there, f"{b} -> {a}": back}
    cache.add(found)
    return {name: found[name] for name in wanted}


def bed_cache(topology: Topology) -> Path:
    """Return the file of a bed's link profiles; its name depends on the topology, not on the bed's name."""
    shape = repr((topology.nodes, topology.links, topology.mtu, topology.window_kb, topology.congestion))
    return cache_folder().parent / "links" / f"{hashlib.sha256(shape.encode()).hexdigest()[:16]}.json"


def profile_table(profiles: Mapping[str, LinkProfile]) -> Table:
    """Return a table of profiles, one row for each link."""
    table = Table("link", "round trip ms", "1 connection Mbit/s", "many Mbit/s", "both ways Mbit/s", "connections")
    for name, profile in profiles.items():
        table.add_row(
            name,
            f"{profile.rtt_s * 1e3:.1f}",
            f"{profile.single_bps / 1e6:.0f}",
            f"{profile.aggregate_bps / 1e6:.0f}",
            f"{profile.opposed_bps / 1e6:.0f}" if profile.opposed_bps else "",
            str(profile.connections),
        )
    return table


def hints(profiles: Collection[LinkProfile], settings: Path) -> list[str]:
    """Return advice for an administrator, from the kernel's ``settings`` folder (/proc/sys/net/ipv4)."""
    found = []

    def last(name: str) -> int:
        try:
            return int((settings / name).read_text().split()[-1])
        except (OSError, ValueError, IndexError):
            return 0

    if last("tcp_slow_start_after_idle"):
        found.append("connections slow down after a pause; sysctl -w net.ipv4.tcp_slow_start_after_idle=0 keeps them")
    share_bytes = max(profile.aggregate_bps / 8 * profile.rtt_s / profile.connections for profile in profiles)
    for name in ("tcp_rmem", "tcp_wmem"):
        if 0 < last(name) < 2 * share_bytes:
            found.append(
                f"a connection's share of the link is {share_bytes / 1e6:.1f} MB in flight; the third value of "
                f"net.ipv4.{name} ({last(name)} bytes) should be twice that"
            )
    if any(1 < profile.connections == max(dict(profile.rates_bps)) for profile in profiles):
        found.append("even the greatest number of connections gained; try again with a greater --most")
    return found
