"""Cache of the measured overlap of operators on this machine's devices, between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.comm.collectives.communicator import Communicator
from weft.conf.host.measurements import Measurement, Measurements
from weft.engine.parallel.communicated import CommunicatedGroup
from weft.engine.strands.overlap_probe import measure_overlap
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import StrandCosts, fit_overlap
from weft.pipeline.strands.segments import Kind, LinkScope
from weft.pipeline.timeline import Timeline

_BOTH = "collectives on both"


@dataclass(frozen=True)
class OverlapCache:
    """Tables of measurements by device, in a JSON file that several processes may write."""

    path: Path

    def read(self, key: str) -> OverlapTable | None:
        """Return the table of a device, or None if it was not measured or the file is unreadable."""
        found = Measurements(self.path).values()
        try:
            compute = {
                (Kind(kind), link): float(factor)
                for link in LinkScope
                for kind, factor in found.get(f"{key}, {link.value}", {}).items()
            }
            return OverlapTable(compute, float(found.get(f"{key}, {_BOTH}", 1.0))) if compute else None
        except (ValueError, AttributeError, TypeError):
            return None

    def write(self, key: str, table: OverlapTable) -> None:
        """Store the measurements of a device. Better measurements that are stored already stay."""
        Measurements(self.path).store(_values(key, table), table.spread)

    def correct(self, key: str, table: OverlapTable, faster: float, *, load: float) -> None:
        """Replace measurements that a run contradicts. See `Measurement.refutes`.

        Args:
            table: the run's measurements.
            faster: ratio of the measured speed of the run's pairs to the speed that the stored table predicts.
            load: number of the run's threads for each processor.
        """
        cache = Measurements(self.path)
        known = cache.read()
        found = {name: Measurement.now(value, table.spread, load=load) for name, value in _values(key, table).items()}
        cache.put({name: new for name, new in found.items() if name in known and new.refutes(known[name], faster)})


def _values(key: str, table: OverlapTable) -> dict[str, object]:
    values: dict[str, object] = {}
    for link in LinkScope:
        if factors := {kind.value: factor for (kind, at), factor in table.compute.items() if at is link}:
            values[f"{key}, {link.value}"] = factors
    return values if len(values) < len(LinkScope) else {**values, f"{key}, {_BOTH}": table.links}


def overlap_cache(cache_dir: str) -> OverlapCache:
    """Return the cache file in a folder such as ``data.cache_dir``."""
    return OverlapCache(Path(cache_dir).expanduser() / "overlap.json")


def overlap_key(device: torch.device) -> str:
    """Return the cache key of a device's table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{name}, from {os.uname().nodename}"


def correct_overlap(
    cache_dir: str, device: torch.device, timelines: Sequence[Timeline], pairs: StrandCosts, *, load: float
) -> None:
    """Correct a device's cached overlap by a run's measured strand pairs. See `OverlapCache.correct`.

    Args:
        timelines: the run's last steps.
        pairs: the costs with which the strand pairs were planned.
    """
    if (found := fit_overlap(timelines, pairs)) is not None:
        overlap, faster = found
        overlap_cache(cache_dir).correct(overlap_key(device), overlap, faster, load=load)


@dataclass(frozen=True)
class HostOverlap:
    """The measured overlap of compute and collectives inside a host.

    Attributes:
        key: key of the device in the cache.
    """

    key: str
    table: OverlapTable

    def store(self, cache_dir: str) -> None:
        """Store the measurements in the cache of this host's runs."""
        overlap_cache(cache_dir).write(self.key, self.table)

    @property
    def factors(self) -> Mapping[str, float]:
        """OEF of a collective of all ranks with each kind of compute."""
        return {kind.value: factor for (kind, _), factor in sorted(self.table.compute.items(), key=str)}


def measure_host(communicator: Communicator, device: torch.device) -> HostOverlap:
    """Measure compute during collectives of all ranks of a host. Collective call over them."""
    groups = {LinkScope.inside_host: CommunicatedGroup("host", communicator, {})}
    return HostOverlap(overlap_key(device), measure_overlap(groups, device))
