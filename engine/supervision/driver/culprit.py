"""The culprit of a standstill, derived from each rank's position in its schedule row.

Every rank executes a known row of slots, so its position determines which input it waits for. When no rank moves, the
culprit is a rank whose next action has all its inputs and does not run. If only a transfer that was sent is missing,
the culprit is the link. (MegaScale section 5.2 derives the same from the ranks' logs.)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from weft.engine.supervision.messages import RowProgress
from weft.pipeline.action import COMPUTE, RECEIVES, SENDS, Action, Op, Slot, parse_slot, receive_of, slot_text
from weft.pipeline.cell import pipeline_of
from weft.pipeline.costs import StageCost
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Replica:
    """A pipeline of the job.

    Attributes:
        schedule: the pipeline's schedule, without relays. Replicas with equal schedules share the object.
        ranks: the global rank that executes each row.
        busy_s: seconds that each row's own computations are predicted to take in a step, or empty if unknown.
    """

    schedule: Schedule
    ranks: tuple[int, ...]
    busy_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class JobRows:
    """The schedule rows of all ranks of a job.

    Attributes:
        replicas: the pipelines. A row executes the same stages in every replica.
        cells: for each DP-cell, the numbers of the replicas that share their uplinks between sites. Other replicas are
            in no cell.
    """

    replicas: tuple[Replica, ...]
    cells: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def seats(self) -> dict[int, tuple[int, int]]:
        """Numbers of the replica and of the row of each global rank."""
        return {
            rank: (number, row)
            for number, replica in enumerate(self.replicas)
            for row, rank in enumerate(replica.ranks)
        }

    def row(self, rank: int) -> tuple[Slot, ...]:
        """Return the slots that a global rank executes in a step."""
        number, row = self.seats[rank]
        return self.replicas[number].schedule.rows[row]

    def predicted_s(self, rank: int) -> float:
        """Return the predicted seconds of a rank's own computations in a step, or 0 if unknown."""
        number, row = self.seats[rank]
        predicted = self.replicas[number].busy_s
        return predicted[row] if predicted else 0.0

    def doing(self, rank: int, progress: RowProgress) -> str:
        """Describe a rank's current action."""
        row = self.row(rank)
        if progress.step == 0:
            return "before its first step"
        if progress.done >= len(row):
            return f"done with step {progress.step}"
        text = f"{slot_text(row[progress.done])} (slot {progress.done + 1} of {len(row)}) of step {progress.step}"
        return f"in {text}" if progress.begun else f"before {text}"

    def crosses(self, rank: int, other: int) -> bool:
        """True if two ranks are at different sites."""
        (number, here), (_, there) = self.seats[rank], self.seats[other]
        sites = self.replicas[number].schedule.placement.rank_sites
        return sites[here] != sites[there]

    @cached_property
    def _cell_of(self) -> dict[int, tuple[int, ...]]:
        return {replica: cell for cell in self.cells for replica in cell}

    def carriers(self, sender: int, receiver: int) -> tuple[tuple[int, int], ...]:
        """Return the links, as pairs of global ranks, that carry a transfer: in a DP-cell all pipelines' uplinks."""
        (number, here), (_, there) = self.seats[sender], self.seats[receiver]
        if number not in self._cell_of or not self.crosses(sender, receiver):
            return ((sender, receiver),)
        return tuple(
            (self.replicas[other].ranks[here], self.replicas[other].ranks[there]) for other in self._cell_of[number]
        )


@dataclass(frozen=True)
class Suspect:
    """A rank or a link that holds up the others.

    Attributes:
        rank: the global rank, or None for a link.
        links: the link as a pair of global ranks. Several pairs if the uplinks of a DP-cell carry the transfer and it
            is unknown which of them fails.
        doing: the current action of the rank, or the transfer that does not arrive.
    """

    rank: int | None
    links: tuple[tuple[int, int], ...] = ()
    doing: str = ""


