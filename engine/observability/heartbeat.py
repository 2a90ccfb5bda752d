"""Tells this rank's phase, and its place in its row, to whoever watches over the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from weft.engine.observability.slots import SlotObserver
from weft.engine.supervision.places import Phase, PlaceWriter

PLACES = "WEFT_PLACES"
"""Environment variable that names the page of places of this host."""
ATTEMPT = "WEFT_ATTEMPT"
"""Environment variable that numbers the attempts of a run, from 0."""


class PlaceObserver:
    """An observer of slots that writes each beginning and end to the host's page; see `SlotObserver`."""

    def __init__(self, place: PlaceWriter, steps_done: Callable[[], int]) -> None:
        """Write to ``place``; ``steps_done`` returns the steps before the one that begins."""
        self._place, self._steps_done = place, steps_done
        self.slot_begins, self.slot_ends = place.slot_begins, place.slot_ends  # with no call between: each takes time

    def step_begins(self, num_microbatches: int) -> None:
        """A step begins."""
        self._place.begin_step(self._steps_done() + 1, num_microbatches)


class Heartbeat:
    """This rank's signs of life; without a page of places nobody watches, and nothing is done."""

    def __init__(self, place: PlaceWriter | None = None) -> None:
        """Write to ``place``, if there is one."""
        self.place = place

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Heartbeat:
        """That of a rank whose agent has set ``WEFT_PLACES`` and ``WEFT_ATTEMPT``, besides what torchrun sets.

        Raises:
            ValueError: what ``WEFT_PLACES`` names is no page of places with room for this rank.
        """
        if not variables.get(PLACES):
            return cls()
        attempt = int(variables.get(ATTEMPT, "0"))
        local_rank, rank = int(variables["LOCAL_RANK"]), int(variables["RANK"])
        return cls(PlaceWriter(Path(variables[PLACES]), local_rank=local_rank, rank=rank, attempt=attempt))

    def enter(self, phase: Phase) -> None:
        """A phase begins."""
        if self.place is not None:
            self.place.enter(phase)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """While steps stand aside for ``phase``."""
        self.enter(phase)
        yield
        self.enter(Phase.steady)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this rank waits for others outside of a transfer; all ranks do so equally often in a step."""
        if self.place is None:
            yield
            return
        self.place.begin_wait()
        yield
        self.place.end_wait()

    def observers(self, steps_done: Callable[[], int]) -> list[SlotObserver]:
        """What the executor tells of slots; see `PlaceObserver`."""
        return [] if self.place is None else [PlaceObserver(self.place, steps_done)]

    def close(self) -> None:
        """The rank ends."""
        if self.place is not None:
            self.place.close()
