"""Random fail-slows in recorded runs: of a rank, a host or a link, always or in half of the steps, by 5 to 30 %."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.tools.watch.recorded import Recording
from weft.pipeline.costs import LinkCost
from weft.tools.watch.analysis import slow_hops, transfers_by_hop
from weft.tools.watch.outliers import outliers, pauses
from weft.tools.watch.record import RunRecord

STAGES, STEPS, SLOW_STEPS, LINK_STEPS = 4, 4, 20, 20
LINK_S = 0.004


class Trial(NamedTuple):
    """A fail-slow and what the views name: ranks, or a link as two ranks."""

    kind: str
    factor: float
    always: bool
    slow: set[tuple[int, ...]]
    named: set[tuple[int, ...]]

    @property
    def is_right(self) -> bool:
        return self.slow == self.named


def named(record: RunRecord, last: int | None = None) -> set[tuple[int, ...]]:
    """Return the ranks and links that the views name at a step."""
    last = record.step_range[1] if last is None else last
    found = {(each.rank,) for each in outliers(record, last)}
    if last == record.step_range[1]:
        found |= {(rank,) for each in pauses(record) for rank in each.ranks}
    steps = [transfers_by_hop(record, record.spans(step)) for step in range(last - LINK_STEPS + 1, last + 1)]
    return found | {hop[:2] for hop in slow_hops(record, steps)}


def recording(folder: Path, seed: int, *, lines: int, link_s: float = LINK_S) -> Recording:
    local = LinkCost(latency_s=link_s)
    return Recording(folder, stages=STAGES, lines=lines, microbatches=4, seed=seed, local=local)


def trial(folder: Path, seed: int, jitter: float = 0.01) -> Trial:
    """Record a run with a random fail-slow in its last steps. A host has the ranks of two neighbouring stages."""
    rng = np.random.default_rng(seed)
    kind, always, factor = ("rank", "host", "link")[seed % 3], bool(rng.integers(2)), 1 + rng.uniform(0.05, 0.3)
    lines = int(rng.integers(2, 5))
    run = recording(folder, seed, lines=lines)
    line, stage = int(rng.integers(lines)), int(rng.integers(STAGES - 1))
    ends = run.rank(line, stage), run.rank(line, stage + 1)
    ranks = {"rank": ends[:1], "host": ends, "link": ()}[kind]
    hops = {ends[:: rng.choice([1, -1])]: factor} if kind == "link" else {}
    run.run(STEPS, jitter=jitter, hops={})
    for _ in range(SLOW_STEPS):
        is_slow = always or rng.random() < 0.5
        run.run(1, jitter=jitter, slow=dict.fromkeys(ranks, factor) if is_slow else {}, hops=hops if is_slow else {})
    slow = set(hops) if hops else {(rank,) for rank in ranks}
    return Trial(kind, factor, always, slow, named(RunRecord(run.write())))
