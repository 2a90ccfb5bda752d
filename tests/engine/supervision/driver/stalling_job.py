"""Jobs that come to a stand: every rank runs as far as it can, in any order, without times.

What a rank does and waits for in a step is the engine's: sends start and go on by themselves,
receives are posted ahead, gradients are reduced and weights gathered behind what is computed, and
in ``STEP`` and after it ranks go from sum to sum.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from weft.engine.supervision.driver.culprit import JobRows
from weft.engine.supervision.messages import RowProgress
from weft.pipeline.action import COMPUTE, RECEIVES, SENDS, Action, Op, receive_of

Condition = Callable[[], bool] | None
"""The condition for which a rank waits; None is its own work."""


@dataclass(repr=False)
class StallingJob:
    """A job with at most one fault.

    Attributes:
        zero_stage: what replicas shard.
        overlap: whether collectives run behind computations.
        clip: whether every step waits for the gradient's norm.
        log_every: steps between sums over everyone for the log.
        hung: a rank that does no more work of its own; what it has started goes on.
        deaf: a rank that does not go on after a receive, though what it waits for is there.
        stopped: a rank whose process stands still.
        cut: links that carry nothing any more, as pairs of ranks.
    """

    job: JobRows
    rng: random.Random
    zero_stage: int = 0
    overlap: bool = True
    clip: bool = True
    log_every: int = 2
    hung: int | None = None
    deaf: int | None = None
    stopped: int | None = None
    cut: set[frozenset[int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.progress = {rank: RowProgress(0) for rank in self.job.seats}
        self._there: dict[object, set[int]] = {}
        self._ended: set[object] = set()
        self._programs = {rank: self._run(rank) for rank in self.job.seats}
        self._waiting: dict[int, Condition] = {rank: next(program) for rank, program in self._programs.items()}

    # -- running -----------------------------------------------------------------------------------

    def can_move(self, rank: int) -> bool:
        if rank == self.stopped:
            return False
        waits_for = self._waiting[rank]
        if rank == self.deaf and isinstance(waits_for, partial):
            return False
        return rank != self.hung if waits_for is None else waits_for()

    def move(self, moves: int | None = None) -> bool:
        """Move random ranks ``moves`` times, or until none can move. True if all moves were made."""
        ranks = list(self._programs)
        for _ in count() if moves is None else range(moves):
            self.rng.shuffle(ranks)
            rank = next(filter(self.can_move, ranks), None)
            if rank is None:
                return False
            self._waiting[rank] = next(self._programs[rank])
        return True

    # -- what moves between ranks ------------------------------------------------------------------

    def _alive(self, ranks: set[int], links: list[tuple[int, int]] | None = None) -> bool:
        return self.stopped not in ranks and not any(frozenset(link) in self.cut for link in links or ())

    def _post(self, condition: Callable[[], bool]) -> None:
        if self.rng.random() < 0.5:  # it may be through at once, or take its time
            condition()

    def _arrived(self, key: object, sender: int, receiver: int) -> bool:
        links = list(self.job.carriers(sender, receiver))
        if key in self._there and key not in self._ended and self._alive({r for link in links for r in link}, links):
            self._ended.add(key)
        return key in self._ended

    def _gathered(self, key: object, ranks: list[int]) -> bool:
        if self._there.get(key, set()) >= set(ranks) and self._alive(set(ranks)):
            self._ended.add(key)
        return key in self._ended

    def _join(self, rank: int, key: object, ranks: list[int]) -> Callable[[], bool]:
        """Take part in something that all of ``ranks`` take part in; the condition that it is through."""
        self._there.setdefault(key, set()).add(rank)
        self._post(lambda: self._gathered(key, ranks))
        return lambda: self._gathered(key, ranks)

    # -- a rank ------------------------------------------------------------------------------------

    def _run(self, rank: int) -> Iterator[Condition]:
        number, row_number = self.job.seats[rank]
        replica = self.job.replicas[number]
        row = replica.schedule.rows[row_number]
        replicas = [other.ranks[row_number] for other in self.job.replicas]
        everyone = list(self.job.seats)
        source = replica.ranks[replica.schedule.placement.stage_ranks[-1]]
        sources = [other.ranks[replica.schedule.placement.stage_ranks[-1]] for other in self.job.replicas]
        published: Condition = None
        for step in count(1):
            yield None  # reads its batches
            counted = self._join(rank, ("count", step), sources) if rank in sources else None
            self.progress[rank] = RowProgress(step)
            yield None
            sent: list[Callable[[], bool]] = []
            reduced: list[Callable[[], bool]] = []
            uses: dict[int, int] = {}
            for index, slot in enumerate(row):
                self.progress[rank] = RowProgress(step, index, True)
                for action in reversed(slot):
                    if action.op in RECEIVES:
                        yield partial(self._arrived, (number, step, action), self._sender(number, action), rank)
                    elif action.op in SENDS:
                        sent.append(self._send(number, step, rank, action))
                        yield None
                    elif action.op in COMPUTE:
                        if published is not None:
                            yield from self._wait(rank, published)
                            published = None
                        if counted is not None and action.op is Op.F and self._is_last(number, action):
                            yield counted
                        if self.zero_stage == 3 and action.op is not Op.W:
                            uses[action.stage] = uses.get(action.stage, 0) + 1
                            key = "gather", step, action.stage, uses[action.stage]
                            yield from self._wait(rank, self._join(rank, key, replicas))
                        yield None
                    elif action.op is Op.UNSHARD:
                        yield None
                    elif action.op is Op.REDUCE_GRAD:
                        yield None
                        reduced.append(self._join(rank, ("reduce", step, action.stage), replicas))
                        if not self.overlap:
                            yield from self._wait(rank, reduced[-1])
                    elif action.op is Op.STEP:
                        yield from self._step(rank, step, reduced, everyone)
                        if self.zero_stage in (1, 2):
                            published = self._join(rank, ("publish", step), replicas)
                    else:
                        yield None
                self.progress[rank] = RowProgress(step, index + 1)
                yield None
            yield from sent
            yield None
            yield from self._end(rank, step, source, sources, everyone)

    def _wait(self, rank: int, *conditions: Condition) -> Iterator[Condition]:
        """A wait that shows in the rank's place."""
        self.progress[rank] = self.progress[rank]._replace(waits=self.progress[rank].waits + 1)
        yield from conditions
        self.progress[rank] = self.progress[rank]._replace(waits=self.progress[rank].waits + 1)

    def _step(self, rank, step, reduced, everyone) -> Iterator[Condition]:
        yield None
        yield from self._wait(rank, *reduced)
        yield None
        if self.clip:
            yield from self._wait(rank, self._join(rank, ("norm", step), everyone))
        yield None

    def _end(self, rank, step, source, sources, everyone) -> Iterator[Condition]:
        if rank in sources:
            summed = self._join(rank, ("loss", step), sources)
            yield from self._wait(rank, summed)
            self._there[("told", step, rank)] = {rank}
        else:
            yield from self._wait(rank, lambda: self._gathered(("told", step, source), [source]))
        yield None
        if step % self.log_every == 0:
            yield from self._wait(rank, self._join(rank, ("log", step), everyone))
            yield None

    def _send(self, number: int, step: int, rank: int, action: Action) -> Callable[[], bool]:
        receive = receive_of(action)
        replica = self.job.replicas[number]
        receiver = replica.ranks[replica.schedule.placement.stage_ranks[receive.stage]]
        key = number, step, receive
        self._there[key] = {rank}

        def through() -> bool:
            return self._arrived(key, rank, receiver)

        self._post(through)
        return through

    def _sender(self, number: int, receive: Action) -> int:
        replica = self.job.replicas[number]
        stage = receive.stage - 1 if receive.op is Op.RECV_F else receive.stage + 1
        return replica.ranks[replica.schedule.placement.stage_ranks[stage]]

    def _is_last(self, number: int, action: Action) -> bool:
        return action.stage == self.job.replicas[number].schedule.placement.num_stages - 1
