"""A file cache of measured collective costs, by topology; loads without torch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.costs import AlphaBeta, CollectiveCosts, Sample
from weft.comm.collectives.group import Group, LinkClass
from weft.conf.host.measurements import Measurement, Measurements, spread_of


def topology_key(group: Group, device: str) -> str:
    """Return the cache key of a group's topology, independent of its rank numbers.

    Args:
        device: `cpu` or `cuda`.
    """
    where = " at sites" if group.at_sites else ""
    return f"{device} on {'+'.join(map(str, group.layout))} ranks{where}, from {os.uname().nodename}"


@dataclass(frozen=True)
class CostCache:
    """Costs by topology, in a JSON file that several processes may write."""

    path: Path

    @classmethod
    def in_folder(cls, cache_dir: str) -> CostCache:
        """Return the cache in a folder such as ``data.cache_dir``."""
        return cls(Path(cache_dir).expanduser() / "collectives.json")

    def read(self, key: str) -> CollectiveCosts | None:
        """Return the costs of a topology, or None if they are missing or outdated, or the file is unreadable."""
        known = Measurements(self.path).read().get(key)
        if known is None or known.is_old:
            return None
        try:
            table = {(LinkClass(r["link"]), Primitive(r["primitive"])): _line(r) for r in known.value}
        except (ValueError, KeyError, TypeError):
            return None
        return CollectiveCosts(table, known.spread)

    def is_due(self, key: str) -> bool:
        """True if the costs of a topology are missing or should be measured again."""
        return Measurements(self.path).is_due(key)

    def write(self, key: str, costs: CollectiveCosts) -> None:
        """Add measured costs of a topology, unless the cache has better ones."""
        Measurements(self.path).store({key: list(_rows(costs))}, costs.spread)

    def correct(self, key: str, samples: Iterable[Sample], *, load: float) -> None:
        """Replace the costs of primitives that contradict a run's measured collectives. See `Measurement.refutes`.

        Args:
            load: the run's ranks per processor.

        Raises:
            OSError: the cache cannot be written.
        """
        cache, costs = Measurements(self.path), self.read(key)
        if costs is None:
            return
        faster = defaultdict(list)
        for sample in samples:
            if (sample.link, sample.primitive) in costs.table:
                faster[sample.link, sample.primitive].append(costs.sample_s(sample) / sample.seconds)
        known, table = cache.read()[key], dict(costs.table)
        for name, ratios in faster.items():
            ratio, line = median(ratios), table[name]
            if Measurement.now(None, spread_of(ratios, ratio), load=load).refutes(known, ratio):
                table[name] = AlphaBeta(line.alpha_s / ratio, line.beta_s / ratio)
        if table != costs.table:
            rows = list(_rows(CollectiveCosts(table)))
            cache.put({key: Measurement.now(rows, costs.spread, load=load)})


def _rows(costs: CollectiveCosts) -> Iterator[dict]:
    for (link, primitive), line in costs.table.items():
        yield {"link": link.value, "primitive": primitive.value, **asdict(line)}


def _line(row: dict) -> AlphaBeta:
    return AlphaBeta(float(row["alpha_s"]), float(row["beta_s"]))
