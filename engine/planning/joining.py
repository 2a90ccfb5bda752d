"""Join the job that a configuration describes, with its sites."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from weft.comm.job import current_job
from weft.comm.links import Sites
from weft.conf.batch import check_world
from weft.conf.schema import WeftConfig
from weft.conf.sites import num_routes, ranks_per_site
from weft.engine import distributed
from weft.engine.layout import RankLayout

log = logging.getLogger(__name__)


def join_job(config: WeftConfig) -> tuple[WeftConfig, torch.device]:
    """Join the job as `join` does, and fit the configuration to its number of processes.

    Returns:
        The configuration with batch sizes derived that were not given, and this rank's device.

    Raises:
        ValueError: the pipeline or the batch does not fit the number of processes.
    """
    device = join(config)
    return check_world(config, dist.get_world_size()), device


def join(config: WeftConfig) -> torch.device:
    """Join the process group that the launcher's environment describes. Idempotent.

    If ``config.cluster`` has several sites, ranks of different sites communicate over authenticated links, and no
    other connection leaves a site.

    Returns:
        This rank's device.
    """
    sites = _sites(config, int(os.environ.get("WORLD_SIZE", "1")))
    device = distributed.init_distributed(config.comm.timeout_s, sites=sites)
    job = current_job()
    if sites is not None and job.is_real and job.address is None and dist.get_rank() == 0:
        log.warning(
            "cluster.sites: the process group was there before weft knew of them, and connects every rank to every "
            "other in the clear; call weft.init_distributed(config) first, with the configuration that has them"
        )
    return device


def _sites(config: WeftConfig, world_size: int) -> Sites | None:
    """Return the sites of ranks, or None for a single site. None also if ranks do not fit, which is reported later."""
    stages, routes, held = config.pipeline.stages, num_routes(config.cluster), ranks_per_site(config)
    if len(held) < 2 or world_size % (stages * routes) or sum(held) != stages * routes:
        return None
    layout = RankLayout(held, world_size // stages, routes=routes)
    sites = tuple(layout.position(rank).site for rank in range(world_size))
    return Sites(sites, config.comm, reduce=routes > 1)
