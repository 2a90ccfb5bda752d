"""Where ranks of a process group differ: a collective that some have not called, or called with other tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import time
from typing import NamedTuple

from weft.tools.watch.calls import Call, RankCalls, parse, read_run

LEAST_S = 1.0
"""Seconds without progress below which a call that others have not made is no difference: they may just be later."""
MOST_NAMED = 8
ANY_INPUTS = ("all_to_all", "scatter")
"""Collectives to which ranks may pass other inputs. The same in torch's ``Op.match``."""
ANY_OUTPUTS = ("all_to_all", "gather")
ANY_TYPES = ("scatter", "gather", "broadcast")


class Group(NamedTuple):
    """A process group. Its backends number their collectives separately."""

    backend: str
    name: str
    ranks: tuple[int, ...]


class Difference(NamedTuple):
    """A call at which the ranks of a group differ or wait.

    Attributes:
        waiting: ranks that made it and wait.
        absent: ranks that did not make it. None of them waits there.
        waited_s: seconds since the last rank made it.
    """

    group: Group
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    waited_s: float
    text: str


def differences(found: Mapping[int, RankCalls], now_s: Mapping[int, float]) -> list[Difference]:
    """Return the first difference of each group. The first of them has ranks that are absent and wait nowhere.

    Args:
        now_s: the times of the dumps, since 1970.
    """
    every = [each for group in _groups(found) for each in _of_group(group, found, now_s)]
    waiting = {rank for each in every for rank in each.waiting}
    return sorted(every, key=lambda each: (not set(each.absent) - waiting, -each.waited_s))


def stored_difference(run_folder: Path, stalled_s: float) -> str:
    """Return the first difference between the calls that were stored in a stall of so many seconds, or an empty text.

    See `weft.tools.watch.stalls`.
    """
    since_s = time() - stalled_s  # an earlier stall may have ended by itself
    recent = {rank: each for rank, each in read_run(run_folder).items() if each[0] >= since_s}
    calls = {rank: parse(dump) for rank, (_, dump) in recent.items()}
    found = differences(calls, {rank: at_s for rank, (at_s, _) in recent.items()})
    return found[0].text if found else ""


def idle(found: Sequence[Difference]) -> list[int]:
    """Return the ranks that are absent from a call and wait in no other: the likely causes."""
    waiting = {rank for each in found for rank in each.waiting}
    return sorted({rank for each in found for rank in each.absent} - waiting)


def _groups(found: Mapping[int, RankCalls]) -> list[Group]:
    """Return the groups in which a rank has made a call."""
    known: set[Group] = set()
    unknown: dict[tuple[str, str], set[int]] = defaultdict(set)
    for rank, calls in found.items():
        for backend, name in {(call.backend, call.group) for call in calls.calls}:
            if name in calls.groups:
                known.add(Group(backend, name, calls.groups[name]))
            else:
                unknown[backend, name].add(rank)
    return sorted(known | {Group(*names, tuple(sorted(ranks))) for names, ranks in unknown.items()})


def _of_group(group: Group, found: Mapping[int, RankCalls], now_s: Mapping[int, float]) -> Iterator[Difference]:
    own = {
        rank: [call for call in found[rank].calls if (call.backend, call.group) == group[:2]]
        for rank in group.ranks
        if rank in found and found[rank].groups.get(group.name, group.ranks) == group.ranks
    }
    yield from _of_collectives(
        group, {rank: {c.number: c for c in calls if c.ends is None} for rank, calls in own.items()}, now_s
    )
    yield from _of_transfers(group, {rank: [c for c in calls if c.ends] for rank, calls in own.items()}, now_s)


def _of_collectives(
    group: Group, own: Mapping[int, Mapping[int, Call]], now_s: Mapping[int, float]
) -> Iterator[Difference]:
    """Yield the first collective that differs, is missing on a rank, or does not finish."""
    known = [calls for calls in own.values() if calls]
    first = max((min(calls) for calls in known), default=0)  # older ones are forgotten on some rank
    for number in sorted({number for calls in known for number in calls if number >= first}):
        made = {rank: calls[number] for rank, calls in own.items() if number in calls}
        absent = tuple(rank for rank in own if rank not in made)
        kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, call in made.items():
            kinds[_kind(call)].append(rank)
        waited_s = min(now_s[rank] - call.at_s for rank, call in made.items())
        if len(kinds) > 1:
            yield _differing(group, number, list(kinds.values()), made, waited_s)
            return
        if waited_s >= LEAST_S and not all(call.is_done for call in made.values()):
            yield _waiting(group, number, made, absent, waited_s)
            return