@dataclass
class _Candidate:
    """A rank that has all its inputs and does not run, or a transfer that was sent and has not arrived.

    Attributes:
        rank: the rank, or the receiver.
        sender: the sender of the transfer, or None if the candidate is the rank itself.
        helpers: ranks whose processes take part in the pending operation. None stands for all ranks.
    """

    rank: int
    sender: int | None = None
    helpers: Collection[int] | None = ()

    def among(self, silent: frozenset[int]) -> frozenset[int]:
        """Return the silent ranks on which the candidate depends."""
        return silent if self.helpers is None else silent.intersection((self.rank, *self.helpers))

    def delivered(self, job: JobRows, sound: Collection[frozenset[int]]) -> _Candidate:
        """Return this candidate, but blame the receiver instead of the transfer if all links of the transfer work."""
        if self.sender is None or not all(frozenset(pair) in sound for pair in job.carriers(self.sender, self.rank)):
            return self
        return _Candidate(self.rank, helpers=self.helpers)


def find_culprits(
    job: JobRows,
    progress: Mapping[int, RowProgress],
    *,
    silent: Collection[int] = (),
    broken: Iterable[tuple[int, int]] = (),
    sound: Iterable[tuple[int, int]] = (),
) -> tuple[Suspect, ...]:
    """Return the rank or link that holds up the others. Several if the ranks' progress does not distinguish them.

    Args:
        silent: ranks without heartbeats: stopped, or with a thread that holds the interpreter's lock. Their
            transfers and collectives stand still with them.
        broken: links, as pairs of ranks in any order, without a connection.
        sound: links that are known to work. Messages sent over them have arrived, so the receiver is the culprit.
    """
    judge = _Judge(job, progress)
    found = [candidate for rank in sorted(progress) if (candidate := judge.candidate(rank)) is not None]
    silent = frozenset(silent)
    mute = frozenset().union(*(candidate.among(silent) for candidate in found)) if silent else silent
    if mute or not found:
        return tuple(Suspect(rank, doing=job.doing(rank, progress[rank])) for rank in sorted(mute or silent))
    works = {frozenset(pair) for pair in sound}
    found = [candidate.delivered(job, works) for candidate in found]
    stuck = [candidate for candidate in found if candidate.sender is not None]
    ranks = [Suspect(c.rank, doing=job.doing(c.rank, progress[c.rank])) for c in found if c.sender is None]
    return (*ranks, *_links(job, progress, stuck, {frozenset(pair) for pair in broken}))


def _links(
    job: JobRows, progress: Mapping[int, RowProgress], stuck: Sequence[_Candidate], broken: Collection[frozenset[int]]
) -> list[Suspect]:
    """Return the links of transfers that were sent and have not arrived. Each set of links is returned once."""
    crossings: dict[frozenset[frozenset[int]], list[_Candidate]] = {}
    for candidate in stuck:
        assert candidate.sender is not None
        carriers = frozenset(map(frozenset, job.carriers(candidate.sender, candidate.rank)))
        crossings.setdefault(carriers, []).append(candidate)
    found = []
    for carriers, candidates in crossings.items():
        ends = frozenset[int]().union(*carriers)
        pairs = [pair for pair in broken if pair <= ends] or carriers
        text = ", ".join(f"rank {c.rank} {job.doing(c.rank, progress[c.rank])}" for c in candidates[:3])
        found.append(Suspect(None, tuple(sorted(_pair(pair) for pair in pairs)), text))
    return found


def _pair(ends: frozenset[int]) -> tuple[int, int]:
    low, high = sorted(ends)
    return low, high


