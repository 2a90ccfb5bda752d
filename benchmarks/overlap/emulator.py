"""One rank of an emulated pair: compute takes its time, collectives are gloo's and take their links' besides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.overlap.cases import CHUNKS, COMPUTE, NAMES, OURS, PAIRS, SEQUENTIAL, Orders, OverlapCase
from benchmarks.overlap.chunked import Do, chunked
from benchmarks.overlap.timeline import PROCESSOR, StrandSpan
from benchmarks.peers.emulated_stage import WAKE_UP_S, pause
from weft.engine.strands.pair import PairRunner
from weft.engine.strands.thread import StrandThread
from weft.engine.strands.turns import Turns, TurnTakingHandle
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.plan import SegmentPlan, Step
from weft.pipeline.strands.segments import Kind, LinkScope, Segment, StrandPair, WeightGradient


@dataclass
class _Transfer:
    """What a link carries.

    Attributes:
        end_s: when it ends if nothing slows it down any more.
        carried: the collective itself; None for a part that goes without.
    """

    link: LinkScope
    step: Step
    start_s: float
    end_s: float
    carried: Any
    machine: Machine

    def wait(self) -> Any:
        """Until all have brought their part, and the link's time is over."""
        begin_s = perf_counter()
        result = None if self.carried is None else self.carried.wait()
        came_s = perf_counter()
        pause(self.end_s - came_s)
        self.machine.spans.append(StrandSpan(self.link.value, self.step, self.start_s, self.end_s))
        self.machine.stood_still(max(self.end_s, came_s) if came_s - begin_s > WAKE_UP_S else self.end_s)
        return result


class Machine:
    """A processor and a queue per link; operators that run at once slow each other down as a table says.

    Where the host runs ahead, as a GPU's does, what it takes between two computations is hidden: a computation
    begins when the one before has ended, or what was waited for has come.
    """

    def __init__(self, table: OverlapTable, *, runs_ahead: bool = False) -> None:
        self._table, self._runs_ahead = table, runs_ahead
        self._transfers: list[_Transfer] = []
        self._free_s = 0.0
        self.spans: list[StrandSpan] = []
        self.hurries = False
        """True if nothing takes time, as in a step that only warms up."""

    def compute(self, seconds: float, kind: Kind, step: Step) -> None:
        """Take so long, and longer while links are busy, whose transfers take longer, too."""
        begin_s, seconds = self._now_s, 0.0 if self.hurries else seconds
        busy = [t for t in self._transfers if t.end_s > begin_s]
        self._transfers = busy
        slow = self._table.slowdown(kind, tuple({transfer.link for transfer in busy})) - 1.0 if busy else 0.0
        beside_s = min(seconds, max((transfer.end_s for transfer in busy), default=begin_s) - begin_s)
        for transfer in busy:
            transfer.end_s += slow * min(beside_s, transfer.end_s - begin_s)
        end_s = begin_s + seconds + slow * beside_s
        pause(end_s - perf_counter())
        self._free_s = end_s if self._runs_ahead else perf_counter()
        self.spans.append(StrandSpan(PROCESSOR, step, begin_s, self._free_s))

    def start(self, seconds: float, link: LinkScope, step: Step, carried: Any = None) -> _Transfer:
        """Occupy a link from when it is free, beside a collective that has been started."""
        seconds = 0.0 if self.hurries else seconds
        start_s = max([self._now_s, *(t.end_s for t in self._transfers if t.link is link)])
        transfer = _Transfer(link, step, start_s, start_s + seconds, carried, self)
        self._transfers.append(transfer)
        return transfer

    def stood_still(self, until_s: float) -> None:
        """There was nothing to compute until then."""
        self._free_s = max(self._free_s, until_s)

    @property
    def _now_s(self) -> float:
        return self._free_s if self._runs_ahead else perf_counter()