def _kind(call: Call) -> tuple[object, ...]:
    """Return what has to be equal on all ranks."""
    operation = call.operation
    return (
        operation,
        None if operation in ANY_INPUTS else call.inputs,
        None if operation in ANY_OUTPUTS else call.outputs,
        None if operation in ANY_TYPES else call.types,
    )


def _differing(
    group: Group, number: int, kinds: list[list[int]], made: Mapping[int, Call], waited_s: float
) -> Difference:
    kinds.sort(key=lambda ranks: (len(ranks), ranks))
    each = "; ".join(f"{_ranks(ranks)} called {_described(made[ranks[0]])}" for ranks in kinds)
    rare = tuple(kinds[0]) if len(kinds[0]) < len(kinds[-1]) else ()
    usual = tuple(rank for rank in made if rank not in rare)
    return Difference(group, usual, rare, waited_s, f"{_named(group)}: collective {number} differs: {each}")


def _waiting(
    group: Group, number: int, made: Mapping[int, Call], absent: tuple[int, ...], waited_s: float
) -> Difference:
    some = next(iter(made.values()))
    what = f"{_named(group)}: {some.operation} {number}"
    unknown = [rank for rank in group.ranks if rank not in made and rank not in absent]
    without = f"; nothing is recorded of {_ranks(unknown)}" if unknown else ""
    if absent:
        text = f"{what}: {_ranks(absent)} {_have(absent)} not called it, {_callers(made)} {waited_s:.1f} s ago{without}"
    else:
        late = [rank for rank, call in made.items() if not call.is_done]
        all_of = "recorded ranks" if unknown else "ranks"
        text = f"{what}: all {all_of} have called it, the last {waited_s:.1f} s ago; not finished on {_ranks(late)}"
        text += f", called by {some.where}{without}" if some.where else without
    return Difference(group, tuple(rank for rank, call in made.items() if not call.is_done), absent, waited_s, text)


def _of_transfers(group: Group, own: Mapping[int, Sequence[Call]], now_s: Mapping[int, float]) -> Iterator[Difference]:
    """Yield the transfers that do not finish. Only NCCL's recorder has transfers."""
    pending: dict[tuple[int, int], dict[str, list[tuple[int, Call]]]] = defaultdict(lambda: {"send": [], "recv": []})
    for rank, calls in own.items():
        for call in calls:
            is_late = not call.is_done and now_s[rank] - call.at_s >= LEAST_S
            if is_late and call.ends is not None and max(call.ends) < len(group.ranks):
                ends = group.ranks[call.ends[0]], group.ranks[call.ends[1]]
                pending[ends][call.operation].append((rank, call))
    for (sender, receiver), each in sorted(pending.items()):
        sends, receives = each["send"], each["recv"]
        rank, call = (sends or receives)[0]
        waited_s = now_s[rank] - call.at_s
        what, absent = f"{_named(group)}: rank {sender} to rank {receiver}", tuple[int, ...]()
        if len(sends) > len(receives) and receiver in own:
            text, absent = f"{what}: the receiver has posted {len(receives)} of {len(sends)} receives", (receiver,)
        elif len(receives) > len(sends) and sender in own:
            text, absent = f"{what}: the sender has posted {len(sends)} of {len(receives)} sends", (sender,)
        else:
            text = f"{what}: posted on both ranks, and does not arrive"
        waiting = tuple(sorted({sender, receiver} - set(absent)))
        yield Difference(group, waiting, absent, waited_s, f"{text} for {waited_s:.1f} s{_by(call)}")


def _callers(made: Mapping[int, Call]) -> str:
    by_place: dict[str, list[int]] = defaultdict(list)
    for rank, call in made.items():
        by_place[call.where].append(rank)
    return " and ".join(f"{_ranks(ranks)} did{_by(made[ranks[0]])}" for ranks in by_place.values())


def _by(call: Call) -> str:
    return f" in {call.where}" if call.where else ""


def _described(call: Call) -> str:
    inputs = ", ".join(f"{'x'.join(map(str, size)) or 'scalar'}" for size in call.inputs[:MOST_NAMED])
    types = "/".join(sorted(set(call.types[0])))
    return f"{call.operation} of {inputs or 'nothing'} {types}".rstrip() + _by(call)


def _named(group: Group) -> str:
    return f"{group.backend} group {group.name} ({_ranks(group.ranks)})"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:MOST_NAMED])) + (", ..." if len(ranks) > MOST_NAMED else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
