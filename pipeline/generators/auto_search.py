"""The search: simulated annealing over rows, with moves along the critical path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import NamedTuple

from weft.pipeline.action import Op
from weft.pipeline.generators.auto_problem import NONE, Durations, Problem, Rows
from weft.pipeline.generators.auto_timing import Timing, mean_s, time_rows


class Block(NamedTuple):
    """Successive slots of a row that are all on the critical path, or whose transfers occupied a link on it."""

    rank: int
    first: int
    last: int


Change = dict[int, list[int]]
"""New rows by rank, or empty if a move changes nothing."""


class Search:
    """Improve rows by simulated annealing; the result never exceeds the cap and is never worse than the start.

    The makespan is the length of the critical path, so every move changes one of its blocks. A move
    shifts a slot within or near the block, shifts a micro-batch earlier or later on several ranks,
    merges an input gradient with its weight gradient or splits them, or forms or splits a strand
    pair. A move that lengthens the step is accepted with a probability that falls during a
    round. Each round starts from the best rows so far.

    With ``sampled`` durations the step is the mean over the samples, and the critical path that of one at random.
    """

    def __init__(
        self, problem: Problem, rows: Rows, cap_bytes: float, *, seed: int = 0, sampled: Sequence[Durations] = ()
    ) -> None:
        self.problem, self.cap_bytes = problem, cap_bytes
        self._sampled = sampled or (problem.medians,)
        self._random = Random(seed)
        self._best = [row[:] for row in rows]
        self._best_s = mean_s(problem, rows, self._sampled)
        self._moves: list[Callable[[Rows, Block], Change]] = [
            *[self._shift_slot] * 8,
            self._toggle_full_backward,
            self._shift_microbatch,
        ]
        if problem.least_pair_scale < 1:
            self._moves += [self._toggle_pair] * 3

    def run(self, evaluations: int, lower_bound_s: float) -> Rows:
        """Run the search and return the best rows.

        Args:
            evaluations: moves to try over all rounds.
            lower_bound_s: stop when the makespan reaches this.
        """
        moves_per_slot = evaluations / max(1, sum(map(len, self._best)))
        rounds = max(1, min(8, int(moves_per_slot / 50)))
        # Hot enough to escape a local optimum, if there are enough moves to settle in another.
        temperature = 0.05 * min(1.0, moves_per_slot / 100)
        for _ in range(rounds):
            self._anneal(evaluations // rounds, lower_bound_s, temperature)
        return self._best

    def _anneal(self, evaluations: int, enough_s: float, temperature: float) -> None:
        """Run one round of annealing, cooling from ``temperature`` (a share of the makespan) to a fiftieth of it."""
        rows, now_s = [row[:] for row in self._best], self._best_s
        temperature_s, cooling = temperature * now_s, 0.02 ** (1 / max(1, evaluations))
        blocks = self._critical_blocks(rows, self._timed(rows, self._random.choice(self._sampled)))
        for _ in range(evaluations):
            if self._best_s <= enough_s:
                return
            temperature_s *= cooling
            change = self._random.choice(self._moves)(rows, self._random.choice(blocks))
            if not change or any(self.problem.peak_bytes(row) > self.cap_bytes for row in change.values()):
                continue
            durations = self._random.choice(self._sampled) if len(self._sampled) > 1 else None
            moved = [change.get(rank, row) for rank, row in enumerate(rows)]
            timing = time_rows(self.problem, moved, durations)
            if timing is None:
                continue
            moved_s = timing.makespan_s if len(self._sampled) == 1 else mean_s(self.problem, moved, self._sampled)
            if not self._accepts(moved_s - now_s, temperature_s):
                continue
            rows, now_s = moved, moved_s
            blocks = self._critical_blocks(rows, timing)
            if now_s < self._best_s:
                self._best_s, self._best = now_s, rows

    def _timed(self, rows: Rows, durations: Durations) -> Timing:
        timing = time_rows(self.problem, rows, durations)
        assert timing is not None
        return timing

    def _accepts(self, longer_s: float, temperature_s: float) -> bool:
        return longer_s <= 0 or self._random.random() < exp(-longer_s / temperature_s)

    def _shift_slot(self, rows: Rows, block: Block) -> Change:
        """Move a slot within or near its block, occasionally anywhere in its row."""
        row = rows[block.rank]
        index = self._random.randint(block.first, block.last)
        if self._random.random() < 0.1:
            target = self._random.randrange(len(row))
        else:
            first, last = max(block.first - 2, index - 8, 0), min(block.last + 2, index + 8, len(row) - 1)
            target = self._random.randint(first, last)
        moved = self._moved(row, index, target)
        return {block.rank: moved} if moved else {}

    def _shift_microbatch(self, rows: Rows, block: Block) -> Change:
        """Move a micro-batch a few positions earlier or later on several successive stages."""
        problem, ranks = self.problem, self.problem.placement.stage_ranks
        node = rows[block.rank][self._random.randint(block.first, block.last)]
        if node >= problem.num_nodes or problem.op(node) is Op.W:
            return {}
        step = self._random.choice((-1, 1)) * problem.nodes_per_stage
        places = self._random.choice((-3, -2, -1, 1, 2, 3))
        change: Change = {}
        for _ in range(self._random.randint(2, max(2, len(ranks)))):
            if not 0 <= node < problem.num_nodes:
                break
            rank = problem.rank(node)
            row = change.get(rank, rows[rank])
            if node in row:
                index = row.index(node)
                moved = self._moved(row, index, min(max(index + places, 0), len(row) - 1))
                change.update({rank: moved} if moved else {})
            node += step
        return change

    def _moved(self, row: list[int], index: int, target: int) -> list[int] | None:
        """Return the row with a slot moved as close to ``target`` as dependencies allow, or None if it cannot move."""
        place, slot, may_swap = index, row[index], self.problem.may_swap
        while place < target and may_swap(slot, row[place + 1]):
            place += 1
        while place > target and may_swap(row[place - 1], slot):
            place -= 1
        if place == index:
            return None
        moved = row[:]
        moved.insert(place, moved.pop(index))
        return moved

    def _toggle_full_backward(self, rows: Rows, block: Block) -> Change:
        """Split a full backward, or merge an input gradient with the weight gradient after it."""
        row, problem = rows[block.rank], self.problem
        index = self._random.randint(block.first, block.last)
        node = row[index]
        if node >= problem.num_nodes:
            return {}
        if problem.op(node) is Op.B:
            return {block.rank: [*row[:index], *problem.facts(node), *row[index + 1 :]]}
        whole = problem.full_backward(*row[index : index + 2])
        return {} if whole == NONE else {block.rank: [*row[:index], whole, *row[index + 2 :]]}

    def _toggle_pair(self, rows: Rows, block: Block) -> Change:
        """Split a strand pair into two slots, or pair a slot with the next one."""
        row, problem = rows[block.rank], self.problem
        index = self._random.randint(block.first, block.last)
        halves = problem.halves.get(row[index])
        if halves is not None:
            return {block.rank: [*row[:index], *self._random.sample(halves, 2), *row[index + 1 :]]}
        pair = problem.strand_pair(*row[index : index + 2])
        return {} if pair == NONE else {block.rank: [*row[:index], pair, *row[index + 2 :]]}

    def _critical_blocks(self, rows: Rows, timing: Timing) -> list[Block]:
        """Return the blocks of one critical path, the last block first."""
        rank = max(range(len(rows)), key=timing.rank_end_s.__getitem__)
        first = last = len(rows[rank]) - 1
        blocks = []
        while True:
            row = rows[rank]
            while first > 0 and timing.cause[row[first]] == NONE:
                first -= 1
            blocks.append(Block(rank, first, last))
            fact = timing.cause[row[first]]
            if fact == NONE:
                return blocks
            rank, place_of_fact = self._position(rows, timing, fact)
            first = last = place_of_fact
            while timing.blocked_by[fact] != NONE:
                fact = timing.blocked_by[fact]
                sender, place = self._position(rows, timing, fact)
                if sender != rank:  # another pipeline of the cell occupied the uplink
                    blocks.append(Block(rank, first, last))
                    rank, last = sender, place
                first = place
            if first < last:
                blocks.append(Block(rank, first, last))
                last = first

    def _position(self, rows: Rows, timing: Timing, fact: int) -> tuple[int, int]:
        rank = self.problem.rank(fact)
        return rank, rows[rank].index(timing.producer[fact])