class _PairMachine(Machine):
    """One whose collectives are all like those of an axis."""

    def __init__(self, table: OverlapTable, axis: str) -> None:
        super().__init__(table, runs_ahead=True)
        self._axis, self._tensor = axis, torch.zeros(dist.get_world_size())

    def exchange(self, seconds: float, link: LinkScope, step: Step, *, whole: bool = True) -> _Transfer:
        """Start a collective, or the link's part of a chunk that gloo is not to be kept busy with."""
        return self.start(seconds, link, step, self._collective() if whole else None)

    def _collective(self) -> Any:
        received = torch.empty_like(self._tensor)
        if self._axis == "expert":
            return dist.all_to_all_single(received, self._tensor, async_op=True)
        return dist.all_gather_into_tensor(received, self._tensor[:1], async_op=True)


def measure(
    case: OverlapCase, pair: StrandPair, orders: Orders, rounds: int
) -> tuple[dict[str, list[float]], list[StrandSpan]]:
    """On one rank: seconds of every way to run a pair, by turns; and what the last run of ours did when."""
    thread, turns = StrandThread(torch.device("cpu")), Turns()
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    spans: list[StrandSpan] = []
    for number in range(rounds + 1):
        for name in NAMES:
            machine = _PairMachine(case.table, case.axis)
            run = _way(name, machine, pair, orders, PairRunner(thread, turns), turns)
            dist.barrier()
            begin_s = perf_counter()
            machine.stood_still(begin_s)
            run()
            taken_s = perf_counter() - begin_s
            if number:  # the first round warms up
                seconds[name].append(taken_s)
            if name == OURS:
                spans = [StrandSpan(s.lane, s.step, s.start_s - begin_s, s.end_s - begin_s) for s in machine.spans]
    thread.close()
    return seconds, spans


def _way(
    name: str, machine: _PairMachine, pair: StrandPair, orders: Orders, runner: PairRunner, turns: Turns
) -> Callable[[], None]:
    if name == COMPUTE:
        return lambda: _alone(machine, pair, communicate=False)
    if name == SEQUENTIAL:
        return lambda: _alone(machine, pair, communicate=True)
    if name == CHUNKS:
        return lambda: _chunked(machine, pair)
    if name == PAIRS:
        return lambda: _paired(machine, orders)
    return lambda: _by_turns(machine, pair, orders.plans[name], runner, turns)


def _alone(machine: _PairMachine, pair: StrandPair, *, communicate: bool) -> None:
    """One strand after the other, with nothing beside a collective."""
    for step, strand in ((Step.backward, pair.backward), (Step.forward, pair.forward)):
        for segment in strand.segments:
            machine.compute(segment.compute_s, segment.kind, step)
            if segment.link is not None and communicate:
                machine.exchange(segment.comm_s, segment.link, step).wait()
    for weight in pair.weights:
        machine.compute(weight.compute_s, weight.kind, Step.weight)


def _chunked(machine: _PairMachine, pair: StrandPair) -> None:
    coming: deque[_Transfer] = deque()
    for step in chunked(pair):
        if step.do is Do.wait:
            coming.popleft().wait()
        elif step.do is Do.compute:
            machine.compute(step.seconds, step.kind, Step.backward)
        else:
            assert step.link is not None
            coming.append(machine.exchange(step.seconds, step.link, Step.backward, whole=step.last))


def _paired(machine: _PairMachine, orders: Orders) -> None:
    """Operators in pairs, with a barrier after each."""
    for operators in orders.paired.together:
        started = [machine.exchange(o.comm_s, o.link, Step.forward) for o in operators if o.link is not None]
        for operator in operators:
            machine.compute(operator.compute_s, operator.kind, Step.forward)
        for transfer in started:
            transfer.wait()


def _by_turns(machine: _PairMachine, pair: StrandPair, plan: SegmentPlan, runner: PairRunner, turns: Turns) -> None:
    weights: Iterator[WeightGradient] = iter(pair.weights)

    def strand(segments: tuple[Segment, ...], step: Step) -> None:
        for segment in segments:
            machine.compute(segment.compute_s, segment.kind, step)
            if segment.link is not None:
                TurnTakingHandle(machine.exchange(segment.comm_s, segment.link, step), turns).wait()

    def play_weight() -> None:
        weight = next(weights)
        machine.compute(weight.compute_s, weight.kind, Step.weight)

    runner.run(
        plan,
        lambda: strand(pair.forward.segments, Step.forward),
        lambda: strand(pair.backward.segments, Step.backward),
        play_weight,
    )
