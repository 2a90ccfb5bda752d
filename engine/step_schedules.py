"""Schedules of a rank's steps, which differ in how many micro-batches its replica reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.engine.deal import StepDeal
from weft.engine.distributed import from_rank_zero
from weft.engine.execution.executor import SlotPairs
from weft.engine.planning.run_plan import RunPlan
from weft.engine.planning.schedules import RankSchedule
from weft.pipeline.schedule import Schedule


class StepSchedules:
    """This rank's parts of the schedules of steps.

    Attributes:
        usual: schedule of a step with the replica's usual number of micro-batches.
    """

    def __init__(self, plan: RunPlan, rank: int, deal: StepDeal, pairs: SlotPairs | None) -> None:
        """Plan the usual step. Collective call."""
        position = plan.layout.position(rank)
        self._pipe_rank, self._replica = position.stage, position.replica
        self._member, self._num_stages = plan.members[position.line], plan.placement.num_stages
        self._deal, self._pairs = deal, pairs
        self._plans: dict[int, RankSchedule] = {}
        self.usual = self._plan(plan.schedules).schedule

    def of(self, num_microbatches: int, make: Callable[[], Mapping[int, Schedule]]) -> RankSchedule:
        """Return the part of a step of ``num_microbatches``, which rank 0 makes at first. Collective call.

        Args:
            make: returns the schedules of DP-cells, by their number of pipelines.
        """
        if num_microbatches not in self._plans:
            self._plan(from_rank_zero(make, Schedule))
        return self._plans[num_microbatches]

    def run(self, schedules: Sequence[Mapping[int, Schedule]], counts: tuple[int, ...]) -> None:
        """Run other schedules from the next step on, see `WeftEngine.run_schedules`. Collective call."""
        self._plans.clear()
        self._deal.counts = counts
        plans = [self._plan(each).schedule for each in schedules]
        self.usual = self._plans[counts[self._replica]].schedule if counts else plans[0]

    def _plan(self, schedules: Mapping[int, Schedule]) -> RankSchedule:
        """Return this rank's part of a step, after planning its strand pairs. Collective call."""
        own = schedules[self._member.pipelines]
        plan = self._plans[own.num_microbatches] = RankSchedule.of(own, self._member.local_rank, self._pipe_rank)
        if self._pairs is not None:
            self._pairs.agree(schedules.values(), self._num_stages)
        return plan
