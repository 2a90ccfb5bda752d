"""A step of an emulated job: connects the twin of this rank's pipeline to its process groups and channels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from time import thread_time

from weft.comm.emulated.operation_log import EmulationError
from weft.comm.emulated.world import EmulatedWorld
from weft.engine.planning.run_plan import RunPlan
from weft.pipeline.action import COMPUTE, RECEIVES, Action, Op, Slot
from weft.pipeline.costs import CostModel
from weft.pipeline.schedule import Schedule
from weft.pipeline.timeline import COMPUTE_LANE, SEND_LANE, Span, Timeline
from weft.recipes.emulation.delays import CheckedDelays, Message
from weft.recipes.emulation.twin import OnlineTwin
from weft.recipes.emulation.what_if import WhatIf

_SENT_BY = {Op.RECV_F: (Op.SEND_F, -1), Op.RECV_B: (Op.SEND_B, 1)}
_FROM_ROOT = ("broadcast", "scatter", "recv")


class JobPace:
    """Durations of ranks' computations and messages, from the delay model and the what-if conditions."""

    def __init__(self, plan: RunPlan, line: int, delays: CheckedDelays | None, what_if: WhatIf, seed: int) -> None:
        """Create the pace of the ranks of pipeline replica ``line``.

        Args:
            delays: the delay model of emulated ranks; None keeps the durations of the cost model.
        """
        self._plan, self._delays, self._what_if = plan, delays, what_if
        self._first_line = line - plan.members[line].local_rank
        self._stages = plan.placement.num_ranks
        self._random = random.Random(seed)

    def compute_s(self, rank: int, action: str, seconds: float) -> float:
        """Return the seconds of an action of a rank, numbered as in the DP-cell."""
        pipeline, stage = divmod(rank, self._stages)
        number = self._plan.layout.lines_of(stage)[self._first_line + pipeline]
        if self._delays is not None:
            seconds = self._delays.compute_s(stage, action, seconds)
        return seconds / self._what_if.factor(number, stage)

    def late_s(self, send: Action, sender: int, receiver: int, num_bytes: float) -> float:
        """Return the additional seconds of a message between ranks, numbered as in the DP-cell."""
        sites, here, there = self._plan.placement.rank_sites, sender % self._stages, receiver % self._stages
        crosses = sites[here] != sites[there]
        late_s = self._what_if.late_s(self._random) if crosses else 0.0
        if self._delays is not None:
            late_s += self._delays.late_s(Message(str(send), here, there, crosses, num_bytes))
        return late_s


