"""The optimum: a constraint model of one pipeline step, solved with OR-Tools CP-SAT."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from math import ceil
from typing import TYPE_CHECKING, Any

from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel
from weft.pipeline.dependencies import dependencies, establishes
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

SPLIT = (Op.F, Op.I, Op.W)


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The solver's bounds when it stops.

    Attributes:
        bound_s: no schedule is shorter.
        best_s: makespan of the best schedule found; infinite if none was.
        proven: True if the two are equal, so that ``best_s`` is the optimum.
        wall_s: seconds that the solver took.
    """

    bound_s: float
    best_s: float
    proven: bool
    wall_s: float


def solve(
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    memory_cap_bytes: float = 0.0,
    *,
    limit_s: float = 60.0,
    workers: int = 2,
    known: Schedule | None = None,
    quantum_s: float = 1.0,
) -> Optimum:
    """Minimise the makespan over all orders, splits of the backward and idle times.

    The same rules as the simulator's: one action at a time per rank, a transfer occupies its
    rank's link and arrives a latency later, first come first served, and the saved bytes of a
    rank stay within the cap. Micro-batches are alike, so each stage takes them in order.

    Args:
        memory_cap_bytes: 0 is no cap.
        limit_s: wall time after which the solver returns its best solution.
        known: a schedule under the cap, from which the solver starts and than which it finds
            no worse.
        quantum_s: durations are rounded down to multiples of it, so that ``bound_s`` stays a
            bound; the optimum is exact if all of them are multiples.

    Raises:
        ValueError: no schedule exists under the cap, or strand pairs are given a gain (the
            model has no pairs, and could be beaten by them).
    """
    if costs.pairs is not None:
        raise ValueError("costs.strands: the optimum is modelled without pairs; leave them out")
    if any(link.pair_bps < link.bandwidth_bps for link in (costs.wan, *(link for _, link in costs.wan_links))):
        raise ValueError("costs.links.pair_mbps: the optimum is modelled with uplinks alone; leave it out")
    from ortools.sat.python import cp_model  # a tool's dependency, not Weft's

    step = _Step(placement, num_microbatches, costs, memory_cap_bytes, quantum_s)
    if known is not None:
        step.hint(known)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    status = solver.solve(step.model)
    if status == cp_model.INFEASIBLE:
        raise ValueError(f"memory_cap_bytes={memory_cap_bytes:g}: no schedule exists under it; raise it")
    assert status != cp_model.MODEL_INVALID, step.model.validate()
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Optimum(
        bound_s=solver.best_objective_bound * quantum_s,
        best_s=solver.objective_value * quantum_s if found else float("inf"),
        proven=status == cp_model.OPTIMAL,
        wall_s=solver.wall_time,
    )


