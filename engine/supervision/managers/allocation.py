"""The hosts that a cluster manager has given, site by site, as the hostfile and sites of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.conf.checks import check
from weft.conf.host.private import write_private
from weft.conf.schema import ClusterConfig, WeftConfig
from weft.engine.supervision.hosts import hostfile_text


def with_hosts(config: WeftConfig, hosts: Mapping[str, Sequence[str]], master_addr: str, hostfile: Path) -> WeftConfig:
    """The configuration of a run on hosts that have names now; writes the hostfile.

    Of each site the first hosts work, and the rest are spares.

    Args:
        config: one whose hosts a manager chooses.
        hosts: hosts of each site, in the order of `cluster.sites`.
        master_addr: address of the first host.

    Raises:
        ValueError: a site has got fewer hosts than it needs.
    """
    cluster = config.cluster
    for site in cluster.sites:
        if len(hosts[site.name]) < site.nodes:
            raise ValueError(
                f"cluster.sites.nodes={site.nodes}: {cluster.manager.name} gave site {site.name!r} "
                f"{len(hosts[site.name])} hosts; ask for more, or correct cluster.sites.select"
            )
    write_private(hostfile, hostfile_text({host: cluster.ranks for site in hosts.values() for host in site}))
    sites = [replace(site, hosts=list(hosts[site.name]), nodes=0, spares=0) for site in cluster.sites]
    spares = [host for site in cluster.sites for host in hosts[site.name][site.nodes :]]
    cluster = replace(
        cluster,
        hostfile=str(hostfile),
        sites=sites,
        spares=spares,
        master_addr=master_addr,
        master_port=cluster.master_port or ClusterConfig.master_port,
    )
    found = replace(config, cluster=cluster)
    check(found)
    return found
