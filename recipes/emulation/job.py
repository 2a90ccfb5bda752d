"""The job whose real ranks run among emulated ones, such as a recipe's job, and the hosts and sites of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Protocol

from weft.comm.emulated.operation_log import EmulationError
from weft.conf.batch import check_world
from weft.conf.hosts import asks_for_nodes, working_hosts, world_size
from weft.conf.schema import DataKind, WeftConfig
from weft.conf.sites import ranks_per_site
from weft.engine.attempt import Attempt
from weft.engine.engine import WeftEngine
from weft.engine.initialize import build_engine
from weft.engine.layout import RankLayout
from weft.engine.planning.joining import join_job
from weft.recipes.preparation import prepare


class EmulatedJob(Protocol):
    """A job to emulate."""

    @property
    def config(self) -> WeftConfig:
        """Configuration of the run."""
        ...

    def engine(self) -> WeftEngine:
        """Return the engine of this process's rank, with its data. Collective call."""
        ...


def hosts_of(config: WeftConfig, per_host: int) -> Callable[[int], int]:
    """Return a function from a rank to the number of its host.

    Hosts come from the hostfile. Without one, each host has ``per_host`` ranks.
    """
    if not config.cluster.hostfile:
        return lambda rank: rank // per_host
    numbers = [host for host, slots in enumerate(working_hosts(config.cluster).values()) for _ in range(slots)]
    return numbers.__getitem__


def sites_of(layout: RankLayout) -> Callable[[int], int]:
    """Return a function from a rank to the number of its site."""
    return lambda rank: layout.rank_sites[rank // layout.lines]


@dataclass(frozen=True)
class RecipeJob:
    """The job of a recipe, with its model, data and settings, without checkpoints, evaluations and logs.

    Attributes:
        folder: folder for the run's files, such as the result of the model's self-check.
    """

    config: WeftConfig
    folder: Path

    def engine(self) -> WeftEngine:
        """Create the engine as `weft train` does."""
        config, device = join_job(self.config)
        config, _, loader, _ = prepare(config, self.folder, Attempt())
        engine = build_engine(replace(config, model=replace(config.model, self_check=False)), device)
        engine.set_dataiterator(chain.from_iterable(repeat(loader)))
        return engine


def recipe_job(config: WeftConfig, folder: Path, replicas: int = 0) -> RecipeJob:
    """Return the emulated job of a configuration.

    Args:
        replicas: number of replicas. 0 takes as many as the cluster's ranks make.

    Raises:
        EmulationError: the hosts or a link's bandwidth are unknown, or the configuration has several routes.
        ValueError: the cluster does not fit the recipe.
    """
    cluster = config.cluster
    if replicas:
        each = config.pipeline.stages * config.parallel.context * config.parallel.tensor
        cluster = replace(cluster, hostfile="", ranks=replicas * each)
    if config.data.kind is DataKind.preference:
        raise EmulationError("data.kind=preference: the reference's passes are not emulated; emulate data.kind=chat")
    if asks_for_nodes(cluster):
        raise EmulationError(
            f"cluster.manager={cluster.manager.name}: the hosts are not known yet; give cluster.hostfile, or "
            "cluster.ranks with cluster.manager=ssh"
        )
    train = replace(config.train, eval_every=0, epochs=0.0, max_seconds=0.0, timeline=False)
    config = replace(
        config,
        cluster=cluster,
        train=train,
        checkpoint=replace(config.checkpoint, every=0, final=False, memory_every=0, resume="never"),
        model=replace(config.model, self_check=False),
        inference=replace(config.inference, enabled=False),
    )
    size = world_size(cluster)
    config = check_world(config, size)
    for link in cluster.links:
        if not link.bandwidth_mbps:
            raise EmulationError(
                f"cluster.links: {' to '.join(link.sites)} has bandwidth_mbps=0, which a run would measure; give it"
            )
    if len(ranks_per_site(config)) > 1 and not cluster.links:
        raise EmulationError(
            "cluster.links: empty, and there are several sites; give latency and bandwidth of each link"
        )
    if len(cluster.routes) > 1:
        raise EmulationError(
            f"cluster.routes={cluster.routes}: an emulated job has replicas that all go through the same sites; leave "
            "out routes, and the sites of all but one"
        )
    return RecipeJob(config, folder)
