"""The state of two strands over time: one processor, one queue per link class."""

from __future__ import annotations

from typing import NamedTuple

from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.segments import Kind, LinkScope, Segment


class Transfer(NamedTuple):
    """The remaining part of a strand's collective.

    Attributes:
        left_s: seconds, alone on its link, or 0 if it has ended.
        second: True if it waits for the other strand's collective on the same link.
    """

    left_s: float = 0.0
    link: LinkScope | None = None
    second: bool = False


IDLE = Transfer()


class PairState(NamedTuple):
    """The state of a pair at one time.

    Attributes:
        forward, backward: the remaining collective of each strand.
    """

    now_s: float = 0.0
    forward: Transfer = IDLE
    backward: Transfer = IDLE

    def waited(self, table: OverlapTable, *, forward: bool) -> PairState:
        """Return the state when the strand's collective has ended; the processor is idle until then."""
        state = self
        while (state.forward if forward else state.backward).left_s > 0:
            state = state.until_next_end(table, None, float("inf"))[0]
        return state

    def computed(self, table: OverlapTable, seconds: float, kind: Kind) -> PairState:
        """Return the state after compute that takes ``seconds`` alone."""
        state, left_s = self, seconds
        while left_s > 0:
            state, left_s = state.until_next_end(table, kind, left_s)
        return state

    def handed(self, table: OverlapTable, seconds: float) -> PairState:
        """Return the state after a switch of strands, which occupies the processor but delays no collective."""
        state, left_s = self, seconds
        while left_s > 0:
            state, left_s = state.until_next_end(table, None, left_s)
        return state

    def ran(self, table: OverlapTable, segment: Segment, *, forward: bool) -> PairState:
        """Return the state after a segment: its wait, its compute, and the start of its collective."""
        state = self.waited(table, forward=forward).computed(table, segment.compute_s, segment.kind)
        return state.started(segment, forward=forward)

    def ended(self, table: OverlapTable) -> PairState:
        """Return the state when both collectives have ended."""
        return self.waited(table, forward=True).waited(table, forward=False)

    def started(self, segment: Segment, *, forward: bool) -> PairState:
        """Return the state with the segment's collective started, if it has one."""
        if segment.link is None:
            return self
        other = self.backward if forward else self.forward
        second = other.left_s > 0 and other.link is segment.link
        mine = Transfer(segment.comm_s, segment.link, second)
        return self._replace(forward=mine) if forward else self._replace(backward=mine)

    def until_next_end(self, table: OverlapTable, kind: Kind | None, left_s: float) -> tuple[PairState, float]:
        """Advance to the next end of compute or a collective; return the state and the remaining compute."""
        running = [t for t in (self.forward, self.backward) if t.left_s > 0 and not t.second]
        first_s = min([left_s, *(transfer.left_s for transfer in running)])
        slow = table.slowdown(kind, tuple(transfer.link for transfer in running if transfer.link is not None))
        forward, backward = (
            t._replace(left_s=t.left_s - first_s if t.left_s > first_s else 0.0) if t in running else t
            for t in (self.forward, self.backward)
        )
        # A collective that waited for one that has ended runs now.
        if not forward.left_s:
            forward, backward = IDLE, backward._replace(second=False)
        if not backward.left_s:
            forward, backward = forward._replace(second=False), IDLE
        return type(self)(self.now_s + first_s * slow, forward, backward), left_s - first_s
