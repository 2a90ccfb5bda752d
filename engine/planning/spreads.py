"""Spreads: the jitter of computations and of links between sites that a run measures, to plan against."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

from weft.pipeline.action import SENDS, Op
from weft.pipeline.costs import CostModel
from weft.pipeline.jitter import MOST_JITTER, jitter_of

if TYPE_CHECKING:
    from weft.engine.engine import WeftEngine

LEAST_BYTES = 64 << 10
"""Bytes over a link from which its rate is derived."""


class LinkMeter:
    """Measures this rank's links to ranks of other sites, once a step, from the counters of its endpoint."""

    def __init__(self, engine: WeftEngine, steps: int) -> None:
        """Begin to measure. The jitter is that of the last ``steps`` steps."""
        self._engine, self._num_sites = engine, len(engine.plan.placement.sites)
        self._before: dict[int, tuple[float, int]] = {}
        self._sums: dict[int, tuple[float, int]] = {}
        self._rates: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=steps))

    def step_ended(self) -> None:
        """Read the counters of all links."""
        endpoint = None if self._engine.wan is None else self._engine.wan.endpoint
        for peer in () if endpoint is None else endpoint.peers:
            if endpoint is None or self._pair(peer) is None:
                continue
            counters = endpoint.counters(peer)
            before_s, before = self._before.get(peer, (counters.busy_s, counters.sent_bytes))
            self._before[peer] = counters.busy_s, counters.sent_bytes
            self._add(peer, counters.busy_s - before_s, counters.sent_bytes - before)

    def _add(self, peer: int, busy_s: float, num_bytes: int) -> None:
        sum_s, sum_bytes = self._sums.get(peer, (0.0, 0))
        self._sums[peer] = sum_s + busy_s, sum_bytes + num_bytes
        if num_bytes >= LEAST_BYTES and busy_s > 0:
            self._rates[peer].append(busy_s / num_bytes)

    def rates(self) -> list[float]:
        """Return the seconds per byte over each pair of sites since the last call, and 0 for what was not measured."""
        numbers = [0.0] * self._num_sites**2
        for peer, (busy_s, num_bytes) in self._sums.items():
            pair = self._pair(peer)
            if pair is not None and num_bytes >= LEAST_BYTES:
                numbers[pair] = max(numbers[pair], busy_s / num_bytes)
        self._sums.clear()
        return numbers

    def jitters(self) -> list[float]:
        """Return the jitter of a transfer over each pair of sites, and 0 for what was not measured.

        A step's rate is the mean over its transfers, so theirs vary by the root of their number more.
        """
        numbers, sends = [0.0] * self._num_sites**2, self._sends()
        for peer, rates in self._rates.items():
            pair = self._pair(peer)
            if pair is not None:
                jitter = jitter_of([rates]) * sqrt(max(1, sends[self._engine.layout.position(peer).stage]))
                numbers[pair] = max(numbers[pair], min(MOST_JITTER, jitter))
        return numbers

    def _pair(self, peer: int) -> int | None:
        """Return the number of this rank's and a peer's pair of sites, or None inside of a site."""
        position = self._engine.layout.position
        here, there = position(self._engine.global_rank).site, position(peer).site
        return None if here == there else here * self._num_sites + there

    def _sends(self) -> Counter[int]:
        """Return the number of transfers of a step to each pipeline rank."""
        engine, ranks = self._engine, self._engine.plan.placement.stage_ranks
        sent = (slot[0] for slot in engine.schedule.rows[engine.pipe_rank] if slot[0].op in SENDS)
        return Counter(ranks[action.stage + (1 if action.op is Op.SEND_F else -1)] for action in sent)


def with_jitter(costs: CostModel, stages: Sequence[float], links: Sequence[float], num_sites: int) -> CostModel:
    """Return the costs with measured jitter, and with that in ``costs`` for what was not measured.

    Args:
        stages: jitter of each virtual stage, or 0.
        links: jitter of each pair of sites, or 0.
    """
    found = dict(costs.wan_links)
    for pair, jitter in enumerate(links):
        if jitter > 0:
            here, there = divmod(pair, num_sites)
            found[here, there] = replace(costs.link(here, there), jitter=min(MOST_JITTER, jitter))
    jittery = tuple(
        replace(cost, jitter=min(MOST_JITTER, jitter)) if jitter > 0 else cost
        for cost, jitter in zip(costs.stages, stages, strict=True)
    )
    return replace(costs, stages=jittery, wan_links=tuple(found.items()))
