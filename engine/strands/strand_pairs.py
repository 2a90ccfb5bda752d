"""Strand pairs of a schedule: a slot's forward and backward, interleaved inside layers (DHelix section 4.2)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from weft.engine.distributed import from_rank_zero
from weft.engine.execution.compute import Compute
from weft.engine.execution.step_state import Key, StepState, key
from weft.engine.parallel.axis import AxisGroups
from weft.engine.strands.pair import PairRunner, StrandThread
from weft.engine.strands.yielding_group import YieldPoint, yielding_groups
from weft.pipeline.action import Op, Slot, is_pair
from weft.pipeline.schedule import Schedule
from weft.pipeline.strands.pairs import StrandCosts, pair_name, plans_for
from weft.pipeline.strands.plan import SegmentPlan, Step

BY_TURNS = SegmentPlan(())
"""An empty plan, with which strands alternate."""


@dataclass(kw_only=True, eq=False)
class StrandPairs:
    """Runs pairs on one rank, each by the plan for its two virtual stages.

    A plan may defer the weight gradients of a full backward. The backward then has two parts, and the plan computes
    the second one parameter by parameter, while the other strand communicates.

    Attributes:
        axes: groups in which operations switch between strands.
        costs: costs of the segments of layers, or None if they are unknown. Strands then alternate.
        plans: plans of pairs by `pair_name`, equal on all ranks.
    """

    runner: PairRunner
    axes: AxisGroups
    costs: StrandCosts | None = None
    plans: dict[str, SegmentPlan] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        axes: AxisGroups,
        device: torch.device,
        costs: StrandCosts | None = None,
        *,
        strict: bool = False,
        yield_point: YieldPoint | None = None,
    ) -> StrandPairs:
        """Create the runner of pairs, and start its thread. For ``strict`` see `PairRunner`.

        Args:
            yield_point: the callbacks of the strands. None creates them.
        """
        yield_point = yield_point or YieldPoint()
        return cls(
            runner=PairRunner(StrandThread(device), yield_point, strict=strict),
            axes=yielding_groups(axes, yield_point),
            costs=costs,
        )

    def agree(self, schedules: Collection[Schedule], num_stages: int) -> None:
        """Broadcast rank 0's plans for the pairs of these schedules. Collective call if there are any.

        Args:
            schedules: schedules of all DP-cells, equal on every rank.
        """
        if not any(is_pair(slot) for schedule in schedules for row in schedule.rows for slot in row):
            return

        def planned() -> dict[str, str]:
            return {name: str(plan) for name, plan in plans_for(schedules, self.costs, num_stages).items()}

        self.plans.update((name, SegmentPlan.of(text)) for name, text in from_rank_zero(planned).items())

    def close(self) -> None:
        """End the thread of backwards."""
        self.runner.thread.close()

    def split(self, row: Iterable[Slot]) -> set[Key]:
        """Return stage and micro-batch of the forwards in a row whose full backward is divided by its pair's plan."""
        backwards = ((slot[1], self._plan(slot)) for slot in row if is_pair(slot))
        return {key(action) for action, plan in backwards if action.op is Op.B and Step.weight in plan.steps}

    def run(self, compute: Compute, state: StepState, pair: Slot) -> None:
        """Run the forward and the backward of the slot ``pair``.

        Raises:
            Exception: the first error of either strand, after both have ended.
        """
        forward, backward = pair
        saved = state.saved[key(backward)]
        saved.in_pair = True
        around = ExitStack()

        def begin_backward() -> None:
            around.enter_context(compute.around_backward(state, backward))
            compute.begin_backward(state, backward)

        self.runner.run(
            self._plan(pair),
            partial(compute.forward, state, forward),
            begin_backward,
            saved.tape.play if saved.tape is not None and backward.op is Op.B else lambda: None,
        )
        saved.in_pair = False
        compute.end_backward(state, backward)
        around.close()

    def _plan(self, pair: Slot) -> SegmentPlan:
        return self.plans.get(pair_name(pair), BY_TURNS)