class _Judge:
    """Decides for each rank whether it is a candidate. Results that several ranks need are cached."""

    def __init__(self, job: JobRows, progress: Mapping[int, RowProgress]) -> None:
        self._job, self._progress = job, progress
        self._far = {rank: self._from_end(rank) for rank in progress}
        self._least = min(self._far.values())
        self._used: dict[tuple[int, int], list[int]] = {}
        self._least_used: dict[tuple[int, int], tuple[int, int, int]] = {}

    def _from_end(self, rank: int) -> tuple[int, int, bool, int]:
        """Return a rank's position relative to the end of its row, because rows of different lengths end together."""
        step, done, begun, waits = self._progress[rank]
        return step, done - len(self._job.row(rank)), begun, waits

    def candidate(self, rank: int) -> _Candidate | None:
        """Return the rank or the transfer that it lacks as a candidate, or None if it waits for other ranks."""
        progress, row = self._progress[rank], self._job.row(rank)
        if progress.done >= len(row) or progress.step == 0 or (progress.begun and row[progress.done][0].op is Op.STEP):
            return self._together(rank)
        if not progress.begun:
            return _Candidate(rank)
        number, _ = self._job.seats[rank]
        for action in row[progress.done]:
            if action.op in RECEIVES:
                return self._receive(number, rank, action)
            if action.op not in SENDS and not self._replicas_are_there(rank, action.stage):
                return None
        return _Candidate(rank, helpers=self._helpers(number, row[progress.done]))

    def _together(self, rank: int) -> _Candidate | None:
        """Return the rank if it is last, or None. In ``STEP`` and later all ranks take part in each reduction."""
        return _Candidate(rank, helpers=None) if self._far[rank] == self._least else None

    def _receive(self, number: int, rank: int, action: Action) -> _Candidate | None:
        replica = self._job.replicas[number]
        stage = action.stage - 1 if action.op is Op.RECV_F else action.stage + 1
        row = replica.schedule.placement.stage_ranks[stage]
        sender = replica.ranks[row]
        step = self._progress[rank].step
        sent = RowProgress(step, self._slot_of(replica.schedule.rows[row], action) + 1)
        if self._progress[sender] < sent:
            return None
        carriers = self._job.carriers(sender, rank)
        return _Candidate(rank, sender, [end for pair in carriers for end in pair])

    @staticmethod
    def _slot_of(row: Sequence[Slot], receive: Action) -> int:
        """Return the index of the slot with the send that a receive waits for."""
        for index, slot in enumerate(row):
            if slot[0].op in SENDS and receive_of(slot[0]) == receive:
                return index
        raise ValueError(f"{receive}: no rank sends it; is the schedule lowered?")

    def _helpers(self, number: int, slot: Slot) -> Collection[int]:
        """Return the ranks whose processes take part in a slot: replicas in a computation, the receiver in a send."""
        replica, op = self._job.replicas[number], slot[0].op
        ranks = replica.schedule.placement.stage_ranks
        if op in SENDS:
            return (replica.ranks[ranks[receive_of(slot[0]).stage]],)
        rows = {ranks[action.stage] for action in slot}
        return [other.ranks[row] for other in self._job.replicas for row in rows]

    # -- replicas, which gather weights and reduce gradients together ------------------------------

    def _replicas_are_there(self, rank: int, stage: int) -> bool:
        """True if all replicas have used a stage in this step as often as this rank has.

        Weights are gathered before a stage is used, and gradients reduced afterwards. How far a rank may run ahead of
        its replicas depends on the ZeRO stage. A rank never has to be ahead of its replicas to continue.
        """
        _, row = self._job.seats[rank]
        if len(self._job.replicas) == 1:
            return True
        key = row, stage
        if key not in self._least_used:
            self._least_used[key] = min(self._use(replica.ranks[row], stage) for replica in self._job.replicas)
        return self._least_used[key] >= self._use(rank, stage)

    def _use(self, rank: int, stage: int) -> tuple[int, int, int]:
        """Return the step, the number of uses of a stage begun in it, and the waits entered in the last use."""
        progress, counts = self._progress[rank], self._counts(rank, stage)
        done = min(progress.done, len(counts) - 1)
        using = progress.begun and counts[done + 1] > counts[done]
        return (progress.step, counts[done] + using, progress.waits if using else _MANY_WAITS)

    def _counts(self, rank: int, stage: int) -> list[int]:
        """Count the uses of a stage before each slot of a rank's row."""
        row = self._job.row(rank)
        key = id(row), stage
        if key not in self._used:
            counts = [0]
            for slot in row:
                counts.append(counts[-1] + any(a.stage == stage and a.op in _USES for a in slot))
            self._used[key] = counts
        return self._used[key]


