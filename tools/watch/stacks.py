"""`weft stacks`: what this host's ranks of a run execute now, with ranks of equal stacks together."""

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

from weft.engine.observability.event_ring import RingReader, rings_folder

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
    """Run ``weft stacks RUN [--native] [--threads]`` and return the exit code.

    Raises:
        ValueError: no rank of the run is alive on this host, or py-spy is missing.
    """
    parser = argparse.ArgumentParser(
        prog="weft stacks", description="Show what this host's ranks of a run execute, ranks of equal stacks together."
    )
    parser.add_argument("run", type=Path, help="folder of the run, such as runs/quickstart")
    parser.add_argument("--native", action="store_true", help="with frames of C++")
    parser.add_argument("--threads", action="store_true", help="with threads other than the main one")
    args = parser.parse_args(argv)
    program = find_py_spy()
    readers = live_ranks(args.run)
    read = partial(read_stacks, program, native=args.native, threads=args.threads)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(readers, pool.map(read, (reader.pid for reader in readers.values())), strict=True))
    print("\n".join(report(readers, found)))
    return 0


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
    """Return the ring of each living rank of a run on this host, by rank.

    Raises:
        ValueError: there is none.
    """
    found = {}
    for path in rings_folder(run_folder.expanduser()).glob("rank*"):
        with suppress(OSError, ValueError):  # it is being replaced, or is not of this user
            reader = RingReader(path)
            if not reader.is_closed:
                found[reader.rank] = reader
    if not found:
        raise ValueError(
            f"{run_folder}: no rank of it is alive on this host that records events for this user; "
            "run this where the ranks run, as their user, with logging.events=true"
        )
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
        yield f"{len(members)} of {len(found)} ranks: " + ", ".join(_doing(readers[rank]) for rank in members)
        if isinstance(stacks, str):
            yield f"    cannot be read: {stacks}"
            continue
        for number, stack in enumerate(stacks):
            if number:
                yield "    another thread"
            yield from (f"    {frame.function} ({frame.file}:{frame.line})" for frame in stack)


def _doing(reader: RingReader) -> str:
    now = reader.current()
    if not now["slot"]:
        return f"rank {now['rank']}"
    seconds = max(0.0, time() - float(str(now["since"])))
    return f"rank {now['rank']} in {now['slot']} of step {now['step']} for {seconds:.1f} s"
