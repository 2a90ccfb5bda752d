"""The baton: of two strands, the one that holds it computes and launches collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from weft.pipeline.strands.plan import SegmentPlan, Step


class OtherStrandFailed(RuntimeError):
    """The other strand of the pair raised an error, so this one cannot go on."""


class Baton:
    """Hands the turn from strand to strand at the ends of segments.

    At any time one strand runs. So all ranks launch their collectives in the plan's order, whichever
    thread a strand is in. A turn changes hands by a lock per strand, which costs some tens of
    microseconds; between two segments of one strand nothing is touched.
    """

    def __init__(
        self, plan: SegmentPlan, play_weight: Callable[[], None], *, separate_generators: bool = False
    ) -> None:
        """Give the first strand its turn.

        Args:
            plan: the same on every rank of the groups that the strands use.
            play_weight: computes the backward's next weight gradient, in the thread that has the turn.
            separate_generators: whether each strand continues its own random numbers after a turn of
                the other; needed where one of them sets the generator back, as checkpointing does.
        """
        self._steps = plan.steps
        self._play_weight = play_weight
        self._separate_generators = separate_generators
        self._at = 0
        self._turns = {Step.forward: threading.Lock(), Step.backward: threading.Lock()}
        self._error: BaseException | None = None
        for turn in self._turns.values():
            turn.acquire()
        self.handovers = 0
        """How often the turn has changed hands."""
        if self._steps:
            self._turns[self._steps[0]].release()

    def begin(self, strand: Step) -> None:
        """Wait for the strand's first turn."""
        self._wait(strand)

    def pause(self, strand: Step) -> None:
        """End a segment, with its collective in flight, and wait for the strand's next turn.

        Raises:
            OtherStrandFailed: it is free to end, too.
            RuntimeError: the plan has no further segment of the strand.
        """
        coming = self._advance(strand)
        if coming is strand:
            return
        if strand not in self._steps[self._at :]:
            raise RuntimeError(
                f"the {strand.name} has more segments than the {self._steps.count(strand)} of its plan; "
                "plan the pair from what it runs"
            )
        state = _generators() if self._separate_generators else None
        self._pass_to(coming)
        self._wait(strand)
        if state is not None:
            _set_generators(state)

    def end(self, strand: Step) -> None:
        """End the strand.

        Raises:
            RuntimeError: the plan has further segments of it.
        """
        coming = self._advance(strand)
        if strand in self._steps[self._at :]:
            raise RuntimeError(
                f"the {strand.name} ended {self._steps[self._at :].count(strand)} segments before its plan did; "
                "plan the pair from what it runs"
            )
        self._pass_to(coming)

    def fail(self, error: BaseException) -> None:
        """Free the other strand, whatever it waits for."""
        if self._error is None:
            self._error = error
        for turn in self._turns.values():
            if turn.locked():
                turn.release()

    def _advance(self, strand: Step) -> Step | None:
        """Past the segment that has ended and the weight gradients behind it, to the next segment."""
        assert self._at < len(self._steps) and self._steps[self._at] is strand
        self._at += 1
        while self._at < len(self._steps) and self._steps[self._at] is Step.weight:
            self._play_weight()
            self._at += 1
        return self._steps[self._at] if self._at < len(self._steps) else None

    def _pass_to(self, strand: Step | None) -> None:
        if strand is not None:
            self.handovers += 1
            self._turns[strand].release()

    def _wait(self, strand: Step) -> None:
        self._turns[strand].acquire()
        if self._error is not None:
            raise OtherStrandFailed(f"the other strand failed: {self._error}") from self._error


def _generators() -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _set_generators(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    host, device = state
    torch.set_rng_state(host)
    if device is not None:
        torch.cuda.set_rng_state(device)
