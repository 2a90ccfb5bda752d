"""Axis groups whose operations end a segment of the strand that starts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from weft.comm.channel import Handle
from weft.engine.parallel.axis import AxisGroup, AxisGroups


class Turns:
    """The hand-over of a thread whose strand has a collective in flight; none outside of a pair."""

    def __init__(self) -> None:
        self._local = _Local()

    @contextmanager
    def taken(self, pause: Callable[[], None]) -> Iterator[None]:
        """Within, this thread calls ``pause`` between the start of a collective and its wait."""
        before, self._local.pause = self._local.pause, pause
        try:
            yield
        finally:
            self._local.pause = before

    def pause(self) -> None:
        """Give the turn away, if this thread runs a strand."""
        if self._local.pause is not None:
            self._local.pause()


class _Local(threading.local):
    pause: Callable[[], None] | None = None


@dataclass(frozen=True)
class TurnTakingHandle:
    """A collective whose wait gives the other strand its turn first."""

    handle: Handle
    turns: Turns

    def wait(self) -> Tensor:
        """The result."""
        self.turns.pause()
        return self.handle.wait()


@dataclass(frozen=True)
class TurnTakingGroup:
    """An axis group for strands: between the start of an operation and its wait the turn changes hands."""

    group: AxisGroup
    turns: Turns

    @property
    def axis(self) -> str:
        """The group's."""
        return self.group.axis

    @property
    def size(self) -> int:
        """The group's."""
        return self.group.size

    @property
    def index(self) -> int:
        """This rank's."""
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
        return handle if self.group.size == 1 else TurnTakingHandle(handle, self.turns)


def take_turns(axes: AxisGroups, turns: Turns) -> AxisGroups:
    """A rank's groups, for strands."""
    taking = {axis: TurnTakingGroup(group, turns) for axis, group in axes.by_axis.items() if group.size > 1}
    return axes.with_groups(taking)


def without_turns(axes: AxisGroups) -> AxisGroups:
    """The groups that `take_turns` was given."""
    given = {axis: group.group for axis, group in axes.by_axis.items() if isinstance(group, TurnTakingGroup)}
    return axes.with_groups(given)


def are_shared(axes: AxisGroups) -> bool:
    """True if this rank shares the work of layers with others, along any axis."""
    return any(group.size > 1 for group in axes.by_axis.values())
