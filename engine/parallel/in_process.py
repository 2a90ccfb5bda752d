"""Axis groups whose members are threads of one process, for checks on small models and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm.channel import Completed, Handle
from weft.engine.parallel.axis import Alone, AxisGroup, AxisGroups

Result = TypeVar("Result")


class ExchangeBarrier:
    """Barrier at which the members of one group exchange values."""

    def __init__(self, size: int, *, timeout_s: float | None = None) -> None:
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._brought: list[Any] = [None] * size

    def exchange(self, index: int, value: Any, what: str) -> list[Any]:
        """Return all members' values of the same operation, in the order of members."""
        self._brought[index] = (what, value)
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()
        others = {name for name, _ in brought}
        if len(others) > 1:
            raise RuntimeError(f"members of one group came to different operations: {', '.join(sorted(others))}")
        return [value for _, value in brought]

    def abort(self) -> None:
        """Release waiting members with a `threading.BrokenBarrierError`."""
        self._barrier.abort()


@dataclass(frozen=True)
class InProcessGroup:
    """One thread's view of its group. Sums are computed in the order of members."""

    axis: str
    size: int
    index: int
    barrier: ExchangeBarrier

    def all_gather(self, shard: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(torch.cat(self._exchange(shard, "all_gather")))

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        parts = [other.chunk(self.size)[self.index] for other in self._exchange(tensor, "reduce_scatter")]
        return Completed(_sum(parts))

    def all_reduce(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(tensor.copy_(_sum(self._exchange(tensor.clone(), "all_reduce"))))

    def maximum(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(tensor.copy_(torch.stack(self._exchange(tensor.clone(), "maximum")).amax(0)))

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """See `AxisGroup`."""
        rows = [parts[self.index] for parts in self._exchange(tensor.split(list(send)), "all_to_all")]
        assert [row.shape[0] for row in rows] == list(receive)
        return Completed(torch.cat(rows))

    def shift(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(self._exchange(tensor.clone(), "shift")[self.index - 1])

    def _exchange(self, value: Any, what: str) -> list[Any]:
        return self.barrier.exchange(self.index, value, f"{what} over the {self.axis} axis")


def run_in_threads(sizes: dict[str, int], member: Callable[[AxisGroups], Result]) -> list[Result]:
    """Run ``member`` in one thread for each position along the axes.

    Args:
        sizes: number of members of each axis of `AxisGroups`, the slowest first. Missing axes have one member. If a
            tensor group has several members, they belong to one expert group, whose size is a multiple of theirs.

    Returns:
        The members' results, in the order of positions.

    Raises:
        Exception: the first error of a member. The other members are released.
    """
    tensor = sizes.get("tensor", 1)
    apart = sizes | {"expert": max(1, sizes.get("expert", 1) // tensor)}
    axes = {axis: apart[axis] for axis, size in sizes.items() if size > 1}
    positions = [dict(zip(axes, at, strict=True)) for at in product(*map(range, axes.values()))]
    barriers: dict[tuple, ExchangeBarrier] = {}
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def groups(at: dict[str, int]) -> AxisGroups:
        found = {axis: _group(axis, axes[axis], at, barriers) for axis in axes if axis != "expert" or tensor == 1}
        if "expert" in axes and tensor > 1:
            others = tuple((name, index) for name, index in at.items() if name not in ("expert", "tensor"))
            barrier = barriers.setdefault(("expert", others), ExchangeBarrier(sizes["expert"]))
            index = at["expert"] * tensor + at["tensor"]
            found["expert"] = InProcessGroup("expert", sizes["expert"], index, barrier)
        return AxisGroups().with_groups(found)

    def run(number: int, mine: AxisGroups) -> None:
        try:
            results[number] = member(mine)
        except BaseException as error:  # the others must be released after any error
            errors.append(error)
            for barrier in barriers.values():
                barrier.abort()

    threads = [
        threading.Thread(target=run, args=(number, mine), daemon=True)
        for number, mine in enumerate([groups(at) for at in positions])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [results[number] for number in range(len(positions))]


def _group(axis: str, size: int, at: dict[str, int], barriers: dict[tuple, ExchangeBarrier]) -> AxisGroup:
    if size == 1:
        return Alone(axis)
    others = tuple((name, index) for name, index in at.items() if name != axis)
    barrier = barriers.setdefault((axis, others), ExchangeBarrier(size))
    return InProcessGroup(axis, size, at[axis], barrier)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
