"""`weft doctor`: check the links between sites, a host, the connections between ranks."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from itertools import combinations, permutations
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from weft.comm.native import cache_folder
from weft.comm.wan.library import load
from weft.tools.diagnostics import options
from weft.tools.netbed import NetBed, Topology
from weft.tools.netbed import load as load_topology

if TYPE_CHECKING:
    from weft.comm.wan.probe import LinkProfile


def main(argv: Sequence[str]) -> int:
    """Run ``weft doctor CHECK ...`` and return the exit code."""
    parser = argparse.ArgumentParser(prog="weft doctor", description=__doc__)
    checks = parser.add_subparsers(dest="check", required=True)
    _net_options(checks.add_parser("net", help="probe the links between sites", description=_NET))
    options.add_node_options(checks.add_parser("node", help="check this host", description=options.NODE))
    options.add_ring_options(
        checks.add_parser("ring", help="check the connections between ranks", description=options.RING)
    )
    options.add_cache_options(checks.add_parser("cache", help="list or clear measurements", description=options.CACHE))
    args = parser.parse_args(argv)
    if args.check == "net":
        return _net(args)
    code: int = import_module(f"weft.tools.diagnostics.{args.check}").run(args)  # they import torch
    return code


_NET = """
Measures round trip, one connection's rate and the rate of many, in each direction alone and in both
at once, and says how many connections fill the link. Run it at both sites: at one `weft doctor net
--bind ADDRESS`, and at the other `weft doctor net --bind ADDRESS --peer ADDRESS:PORT` with what the
first one prints. Both need the same WEFT_KEY. With --netbed FILE it probes an emulated WAN instead.
"""


def _net_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--netbed", type=Path, metavar="FILE", help="a topology of `weft netbed`")
    where.add_argument("--bind", help="this host's IP address on the WAN")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; default: a free one")
    parser.add_argument("--peer", default="", help="ADDRESS:PORT of the other site's doctor")
    parser.add_argument("--most", type=int, default=32, help="the greatest number of connections to try")
    parser.add_argument("--seconds", type=float, default=0.5, help="time of one measurement")
    parser.add_argument("--congestion", default="", help="the kernel's congestion control, as in comm.congestion")


def _net(args: argparse.Namespace) -> int:
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
    from weft.comm.key import WanKey
    from weft.comm.wan.endpoint import WanEndpoint  # imports torch, which no option needs
    from weft.comm.wan.probe import probe_both

    """The link between this host and one other, from real addresses."""
    settings = {"connections": args.most, "congestion": args.congestion, "port": args.port}
    first = bool(args.peer)
    rank = 0 if first else 1
    with WanEndpoint(rank=rank, bind=args.bind, key=WanKey.from_environment(), **settings) as endpoint:
        if not first:
            host, port = endpoint.address
            print(f"waiting for: weft doctor net --bind ADDRESS --peer {host}:{port}", flush=True)
        endpoint.link(1 - rank, address=_peer_address(args.peer) if first else None)
        there, back = probe_both(endpoint, 1 - rank, first=first, most=args.most, seconds=args.seconds)
    return {"to the peer": there, "from the peer": back}


def _peer_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--peer={text}: expected ADDRESS:PORT, as the other site's doctor prints it")
    return host.strip("[]"), int(port)


def _probe_bed(args: argparse.Namespace) -> Mapping[str, LinkProfile]:
    from weft.comm.wan.probe import ProfileCache
    from weft.tools.netbed.probing import probe_nodes

    """Probe the first nodes of every pair of sites; cached under the topology's hash."""
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
    """File of a bed's link profiles, named by its topology and not by its name."""
    shape = repr((topology.nodes, topology.links, topology.mtu, topology.window_kb, topology.congestion))
    return cache_folder().parent / "links" / f"{hashlib.sha256(shape.encode()).hexdigest()[:16]}.json"


def profile_table(profiles: Mapping[str, LinkProfile]) -> Table:
    """Profiles by link name."""
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
    """Return improvements for an administrator, from the kernel's ``settings`` folder (/proc/sys/net/ipv4)."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
