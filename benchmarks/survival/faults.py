"""Faults of ranks, hosts and disks for `benchmarks survive`, and the expected diagnosis of each."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

from benchmarks.survival.hosts import HOSTS
from benchmarks.survival.run import RankProcess, SupervisedRun, now
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.culprit import read_rows
from weft.engine.supervision.progress_page import Reading, page_path
from weft.pipeline.action import Op, Slot
from weft.tools.preflight import MIN_FREE_BYTES

Culprit = dict[str, Any]
"""The culprit of a fault in the journal: rank and host, or a link."""


@dataclass(frozen=True)
class Inflicted:
    """A fault that has begun.

    Attributes:
        blamed: the expected culprit and kind, as in the journal; all entries have to agree. In addition, ``site``
            stands for any of its hosts, ``between`` for any link between sites and ``ranks`` for ranks that cannot
            be distinguished. None if no culprit is expected, because nothing has to be restarted.
        at_s: time of day at which it began; some faults wait for a suitable moment.
        healed_s: time of day from which training can continue, if that is later.
    """

    blamed: Culprit | None = None
    at_s: float = field(default_factory=now)
    healed_s: float = 0.0


@dataclass(frozen=True)
class Fault:
    """A fault of a run, and its expected consequences.

    Attributes:
        alert: kind of the alert that has to be raised, if it is not a fault.
        ends: kind of the fault with which the run should end, because it cannot recover.
        rounds: True if another number of replicas changes the order of sums from here on.
        grows: True if the run gets more ranks again.
        skips: True if a batch is skipped.
    """

    name: str
    inflict: Callable[[SupervisedRun], Inflicted]
    alert: str = ""
    ends: str = ""
    rounds: bool = False
    grows: bool = False
    skips: bool = False


def _blame(rank: RankProcess) -> Inflicted:
    return Inflicted({"rank": rank.rank, "host": rank.host})


# ---- one rank


def _row(run: SupervisedRun, rank: RankProcess) -> list[Slot]:
    return list(read_rows((run.folder / "plan.json").read_text()).row(rank.rank))


def _kill_in(run: SupervisedRun, number: int, *ops: Op) -> Inflicted:
    """Send SIGKILL while the rank executes a slot with one of these operations."""
    row = _row(run, run.rank(number))
    wanted = {index for index, slot in enumerate(row) if any(action.op in ops for action in slot)}
    return _kill_when(run, number, lambda reading: reading.progress.begun and reading.progress.done in wanted)


def _kill_in_save(run: SupervisedRun, number: int) -> Inflicted:
    return _kill_when(run, number, lambda reading: reading.phase is Phase.checkpoint)


def _kill_when(run: SupervisedRun, number: int, due: Callable[[Reading], bool]) -> Inflicted:
    """Send SIGKILL as soon as ``due`` is true of the rank's published progress, which changes within milliseconds."""
    rank, limit = run.rank(number), monotonic() + 60.0
    page = run.page(rank.host)
    while monotonic() < limit:
        if (reading := page.read(rank.local_rank)) and due(reading):
            os.kill(rank.pid, signal.SIGKILL)
            return _blame(rank)
    raise RuntimeError(f"rank {number} was never seen where it should be killed")


def _stop(run: SupervisedRun, number: int) -> Inflicted:
    rank = run.rank(number)
    os.kill(rank.pid, signal.SIGSTOP)
    return _blame(rank)


def _stop_and_go(run: SupervisedRun, number: int) -> Inflicted:
    """Stop and continue the rank every 0.1 s during 15 s."""
    rank = run.rank(number)

    def turns() -> None:
        limit = monotonic() + 15.0
        with suppress(ProcessLookupError):
            while monotonic() < limit:
                os.kill(rank.pid, signal.SIGSTOP)
                sleep(0.1)
                os.kill(rank.pid, signal.SIGCONT)
                sleep(0.1)

    threading.Thread(target=turns, daemon=True).start()
    begun = Inflicted()
    sleep(15.5)
    return begun


def _hold_lock(run: SupervisedRun, number: int) -> Inflicted:
    rank = run.rank(number)
    run.order(number, "hold_lock", seconds=60)
    return _blame(rank)


def _hold_lock_in_save(run: SupervisedRun, number: int) -> Inflicted:
    """Make the rank hold the lock while it saves a checkpoint, which may take long but has to show progress."""
    rank, begun = run.rank(number), run.orders / "saves"
    begun.unlink(missing_ok=True)
    run.order(number, "hold_lock_in_save", seconds=60)
    run.wait_for(begun.exists, "a save")
    return _blame(rank)


def _exhaust_memory(run: SupervisedRun, number: int) -> Inflicted:
    """Make the rank allocate more memory than its new control group of 256 MiB may have."""
    rank = run.rank(number)
    version1 = Path("/sys/fs/cgroup/memory")
    group = (version1 if version1.is_dir() else version1.parent) / f"weft-survive-{rank.pid}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if version1.is_dir() else "memory.max")).write_text(str(256 << 20))
    (group / "cgroup.procs").write_text(str(rank.pid))
    run.order(number, "take_memory", num_bytes=1 << 30)
    return _blame(rank)


def _flip(run: SupervisedRun, number: int) -> Inflicted:
    """Flip a bit; both of two replicas are blamed, because either may be wrong."""
    run.order(number, "flip")
    return Inflicted({"ranks": sorted((number, number ^ 1)), "kind": "corruption"})


# ---- hosts and those who watch


def _kill_hosts(run: SupervisedRun, *hosts: str) -> Inflicted:
    victims = run.agents(hosts)
    everyone = [child for agent in victims for child in agent.children(recursive=True)] + victims
    for process in everyone:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return Inflicted({"host": hosts[0]})