class _Step:
    """The model of one step; times are whole quanta."""

    def __init__(
        self, placement: Placement, num_microbatches: int, costs: CostModel, cap_bytes: float, quantum_s: float
    ) -> None:
        from ortools.sat.python import cp_model

        self.placement, self.num_microbatches, self.costs = placement, num_microbatches, costs
        self.quantum_s = quantum_s
        self.model = cp_model.CpModel()
        self.horizon = self._serial_quanta()
        self.start: dict[Action, cp_model.IntVar] = {}
        self.whole: dict[Action, Any] = {}  # by W: whether it joins its I in a full backward
        self._compute()
        self._order()
        self._transfers()
        if cap_bytes:
            self._memory(cap_bytes)
        self.makespan = self.model.new_int_var(0, self.horizon, "makespan")
        for action in self.start:
            if action.op is Op.W:
                self.model.add(self._end(action) <= self.makespan)
        self.model.minimize(self.makespan)

    def hint(self, known: Schedule) -> None:
        """Start from ``known``, and admit only solutions that are no longer."""
        timeline = simulate(known, self.costs)
        for span in (span for lane in timeline.compute for span in lane):
            now_s = span.start_s
            for action in span.slot:
                for part in establishes(action):
                    self.model.add_hint(self.start[part], round(now_s / self.quantum_s))
                    now_s += self.costs.stages[part.stage].seconds(part.op)
        self.model.add(self.makespan <= ceil(max(lane[-1].end_s for lane in timeline.compute) / self.quantum_s - 1e-6))

    def _quanta(self, seconds: float) -> int:
        return int(seconds / self.quantum_s + 1e-6)

    def _duration(self, action: Action) -> int:
        return self._quanta(self.costs.stages[action.stage].seconds(action.op))

    def _end(self, action: Action) -> cp_model.LinearExpr:
        return self.start[action] + self._duration(action)

    def _actions(self) -> list[Action]:
        return [
            Action(op, stage, m)
            for stage, op, m in product(range(self.placement.num_stages), SPLIT, range(self.num_microbatches))
        ]

    def _serial_quanta(self) -> int:
        """Return the duration of all actions in sequence."""
        total = sum(map(self._duration, self._actions()))
        ways = (self._way(action) for action in self._actions())
        return total + sum(occupancy + latency for _, occupancy, latency in filter(None, ways))

    def _way(self, action: Action) -> tuple[tuple[int, str], int, int] | None:
        """Return link, occupancy and latency of the transfer after ``action``, or None if it sends nothing."""
        to = {Op.F: action.stage + 1, Op.I: action.stage - 1}.get(action.op, -1)
        ranks, sites = self.placement.stage_ranks, self.placement.rank_sites
        if not 0 <= to < len(ranks) or ranks[to] == ranks[action.stage]:
            return None
        here, there = ranks[action.stage], ranks[to]
        link = self.costs.link(sites[here], sites[there])
        sent_bytes = self.costs.stages[min(action.stage, to)].output_bytes
        lane = action.op.value if sites[here] == sites[there] else "uplink"
        return (here, lane), self._quanta(link.occupancy_s(sent_bytes)), self._quanta(link.latency_s)

    def _compute(self) -> None:
        """Create the start times, and allow one action at a time on each rank."""
        busy: list[list[Any]] = [[] for _ in range(self.placement.num_ranks)]
        for action in self._actions():
            self.start[action] = self.model.new_int_var(0, self.horizon, str(action))
            interval = self.model.new_fixed_size_interval_var(self.start[action], self._duration(action), str(action))
            busy[self.placement.stage_ranks[action.stage]].append(interval)
        for intervals in busy:
            self.model.add_no_overlap(intervals)

    def _order(self) -> None:
        """Keep the micro-batches of a stage in order; a full backward is an I with its W directly after it."""
        for action, start in self.start.items():
            if action.microbatch:
                before = action._replace(microbatch=action.microbatch - 1)
                self.model.add(start >= self._end(before))
            if action.op is Op.W:
                whole = self.model.new_bool_var(f"whole {action}")
                self.whole[action] = whole
                self.model.add(start == self._end(action._replace(op=Op.I))).only_enforce_if(whole)

    def _made(self, action: Action) -> cp_model.LinearExpr:
        """Return when the result of ``action`` exists on its own rank.

        In a full backward, the input gradient exists only after the weight gradient.
        """
        if action.op is not Op.I:
            return self._end(action)
        weight = action._replace(op=Op.W)
        return self._end(action) + self._duration(weight) * self.whole[weight]

    def _transfers(self) -> None:
        """Constrain the transfers of all needs over the links."""
        ranks = self.placement.stage_ranks
        arrives: dict[Action, Any] = {}
        lanes: dict[tuple[int, str], list[_Transfer]] = {}
        for action in self.start:
            way = self._way(action)
            if way is None:
                continue
            lane, occupancy, latency = way
            leaves = self._made(action)
            if occupancy:
                leaves = self.model.new_int_var(0, self.horizon, f"leaves {action}")
                self.model.add(leaves >= self._made(action))
                lanes.setdefault(lane, []).append(_Transfer(action, leaves, occupancy))
            arrives[action] = leaves + occupancy + latency
        for transfers in lanes.values():
            self._serve(transfers)
        for action, start in self.start.items():
            for need in dependencies(action, self.placement, self.num_microbatches, frozenset(SPLIT)):
                if ranks[need.stage] != ranks[action.stage]:
                    self.model.add(start >= arrives[need])
                else:
                    self.model.add(start >= (self._end(need) if action.op is Op.W else self._made(need)))

    def _serve(self, transfers: list[_Transfer]) -> None:
        """Constrain a link to one transfer at a time, in the order in which the results exist."""
        self.model.add_no_overlap(
            [self.model.new_fixed_size_interval_var(t.leaves, t.occupancy, f"send {t.action}") for t in transfers]
        )
        for one, other in combinations(transfers, 2):
            if one.action[:2] == other.action[:2]:
                first, second = sorted((one, other), key=lambda t: t.action.microbatch or 0)
                self.model.add(first.leaves + first.occupancy <= second.leaves)
                continue
            ahead = self.model.new_bool_var(f"{one.action} before {other.action}")
            for first, second, holds in ((one, other, ahead), (other, one, ahead.Not())):
                self.model.add(self._made(first.action) <= self._made(second.action)).only_enforce_if(holds)
                self.model.add(first.leaves + first.occupancy <= second.leaves).only_enforce_if(holds)

    def _memory(self, cap_bytes: float) -> None:
        """Limit the saved bytes of each rank at any time."""
        saved = [s.activation_bytes for s in self.costs.stages] + [s.weight_saved_bytes for s in self.costs.stages]
        quantum = 1.0 if all(float(b).is_integer() for b in [*saved, cap_bytes]) else cap_bytes / 1e6
        for held in self.placement.rank_stages:
            intervals, demands = [], []
            for stage, m in product(held, range(self.num_microbatches)):
                forward, gradient, weight = (Action(op, stage, m) for op in SPLIT)
                cost = self.costs.stages[stage]
                intervals.append(self._span(self.start[forward], self._made(gradient), f"saved {forward}"))
                demands.append(int(cost.activation_bytes / quantum))
                if cost.weight_saved_bytes:
                    intervals.append(self._span(self.start[gradient], self._end(weight), f"kept {weight}"))
                    demands.append(int(cost.weight_saved_bytes / quantum) * (1 - self.whole[weight]))
            self.model.add_cumulative(intervals, demands, int(cap_bytes / quantum))

    def _span(self, start: Any, end: Any, name: str) -> Any:
        """Return an interval between two expressions."""
        size = self.model.new_int_var(0, self.horizon, f"{name} size")
        stop = self.model.new_int_var(0, self.horizon, f"{name} end")
        self.model.add(stop == end)
        return self.model.new_interval_var(start, size, stop, name)


@dataclass(frozen=True)
class _Transfer:
    """The transfer of one action over a link, with its start and its duration."""

    action: Action
    leaves: Any
    occupancy: int
