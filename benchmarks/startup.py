"""Start-up: what ranks ask of the job's store, and how long a run takes to its first step and from its last."""

from __future__ import annotations

import argparse
import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import linear_regression, median

from benchmarks.results import finish, parse, show
from benchmarks.starts.clients import FILES_PER_CLIENT, Asked, ask_as_many
from benchmarks.starts.first_step import PEER, RANKS, WEFT, Run, compare
from benchmarks.starts.ranks import (
    DEEPSPEED,
    ENGINE,
    WORLD,
    EmulatedStart,
    Part,
    start_among_emulated,
    start_for_real,
)
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

STAGES = 4
TIMEOUT_S = 280.0
PROCESSES = 8
"""That share the clients of the store."""
GOALS_S = {2048: 5.0, 10_240: 30.0}
"""Most seconds that clients are connected and answered in (MegaScale section 3.5: below 5 at 2,048 ranks)."""
MOST_CPU = 1.1
"""Times the peer's processor time that a run may take."""
OTHER_FILES = 512
"""That a process may have open besides those of its clients."""


def main(argv: Sequence[str]) -> int:
    """Run ``[--ranks N ...] [--clients N ...] [--rounds N]``; returns 1 if a goal is missed.

    Raises:
        ValueError: a number of ranks or clients that cannot be started here.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks startup", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16, 32], help="real ranks (default 4 8 16 32)")
    parser.add_argument(
        "--clients", type=int, nargs="*", default=[2048, 10_240], help="clients of the store (default 2048 10240)"
    )
    parser.add_argument("--rounds", type=int, default=0, help="of weft launch and torchrun by turns (default none)")
    args = parse(parser, argv)
    if wrong := [count for count in (*args.ranks, *args.clients) if count < STAGES or count % STAGES]:
        raise ValueError(f"{wrong[0]} ranks: give a multiple of {STAGES}, which is how many stages the job has")
    files = _files()
    if too_many := [count for count in args.clients if count + OTHER_FILES > files]:
        raise ValueError(
            f"--clients {too_many[0]}: a process may open {files} files, and the store's needs one for each client; "
            "raise it (ulimit -n)"
        )
    real = {count: _real(count) for count in args.ranks}
    if real:
        show(table_of(_real_rows(real), f"Real ranks over gloo, {STAGES} stages"), *_fits(real))
    emulated = {count: _emulated(count) for count in args.clients}
    asked = {count: _asked(count, emulated[count]) for count in args.clients}
    if emulated:
        show(table_of(map(_client_row, emulated.values(), asked.items()), "A rank among emulated ones, and its store"))
    begun: Mapping[str, Sequence[Run]] = compare(args.rounds) if args.rounds > 0 else {}
    if begun:
        show(table_of(map(_start_row, begun.items()), f"{RANKS} ranks, a tiny model with LoRA, {args.rounds} rounds"))
        show(table_of([_ratio_row(begun)], f"{WEFT} over {PEER}, median of ratios by round"))
    met = _is_no_slower(begun) and all(
        each.connect_s + each.ask_s <= GOALS_S.get(count, TIMEOUT_S) for count, each in asked.items()
    )
    figures = {
        "real": {count: list(map(_as_dicts, ranks)) for count, ranks in real.items()},
        "emulated": {count: asdict(each) for count, each in emulated.items()},
        "starts": {side: [asdict(run) for run in runs] for side, runs in begun.items()},
        "clients": {count: asdict(each) for count, each in asked.items()},
    }
    return finish(args, "startup", figures, met=met)


def _start_row(found: tuple[str, Sequence[Run]]) -> dict[str, object]:
    side, runs = found
    names = {
        "first output": "said_s",
        "first step": "first_step_s",
        "last step to exit": "exit_s",
        "processor": "cpu_s",
    }
    return {"run by": side, **{head: _spread([getattr(run, name) for run in runs]) for head, name in names.items()}}


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"


def _ratios(begun: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """How many times as long as the peer `weft launch` takes, by what is measured."""
    names = ("first_step_s", "exit_s", "cpu_s")
    pairs = list(zip(begun[WEFT], begun[PEER], strict=True))
    return {name: median(getattr(own, name) / getattr(peer, name) for own, peer in pairs) for name in names}


def _ratio_row(begun: Mapping[str, Sequence[Run]]) -> dict[str, object]:
    ratios = _ratios(begun)
    return {
        "first step": f"{ratios['first_step_s']:.2f}",
        "last step to exit": f"{ratios['exit_s']:.2f}",
        "processor": f"{ratios['cpu_s']:.2f}",
    }


def _is_no_slower(begun: Mapping[str, Sequence[Run]]) -> bool:
    """True if first step and exit come no later than the peer's, for at most `MOST_CPU` of its processor time."""
    if not begun:
        return True
    ratios = _ratios(begun)
    return ratios["first_step_s"] <= 1.0 and ratios["exit_s"] <= 1.0 and ratios["cpu_s"] <= MOST_CPU


