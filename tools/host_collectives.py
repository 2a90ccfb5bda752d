"""Costs of collectives on this host, alone and with concurrent compute; stored where runs look for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Protocol

import torch
import torch.distributed as dist

from weft.comm.collectives import CollectiveCosts, Group, Primitive
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.probe import fitted, measure
from weft.conf.features import entry, is_installed
from weft.tools.local_ranks import answers_of

_MEANT = (Primitive.all_gather, Primitive.reduce_scatter)
MOST_S = 90.0
"""Seconds within which all ranks have to have measured everything."""


class Overlap(Protocol):
    """Measured overlap of compute and collectives. See `weft.engine.strands`."""

    def store(self, cache_dir: str) -> None:
        """Store the measurements in the folder from which runs on this host read them."""

    @property
    def factors(self) -> Mapping[str, float]:
        """The OEF of each kind of compute with a collective of all ranks."""


@dataclass(frozen=True)
class HostCollectives:
    """The measured costs of collectives on this host.

    Attributes:
        costs: costs by the topology's key, measured with all groups of a size at once.
        overlap: overlap of compute with a collective of all ranks; None if strand pairs are not installed.
    """

    costs: dict[str, CollectiveCosts]
    overlap: Overlap | None

    def line_of_all(self, ranks: int) -> tuple[float, float]:
        """Return the seconds per message and per byte sent among all ranks.

        They are means of all-gather and reduce-scatter.
        """
        (table,) = [costs.table for key, costs in self.costs.items() if f" on {ranks} ranks" in key]
        lines = [line for (_, primitive), line in table.items() if primitive in _MEANT]
        return mean(line.alpha_s for line in lines), mean(line.beta_s for line in lines)


def measure_host(ranks: int) -> HostCollectives:
    """Start ``ranks`` processes, one per GPU if there are any, and measure collectives among them.

    Raises:
        RuntimeError: a rank failed, or was not done in time.
    """
    answers = answers_of(ranks, _measure, most_s=MOST_S)
    for rank in range(ranks):
        if not isinstance(answer := answers.get(rank), HostCollectives):
            why = answer.strip().splitlines()[-1] if isinstance(answer, str) else f"it was not done after {MOST_S:g} s"
            raise RuntimeError(f"collectives of {ranks} ranks were not measured: rank {rank}: {why}")
    return answers[0]


def store(found: HostCollectives, cache_dir: str) -> None:
    """Add the measurements to the files that runs on this host read."""
    for key, costs in found.costs.items():
        CostCache.in_folder(cache_dir).write(key, costs)
    if found.overlap is not None:
        found.overlap.store(cache_dir)


def _measure(device: torch.device) -> HostCollectives:
    size, costs, overlap = dist.get_world_size(), {}, None
    for part in _parts(size):
        groups = [Group(tuple(range(begin, begin + part)), (0,) * part) for begin in range(0, size, part)]
        communicator = Communicator.open(groups, device=device, timeout_s=MOST_S, name=f"{part} ranks")
        assert communicator is not None, "every rank is in one of the groups"
        whole = fitted(measure(communicator, device=device, concurrent=dist.group.WORLD))
        costs[topology_key(communicator.group, device.type)] = whole
        if part == size and is_installed("strands"):
            overlap = entry("strands").measure_host(communicator, device)
        communicator.close()
    return HostCollectives(costs, overlap)


def _parts(size: int) -> Sequence[int]:
    """Return the sizes of groups that divide a host's ranks evenly, from two to all."""
    return [part for part in range(2, size + 1) if size % part == 0]
