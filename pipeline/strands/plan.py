"""The segment plan: the order in which the segments of two strands run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from weft.pipeline.limits import short_repr
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.segments import StrandPair
from weft.pipeline.strands.state import PairState


class Step(Enum):
    """The kinds of steps of a plan."""

    forward = "F"
    """The forward's next segment: wait for its inputs, compute, start its collective."""
    backward = "B"
    """The backward's next segment."""
    weight = "W"
    """The backward's next weight gradient."""

    __hash__ = object.__hash__


def steps_of(pair: StrandPair) -> dict[Step, int]:
    """Return the number of steps of each kind in a plan of ``pair``."""
    return {
        Step.forward: len(pair.forward.segments),
        Step.backward: len(pair.backward.segments),
        Step.weight: len(pair.weights),
    }


@dataclass(frozen=True)
class SegmentPlan:
    """All segments of both strands and all weight gradients in one order, which is the same on every rank.

    Text form: runs of steps, such as ``B 2F W B``.
    """

    steps: tuple[Step, ...]

    @classmethod
    def of(cls, text: str) -> SegmentPlan:
        """Read the text form. Raise ValueError if the text is not a plan."""
        steps: list[Step] = []
        for word in text.split():
            if not (found := re.fullmatch(r"([1-9][0-9]{0,5})?([FBW])", word)):
                raise ValueError(f"segment plan: {short_repr(word)} is no run of steps, such as 2F, B or 3W")
            steps += [Step(found[2])] * int(found[1] or 1)
        return cls(tuple(steps))

    def __str__(self) -> str:
        runs = ((step.value, len(list(run))) for step, run in groupby(self.steps))
        return " ".join(f"{count if count > 1 else ''}{letter}" for letter, count in runs)

    def check(self, pair: StrandPair) -> None:
        """Check that the plan fits a pair: it runs every segment once, and weight gradients after their inputs.

        Raises:
            ValueError: it does not; the message names the failing step.
        """
        done = dict.fromkeys(Step, 0)
        for number, step in enumerate(self.steps):
            if step is Step.weight and done[Step.weight] >= pair.available(done[Step.backward]):
                raise ValueError(
                    f"segment plan: step {number} is weight gradient {done[step]}, which needs more of the backward "
                    f"than the {done[Step.backward]} segments before it; move it behind them"
                )
            done[step] += 1
        for step, count in steps_of(pair).items():
            if done[step] != count:
                raise ValueError(f"segment plan: {done[step]} steps {step.value}, where the pair has {count}")

    def seconds(self, pair: StrandPair, table: OverlapTable, handover_s: float = 0.0) -> float:
        """Return the predicted duration of a pair under this plan, until the last collective has ended.

        Args:
            handover_s: seconds of a switch between strands.
        """
        state, at, turn = PairState(), dict.fromkeys(Step, 0), None
        for step in self.steps:
            state, turn = turned(state, turn, step, table, handover_s)
            state = take(state, pair, step, at[step], table)
            at[step] += 1
        return state.ended(table).now_s

    def hidden(self, pair: StrandPair, table: OverlapTable) -> float:
        """Return the share of the collectives' time that the plan hides behind compute or each other."""
        return (pair.sequential_s - self.seconds(pair, table)) / pair.comm_s if pair.comm_s else 1.0


def turned(
    state: PairState, turn: Step | None, step: Step, table: OverlapTable, handover_s: float
) -> tuple[PairState, Step | None]:
    """Return the state after a switch to the strand of ``step``, and that strand; the first step has no switch."""
    if step is Step.weight or step is turn:
        return state, turn
    return (state if turn is None else state.handed(table, handover_s)), step


def take(state: PairState, pair: StrandPair, step: Step, index: int, table: OverlapTable) -> PairState:
    """Return the state after one step, which is the ``index``-th of its kind."""
    if step is Step.weight:
        return state.computed(table, pair.weights[index].compute_s, pair.weights[index].kind)
    forward = step is Step.forward
    return state.ran(table, (pair.forward if forward else pair.backward).segments[index], forward=forward)
