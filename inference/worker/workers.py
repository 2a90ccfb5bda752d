"""Which ranks of a run form prefill workers, on which hosts, and at which ports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.conf.hosts import hosts_of_ranks, ranks_by_host, ranks_here
from weft.conf.schema import ClusterConfig, ClusterManager, WeftConfig
from weft.inference.board.layout import board_path, boards_folder


@dataclass(frozen=True)
class Worker:
    """A vLLM server, on the host of its first rank.

    Attributes:
        index: number of the worker on its host.
        ranks: training ranks whose devices it uses.
        side_port: port of its NIXL connector's side channel.
        status: path of its engine's `WorkerStatus`.
        boards: the ranks' bubble boards, or the copies of those of other hosts.
        remote: for each rank HOST:PORT of its stage's process, or an empty string if the rank is on this host.
    """

    index: int
    ranks: tuple[int, ...]
    port: int
    side_port: int
    status: Path
    boards: tuple[Path, ...]
    remote: tuple[str, ...]

    @property
    def ranks_here(self) -> list[int]:
        """The ranks on this host."""
        return [rank for rank, remote in zip(self.ranks, self.remote, strict=True) if not remote]


@dataclass(frozen=True)
class StageHost:
    """A process on this host that computes a stage of a worker of another host.

    Attributes:
        worker: the worker, as this host sees it: only ``rank`` counts as being here.
        stage: number of the stage.
        port: the port on which it listens.
        server: the worker's host.
    """

    worker: Worker
    stage: int
    port: int
    server: str

    @property
    def rank(self) -> int:
        """The training rank in whose bubbles it computes."""
        return self.worker.ranks[self.stage]


def workers_of(config: WeftConfig) -> tuple[Worker, ...]:
    """Return the workers that `weft serve` starts on this host.

    Raises:
        ValueError: the ranks that train here are not known.
    """
    groups, hosts = _groups(config)
    ours = [group for group in groups if not hosts[group[0]]] if hosts else groups
    return tuple(_worker(config, index, group, hosts) for index, group in enumerate(ours))


def stage_hosts_of(config: WeftConfig) -> tuple[StageHost, ...]:
    """Return the stages of other hosts' workers that `weft serve` starts on this host.

    Raises:
        ValueError: the ranks that train here are not known.
    """
    groups, hosts = _groups(config)
    return tuple(
        StageHost(
            worker=_worker(config, 0, group, [host if other == rank else "other" for other, host in enumerate(hosts)]),
            stage=stage,
            port=_stage_port(config, rank),
            server=hosts[group[0]],
        )
        for group in groups
        if hosts and hosts[group[0]]
        for stage, rank in enumerate(group)
        if not hosts[rank]
    )


def first_rank_here(cluster: ClusterConfig, worker: Worker) -> int:
    """Return the first rank on the host of a worker's ranks on this host."""
    return next((ranks.start for ranks in ranks_by_host(cluster) if worker.ranks_here[0] in ranks), 0)


def _groups(config: WeftConfig) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the ranks of each worker of this host. If a worker spans hosts, those of all hosts, and each rank's host.

    See `hosts_of_ranks`.
    """
    prefill, cluster = config.inference.prefill, config.cluster
    each = prefill.ranks_per_worker * prefill.stages
    if prefill.stages > 1 and cluster.hostfile and cluster.manager is not ClusterManager.local:
        places = ranks_by_host(cluster)
        groups = _cut(prefill.ranks or range(places[-1].stop), each)
        if any(not any(set(group) <= set(place) for place in places) for group in groups):
            return groups, hosts_of_ranks(cluster)
    return _cut(prefill.ranks or ranks_here(cluster), each), []


def _cut(ranks: Sequence[int], each: int) -> list[tuple[int, ...]]:
    return [tuple(ranks[first : first + each]) for first in range(0, len(ranks), each)]


def _worker(config: WeftConfig, index: int, ranks: tuple[int, ...], hosts: Sequence[str]) -> Worker:
    folder = boards_folder(config, os.getuid())
    return Worker(
        index=index,
        ranks=ranks,
        port=config.inference.prefill.first_port + index,
        side_port=config.inference.prefill.first_side_port + index,
        status=(folder / f"worker{index}.status").absolute(),
        boards=tuple(board_path(folder, rank).absolute() for rank in ranks),
        remote=tuple(f"{hosts[rank]}:{_stage_port(config, rank)}" if hosts and hosts[rank] else "" for rank in ranks),
    )


def _stage_port(config: WeftConfig, rank: int) -> int:
    first = next(ranks.start for ranks in ranks_by_host(config.cluster) if rank in ranks)
    return config.inference.prefill.first_stage_port + rank - first
