"""Offloads: saved activations that go to host memory and back, so that a schedule keeps to a memory cap."""

from __future__ import annotations

from collections.abc import Sequence

from weft.pipeline.action import Action, Op, Slot
from weft.pipeline.costs import CostModel
from weft.pipeline.memory import freed_bytes, held_along, saved_bytes
from weft.pipeline.schedule import Schedule

_ROUNDED_UP = 1 + 1e-9
"""Tolerance for rounding errors in sums of bytes."""
_AHEAD = 1.5
"""A reload begins when as much computation as this many copies is left before its backward, if memory allows."""


def add_offloads(schedule: Schedule, costs: CostModel, cap_bytes: float) -> Schedule:
    """Return a compute-only schedule with the offloads that it needs under a memory cap, in the same order of compute.

    When a slot does not fit, the activation whose backward is farthest away goes (Belady's rule). Its memory is freed
    as late as possible, because the copy takes time, and allocated again just early enough to hide the copy back.

    Args:
        schedule: without strand pairs.

    Raises:
        ValueError: a rank exceeds the cap even so.
    """
    rows = [_Row(row, costs, cap_bytes * _ROUNDED_UP, rank).run() for rank, row in enumerate(schedule.rows)]
    return schedule.with_rows([_reload_early(row, costs, cap_bytes * _ROUNDED_UP) for row in rows])


class _Row:
    """The offloads of one rank's row."""

    def __init__(self, row: Sequence[Slot], costs: CostModel, cap_bytes: float, rank: int) -> None:
        self._row, self._costs, self._cap_bytes, self._rank = row, costs, cap_bytes, rank
        self._ends = {
            action._replace(op=Op.F): at
            for at, slot in enumerate(row)
            for action in slot
            if action.op is Op.B or action.op is Op.I
        }
        self._here: list[Action] = []  # forwards whose activations are on the device and have not been away
        self._away: set[Action] = set()
        self._held = 0.0
        self._rows: list[Slot] = []

    def run(self) -> list[Slot]:
        """Return the row with offloads, and each reload right before its backward."""
        for slot in self._row:
            assert len(slot) == 1, f"{slot}: strand pairs are not supported"
            self._run(slot[0])
        return self._rows

    def _run(self, action: Action) -> None:
        forward = action._replace(op=Op.F)
        cost = self._costs.stages[action.stage]
        added = saved_bytes(cost, action.op)
        if action.op in (Op.B, Op.I) and forward in self._away:
            added += self._costs.offload_bytes(action.stage)
        while self._held + added > self._cap_bytes:
            self._offload_farthest(forward, self._held + added)
        if action.op in (Op.B, Op.I):
            if forward in self._away:
                self._rows.append((action._replace(op=Op.RELOAD),))
                self._away.remove(forward)
            else:
                self._here.remove(forward)
        self._rows.append((action,))
        self._held += added - freed_bytes(cost, action.op)
        if action.op is Op.F:
            self._here.append(forward)

    def _offload_farthest(self, needed: Action, num_bytes: float) -> None:
        able = [action for action in self._here if action != needed and self._costs.offload_bytes(action.stage) > 0]
        if not able:
            raise ValueError(
                f"pipeline.memory_cap_bytes={self._cap_bytes / _ROUNDED_UP:g}: rank {self._rank} needs {num_bytes:g} "
                f"bytes for {needed} alone, with every other activation in host memory; raise the cap to that, set "
                "pipeline.recompute=layers, make micro-batches smaller, or use more virtual stages"
            )
        farthest = max(able, key=self._ends.__getitem__)
        self._here.remove(farthest)
        self._away.add(farthest)
        self._held -= self._costs.offload_bytes(farthest.stage)
        self._rows.append((farthest._replace(op=Op.OFFLOAD),))


def _reload_early(row: list[Slot], costs: CostModel, cap_bytes: float) -> list[Slot]:
    """Move each reload ahead of earlier slots, until these take longer than its copy or memory does not suffice."""
    row = list(row)
    for at in [at for at, slot in enumerate(row) if slot[0].op is Op.RELOAD]:
        reload = row.pop(at)
        stage = reload[0].stage
        moved = costs.offload_bytes(stage)
        left_s = _AHEAD * costs.host.transit_s(moved)
        peaks = _peaks(row[:at], costs)
        to = at
        while to and left_s > 0 and peaks[to - 1] + moved <= cap_bytes:
            op, before, microbatch = row[to - 1][0]
            if op is Op.OFFLOAD and (before, microbatch) == (stage, reload[0].microbatch):
                break
            left_s -= costs.stages[before].seconds(op)
            to -= 1
        row.insert(to, reload)
    return row


def _peaks(row: Sequence[Slot], costs: CostModel) -> list[float]:
    return [held.num_bytes for held in held_along(row, costs)]