_USES = COMPUTE | {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD}
_MANY_WAITS = 1 << 30


def shortage(plan: str, replicas: int, *, zero_stage: int) -> str:
    """Return why a number of replicas cannot fit into the devices' memory, or empty if it may.

    With fewer replicas, each has a larger shard of the optimiser's state. Other memory is assumed to be unchanged. The
    estimate is a lower bound, so a run that passes may still run out of memory.

    Args:
        plan: text of the previous attempt's ``plan.json``. Without a readable plan the result is empty.
    """
    try:
        tree = json.loads(plan)
        before = len(tree["ranks"])
        free = float(tree["facts"]["device_bytes"]["value"])
        most = max(_bytes(rank, before / replicas, zero_stage) for rank in tree["memory"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    if replicas >= before or most <= free:
        return ""
    return f"the fullest rank needs {most / 2**30:.3g} GiB or more, and has {free / 2**30:.3g}"


def _bytes(rank: dict[str, float], times: float, zero_stage: int) -> float:
    """Return the least bytes of a pipeline rank if its shards of optimiser state grow by the factor ``times``."""
    whole = sum(map(float, rank.values()))
    return whole - rank["buffers"] + (times - 1) * (rank["optimizer"] if zero_stage else 0.0)


_COMPUTED = ("forward_s", "input_s", "weight_s")


def read_rows(text: str) -> JobRows:
    """Parse the schedule rows in the text of a ``plan.json``. See `weft.engine.planning.plan_file`.

    Raises:
        ValueError: the text is not a plan of this version of Weft.
    """
    try:
        tree = json.loads(text)
        placement = Placement(
            tuple(tree["placement"]["groups"]), tree["placement"]["legs"], tuple(tree["placement"]["sites"])
        )
        sizes = {member["schedule"]: member["pipelines"] for member in tree["members"]}
        cells = {key: _schedule(tree["schedules"][key], placement, size) for key, size in sizes.items()}
        members = [(member["schedule"], member["local_rank"]) for member in tree["members"]]
        sites = [tuple(map(int, line)) for line in tree["sites"]]
        ranks = [tuple(map(int, row)) for row in tree["ranks"]]
        stages = tree["costs"]["stages"]
        costs = [StageCost(**{name: cost[name] or 0.0 for name in _COMPUTED}, activation_bytes=0.0) for cost in stages]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"plan.json: not a plan of this Weft ({error!r})") from error
    lines = list(zip(members, sites, strict=True))
    alone = {(member, at): _at_sites(pipeline_of(cells[member[0]], member[1]), at) for member, at in set(lines)}
    busy_s = {id(schedule): _busy_s(schedule, costs) for schedule in alone.values()}
    replicas = tuple(Replica(alone[line], row, busy_s[id(alone[line])]) for line, row in zip(lines, ranks, strict=True))
    counts = [sizes[key] for key, local_rank in members if local_rank == 0]
    firsts = accumulate(counts, initial=0)
    shared = tuple(tuple(range(first, first + size)) for first, size in zip(firsts, counts, strict=False) if size > 1)
    return JobRows(replicas, shared)


def _at_sites(schedule: Schedule, sites: tuple[int, ...]) -> Schedule:
    return replace(schedule, placement=replace(schedule.placement, sites=sites))


def _busy_s(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """Return the predicted computation seconds of each row, by the plan's costs."""
    actions = [[action for slot in row for action in slot if action.op in COMPUTE] for row in schedule.rows]
    return tuple(sum(costs[action.stage].seconds(action.op) for action in row) for row in actions)


def _schedule(entry: dict[str, Any], placement: Placement, pipelines: int) -> Schedule:
    whole = Placement(placement.groups, placement.legs, placement.sites, pipelines)
    rows = tuple(tuple(map(parse_slot, row.split())) for row in entry["rows"])
    if len(rows) != whole.num_ranks:
        raise ValueError(f"schedules: {len(rows)} rows for {whole.num_ranks} ranks")
    return Schedule(entry["name"], whole, entry["num_microbatches"], rows)
