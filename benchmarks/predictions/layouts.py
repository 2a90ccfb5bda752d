"""The layouts: one emulated model and batch over one to three sites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.peers.layout import Layout

MICROBATCHES = 12
"""Micro-batches of a step, over all replicas."""


def _at(*sites: int, **settings: Any) -> Layout:
    """Create a layout with ``sites`` pipeline ranks at each site, named by its settings."""
    replicas = settings.get("replicas", 1)
    given = {"schedule": "auto", "zero": 0, "microbatches": MICROBATCHES // replicas, **settings}
    layout = Layout("", stages=sum(sites), sites=sites, **given)
    return replace(layout, name="; ".join(_words(layout)))


def _words(layout: Layout) -> Iterator[str]:
    yield f"{len(layout.sites)} site{'s' * (len(layout.sites) > 1)} of {' + '.join(map(str, layout.sites))}"
    yield f"{layout.placement.replace('_', ' ')} {layout.schedule}"
    if layout.layers:
        yield f"layers {' '.join(map(str, layout.layers))}"
    if layout.replicas > 1:
        yield f"{layout.replicas} replicas"
    if layout.cell > 1:
        yield f"cell of {layout.cell}"
    if layout.replicas > 1:
        yield f"ZeRO-{layout.zero}"


LAYOUTS = (
    _at(4, schedule="1f1b"),
    _at(4, placement="fold"),
    _at(4, layers=(1, 2, 3, 2)),
    _at(2, replicas=2, zero=1),
    _at(2, 2),
    _at(2, 2, placement="fold"),
    _at(2, 2, placement="site_fold"),
    _at(2, 2, replicas=2, cell=2, zero=1),
    _at(3, 1, layers=(3, 2, 2, 1), replicas=2, zero=2),
    _at(1, 2, 1, schedule="1f1b"),
    _at(1, 2, 1, replicas=3, cell=3, zero=2),
    _at(1, 1, 1, layers=(3, 2, 3), replicas=3, cell=3),
)
"""All of them train the same layers on the same micro-batches, so that their steps can be ranked."""

PROFILED = _at(4, layers=(1, 3, 3, 1))
"""Measured before the others, for what stages of few and of many layers take."""