class TwinStep:
    """The emulated ranks' part of a step. It is a `SlotObserver` of this rank, and the `Step` of its world."""

    def __init__(
        self, world: EmulatedWorld, plan: RunPlan, costs: CostModel, delays: CheckedDelays, what_if: WhatIf, seed: int
    ) -> None:
        """Emulate all ranks except the world's own rank.

        Args:
            costs: costs of the virtual stages of one pipeline.
        """
        at = plan.layout.position(world.rank)
        member = plan.members[at.line]
        self._world, self._plan, self._stage, self._line = world, plan, at.stage, at.line
        self._first_stage = member.local_rank * plan.placement.num_stages
        self._first_rank = member.local_rank * plan.placement.num_ranks
        pace = JobPace(plan, at.line, delays, what_if, seed)
        cell: Schedule = plan.schedule(at.line)
        self.twin = OnlineTwin(cell, costs.for_cell(member.pipelines), self._first_rank + at.stage, pace)
        self._speed = what_if.factor(world.rank, at.stage)
        self._members: dict[Sequence[int], tuple[int, ...]] = {}
        self.spans: list[list[Span]] = []
        """Spans of this rank in each step, on the world's clock. Each span ends when the next slot begins."""
        self.step_s: list[float] = []
        """Seconds of processor time that this rank used in each optimiser step."""
        self._ended_s: float | None = None
        self._ran: Slot = ()
        self._received_s = 0.0

    # -- what this rank does (SlotObserver) --------------------------------------------------------

    def step_begins(self, num_microbatches: int) -> None:
        """Begin a step on all ranks."""
        clock = self._world.clock
        with clock.left_out():
            now = clock.now()
            self.twin.begin(now, 0.0 if self._ended_s is None else max(0.0, now - self._ended_s))
        self._world.step = self
        self.spans.append([])
        self._ran, self._received_s = (), 0.0

    def slot_begins(self, slot: Slot) -> None:
        """Record the beginning of a slot, which ends the previous slot's duration."""
        clock = self._world.clock
        self._note(clock.now())
        self._begun_s, self._waited_s, self._begun_cpu_s = clock.now(), clock.waited_s, thread_time()

    def slot_ends(self, slot: Slot) -> None:
        """Record the end of a slot, and scale a computation to the rank's speed in the what-if conditions."""
        op, clock = slot[0].op, self._world.clock
        now, took_s = clock.now(), 0.0
        if op is Op.STEP:  # it waits for other ranks, which takes no processor time
            took_s = thread_time() - self._begun_cpu_s
            self.step_s.append(took_s)
            self.spans[-1].append(Span(self._stage, COMPUTE_LANE, slot, now - took_s, now))
        else:
            self._ran = slot
            if op in COMPUTE:
                took_s = now - self._begun_s
        self._stretched_s = took_s * (1.0 / self._speed - 1.0)
        clock.leave_out(-self._stretched_s)

    def _note(self, end_s: float) -> None:
        """Record the duration of the last slot until ``end_s``, which includes the host's work between slots.

        The time of a receive beyond its wait counts for the next computation.
        """
        slot, self._ran = self._ran, ()
        if not slot:
            return
        took_s = end_s - self._begun_s - self._stretched_s
        if (op := slot[0].op) in RECEIVES:
            self._received_s += took_s - (self._world.clock.waited_s - self._waited_s)
            return
        lane = COMPUTE_LANE if op in COMPUTE else SEND_LANE
        if op in COMPUTE:
            took_s += self._received_s
            self._received_s = 0.0
        self.spans[-1].append(Span(self._stage, lane, slot, end_s - took_s, end_s))

    def timelines(self, schedule: Schedule, skip: int) -> list[Timeline]:
        """Return this rank's timelines of all steps except the first ``skip``."""
        none = (0.0,) * schedule.num_ranks
        return [
            Timeline(schedule.name, schedule.num_ranks, tuple(spans), none, (0,) * schedule.num_ranks)
            for spans in self.spans[skip:]
        ]

    # -- what the others do (Step) -------------------------------------------------------------------

    def sent(self, peer: int, tag: str, num_bytes: int, at_s: float) -> None:
        """Report a send of this rank to the twin. See `weft.comm.emulated.step.Step`."""
        try:
            self.twin.sent(self._send_of(tag), at_s)
        except LookupError as error:
            raise EmulationError(f"rank {self._world.rank} sends {tag} to rank {peer}: {error}") from error

    def arrival_s(self, peer: int, tag: str) -> float:
        """Return the time at which a message arrives. See `weft.comm.emulated.step.Step`."""
        try:
            return self.twin.arrival_s(self._send_of(tag))
        except LookupError as error:
            raise EmulationError(f"rank {self._world.rank} waits for {tag} of rank {peer}: {error}") from error

    def ready_s(self, operation: str, ranks: Sequence[int], root: int | None) -> float:
        """Return the time at which the last other member is ready. See `weft.comm.emulated.step.Step`.

        Ranks outside of this rank's pipeline are always ready.
        """
        if operation in _FROM_ROOT and root is not None:
            at = self._plan.layout.position(root)
            other = root != self._world.rank and at.line == self._line
            return self.twin.ended_s(self._first_rank + at.stage) if other else 0.0
        if operation == "send":
            return 0.0
        return max((self.twin.reached_s(rank) for rank in self._others(ranks)), default=0.0)

    def ended(self, operation: str, ranks: Sequence[int], at_s: float) -> None:
        """Delay the other members until the operation has ended. See `weft.comm.emulated.step.Step`.

        Operations from a root and barriers come after a step. Other operations are inside of a step.
        """
        others = self._others(ranks)
        after = operation in (*_FROM_ROOT, "barrier")
        for rank in others:
            self.twin.hold(rank, at_s + (0.0 if after else self.twin.step_s(rank)))
        if others and after:
            self._ended_s = self._world.clock.now()

    def _others(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the other ranks of this rank's pipeline among ``ranks``, numbered as in the DP-cell."""
        if ranks not in self._members:
            found = (self._plan.layout.position(rank) for rank in ranks if rank != self._world.rank)
            self._members[ranks] = tuple(self._first_rank + at.stage for at in found if at.line == self._line)
        return self._members[ranks]

    def _send_of(self, tag: str) -> Action:
        receive = Action.parse(tag)
        op, step = _SENT_BY[receive.op]
        return Action(op, self._first_stage + receive.stage + step, receive.microbatch)