def _kill_agent(run: SupervisedRun, host: str) -> Inflicted:
    """Kill only the agent by SIGKILL; its ranks end with it."""
    for process in run.agents([host]):
        process.kill()
    return Inflicted({"host": host})


def _kill_driver(run: SupervisedRun) -> Inflicted:
    run.process.kill()
    begun = Inflicted()
    sleep(3.0)
    return begun


def _shout_at_ports(run: SupervisedRun) -> Inflicted:
    """Send garbage to every port on which a process of the run listens."""
    begun = Inflicted()
    pids = {each.pid for each in run.ranks()} | {agent.pid for agent in run.agents()} | {run.process.pid}
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid in pids:
            with suppress(OSError), socket.create_connection(connection.laddr[:2], timeout=1.0) as caller:
                caller.sendall(os.urandom(4096))
                caller.settimeout(1.0)
                while caller.recv(4096):
                    pass
    sleep(2.0)
    return begun


def _shift_clocks(run: SupervisedRun) -> Inflicted:
    begun = Inflicted()
    for number, rank in enumerate(run.ranks()):
        run.order(rank.rank, "shift_clock", seconds=60.0 if number % 2 else -60.0)
    sleep(3.0)
    return begun


# ---- checkpoints in storage; a rank is killed so that they are read


@contextmanager
def _held_still(run: SupervisedRun) -> Iterator[None]:
    """Stop all ranks during the block, so that none writes."""
    pids = [each.pid for each in run.ranks()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _damage_newest(run: SupervisedRun) -> Inflicted:
    """Flip a bit of the newest checkpoint. Then remove the copies in memory and kill a rank, so that it is read."""
    run.wait_for(lambda: len(_complete(run)) > 1, "two checkpoints")
    rank = run.rank(5)
    with _held_still(run):
        newest = max(_complete(run), key=lambda path: int(path.name[5:]))
        _flip_stored_bit(sorted(newest.glob("**/*.safetensors"))[0])
        _forget_memory(run)
        os.kill(rank.pid, signal.SIGKILL)
    return _blame(rank)


def _complete(run: SupervisedRun) -> list[Path]:
    return [path for path in (run.folder / "checkpoints").glob("step-*") if path.name[5:].isdigit()]


def _forget_memory(run: SupervisedRun) -> None:
    for page in (page_path(run.folder, host) for host in HOSTS):
        for path in page.parent.glob(f"{page.name}.memory*/**/*.safetensors"):
            path.unlink(missing_ok=True)


def _flip_stored_bit(shard: Path) -> None:
    with open(shard, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


ONE_RANK = (
    Fault("SIGKILL in F", lambda run: _kill_in(run, 4, Op.F)),
    Fault("SIGKILL in B", lambda run: _kill_in(run, 3, Op.B, Op.I)),
    Fault("SIGKILL in a send", lambda run: _kill_in(run, 2, Op.SEND_F, Op.SEND_B)),
    Fault("SIGKILL in the reduction", lambda run: _kill_in(run, 5, Op.REDUCE_GRAD)),
    Fault("SIGKILL in the step", lambda run: _kill_in(run, 6, Op.STEP)),
    Fault("SIGKILL in a save", lambda run: _kill_in_save(run, 1)),
    Fault("SIGSTOP for good", lambda run: _stop(run, 3)),
    Fault("SIGSTOP half of the time", lambda run: _stop_and_go(run, 2), alert="straggler"),
    Fault("interpreter lock held for 60 s", lambda run: _hold_lock(run, 6)),
    Fault("interpreter lock held in a save", lambda run: _hold_lock_in_save(run, 7)),
    Fault("out of memory in a control group", lambda run: _exhaust_memory(run, 4)),
    Fault("a bit flipped in a replica's weights", lambda run: _flip(run, 5)),
)
HOSTS_AND_WATCHERS = (
    Fault("a whole host killed", lambda run: _kill_hosts(run, HOSTS[1])),
    Fault("the host of rank 0 killed", lambda run: _kill_hosts(run, HOSTS[0])),
    Fault("an agent killed", lambda run: _kill_agent(run, HOSTS[2])),
    Fault("the driver killed", _kill_driver),
    Fault("wall clocks of ranks wrong by +-60 s", _shift_clocks),
    Fault("garbage on every open port", _shout_at_ports),
)
STORAGE = (Fault("newest checkpoint: a bit flipped", _damage_newest),)


# ---- numbers


def _poison(run: SupervisedRun, times: int) -> Inflicted:
    run.order(7, "poison", times=times)
    begun = Inflicted()
    run.wait_for((run.orders / "poisoned").exists, "a gradient of NaN")
    return begun


NUMBERS = (Fault("one batch gives NaN", lambda run: _poison(run, 1), skips=True),)
ENDLESS_NAN = (Fault("every batch gives NaN", lambda run: _poison(run, 1 << 30), ends="bad_numbers"),)


# ---- the disk


def _fill_disk(run: SupervisedRun) -> Inflicted:
    """Fill the file system of the run's folder until a checkpoint has been skipped."""
    ballast = run.folder / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    begun = Inflicted()
    run.wait_for(lambda: "no checkpoint: " in run.output(), "a checkpoint that does not fit")
    ballast.unlink()
    return Inflicted(None, begun.at_s, now())


DISK_MIB = (MIN_FREE_BYTES >> 20) + 90
"""A little more than a run requires before it starts."""
DISK = (Fault("the disk full, then emptied", _fill_disk, alert="disk"),)
