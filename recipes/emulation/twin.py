"""The online twin: simulates the other ranks of a pipeline while one of its ranks runs for real.

The real rank reports its sends to the twin, which returns when the other ranks' messages arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.pipeline.action import COMPUTE, SENDS, Action, Op, Slot, slot_text
from weft.pipeline.costs import CostModel
from weft.pipeline.dependencies import establishes
from weft.pipeline.order import execution_order, visits_of
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import SimulatedStep
from weft.pipeline.timeline import Span


class Pace(Protocol):
    """Durations of the emulated ranks."""

    def compute_s(self, rank: int, action: str, seconds: float) -> float:
        """Return the seconds of a computation that costs ``seconds`` in the cost model.

        ``action`` counts stages within its pipeline.
        """
        ...

    def late_s(self, send: Action, sender: int, receiver: int, num_bytes: float) -> float:
        """Return the seconds that a message takes in addition to its link's latency and bandwidth."""
        ...


class OnlineTwin:
    """Simulation of all ranks of a schedule except one, step by step, on the caller's clock.

    Costs are counted as in `simulate`. A rank begins a step when it has ended the previous one. `hold` delays a rank
    that waits for others at the end of a step.
    """

    def __init__(self, schedule: Schedule, costs: CostModel, real: int, pace: Pace | None = None) -> None:
        """Simulate all ranks except ``real``.

        Args:
            schedule: the lowered schedule of a pipeline or a DP-cell.
            costs: costs of all virtual stages of the schedule.
            pace: replaces durations. None keeps those of ``costs``.
        """
        self.schedule, self.costs, self.real, self._pace = schedule, costs, real, pace
        self._visits = visits_of(schedule)
        self._senders = {
            action: rank for rank, row in enumerate(self._visits) for v in row for action in v.slot if _sends(action)
        }
        self._began_s: list[float] | None = None
        self._step: _Peers | None = None

    def begin(self, at_s: float, pause_s: float = 0.0) -> None:
        """Begin a step.

        The real rank begins at ``at_s``, and the others ``pause_s`` after the end of their previous step.
        """
        if self._began_s is None:
            self._began_s = [at_s] * self.schedule.num_ranks
        else:
            self._began_s = [self.ended_s(rank) + pause_s for rank in range(self.schedule.num_ranks)]
        self._began_s[self.real] = at_s
        self._step = _Peers(self.schedule, self.costs, self._pace, self._began_s)
        self._fronts = [0] * self.schedule.num_ranks
        self._waiting: dict[Action, list[int]] = {}
        self._reached_s: dict[int, float] = {}
        self._go_on([rank for rank in range(self.schedule.num_ranks) if rank != self.real])

    def sent(self, send: Action, at_s: float) -> None:
        """Report a send of the real rank. The message leaves when its link is free.

        Raises:
            LookupError: no rank receives it.
        """
        if self._senders.get(send) != self.real:
            raise LookupError(f"no rank of schedule {self.schedule.name!r} waits for {send} of rank {self.real}")
        self._running.post(self.real, (send,), at_s)
        self._go_on(self._waiting.pop(send, []))

    def arrival_s(self, send: Action) -> float:
        """Return the time at which the message of another rank's ``send`` arrives.

        Raises:
            LookupError: it is never sent. The message names what the sender waits for.
        """
        if send not in self._senders:
            raise LookupError(f"no rank of schedule {self.schedule.name!r} sends {send}")
        found = self._running.time_of(send)
        if found is None:
            raise LookupError(self._stuck(send))
        return found

    def reached_s(self, rank: int) -> float:
        """Return the time at which a rank can start its optimiser step, after its reductions."""
        return self._reached_s.get(rank, self._running.free_s(rank))

    def ended_s(self, rank: int) -> float:
        """Return the time at which a rank has ended its actions so far."""
        return self._running.free_s(rank)

    def hold(self, rank: int, until_s: float) -> None:
        """Delay the end of a rank that waits for others until ``until_s``."""
        self._running.hold(rank, until_s)

    def step_s(self, rank: int) -> float:
        """Return the seconds of a rank's optimiser step."""
        return next(self._running.seconds(v.slot) for v in self._visits[rank] if v.slot[0].op is Op.STEP)

    def spans(self) -> list[Span]:
        """Return the simulated ranks' spans of the step, on the caller's clock."""
        return [span for span in self._running.spans() if span.rank != self.real]

    @property
    def _running(self) -> _Peers:
        assert self._step is not None, "a step has begun"
        return self._step

    def _go_on(self, ranks: Sequence[int]) -> None:
        """Run ``ranks`` as far as possible, and then the ranks that waited for their actions."""
        ready, step = list(ranks), self._running
        while ready:
            rank = ready.pop()
            row = self._visits[rank]
            index = self._fronts[rank]
            while index < len(row):
                visit = row[index]
                missing = next((need for need in visit.needs if step.time_of(need) is None), None)
                if missing is not None:
                    self._waiting.setdefault(missing, []).append(rank)
                    break
                if visit.slot[0].op is Op.STEP:
                    self._reached_s[rank] = step.could_start_s(visit)
                step.step(visit)
                index += 1
                for action in visit.slot:
                    for fact in establishes(action):
                        ready += self._waiting.pop(fact, ())
            self._fronts[rank] = index

    def _stuck(self, send: Action) -> str:
        rank = self._senders[send]
        if rank == self.real:
            return f"{send} is this rank's own"
        visit = self._visits[rank][self._fronts[rank]]
        needs = [str(need) for need in visit.needs if self._running.time_of(need) is None]
        return f"{send} of rank {rank} never comes: its {slot_text(visit.slot)} waits for {', '.join(needs)}"


