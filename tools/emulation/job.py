"""The interface of a job that is emulated: how a rank of it makes its engine, and where its ranks are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weft.conf.hosts import working_hosts
from weft.conf.schema import WeftConfig
from weft.engine.engine import WeftEngine
from weft.engine.planning.layout import RankLayout


class EmulatedJob(Protocol):
    """The inputs of an emulated job's ranks."""

    @property
    def config(self) -> WeftConfig:
        """Return the run's configuration."""
        ...

    def engine(self) -> WeftEngine:
        """The engine of this process's rank, with its data. A collective call."""
        ...


def hosts_of(config: WeftConfig, per_host: int) -> Callable[[int], int]:
    """The number of each rank's host: by the hostfile, or of ``per_host`` ranks each."""
    if not config.cluster.hostfile:
        return lambda rank: rank // per_host
    numbers = [host for host, slots in enumerate(working_hosts(config.cluster).values()) for _ in range(slots)]
    return numbers.__getitem__


def sites_of(layout: RankLayout) -> Callable[[int], int]:
    """The number of each rank's site."""
    return lambda rank: layout.rank_sites[rank // layout.lines]
