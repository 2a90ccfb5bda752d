"""Corrections of the cached measurements for plans, by the measured slots and collectives of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weft.comm.collectives import Primitive
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.costs import Sample
from weft.comm.collectives.group import LinkClass
from weft.comm.exchange import gather
from weft.comm.job import current_job
from weft.conf.features import entry
from weft.conf.host.measurements import Measurement, spread_of
from weft.conf.schema import WeftConfig
from weft.engine.distributed import ranks_on_this_host
from weft.engine.parallel.communicated import communicators_of
from weft.engine.planning.devices import correct, correct_reached, peak_flops
from weft.engine.planning.gathering import devices_cache
from weft.engine.planning.run_plan import RunPlan
from weft.pipeline.costs import CostModel
from weft.pipeline.profile import fit_costs
from weft.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from weft.engine.engine import WeftEngine


def correct_measurements(engine: WeftEngine) -> list[Timeline]:
    """Replace cached speeds, overlaps and costs of collectives that the last steps contradict. Collective call.

    Returns:
        The timelines of the last steps. See `WeftEngine.measured_timelines`.
    """
    engine.sharding.settle()  # no other collective may run over the groups
    timelines = engine.measured_timelines()
    if not current_job().is_real:
        return timelines  # durations of emulated ranks are configured
    config, plan, device = engine.weft, engine.plan, engine.device
    load, cache = _run_load(device), CostCache.in_folder(config.data.cache_dir)
    with suppress(OSError):  # a cache that cannot be written was not read either
        if dist.get_rank() == 0 and timelines:
            _correct_speed(config, plan, timelines, device, load)
            if (pairs := plan.costs.pairs) is not None:
                entry("strands").correct_overlap(config.data.cache_dir, device, timelines, pairs, load=load)
    for communicator in (*engine.collectives.communicators, *communicators_of(engine.axes)):
        _correct_collectives(communicator, cache, device, load)
    return timelines


def _run_load(device: torch.device) -> float:
    """Return the number of this job's threads for each processor of this host, or 0 if the ranks compute on GPUs."""
    threads = ranks_on_this_host() * torch.get_num_threads()
    return threads / len(os.sched_getaffinity(0)) if device.type == "cpu" else 0.0


def _correct_speed(
    config: WeftConfig, plan: RunPlan, timelines: Sequence[Timeline], device: torch.device, load: float
) -> None:
    """Correct the device's speed, and the speed that explains the measured durations of the stages' slots."""
    correct(device, peak_flops(device), devices_cache(config), load=load)
    planned = plan.facts.flops_per_s
    if planned is None or not plan.facts.run:
        return
    rates = [planned * _compute_s(plan.costs) / _compute_s(fit_costs([timeline], plan.costs)) for timeline in timelines]
    found = Measurement.now(median(rates), spread_of(rates, median(rates)), load=load)
    correct_reached(plan.facts.run, device, planned, found, devices_cache(config))


def _compute_s(costs: CostModel) -> float:
    return sum(stage.compute_s for stage in costs.stages)


def _correct_collectives(communicator: Communicator, cache: CostCache, device: torch.device, load: float) -> None:
    """Correct the costs of collectives by the shortest time of all members. The last to arrive does not wait."""
    group = communicator.group
    kinds = Sample, LinkClass, Primitive
    everyones = gather(communicator.times.samples(), group=communicator.process_group(group.flat, 0), kinds=kinds)
    if dist.get_rank() == group.ranks[0]:
        shortest: dict[tuple[object, ...], Sample] = {}
        for sample in sorted(chain.from_iterable(everyones), key=lambda sample: sample.seconds):
            shortest.setdefault((sample.link, sample.primitive, sample.size, sample.num_bytes), sample)
        with suppress(OSError):
            cache.correct(topology_key(group, device.type), shortest.values(), load=load)