def simulated_s(schedule: Schedule, costs: CostModel, pace: Pace) -> float:
    """Return the seconds of a step in which all ranks are simulated, with the durations of ``pace``."""
    step = _Peers(schedule, costs, pace, [0.0] * schedule.num_ranks)
    for visit in execution_order(schedule):
        step.step(visit)
    return max(span.end_s for span in step.spans())


def _sends(action: Action) -> bool:
    return action.op in SENDS


class _Peers(SimulatedStep):
    """A simulated step whose ranks begin at different times, and one of whose ranks is real."""

    def __init__(self, schedule: Schedule, costs: CostModel, pace: Pace | None, began_s: Sequence[float]) -> None:
        super().__init__(schedule, costs)
        self._rank_free_s = list(began_s)
        self._pace = pace

    def post(self, rank: int, slot: Slot, at_s: float) -> None:
        end_s = self._send(rank, slot, at_s)
        for action in slot:
            self._fact_s[action] = end_s

    def time_of(self, fact: Action) -> float | None:
        return self._fact_s.get(fact)

    def free_s(self, rank: int) -> float:
        return self._rank_free_s[rank]

    def hold(self, rank: int, until_s: float) -> None:
        self._rank_free_s[rank] = max(self._rank_free_s[rank], until_s)

    def seconds(self, slot: Slot) -> float:
        seconds = super().seconds(slot)
        if self._pace is None or slot[0].op not in COMPUTE | {Op.STEP}:
            return seconds
        stages = self._schedule.placement.single.num_stages
        own = tuple(action._replace(stage=action.stage % stages) for action in slot)
        return self._pace.compute_s(self._rank_of(slot[0]), slot_text(own), seconds)

    def _send(self, rank: int, slot: Slot, posted_s: float) -> float:
        end_s = super()._send(rank, slot, posted_s)
        if self._pace is None:
            return end_s
        (op, stage, _) = slot[0]
        other = stage + 1 if op is Op.SEND_F else stage - 1
        num_bytes = self._costs.stages[min(stage, other)].output_bytes
        receiver = self._schedule.placement.stage_ranks[other]
        return end_s + self._pace.late_s(slot[0], rank, receiver, num_bytes)
