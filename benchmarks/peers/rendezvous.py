"""How long a step takes of an engine whose transfers are gloo's, from its own order of computing, posting and waiting.

Our simulator lets a transfer leave when its producer has ended and its link is free. With gloo a
transfer is a rendezvous: it leaves once the sender knows that the receive is posted, and that
notice queues behind what the receiver itself is sending over the same connection. So a rank that
posts a send and a receive together may have them one after the other (measured between two nodes
40 ms apart, 1.125 MB each way: 3.2 s if both sides post the receive first, 6.2 s if they do not).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weft.pipeline.action import Op
from weft.pipeline.costs import CostModel
from weft.pipeline.placement import Placement


@dataclass(frozen=True)
class Transfer:
    """An activation (``F``) or gradient (``B``) of one micro-batch, between neighbours of a pipeline."""

    letter: str
    microbatch: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class Compute:
    """``F`` or ``B`` of one micro-batch."""

    letter: str


@dataclass(frozen=True)
class Post:
    """Sends and receives that a rank starts, in this order."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Wait:
    """Sends and receives that a rank waits for."""

    transfers: tuple[Transfer, ...]


Step = Compute | Post | Wait
Program = Callable[[int, int, int], Iterator[Step]]
"""What a rank does in a step: (rank, number of ranks, micro-batches)."""


def _out(rank: int, ranks: int, letter: str, microbatch: int) -> tuple[Transfer, ...]:
    peer = rank + 1 if letter == "F" else rank - 1
    return (Transfer(letter, microbatch, rank, peer),) if 0 <= peer < ranks else ()


def _in(rank: int, ranks: int, letter: str, microbatch: int) -> tuple[Transfer, ...]:
    peer = rank - 1 if letter == "F" else rank + 1
    return (Transfer(letter, microbatch, peer, rank),) if 0 <= peer < ranks else ()


def torch_gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Step]:
    """`ScheduleGPipe` of torch 2.13: receives wait one by one, sends at the end of each half."""
    for letter in "FB":
        sent: tuple[Transfer, ...] = ()
        for k in range(microbatches):
            arriving, leaving = _in(rank, ranks, letter, k), _out(rank, ranks, letter, k)
            yield from (Post(arriving), Wait(arriving), Compute(letter), Post(leaving))
            sent += leaving
        yield Wait(sent)


def torch_1f1b(rank: int, ranks: int, microbatches: int) -> Iterator[Step]:
    """`Schedule1F1B` of torch 2.13: in the middle a send and the next receive are posted and waited for together."""
    ahead = min(microbatches, ranks - rank)
    leaving: tuple[Transfer, ...] = ()
    for k in range(ahead):
        arriving = _in(rank, ranks, "F", k)
        yield from (Post(arriving), Wait(arriving), Compute("F"), Wait(leaving))
        leaving = _out(rank, ranks, "F", k)
        if k < ahead - 1:
            yield Post(leaving)
    for k in range(microbatches - ahead + 1):
        together = leaving + _in(rank, ranks, "B", k)
        yield from (Post(together), Wait(together), Compute("B"))
        leaving = _out(rank, ranks, "B", k)
        if k < microbatches - ahead:
            together = leaving + _in(rank, ranks, "F", ahead + k)
            yield from (Post(together), Wait(together), Compute("F"))
            leaving = _out(rank, ranks, "F", ahead + k)
    yield Post(leaving)
    for k in range(microbatches - ahead + 1, microbatches):
        arriving = _in(rank, ranks, "B", k)
        yield from (Post(arriving), Wait(arriving), Compute("B"), Wait(leaving))
        leaving = _out(rank, ranks, "B", k)
        yield Post(leaving)
    yield Wait(leaving)


