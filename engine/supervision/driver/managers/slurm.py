"""Slurm: the script that requests a run's nodes, and the nodes of this process's allocation."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.conf.checks import check
from weft.conf.host.private import write_private
from weft.conf.hosts import run_folder
from weft.conf.schema import SiteConfig, WeftConfig
from weft.engine.supervision.driver.hosts import hostfile_text, on_hosts

_MOST_S = 60.0
_KINDS = ("partition", "constraint")


def script(config: WeftConfig, overrides: Sequence[str], python: str) -> str:
    """Return an sbatch script that starts the run on the first node of its allocation.

    Sites are features of nodes in one job, or partitions in a heterogeneous job of one part each.
    A node that fails does not end the job (``--no-kill``), and spares are nodes of the allocation.

    Args:
        config: a configuration with nodes for each site.
        overrides: arguments of `weft launch`, which are passed to `weft launch` in the allocation.
        python: the Python that runs weft on the nodes.

    Raises:
        ValueError: `cluster.sites.select` cannot be expressed as one job.
    """
    common = ["--ntasks-per-node=1", "--exclusive", "--no-kill", *config.cluster.slurm.options]
    lines = ["#!/bin/bash", f"#SBATCH --job-name={shlex.quote(config.train.name)}", "#SBATCH --requeue"]
    lines.append("#SBATCH --open-mode=append")
    for number, request in enumerate(_requests(config.cluster.sites)):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {option}" for option in (*request, *common)]
    launch = shlex.join([python, "-m", "weft.tools.cli", "launch", *overrides])
    folder = run_folder(config)
    attach = shlex.join([python, "-m", "weft.tools.cli", "launch", "--attach", str(folder)])
    return "\n".join(
        [
            *lines,
            "",
            *config.cluster.slurm.setup,
            "# A signal (sbatch --signal=B:TERM@300) reaches this script; weft saves a checkpoint and ends.",
            "trap 'kill -TERM $weft' TERM INT",
            "await() { weft=$!; wait $weft; code=$?; while kill -0 $weft 2>&-; do wait $weft; code=$?; done; }",
            "# A job that Slurm has queued again goes on where it was.",
            f"{launch} ${{SLURM_RESTART_COUNT:+checkpoint.resume=auto}} & await",
            "# The driver was killed: training goes on, and so does the job.",
            f"while [ $code = 137 ]; do {attach} & await; done",
            "exit $code",
            "",
        ]
    )


def submit(file: Path, folder: Path) -> str:
    """Submit a script, and return the job's number. The job's output goes to ``folder``.

    Raises:
        ValueError: sbatch does not exist, or refuses the script.
    """
    output = f"--output={folder / 'slurm-%j.out'}"
    return _ask(["sbatch", "--parsable", output, str(file)]).split(";")[0]


def in_allocation(environment: Mapping[str, str]) -> bool:
    """True if this process runs inside an allocation."""
    return "SLURM_JOB_ID" in environment


def with_allocation(config: WeftConfig, environment: Mapping[str, str], hostfile: Path) -> WeftConfig:
    """Return the configuration with the hosts of the allocation in ``environment``, and write the hostfile.

    Raises:
        ValueError: the allocation lacks nodes that the sites need, or Slurm does not answer.
    """
    nodes = [node for number, names in _groups(environment) for node in _nodes(names, number)]
    sites = config.cluster.sites
    hosts = {
        site.name: [node.name for node in nodes if len(sites) == 1 or _is_of(node, index, site)]
        for index, site in enumerate(sites)
    }
    first = next(iter(hosts[sites[0].name]), "")
    address = next((node.address for node in nodes if node.name == first), "")
    return with_hosts(config, hosts, address, hostfile)


@dataclass(frozen=True)
class _Node:
    """A node of an allocation.

    Attributes:
        group: number of its part in a heterogeneous job, or None in other jobs.
    """

    name: str
    address: str
    features: frozenset[str]
    group: int | None


def _requests(sites: Sequence[SiteConfig]) -> list[list[str]]:
    for site in sites:
        if unknown := set(site.select) - set(_KINDS):
            raise ValueError(
                f"cluster.sites.select={site.select}: slurm selects by partition or constraint, not {min(unknown)}"
            )
    if any("partition" in site.select for site in sites) and len(sites) > 1:
        if not all("partition" in site.select for site in sites):
            raise ValueError("cluster.sites.select: give every site a partition, or all of them a constraint")
        return [_request(site) for site in sites]
    if len(sites) == 1:
        return [_request(sites[0])]
    counts = []
    for site in sites:
        if "constraint" not in site.select:
            raise ValueError(
                f"cluster.sites.select={site.select}: nothing tells nodes of site {site.name!r} from others; set "
                "{partition: NAME} or {constraint: FEATURE}"
            )
        counts.append(f"{site.select['constraint']}*{site.nodes + site.spares}")
    return [[f"--nodes={sum(site.nodes + site.spares for site in sites)}", f"--constraint=[{'&'.join(counts)}]"]]


def _request(site: SiteConfig) -> list[str]:
    return [f"--nodes={site.nodes + site.spares}", *(f"--{name}={value}" for name, value in site.select.items())]


def _groups(environment: Mapping[str, str]) -> Iterator[tuple[int | None, str]]:
    """Yield the number and the nodes of each part of the job."""
    size = int(environment.get("SLURM_HET_SIZE", "0"))
    for number in range(size):
        yield number, environment[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"]
    if not size:
        yield None, environment["SLURM_JOB_NODELIST"]


def _nodes(names: str, group: int | None) -> list[_Node]:
    """Return the nodes of a list such as ``node[0-3]``, in its order."""
    found = []
    for entry in _ask(["scontrol", "show", "node", "--oneliner", names]).splitlines():
        fields = dict(re.findall(r"(\w+)=(\S+)", entry))
        features = frozenset(fields.get("AvailableFeatures", "").split(","))
        found.append(_Node(fields["NodeName"], fields.get("NodeAddr") or fields["NodeName"], features, group))
    order = _ask(["scontrol", "show", "hostnames", names]).split()
    return sorted(found, key=lambda node: order.index(node.name))


def _is_of(node: _Node, index: int, site: SiteConfig) -> bool:
    """True if a node belongs to a site, by its part of the job or by its features."""
    if node.group is not None:
        return node.group == index
    return site.select.get("constraint") in node.features


def _ask(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S)
    except FileNotFoundError as error:
        raise ValueError(f"cluster.manager=slurm: {command[0]} is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"cluster.manager=slurm: {command[0]} does not answer in {_MOST_S:g} s") from error
    if done.returncode:
        raise ValueError(f"cluster.manager=slurm: {shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def with_hosts(config: WeftConfig, hosts: Mapping[str, Sequence[str]], master_addr: str, hostfile: Path) -> WeftConfig:
    """Return the configuration of a run with the names of its hosts, and write the hostfile.

    The first hosts of each site work, and the rest are spares.

    Args:
        config: a configuration whose hosts a manager chooses.
        hosts: hosts of each site, in the order of `cluster.sites`.
        master_addr: address of the first host.

    Raises:
        ValueError: a site has fewer hosts than it needs.
    """
    cluster = config.cluster
    for site in cluster.sites:
        if len(hosts[site.name]) < site.nodes:
            raise ValueError(
                f"cluster.sites.nodes={site.nodes}: {cluster.manager.name} gave site {site.name!r} "
                f"{len(hosts[site.name])} hosts; ask for more, or correct cluster.sites.select"
            )
    write_private(hostfile, hostfile_text({host: cluster.ranks for site in hosts.values() for host in site}))
    found = on_hosts(config, hosts, master_addr, str(hostfile))
    check(found)
    return found
