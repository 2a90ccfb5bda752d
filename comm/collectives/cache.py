"""A file cache of measured collective costs, by topology; loads without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.costs import AlphaBeta, CollectiveCosts
from weft.comm.collectives.group import Group, LinkClass
from weft.conf.files import JsonCache
from weft.conf.measurements import keep, measured


def topology_key(group: Group, device: str) -> str:
    """Cache key of a group's topology, independent of its rank numbers.

    Args:
        device: `cpu` or `cuda`.
    """
    where = " at sites" if group.at_sites else ""
    return f"{device} on {'+'.join(map(str, group.layout))} ranks{where}, from {os.uname().nodename}"


@dataclass(frozen=True)
class CostCache:
    """Costs by topology, in a JSON file that several processes may write.

    Attributes:
        path: the file.
    """

    path: Path

    @classmethod
    def in_folder(cls, cache_dir: str) -> CostCache:
        """The cache file in a folder such as ``data.cache_dir``."""
        return cls(Path(cache_dir).expanduser() / "collectives.json")

    def read(self, key: str) -> CollectiveCosts | None:
        """The costs of a topology; None if they were not measured, or long ago, or the file is unreadable."""
        try:
            rows = measured(JsonCache(self.path))[key]
            return CollectiveCosts({(LinkClass(r["link"]), Primitive(r["primitive"])): _line(r) for r in rows})
        except (ValueError, KeyError, TypeError):
            return None

    def write(self, key: str, costs: CollectiveCosts) -> None:
        """Add the costs of a topology; atomic."""
        keep(JsonCache(self.path), {key: list(_rows(costs))})


def _rows(costs: CollectiveCosts) -> Iterator[dict]:
    for (link, primitive), line in costs.table.items():
        yield {"link": link.value, "primitive": primitive.value, **asdict(line)}


def _line(row: dict) -> AlphaBeta:
    return AlphaBeta(float(row["alpha_s"]), float(row["beta_s"]))