def deepspeed_1f1b(rank: int, ranks: int, microbatches: int) -> Iterator[Step]:
    """DeepSpeed's own instructions; each send and each receive waits until it is through."""
    from deepspeed.runtime.pipe import schedule as instructions

    moves = {
        instructions.SendActivation: (_out, "F"),
        instructions.RecvActivation: (_in, "F"),
        instructions.SendGrad: (_out, "B"),
        instructions.RecvGrad: (_in, "B"),
    }
    computes = {instructions.ForwardPass: "F", instructions.BackwardPass: "B"}
    counts: Counter[type] = Counter()
    for commands in instructions.TrainSchedule(microbatches, ranks, rank).steps():
        for kind in map(type, commands):
            if kind in computes:
                yield Compute(computes[kind])
            elif kind in moves:
                make, letter = moves[kind]
                transfers = make(rank, ranks, letter, counts[kind])
                counts[kind] += 1
                yield from (Post(transfers), Wait(transfers))


PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {"torch GPipe": torch_gpipe, "torch 1F1B": torch_1f1b, "DeepSpeed 1F1B": deepspeed_1f1b}
)


def step_s(program: Program, placement: Placement, microbatches: int, costs: CostModel) -> float:
    """Seconds until the last rank of one pipeline has ended its step.

    Args:
        placement: one stage per rank, in order.
        costs: of its stages and links.

    Raises:
        ValueError: the ranks wait for each other without end.
    """
    return _Run(program, placement, microbatches, costs).until_all_end_s()


class _Run:
    def __init__(self, program: Program, placement: Placement, microbatches: int, costs: CostModel) -> None:
        ranks = placement.num_ranks
        self._placement, self._costs = placement, costs
        self._programs = [list(program(rank, ranks, microbatches)) for rank in range(ranks)]
        self._next = [0] * ranks
        self._now_s = [0.0] * ranks
        self._asked_s: dict[Transfer, float] = {}  # when its send was posted
        self._invited_s: dict[Transfer, float] = {}  # when its sender knows that the receive is posted
        self._left_s: dict[Transfer, float] = {}
        self._arrived_s: dict[Transfer, float] = {}
        self._busy_s: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)

    def until_all_end_s(self) -> float:
        while (found := min(self._able(), default=None)) is not None:
            now_s, rank = found
            step = self._programs[rank][self._next[rank]]
            self._next[rank] += 1
            if isinstance(step, Compute):
                now_s += self._costs.stages[rank].seconds(Op[step.letter])
            elif isinstance(step, Post):
                for transfer in step.transfers:
                    self._post(rank, transfer, now_s)
            self._now_s[rank] = now_s
        if any(done < len(program) for done, program in zip(self._next, self._programs, strict=True)):
            raise ValueError("the ranks wait for each other without end")
        return max(self._now_s)

    def _able(self) -> Iterator[tuple[float, int]]:
        """Ranks that can go on, and when."""
        for rank, program in enumerate(self._programs):
            step = program[self._next[rank]] if self._next[rank] < len(program) else None
            if isinstance(step, Wait):
                ends = [(self._left_s if t.sender == rank else self._arrived_s).get(t) for t in step.transfers]
                if None not in ends:
                    yield max([self._now_s[rank], *(end for end in ends if end is not None)]), rank
            elif step is not None:
                yield self._now_s[rank], rank

    def _post(self, rank: int, transfer: Transfer, now_s: float) -> None:
        way = (transfer.sender, transfer.receiver)
        sites = self._placement.rank_sites
        link = self._costs.link(sites[way[0]], sites[way[1]])
        if rank == transfer.sender:
            self._asked_s[transfer] = now_s
        else:
            self._invited_s[transfer] = self._free_s((transfer.receiver, transfer.sender), now_s) + link.latency_s
        if transfer in self._asked_s and transfer in self._invited_s:
            start_s = max(self._asked_s[transfer], self._invited_s[transfer], *(end for _, end in self._busy_s[way]))
            num_bytes = self._costs.stages[min(way)].output_bytes
            self._left_s[transfer] = start_s + link.occupancy_s(num_bytes)
            self._arrived_s[transfer] = self._left_s[transfer] + link.latency_s
            self._busy_s[way].append((start_s, self._left_s[transfer]))

    def _free_s(self, way: tuple[int, int], now_s: float) -> float:
        """When what is posted now on ``way`` leaves: behind the transfer under way, and those right after it."""
        for start_s, end_s in self._busy_s[way]:
            if start_s <= now_s < end_s:
                now_s = end_s
        return now_s
