"""The machines of a run: the hostfile and the number of ranks per host."""

from __future__ import annotations

import re
import socket
from itertools import accumulate
from pathlib import Path

import psutil

from weft.conf.host.documents import read_text
from weft.conf.schema import ClusterConfig, ClusterManager, WeftConfig

MOST_BYTES = 2**20
LINE = re.compile(r"(?P<host>[^\s-]\S*)\s+slots=(?P<slots>\d+)\s*(#.*)?")


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Return the number of ranks of each host, in the file's order, from lines such as ``worker-0 slots=8``.

    Raises:
        ValueError: a line is malformed, a host is listed twice, or there is no host.
    """
    hosts: dict[str, int] = {}
    try:
        lines = read_text(Path(path).expanduser(), most_bytes=MOST_BYTES).splitlines()
    except ValueError as error:
        raise ValueError(f"cluster.hostfile={path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = LINE.fullmatch(text)
        if not match or int(match["slots"]) < 1:
            raise ValueError(f"cluster.hostfile={path}: line {number} is {text!r}; write it as `host slots=8`")
        if match["host"] in hosts:
            raise ValueError(f"cluster.hostfile={path}: host {match['host']} is listed twice; give its slots once")
        hosts[match["host"]] = int(match["slots"])
    if not hosts:
        raise ValueError(f"cluster.hostfile={path}: names no host; write lines such as `host slots=8`")
    return hosts


def working_hosts(cluster: ClusterConfig) -> dict[str, int]:
    """Return the number of ranks of each host on which the run begins: those of the hostfile, except the spares.

    Raises:
        ValueError: the hostfile is malformed, lacks a spare, or has nothing but spares.
    """
    hosts = read_hostfile(cluster.hostfile)
    if unknown := [host for host in cluster.spares if host not in hosts]:
        raise ValueError(f"cluster.spares={cluster.spares}: {unknown[0]} is not in {cluster.hostfile}; add its line")
    if len(set(cluster.spares)) == len(hosts):
        raise ValueError(f"cluster.spares={cluster.spares}: no host of {cluster.hostfile} is left to work; spare fewer")
    return {host: slots for host, slots in hosts.items() if host not in cluster.spares}


def ranks_by_host(cluster: ClusterConfig) -> list[range]:
    """Return the ranks of each host on which the run begins."""
    slots = [cluster.ranks]
    if cluster.hostfile:
        slots = list(working_hosts(cluster).values())
    elif asks_for_nodes(cluster):
        slots *= sum(site.nodes for site in cluster.sites)
    return [range(end - count, end) for count, end in zip(slots, accumulate(slots), strict=True)]


def ranks_here(cluster: ClusterConfig) -> range:
    """Return the ranks that train on this host.

    Raises:
        ValueError: there are several hosts, and none of them is known to be this one.
    """
    hosts = ranks_by_host(cluster)
    if len(hosts) == 1 or cluster.manager is ClusterManager.local:
        return range(sum(map(len, hosts)))
    name = socket.gethostname()
    own = {name, name.partition(".")[0]} | {end.address for ends in psutil.net_if_addrs().values() for end in ends}
    names = working_hosts(cluster) if cluster.hostfile else ()
    for host, ranks in zip(names, hosts, strict=False):
        if host in own or host.partition(".")[0] == name:
            return ranks
    where = f"is not in {cluster.hostfile}" if names else f"is one of {len(hosts)} that a cluster manager chooses"
    remedy = " (or, for workers over several hosts, write this host's name or address in the file)" if names else ""
    raise ValueError(f"inference.prefill.ranks=[]: this host, {name}, {where}; name the ranks that train here{remedy}")


def hosts_of_ranks(cluster: ClusterConfig) -> list[str]:
    """Return for each rank the hostfile's name of its host, or an empty string if it trains on this host.

    Raises:
        ValueError: see `ranks_here`.
    """
    here = ranks_here(cluster)
    if not cluster.hostfile:
        return [""] * len(here)
    names = working_hosts(cluster)
    return [
        "" if rank in here else name
        for name, ranks in zip(names, ranks_by_host(cluster), strict=True)
        for rank in ranks
    ]


def asks_for_nodes(cluster: ClusterConfig) -> bool:
    """True if a cluster manager chooses the hosts, so that only their number is known before the run."""
    return not cluster.hostfile and cluster.manager in (ClusterManager.slurm, ClusterManager.kubernetes)


def world_size(cluster: ClusterConfig) -> int:
    """Return the number of processes of the run."""
    return sum(map(len, ranks_by_host(cluster)))


def most_ranks_of_a_host(cluster: ClusterConfig) -> int:
    """Return the largest number of processes on one host."""
    return max(map(len, ranks_by_host(cluster)), default=cluster.ranks)


def is_loopback(address: str) -> bool:
    """True if only processes of the same machine can reach this address."""
    return address in ("localhost", "::1") or address.startswith("127.")


def run_folder(config: WeftConfig) -> Path:
    """Return the folder of a run."""
    return (Path(config.train.output_dir).expanduser() / config.train.name).absolute()


def resume_folder(config: WeftConfig) -> Path:
    """Return the folder of checkpoints, or the checkpoint, that a run resumes from unless it never does."""
    resume = config.checkpoint.resume
    return run_folder(config) / "checkpoints" if resume == "auto" else Path(resume).expanduser()
