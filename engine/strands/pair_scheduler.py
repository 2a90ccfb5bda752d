"""Scheduler of a strand pair. Only one strand at a time computes and launches collectives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from weft.pipeline.strands.plan import SegmentPlan, Step

_OTHER = {Step.forward: Step.backward, Step.backward: Step.forward}
_Generators = tuple[torch.Tensor, torch.Tensor | None]


class OtherStrandFailed(RuntimeError):
    """The other strand of the pair raised an error, so this one cannot go on."""


class PairScheduler:
    """Switches between two strands at the ends of segments.

    Only one strand runs at any time. So all ranks launch their collectives in the same order. This is the plan's order.
    After the end of the plan the strands alternate. Without a plan the backward begins. A switch takes some tens of
    microseconds. Consecutive segments of one strand need no switch.

    Each strand has its own random states, because a recomputation resets the generators, and a switch may interrupt
    it.
    """

    def __init__(self, plan: SegmentPlan, play_weight: Callable[[], object]) -> None:
        """Start with the first strand of the plan.

        Args:
            plan: order of segments, equal on every rank of the groups that the strands use.
            play_weight: computes the backward's next deferred weight gradient, if one is ready, in the thread of the
                running strand.
        """
        self._coming = deque(plan.steps)
        self._play_weight = play_weight
        self._running = {Step.forward, Step.backward}
        self._locks = {Step.forward: threading.Lock(), Step.backward: threading.Lock()}
        self._generators = dict.fromkeys(self._locks, _generators())
        self._error: BaseException | None = None
        for lock in self._locks.values():
            lock.acquire()
        self.handovers = 0
        """Number of switches."""
        self.segments = dict.fromkeys(self._locks, 0)
        """Number of segments that each strand has run."""
        first = self._after(Step.forward)
        assert first is not None
        self._locks[first].release()

    def begin(self, strand: Step) -> None:
        """Wait until the strand may run its first segment. Raise OtherStrandFailed if this strand must end, too."""
        self._wait(strand)

    def pause(self, strand: Step) -> None:
        """End a segment, with its collective in flight, and wait until the strand may run the next one.

        Raises:
            OtherStrandFailed: this strand must end, too.
        """
        self.segments[strand] += 1
        coming = self._after(strand)
        if coming is not strand:
            self._leave(strand, coming)
            self._wait(strand)

    def end(self, strand: Step) -> None:
        """End the strand. The rest of the plan runs the other one."""
        self.segments[strand] += 1
        self._running.discard(strand)
        self._leave(strand, self._after(strand))

    def settle(self) -> None:
        """After both strands have ended, set the random states to those at the end of the forward.

        The backward's states do not count, because its random numbers only repeat those of earlier forwards.
        """
        _set_generators(self._generators[Step.forward])

    def fail(self, error: BaseException) -> None:
        """Wake the other strand, whose wait raises `OtherStrandFailed`."""
        if self._error is None:
            self._error = error
        for lock in self._locks.values():
            if lock.locked():
                lock.release()

    def _after(self, strand: Step) -> Step | None:
        """Compute weight gradients that come next in the plan, and return the following strand, or None at the end."""
        while self._coming:
            step = self._coming.popleft()
            if step is Step.weight:
                self._play_weight()
            elif step in self._running:
                return step
        return next((step for step in (_OTHER[strand], strand) if step in self._running), None)

    def _leave(self, strand: Step, coming: Step | None) -> None:
        self._generators[strand] = _generators()
        if coming is not None:
            self.handovers += 1
            self._locks[coming].release()

    def _wait(self, strand: Step) -> None:
        self._locks[strand].acquire()
        if self._error is not None:
            raise OtherStrandFailed(f"the other strand failed: {self._error}") from self._error
        _set_generators(self._generators[strand])


def _generators() -> _Generators:
    """Return the random states of CPU and GPU, without synchronisation."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _set_generators(state: _Generators) -> None:
    host, device = state
    torch.set_rng_state(host)
    if device is not None:
        torch.cuda.set_rng_state(device)
