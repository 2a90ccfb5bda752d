"""Reasons for which layouts were refused, and the error if there is no plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.network import Network
from weft.pipeline.planner.request import PINS, Request
from weft.pipeline.planner.shapes import shapes
from weft.pipeline.text import bytes_text
from weft.pipeline.workload import ModelWork


class Refusals:
    """Counts of the reasons for which the layouts of one request were refused."""

    def __init__(self, cluster: Cluster, work: ModelWork, request: Request) -> None:
        self._cluster, self._work, self._request = cluster, work, request
        self._reasons: Counter[str] = Counter()
        self._too_large: list[Callable[[], tuple[float, str]]] = []
        self._least_price = float("inf")

    def gpus(self) -> None:
        """Count a layout that needs more GPUs than there are."""
        self._reasons["gpus"] += 1

    def links(self) -> None:
        """Count a layout for which the sites with enough GPUs have no links."""
        self._reasons["links"] += 1

    def memory(self, needed: Callable[[], tuple[float, str]] | None = None) -> None:
        """Count a layout that exceeds memory.

        Args:
            needed: returns the least bytes on a GPU and a description of the shape; called only to explain an error.
        """
        self._reasons["memory"] += 1
        if needed is not None:
            self._too_large.append(needed)

    def price(self, an_hour: float) -> None:
        """Count a layout whose hourly price ``an_hour`` is above the limit."""
        self._least_price = min(self._least_price, an_hour)
        self._reasons["price"] += 1

    def explained(self) -> str:
        """Return the most frequent reason and its remedy."""
        if not self._reasons:
            return self._no_shape()
        reason, _ = self._reasons.most_common(1)[0]
        if reason == "memory":
            return self._no_memory()
        if reason == "price":
            return (
                f"--max-cost-per-hour: every layout costs more, the cheapest {self._least_price:,.4g} an hour; raise "
                "it, or add cheaper GPUs"
            )
        if reason == "links":
            return "links: sites with enough GPUs are not neighbours; add links, or add GPUs"
        return "GPUs: no set of sites has enough; loosen --pin, or add GPUs"

    def _no_memory(self) -> str:
        least, where = min((needed() for needed in self._too_large), default=(0.0, ""))
        rooms = [site.gpu.memory_bytes * self._request.max_memory for site in self._cluster.sites]
        filled = " to ".join(dict.fromkeys(map(bytes_text, (min(rooms), max(rooms)))))
        need = f"at best {bytes_text(least)} on a GPU ({where})" if least > min(rooms) else "no cut of its layers does"
        return (
            f"memory: the model does not fit the GPUs: {need}, and a plan fills {filled}; add GPUs or choose "
            "ones with more memory, raise --max-memory, or free a pinned field"
        )

    def _no_shape(self) -> str:
        """Return an error that names a pinned value that no layout has, with possible values."""
        pins, network = self._request.pins, Network(self._cluster)
        for name, value in pins.items():
            if name == "microbatches" and not self._request.sequences:
                continue  # an open batch follows from it
            others = replace(self._request, pins={one: held for one, held in pins.items() if one != name})
            is_known = name == "cell" or name in Shape.__dataclass_fields__
            every = shapes(self._cluster, self._work, others) if is_known else ()
            linked = (one for one in every if network.best_sites(one.routes))  # of sites with links to each other
            found = {possible for one in linked for possible in _values(one, name)}
            if found and value not in found:
                field = next(field for field, held in PINS.items() if held == name)
                some = ", ".join(map(str, sorted(found)[:12])) + (", ..." if len(found) > 12 else "")
                return f"--pin {field}={value}: no layout has it with this batch, GPUs and links; choose one of {some}"
        return (
            "no layout: the pinned fields, the batch, the GPUs, links, --max-sites and --keep-data-in go with none; "
            "loosen one of them, or choose a --batch-tokens that more numbers of replicas divide"
        )


def _values(shape: Shape, name: str) -> Iterable[Any]:
    """Return the values of a field that a layout of this shape may have."""
    if name == "cell":
        return range(1, shape.replicas + 1) if shape.may_pool else (1,)
    return (getattr(shape, name),)
