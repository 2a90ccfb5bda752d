"""`weft stacks`: what this host's ranks of a run execute now, and the collective at which the ranks differ."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from weft.conf.host.terminal import printable
from weft.engine.observability.event_ring import RingReader, rings_folder
from weft.tools.parsers import refuse_unused
from weft.tools.watch.calls import Dumps, parse, read_dumps, read_ranks, read_run
from weft.tools.watch.desync import differences, idle

LIMIT_S = 20.0
"""Seconds after which a process is given up that cannot be read, as one that the kernel has stopped."""
AT_ONCE = 8


class Frame(NamedTuple):
    """A line that is being executed, and its function."""

    function: str
    file: str
    line: int


Stack = tuple[Frame, ...]
"""The frames of a thread, the innermost first."""


def main(argv: Sequence[str]) -> int:
    """Run ``weft stacks RUN [--native] [--threads] [--dumps FOLDER]`` and return the exit code.

    Raises:
        ValueError: no rank of the run is alive on this host and no calls are stored, or py-spy is missing.
    """
    parser = argparse.ArgumentParser(
        prog="weft stacks",
        description="Show what this host's ranks of a run execute, ranks of equal stacks together, and at which "
        "collective the ranks of all hosts differ.",
    )
    parser.add_argument("run", type=Path, help="folder of the run, such as runs/quickstart")
    parser.add_argument("--native", action="store_true", help="with frames of C++")
    parser.add_argument("--threads", action="store_true", help="with threads other than the main one")
    parser.add_argument("--dumps", type=Path, metavar="FOLDER", help="read only the dumps that NCCL's watchdog wrote")
    args = parser.parse_args(argv)
    if args.dumps:
        refuse_unused(parser, argv, ("native", "threads"), "--dumps reads files and no process; leave out one")
        print("\n".join(calls_report(read_dumps(args.dumps), {})))
        return 0
    run, program = args.run.expanduser(), find_py_spy()
    readers, stored = live_ranks(run), read_run(run)
    if not readers and not stored:
        raise ValueError(
            f"{args.run}: no rank of it is alive on this host that records events for this user, and no calls of a "
            "stall are stored; run this where the ranks run, as their user, with logging.events=true"
        )
    if readers:
        read = partial(read_stacks, program, native=args.native, threads=args.threads)
        reports = list(_of_calls(run, readers, stored))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = dict(zip(readers, pool.map(read, (reader.pid for reader in readers.values())), strict=True))
        print("\n".join([*report(readers, found), *reports]))
    else:
        print("\n".join(calls_report(stored, {})))
    return 0


def _of_calls(run: Path, readers: Mapping[int, RingReader], stored: Dumps) -> Iterator[str]:
    """Yield the report on the calls of this host's ranks, with the stored ones of other hosts in the same stall."""
    answers, now_s = read_ranks(rings_folder(run), list(readers)), time()
    current = {rank: reader.current() for rank, reader in readers.items()}
    still_s = min((float(str(now["since"])) for now in current.values() if now["slot"]), default=now_s)
    calls = {rank: each for rank, each in stored.items() if rank not in readers and each[0] >= still_s}
    for rank, answer in answers.items():
        if isinstance(answer, dict):
            calls[rank] = now_s, {**answer, "now": current[rank]}
    yield from calls_report(calls, {rank: text for rank, text in answers.items() if isinstance(text, str)})
    if stored and all(at_s < still_s for at_s, _ in stored.values()):
        yield "before this, in the last stall:"
        yield from calls_report(stored, {})


def find_py_spy() -> str:
    """Return the program that reads stacks.

    Raises:
        ValueError: it is not installed.
    """
    beside = Path(sys.executable).with_name("py-spy")
    if (program := str(beside) if beside.is_file() else shutil.which("py-spy")) is None:
        raise ValueError("weft stacks needs py-spy: pip install 'weft[watch]'")
    return program


def live_ranks(run_folder: Path) -> dict[int, RingReader]:
    """Return the ring of each living rank of a run on this host, by rank."""
    found = {}
    for path in rings_folder(run_folder).glob("rank*"):
        with suppress(OSError, ValueError):  # it is being replaced, or is not of this user
            reader = RingReader(path)
            if not reader.is_closed:
                found[reader.rank] = reader
    return dict(sorted(found.items()))


def read_stacks(program: str, pid: int, *, native: bool, threads: bool) -> tuple[Stack, ...] | str:
    """Return the stacks of a process, that of the main thread first, or why they cannot be read."""
    command = [program, "dump", "--pid", str(pid), "--json", *(["--native"] if native else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            return (done.stderr.strip() or f"py-spy ended with {done.returncode}").splitlines()[-1]
        dumped = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return str(error)
    stacks = sorted(dumped, key=lambda thread: thread["os_thread_id"] != pid)
    return tuple(map(_stack, stacks if threads else stacks[:1]))


def _stack(thread: Mapping[str, Any]) -> Stack:
    return tuple(
        Frame(each["name"], each["short_filename"] or each["filename"], each["line"]) for each in thread["frames"]
    )


def report(readers: Mapping[int, RingReader], found: Mapping[int, tuple[Stack, ...] | str]) -> Iterator[str]:
    """Yield the lines of the report: stacks that the fewest ranks have come first, because they tell most."""
    ranks = defaultdict(list)
    for rank, stacks in found.items():
        ranks[stacks].append(rank)
    for stacks, members in sorted(ranks.items(), key=lambda item: (len(item[1]), item[1])):
        doing = [_doing(rank, readers[rank].current(), time()) for rank in members]
        yield f"{len(members)} of {len(found)} ranks: " + ", ".join(doing)
        if isinstance(stacks, str):
            yield f"    cannot be read: {stacks}"
            continue
        for number, stack in enumerate(stacks):
            if number:
                yield "    another thread"
            yield from (f"    {frame.function} ({frame.file}:{frame.line})" for frame in stack)


def calls_report(calls: Dumps, silent: Mapping[int, str]) -> Iterator[str]:
    """Yield lines on the collective calls at which ranks differ, and on the ranks to examine first.

    Args:
        calls: each rank's dump in torch's format, with its time.
        silent: why a rank has not answered.
    """
    oldest_s = max((time() - at_s for at_s, _ in calls.values()), default=0.0)
    age = f", up to {oldest_s:.0f} s old" if oldest_s > 1 else ""
    yield f"collective calls of {len(calls)} ranks{age}:"
    for rank, text in silent.items():
        yield f"    rank {rank}: {text}"
    known = {rank: parse(dump) for rank, (_, dump) in calls.items()}
    found = differences(known, {rank: at_s for rank, (at_s, _) in calls.items()})
    yield from (f"    {each.text}" for each in found)
    for rank in idle(found):
        doing = _doing(rank, printable(calls[rank][1].get("now")), calls[rank][0])
        yield f"    examine {doing} first: it waits in none of these calls"
    if known and not any(each.calls for each in known.values()):
        yield "    none is recorded (TORCH_FR_BUFFER_SIZE=0 turns torch's Flight Recorder off)"
    elif known and not found:
        yield "    none waits, and no ranks differ"


def _doing(rank: int, now: Any, at_s: float) -> str:
    """Describe the slot of a rank, which `RingReader.current` returned at this time."""
    if not isinstance(now, dict) or not now.get("slot"):
        return f"rank {rank}"
    with suppress(ValueError, KeyError, TypeError):
        return f"rank {rank} in {now['slot']} of step {now['step']} for {max(0.0, at_s - float(now['since'])):.1f} s"
    return f"rank {rank}"
