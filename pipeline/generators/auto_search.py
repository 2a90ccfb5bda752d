"""The search: simulated annealing over the rows, with moves along the critical path."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from random import Random
from typing import NamedTuple

from weft.pipeline.action import Op
from weft.pipeline.generators.auto_problem import NONE, Problem, Rows
from weft.pipeline.generators.auto_timing import Timing, time_rows


class Block(NamedTuple):
    """Slots of a rank's row without a gap on the critical path, or that kept a link on it busy."""

    rank: int
    first: int
    last: int


Change = dict[int, list[int]]
"""New rows by rank; empty if a move came to nothing."""


class Search:
    """Annealing from one set of rows to better ones; never above the cap, never worse at the end.

    The makespan is the length of the critical path, so a move starts from one of its blocks:
    a slot goes elsewhere in or near the block, a micro-batch goes earlier or later on several
    ranks, a weight gradient joins or leaves its input gradient, a strand pair forms or opens.
    Moves that lengthen the step are kept with a probability that falls as a round goes on;
    each round starts from the best so far.
    """

    def __init__(self, problem: Problem, rows: Rows, cap_bytes: float, *, seed: int = 0) -> None:
        self.problem, self.cap_bytes = problem, cap_bytes
        self._random = Random(seed)
        self._best = [row[:] for row in rows]
        self._best_s = self._timed(rows).makespan_s
        self._moves: list[Callable[[Rows, Block], Change]] = [*[self._shift] * 8, self._merge, self._wave]
        if problem.costs.pair_scale < 1:
            self._moves += [self._strand] * 3

    def run(self, evaluations: int, lower_bound_s: float) -> Rows:
        """The best rows found.

        Args:
            evaluations: moves to try, over all rounds.
            lower_bound_s: a makespan that cannot be beaten: the search ends when it is reached.
        """
        moves_per_slot = evaluations / max(1, sum(map(len, self._best)))
        rounds = max(1, min(8, int(moves_per_slot / 50)))
        # Hot enough to leave a basin, if there is time to settle in another.
        heat = 0.05 * min(1.0, moves_per_slot / 100)
        for _ in range(rounds):
            self._anneal(evaluations // rounds, lower_bound_s, heat)
        return self._best

    def _anneal(self, evaluations: int, enough_s: float, heat: float) -> None:
        """One round, cooling from ``heat`` (a share of the makespan) to a fiftieth of it."""
        rows, now_s = [row[:] for row in self._best], self._best_s
        heat_s, cool = heat * now_s, 0.02 ** (1 / max(1, evaluations))
        blocks = self._critical(rows, self._timed(rows))
        for _ in range(evaluations):
            if self._best_s <= enough_s:
                return
            heat_s *= cool
            change = self._random.choice(self._moves)(rows, self._random.choice(blocks))
            if not change or any(self.problem.peak_bytes(row) > self.cap_bytes for row in change.values()):
                continue
            moved = [change.get(rank, row) for rank, row in enumerate(rows)]
            timing = time_rows(self.problem, moved)
            if timing is None or not self._keeps(timing.makespan_s - now_s, heat_s):
                continue
            rows, now_s = moved, timing.makespan_s
            blocks = self._critical(rows, timing)
            if now_s < self._best_s:
                self._best_s, self._best = now_s, rows

    def _timed(self, rows: Rows) -> Timing:
        timing = time_rows(self.problem, rows)
        assert timing is not None
        return timing

    def _keeps(self, longer_s: float, heat_s: float) -> bool:
        return longer_s <= 0 or self._random.random() < exp(-longer_s / heat_s)

    def _shift(self, rows: Rows, block: Block) -> Change:
        """A slot goes to another place in or near its block, now and then anywhere in its row."""
        row = rows[block.rank]
        index = self._random.randint(block.first, block.last)
        if self._random.random() < 0.1:
            target = self._random.randrange(len(row))
        else:
            first, last = max(block.first - 2, index - 8, 0), min(block.last + 2, index + 8, len(row) - 1)
            target = self._random.randint(first, last)
        moved = self._moved(row, index, target)
        return {block.rank: moved} if moved else {}

    def _wave(self, rows: Rows, block: Block) -> Change:
        """A micro-batch goes some places earlier or later, on a run of stages up or down the model."""
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
        """The row with a slot as near to ``target`` as what it needs and feeds lets it go."""
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

    def _merge(self, rows: Rows, block: Block) -> Change:
        """A full backward opens, or an input gradient joins the weight gradient behind it."""
        row, problem = rows[block.rank], self.problem
        index = self._random.randint(block.first, block.last)
        node = row[index]
        if node >= problem.num_nodes:
            return {}
        if problem.op(node) is Op.B:
            return {block.rank: [*row[:index], *problem.facts(node), *row[index + 1 :]]}
        whole = problem.whole(*row[index : index + 2])
        return {} if whole == NONE else {block.rank: [*row[:index], whole, *row[index + 2 :]]}

    def _strand(self, rows: Rows, block: Block) -> Change:
        """A strand pair opens, or a slot forms one with the next."""
        row, problem = rows[block.rank], self.problem
        index = self._random.randint(block.first, block.last)
        halves = problem.halves.get(row[index])
        if halves is not None:
            return {block.rank: [*row[:index], *self._random.sample(halves, 2), *row[index + 1 :]]}
        pair = problem.strands(*row[index : index + 2])
        return {} if pair == NONE else {block.rank: [*row[:index], pair, *row[index + 2 :]]}

    def _critical(self, rows: Rows, timing: Timing) -> list[Block]:
        """The blocks of one critical path, last first."""
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
            rank, behind = self._made(rows, timing, fact)
            first = last = behind
            while timing.ahead[fact] != NONE:
                fact = timing.ahead[fact]
                sender, place = self._made(rows, timing, fact)
                if sender != rank:  # another pipeline of the cell kept the uplink busy
                    blocks.append(Block(rank, first, last))
                    rank, last = sender, place
                first = place
            if first < last:
                blocks.append(Block(rank, first, last))
                last = first

    def _made(self, rows: Rows, timing: Timing, fact: int) -> tuple[int, int]:
        """The rank and the place of the slot that establishes a fact."""
        rank = self.problem.rank(fact)
        return rank, rows[rank].index(timing.maker[fact])
