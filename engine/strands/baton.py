"""The baton: of two strands, the one that holds it computes and launches collectives."""

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


class Baton:
    """Hands the turn from strand to strand at the ends of segments.

    At any time one strand runs. So all ranks launch their collectives in one order, whichever thread a
    strand is in: that of the plan, and past its end alternately, the backward first. A turn changes hands
    by a lock per strand, which costs some tens of microseconds; between two segments of one strand
    nothing is touched.

    Each strand goes on with its own random numbers: a recomputation sets the generators back, and the
    other strand's turn may come in the middle of it.
    """

    def __init__(self, plan: SegmentPlan, play_weight: Callable[[], object]) -> None:
        """Give the first strand its turn.

        Args:
            plan: the same on every rank of the groups that the strands use.
            play_weight: computes the backward's next weight gradient, if there is one by then, in the
                thread that has the turn.
        """
        self._coming = deque(plan.steps)
        self._play_weight = play_weight
        self._running = {Step.forward, Step.backward}
        self._turns = {Step.forward: threading.Lock(), Step.backward: threading.Lock()}
        self._generators = dict.fromkeys(self._turns, _generators())
        self._error: BaseException | None = None
        for turn in self._turns.values():
            turn.acquire()
        self.handovers = 0
        """How often the turn has changed hands."""
        self.segments = dict.fromkeys(self._turns, 0)
        """How many each strand has run."""
        first = self._after(Step.forward)
        assert first is not None
        self._turns[first].release()

    def begin(self, strand: Step) -> None:
        """Wait for the strand's first turn.

        Raises:
            OtherStrandFailed: it is free to end, too.
        """
        self._wait(strand)

    def pause(self, strand: Step) -> None:
        """End a segment, with its collective in flight, and wait for the strand's next turn.

        Raises:
            OtherStrandFailed: it is free to end, too.
        """
        self.segments[strand] += 1
        coming = self._after(strand)
        if coming is not strand:
            self._leave(strand, coming)
            self._wait(strand)

    def end(self, strand: Step) -> None:
        """End the strand; what is left of the plan is the other's."""
        self.segments[strand] += 1
        self._running.discard(strand)
        self._leave(strand, self._after(strand))

    def settle(self) -> None:
        """Once both have ended: go on with the forward's random numbers, as the backward has used none for good."""
        _set_generators(self._generators[Step.forward])

    def fail(self, error: BaseException) -> None:
        """Free the other strand, whatever it waits for."""
        if self._error is None:
            self._error = error
        for turn in self._turns.values():
            if turn.locked():
                turn.release()

    def _after(self, strand: Step) -> Step | None:
        """Past the weight gradients that come now, to whose turn it is after this strand's, or None at the end."""
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
            self._turns[coming].release()

    def _wait(self, strand: Step) -> None:
        self._turns[strand].acquire()
        if self._error is not None:
            raise OtherStrandFailed(f"the other strand failed: {self._error}") from self._error
        _set_generators(self._generators[strand])


def _generators() -> _Generators:
    """States of the generators of this thread's devices; nobody waits for a device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _set_generators(state: _Generators) -> None:
    host, device = state
    torch.set_rng_state(host)
    if device is not None:
        torch.cuda.set_rng_state(device)
