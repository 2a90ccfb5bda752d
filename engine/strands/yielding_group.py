"""Axis groups that switch to the other strand before they wait for a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from weft.comm.channel import Handle
from weft.engine.parallel.axis import AxisGroup, AxisGroups


class YieldPoint:
    """The callback of the current thread that switches strands. Outside a pair there is none."""

    def __init__(self) -> None:
        self._local = _Local()

    @contextmanager
    def taken(self, pause: Callable[[], None]) -> Iterator[None]:
        """Let this thread call ``pause`` between the start of a collective and its wait, inside the context."""
        before, self._local.pause = self._local.pause, pause
        try:
            yield
        finally:
            self._local.pause = before

    def pause(self) -> None:
        """Switch to the other strand, if this thread runs a strand."""
        if self._local.pause is not None:
            self._local.pause()


class _Local(threading.local):
    pause: Callable[[], None] | None = None


@dataclass(frozen=True)
class YieldingHandle:
    """Handle of a collective. Its `wait` switches to the other strand first."""

    handle: Handle
    yield_point: YieldPoint

    def wait(self) -> Tensor:
        """Switch to the other strand, and then wait for the result and return it."""
        self.yield_point.pause()
        return self.handle.wait()


@dataclass(frozen=True)
class YieldingGroup:
    """An axis group for strands, which switches between the start of an operation and its wait."""

    group: AxisGroup
    yield_point: YieldPoint

    @property
    def axis(self) -> str:
        """Name of the axis."""
        return self.group.axis

    @property
    def size(self) -> int:
        """Number of members."""
        return self.group.size

    @property
    def index(self) -> int:
        """Index of this rank in the group."""
        return self.group.index

    def all_gather(self, shard: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._turn(self.group.all_gather(shard))

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._turn(self.group.reduce_scatter(tensor))

    def all_reduce(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._turn(self.group.all_reduce(tensor))

    def maximum(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._turn(self.group.maximum(tensor))

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """See `AxisGroup`."""
        return self._turn(self.group.all_to_all(tensor, send, receive))

    def shift(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._turn(self.group.shift(tensor))

    def _turn(self, handle: Handle) -> Handle:
        return handle if self.group.size == 1 else YieldingHandle(handle, self.yield_point)


def yielding_groups(axes: AxisGroups, yield_point: YieldPoint) -> AxisGroups:
    """Return a rank's groups, wrapped so that their operations switch between strands."""
    taking = {axis: YieldingGroup(group, yield_point) for axis, group in axes.by_axis.items() if group.size > 1}
    return axes.with_groups(taking)