def _real(count: int) -> list[dict[str, Part]]:
    return run_ranks(count, start_for_real, STAGES, count // STAGES, TIMEOUT_S, timeout_s=TIMEOUT_S)


def _emulated(count: int) -> EmulatedStart:
    return run_ranks(1, start_among_emulated, STAGES, count // STAGES, TIMEOUT_S, timeout_s=TIMEOUT_S)[0]


def _asked(count: int, start: EmulatedStart) -> Asked:
    """By all clients: operations of all, the time that the last of them took, and what the store itself took."""
    fronts = fronts_for(count, _files())
    run = partial(run_ranks, 1 + fronts + PROCESSES, ask_as_many, count, start.group_sizes, TIMEOUT_S, fronts)
    found: list[Asked] = run(timeout_s=TIMEOUT_S)
    return Asked(
        sum(each.operations for each in found),
        max(each.connect_s for each in found),
        max(each.ask_s for each in found),
        sum(each.cpu_s for each in found[: 1 + fronts]),
    )


def _files() -> int:
    """That a process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def fronts_for(count: int, files: int) -> int:
    """Processes that authenticate clients for the store, so that none opens more than ``files``; 0 if it can itself."""
    room = files - OTHER_FILES
    return 0 if FILES_PER_CLIENT * count <= room else math.ceil((FILES_PER_CLIENT - 1) * count / room)


def _real_rows(real: Mapping[int, Sequence[Mapping[str, Part]]]) -> list[dict[str, object]]:
    return [
        {
            "part": name,
            "ranks": count,
            "of a rank, at most": max(each[name].operations for each in ranks),
            "which": _named(max((each[name] for each in ranks), key=lambda part: part.operations)),
            "of all": sum(each[name].operations for each in ranks),
            "slowest rank": f"{max(each[name].seconds for each in ranks):.2f} s",
        }
        for name in (WORLD, ENGINE, DEEPSPEED)
        for count, ranks in real.items()
    ]


def _fits(real: Mapping[int, Sequence[Mapping[str, Part]]]) -> list[str]:
    """What a rank asks, as a line over the number of ranks; a single replica has other groups and is left out."""
    real = {count: ranks for count, ranks in real.items() if count > STAGES}
    if len(real) < 2:
        return []
    lines = []
    for name in (WORLD, ENGINE, DEEPSPEED):
        most = [max(each[name].operations for each in ranks) for ranks in real.values()]
        slope, rest = linear_regression(list(real), most)
        lines.append(f"{name}: {slope:.2f} n {rest:+.1f} operations of a rank of n")
    return lines


def _client_row(start: EmulatedStart, found: tuple[int, Asked]) -> dict[str, object]:
    count, asked = found
    return {
        "ranks": f"{count:,}",
        "engine stands after": f"{start.seconds:.1f} s",
        "groups of a rank": len(start.group_sizes),
        "operations of all": f"{asked.operations:,}",
        "store behind": f"{fronts} fronts" if (fronts := fronts_for(count, _files())) else "",
        "connected": f"{asked.connect_s:.1f} s",
        "answered": f"{asked.ask_s:.1f} s",
        "the store's processor time": f"{asked.cpu_s:.1f} s",
        "goal": f"{GOALS_S[count]:g} s" if count in GOALS_S else "",
    }


def _as_dicts(parts: Mapping[str, Part]) -> dict[str, dict[str, object]]:
    return {name: asdict(part) for name, part in parts.items()}


def _named(part: Part) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(part.asked.items()))
