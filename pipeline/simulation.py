"""The simulator: predicts a timeline from a schedule and a cost model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from weft.pipeline.action import COMPUTE, RECEIVES, RELAYS, SENDS, Action, Op, Slot
from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.dependencies import establishes
from weft.pipeline.jitter import sampled_factor, sampled_s
from weft.pipeline.lowering import add_transfers
from weft.pipeline.memory import held_along
from weft.pipeline.order import Visit, execution_order
from weft.pipeline.schedule import Schedule
from weft.pipeline.timeline import COMPUTE_LANE, OFFLOAD_LANE, REDUCE_LANE, RELOAD_LANE, SEND_LANE, Lane, Span, Timeline

_SIDE = frozenset({Op.REDUCE_GRAD, Op.UNSHARD})
"""Collectives over replicas: started in row order, overlapped with compute."""


def simulate(schedule: Schedule, costs: CostModel, sample: int | None = None) -> Timeline:
    """Predict the timeline of ``schedule``; deterministic.

    - **Compute**: each rank runs its slots in row order, one at a time. A strand pair starts when
      the dependencies of both halves are met and takes as long as their segment plan (`CostModel.pair_s`).
    - **Transfers**: a transfer leaves when its producer has finished and its link is free, first
      come first served, and arrives ``latency_s`` after its last byte has left. Starting it
      occupies the rank for ``send_s``; the transfer may leave meanwhile.
    - **Links** are full duplex. Within a site a rank sends activations and gradients concurrently.
      A rank's transfers to other sites share its one uplink (Atlas section 3), or the part of it
      that a pair of nodes gets (section 4.1). In a DP-cell the uplinks of all pipelines carry
      each transfer together, one transfer after the other in row order (section 4.4).
    - **Copies** of activations to host memory and back queue on a lane for each direction. ``OFFLOAD`` waits for the
      first, and the backward waits for the second.
    - **Collectives** over replicas queue on a lane of their own.

    Args:
        schedule: a valid schedule; lowered, or compute-only with implied transfers.
        sample: number of a sample of computations' and transfers' durations, by the costs' jitter. None takes medians.

    Raises:
        ValueError: ``costs`` is for another number of virtual stages.
        ScheduleError: the schedule deadlocks.
    """
    costs.require_stages(schedule.placement.num_stages, f"schedule {schedule.name!r}")
    if _has_transfers(costs):
        schedule = add_transfers(schedule)
    run = SimulatedStep(schedule, costs, sample)
    for visit in execution_order(schedule):
        run.step(visit)
    held = [tuple(held_along(row, costs)) for row in schedule.rows]
    return Timeline(
        name=f"{schedule.name} predicted",
        num_ranks=schedule.num_ranks,
        spans=tuple(run.spans()),
        peak_bytes=tuple(max((h.num_bytes for h in row), default=0.0) for row in held),
        live_microbatches=tuple(max((h.num_chunks for h in row), default=0) for row in held),
    )


def sampled_steps_s(schedule: Schedule, costs: CostModel, samples: Iterable[int]) -> list[float]:
    """Return the seconds of a step in each sample, sorted. ``schedule`` has relays if it is of a DP-cell."""
    return sorted(simulate(schedule, costs, sample).step_s for sample in samples)


def _has_transfers(costs: CostModel) -> bool:
    """True if any transfer takes time; otherwise transfers need no simulation."""
    links = (costs.local, costs.wan, *(link for _, link in costs.wan_links))
    return any(link.latency_s or link.transit_s(1.0) for link in links) or any(s.send_s for s in costs.stages)


class SimulatedStep:
    """A step that is being simulated: the clocks of ranks and links, and the time of each result."""

    def __init__(self, schedule: Schedule, costs: CostModel, sample: int | None = None) -> None:
        self._schedule = schedule
        self._costs = costs
        self._sample = sample
        self._fact_s: dict[Action, float] = {}
        self._copied_s: dict[Action, float] = {}
        self._offloads = {slot[0] for row in schedule.rows for slot in row if slot[0].op is Op.OFFLOAD}
        self._rank_free_s = [0.0] * schedule.num_ranks
        self._lane_free_s: dict[tuple[int, str], float] = {}
        self._rank_spans: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]

    def spans(self) -> list[Span]:
        """Return all spans, rank by rank, with each lane in order."""
        return [span for spans in self._rank_spans for span in spans]

    def could_start_s(self, visit: Visit) -> float:
        """Return the time at which the slot's rank is free and its dependencies are met."""
        reloaded_s = (self._copied_s.get(action._replace(op=Op.RELOAD), 0.0) for action in visit.slot)
        return max(self._rank_free_s[visit.rank], *(self._fact_s[need] for need in visit.needs), *reloaded_s)

    def step(self, visit: Visit) -> None:
        """Execute the next slot of `execution_order`."""
        rank, _, slot, needs = visit
        op, posted_s = slot[0].op, self.could_start_s(visit)
        if op in SENDS:
            end_s = self._send(rank, slot, posted_s)
        elif op in RELAYS:
            end_s = self._relay(rank, slot, needs[0])
        elif op is Op.OFFLOAD:
            end_s = self._rank_free_s[rank] = max(posted_s, self._copied_s[slot[0]])
        elif op is Op.RELOAD:
            end_s = self._copied_s[slot[0]] = self._copy(rank, RELOAD_LANE, slot[0], posted_s)
        elif op in RECEIVES or op is Op.RESHARD:
            end_s = self._rank_free_s[rank] = posted_s
        elif op in _SIDE:
            end_s = self._occupy(rank, REDUCE_LANE, slot, posted_s, self.seconds(slot))
        else:
            end_s = self._compute(rank, slot, posted_s)
        for action in slot:
            for fact in establishes(action):
                self._fact_s[fact] = end_s

    def _copy(self, rank: int, lane: Lane, action: Action, posted_s: float) -> float:
        """Post a copy between a device and its host, and return its end."""
        seconds = self._costs.host.transit_s(self._costs.offload_bytes(action.stage))
        return self._occupy(rank, lane, (action,), posted_s, seconds)

    def _compute(self, rank: int, slot: Slot, start_s: float) -> float:
        end_s = self._rank_free_s[rank] = start_s + self.seconds(slot)
        if slot[0].op is not Op.STEP or end_s > start_s:
            self._rank_spans[rank].append(Span(rank, COMPUTE_LANE, slot, start_s, end_s))
        for action in slot:
            if (offload := action._replace(op=Op.OFFLOAD)) in self._offloads and action.op is Op.F:
                self._copied_s[offload] = self._copy(rank, OFFLOAD_LANE, offload, end_s)
        return end_s

    def seconds(self, slot: Slot) -> float:
        """Return the seconds for which a slot occupies its rank, or the lane of a collective."""
        stages = self._costs.stages
        if self._sample is not None and slot[0].op in COMPUTE:
            halves_s = sum(sampled_s(self._costs, action, self._sample) for action in slot)
            if len(slot) == 1:
                return halves_s
            forward, backward = slot
            return halves_s * self._costs.pair_scale(forward.stage, backward.stage, backward.op)
        if len(slot) == 1:
            action = slot[0]
            if action.op is Op.STEP:
                return sum(stages[s].step_s for s in self._schedule.placement.rank_stages[self._rank_of(action)])
            return stages[action.stage].seconds(action.op)
        return self._costs.pair_s(*slot)

    def _rank_of(self, action: Action) -> int:
        return self._schedule.placement.stage_ranks[action.stage]

    def _send(self, rank: int, slot: Slot, posted_s: float) -> float:
        """Post a transfer and return its arrival time."""
        op, stage, _ = slot[0]
        placement = self._schedule.placement
        self._rank_free_s[rank] = self._occupy(rank, SEND_LANE, slot, posted_s, self.seconds(slot))
        other = stage + 1 if op is Op.SEND_F else stage - 1
        peer = placement.stage_ranks[other]
        link = self._link(rank, peer)
        # The transfer is the output of the hop's lower-numbered stage, or the gradient of that output.
        num_bytes = self._costs.stages[min(stage, other)].output_bytes
        factor = 1.0 if self._sample is None else sampled_factor(link, slot[0], self._sample)
        occupied_s, transit_s = factor * link.occupancy_s(num_bytes), factor * link.transit_s(num_bytes)
        letter = "F" if op is Op.SEND_F else "B"
        crosses = placement.rank_sites[rank] != placement.rank_sites[peer]
        here, there, shared = rank, peer, crosses and link.sharing > 1
        if shared:
            each = placement.num_ranks // placement.pipelines
            here, there = rank % each, peer % each
        queues = {(here, ("uplinks" if shared else "uplink") if crosses else letter): occupied_s}
        if crosses and transit_s > occupied_s:
            queues[here, f"to {there}"] = transit_s
        return self._occupy(
            rank, Lane.transfer(letter, peer), slot, posted_s, transit_s, factor * link.latency_s, queues
        )

    def _relay(self, rank: int, slot: Slot, sent: Action) -> float:
        """Record the transfer that this rank's uplink carries in part, and return its arrival time."""
        spans = self._rank_spans[self._rank_of(sent)]
        whole = next((span for span in reversed(spans) if span.slot == (sent,)), None)
        if whole is not None:
            self._rank_spans[rank].append(replace(whole, rank=rank, slot=slot))
        return self._fact_s[sent]

    def _link(self, rank: int, peer: int) -> LinkCost:
        sites = self._schedule.placement.rank_sites
        return self._costs.link(sites[rank], sites[peer])

    def _occupy(
        self,
        rank: int,
        lane: Lane,
        slot: Slot,
        posted_s: float,
        seconds: float,
        latency_s: float = 0.0,
        queues: Mapping[tuple[int, str], float] | None = None,
    ) -> float:
        """Wait until all queues are free, occupy each queue for its seconds, and return the end time.

        Args:
            queues: seconds by queue; None takes the rank's lane for ``seconds``.
        """
        if seconds == 0.0 and latency_s == 0.0:
            return posted_s
        start_s = posted_s
        if seconds > 0.0:
            queues = queues or {(rank, lane): seconds}
            start_s = max(posted_s, *(self._lane_free_s.get(queue, 0.0) for queue in queues))
            self._lane_free_s.update((queue, start_s + held_s) for queue, held_s in queues.items())
        end_s = start_s + seconds + latency_s
        self._rank_spans[rank].append(Span(rank, lane, slot, start_s, end_s))
        return end_s
