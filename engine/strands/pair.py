"""A strand pair: a forward and a backward, run by turns in two threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from weft.engine.strands.baton import Baton, OtherStrandFailed
from weft.engine.strands.thread import StrandThread
from weft.engine.strands.turns import Turns
from weft.pipeline.strands.plan import SegmentPlan, Step

Result = TypeVar("Result")
Other = TypeVar("Other")


@dataclass(frozen=True)
class PairRunner:
    """Runs pairs on one rank.

    Attributes:
        thread: where backwards run; forwards run in the caller's.
        turns: that the axis groups of both strands take, see `TurnTakingGroup`.
    """

    thread: StrandThread
    turns: Turns

    def run(
        self,
        plan: SegmentPlan,
        forward: Callable[[], Result],
        backward: Callable[[], Other],
        play_weight: Callable[[], None],
        *,
        separate_generators: bool = False,
    ) -> tuple[Result, Other]:
        """Run a forward and a backward by turns.

        Args:
            plan: whose turn is when.
            play_weight: computes the backward's next deferred weight gradient.
            separate_generators: see `Baton`.

        Returns:
            What they return.

        Raises:
            Exception: the first error of either; the other has been freed and has ended.
        """
        baton = Baton(plan, play_weight, separate_generators=separate_generators)
        future = self.thread.start(partial(self._strand, baton, Step.backward, backward))
        errors: list[BaseException] = []
        try:
            result = self._strand(baton, Step.forward, forward)
        except BaseException as error:
            errors.append(error)
        if (other := future.exception()) is not None:
            errors.append(other)
        if errors:
            raise min(errors, key=lambda raised: isinstance(raised, OtherStrandFailed))
        return result, future.result()

    def _strand(self, baton: Baton, strand: Step, body: Callable[[], Result]) -> Result:
        try:
            baton.begin(strand)
            with self.turns.taken(partial(baton.pause, strand)):
                result = body()
            baton.end(strand)
        except BaseException as error:
            baton.fail(error)
            raise
        return result
