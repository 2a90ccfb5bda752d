"""A run on a bed built from its own `cluster`: every rank is a machine, and sites are joined by a WAN."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, sleep

from weft.comm.key import VARIABLE
from weft.conf import load
from weft.conf.host.run_lock import RunLock
from weft.conf.hosts import run_folder
from weft.conf.sites import num_routes
from weft.tools.launch import environment, write_config
from weft.tools.netbed.bed import NetBed
from weft.tools.netbed.topology import Topology
from weft.tools.preflight import preflight

_PORT = 29500  # each bed has a network of its own
_GRACE_S = 15.0


def launch(overrides: Sequence[str], *, window_kb: float) -> int:
    """Build the bed, start the ranks in its nodes, wait for them and return the first exit code that is not 0.

    Raises:
        ValueError: bad input, found before any process starts.
    """
    config = load(overrides)
    cluster = config.cluster
    if len(cluster.sites) < 2:
        raise ValueError("cluster.sites: a bed has at least two; choose cluster=three_sites, or list your own")
    if cluster.hostfile:
        raise ValueError(f"cluster.hostfile={cluster.hostfile}: the ranks run in the bed; leave it out")
    preflight(config, leave_out={"port"})
    replicas = cluster.ranks // config.pipeline.stages // num_routes(cluster)
    topology = Topology.of_cluster(cluster, name=f"run{os.getpid()}", replicas=replicas, window_kb=window_kb)
    with NetBed.up(topology) as bed:
        config = replace(config, cluster=replace(cluster, master_addr=bed.address(bed.nodes[0]), master_port=_PORT))
        folder = run_folder(config)
        RunLock.check(folder)
        file = write_config(config, folder / "config.yaml")
        command = [sys.executable, "-m", "weft.recipes.train", "--config-file", str(file)]
        shared = {VARIABLE: secrets.token_hex(32), **environment(os.environ)} | {
            "WORLD_SIZE": str(cluster.ranks),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": config.cluster.master_addr,
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": "lan0",
        }
        return _wait(
            [bed.popen(node, command, env={**shared, "RANK": str(rank)}) for rank, node in enumerate(bed.nodes)],
            patience_s=config.comm.deadline_s + _GRACE_S,
        )


def _wait(ranks: Sequence[subprocess.Popen], *, patience_s: float) -> int:
    """Wait for all ranks, at most ``patience_s`` seconds after the first failure; return the exit code."""
    code, limit = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and monotonic() < limit:
        failed = next((rank.returncode for rank in ranks if rank.returncode), 0)
        if failed and not code:
            code, limit = failed, monotonic() + patience_s
        sleep(0.1)
    return code or next((rank.returncode for rank in ranks if rank.returncode), 0)
