"""The driver of a run: receives the agents' reports, decides by `Job`, and writes the journal.

Training continues without it. All of its state is in the run's folder, so that it can be restarted at any time: by the
agent of the first host, which detects its end, or by `weft launch --attach`.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from weft.comm.authenticated_socket import RUN
from weft.conf import load
from weft.conf.features import entry
from weft.conf.host.private import credentials_in, write_private
from weft.conf.host.run_lock import RunLock
from weft.conf.host.storage import STORAGE_TIMEOUT_S, Storage, StorageHangs, TimedRead
from weft.conf.host.terminal import print_error, print_notice
from weft.conf.hosts import is_loopback, read_hostfile
from weft.conf.schema import ClusterManager, WeftConfig
from weft.conf.trees import to_yaml
from weft.engine.planning.next_attempt import NextAttempt, read_next_attempt
from weft.engine.supervision.agent.forkserver import EarlyAgent
from weft.engine.supervision.agent.guard import LaunchGuard
from weft.engine.supervision.agent.output import stderr_on_thread
from weft.engine.supervision.control import CLOCK_CLIENT, ControlServer, answer_clock
from weft.engine.supervision.driver.culprit import JobRows, read_rows, shortage
from weft.engine.supervision.driver.files import JOURNAL, DenyList, Journal, Spec, config_file, spec_file, written_ns
from weft.engine.supervision.driver.hosts import (
    THIS_MACHINE,
    ChosenHosts,
    Layout,
    choose_hosts,
    config_for,
    hostfile_text,
)
from weft.engine.supervision.driver.job import STOPS_S, Job
from weft.engine.supervision.driver.managers.starters import AgentProcess, start_here, starter_for
from weft.engine.supervision.driver.state import Stage
from weft.engine.supervision.messages import AgentCommand, DesiredState, to_fields

TICK_S = 0.05
LEAVE_S = 10.0
"""Timeout for agents to exit after the end of the run, in seconds."""
COLLECT_EVERY = 100_000
"""Threshold of Python's garbage collector, in objects. Reports of ranks contain no cycles, and each replaces another.
With Python's default of 700, collections take a third of the time of a heartbeat."""


def main(argv: Sequence[str]) -> int:
    """Run ``launch RUN_FOLDER`` or ``attach RUN_FOLDER``, and return the run's exit code."""
    word, folder = argv
    return drive(Path(folder), attach=word == "attach")


def drive(run_folder: Path, *, attach: bool = False, early: EarlyAgent | None = None) -> int:
    """Drive a run to its end, and return its exit code.

    Args:
        attach: whether the run is already in progress.
        early: the agent of this host if the host has all ranks, or None if agents still have to be started.
    """
    collect_rarely()
    try:
        driver = Driver(run_folder, attach=attach, early=early)
        with stderr_on_thread():
            return asyncio.run(driver.run())
    except ValueError as error:
        print_error("weft launch", error)
        return 2


def collect_rarely() -> None:
    """Make Python's garbage collections rare enough for a driver of thousands of ranks."""
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY)


class Driver:
    """The driver process: a `Job`, connected to agents, a journal and a clock."""

    def __init__(self, run_folder: Path, *, attach: bool, early: EarlyAgent | None = None) -> None:
        """Lock the run's folder. For the arguments see `drive`.

        Raises:
            ValueError: another driver has the lock, or there is no run to attach to.
        """
        self._folder, self._attach, self._early = run_folder, attach, early
        self._lock = RunLock(run_folder / "supervisor")
        self._spec = Spec.read(run_folder)
        for name, value in self._spec.environment.items():
            os.environ.setdefault(name, value)
        self._config = load([], recipe_file=str(config_file(run_folder)))
        self._journal = Journal(run_folder / JOURNAL)
        hostfile = self._config.cluster.hostfile
        self._hosts = read_hostfile(hostfile) if hostfile else {THIS_MACHINE: self._config.cluster.ranks}
        self._deny_list = DenyList.of(self._config.cluster.deny_list, self._config.train.output_dir)
        self._storage, self._calls = Storage(run_folder), Storage(run_folder)
        self._start = start_here if early else starter_for(self._config.cluster.manager, self._spec.ssh_port)
        self._processes: dict[tuple[str, int], AgentProcess] = {}
        self._address: str | tuple[str, int] = ""
        self._signals, self._early_is_due = 0, True
        self._complaint = ""
        self._guard: LaunchGuard | None = None
        self._laid_out: tuple[ChosenHosts, WeftConfig, Path] | None = None
        self.job = Job(
            settings=self._config.supervise,
            layouts=self._layout,
            effects=self,
            target=self._spec.target,
            link_deadline_s=self._config.comm.deadline_s,
            sites=[site.hosts for site in self._config.cluster.sites],
            past=self._journal.past,
        )
        self._denied = TimedRead(self._deny_list.path, self._read_denied)
        self._newest = TimedRead(run_folder, self._read_newest)
        self._plan_written = TimedRead(run_folder, partial(written_ns, run_folder / "plan.json"))
        self._next_attempt = TimedRead(run_folder, partial(read_next_attempt, run_folder))
        if attach and self.job.stage is Stage.ended:
            raise ValueError(f"{run_folder}: the run has ended; `weft launch` starts it again")

    async def run(self) -> int:
        """Drive the run to its end. Until the first agent has started, another process guards a launch."""
        if self._attach or not self._is_guarded:
            return await self._run()
        self._guard = LaunchGuard(self._command("launch"))
        try:
            return await self._run()
        finally:
            self._guard.release()

    async def _run(self) -> int:
        self._server = ControlServer(
            on_message=self._on_message,
            on_connected=self._on_connected,
            on_lost=lambda peer: self.job.on_lost(*_parts(peer)),
        )
        self._address = await self._server.listen(self._place())
        self.record("driver", pid=os.getpid(), address=self._address)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        (self.job.attach if self._attach else self.job.launch)(monotonic())
        while self.job.stage is not Stage.ended:
            await asyncio.sleep(TICK_S)
            self._poll()
            self.job.tick(monotonic())
            self._journal.flush()
        await self._leave()
        assert self.job.code is not None
        return self.job.code

    async def _leave(self) -> None:
        """Wait for the agents to end, and kill this machine's agents that do not."""
        limit = monotonic() + LEAVE_S
        while (self._server.connected or self._processes) and monotonic() < limit and self._signals < 2:
            await asyncio.sleep(TICK_S)
            self._poll()
        for process in self._processes.values():
            process.kill()
        await self._server.close()
        spec_file(self._folder).unlink(missing_ok=True)  # it contains the keys
        self._journal.close()

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        checkpoint = self._config.checkpoint
        if self._signals == 1 and checkpoint.on_signal:
            self.say("ending after the running step, with a checkpoint; once more to kill every rank")
            limit_s = checkpoint.signal_deadline_s + STOPS_S
            self.job.stop(number, limit_s, monotonic(), memory=checkpoint.memory_every > 0)
            return
        if self._signals == 1:
            self.say("stopping every rank; once more to kill them")
        self.job.end(128 + number, f"stopped by {signal.Signals(number).name}")

    def _poll(self) -> None:
        for agent, process in list(self._processes.items()):
            if process.poll() is not None:
                del self._processes[agent]
                self.job.on_exit(*agent, monotonic())

    def _on_connected(self, peer: str) -> None:
        if not peer.startswith(CLOCK_CLIENT):
            self.job.on_connected(*_parts(peer), monotonic())

    def _on_message(self, peer: str, message: dict[str, Any]) -> None:
        if peer.startswith(CLOCK_CLIENT):
            answer = answer_clock(message)
            if answer is not None:
                self._server.send(peer, answer)
            return
        self.job.on_report(*_parts(peer), message, monotonic())

    def _place(self) -> str | tuple[str, int]:
        """Return the address to listen on, which is a Unix socket if all hosts are this machine."""
        cluster, settings = self._config.cluster, self._config.supervise
        if self._early or not cluster.hostfile or cluster.manager is ClusterManager.local:
            return f"weft-{os.getuid()}-{_name(self._folder)}"
        port = settings.port or cluster.master_port
        if cluster.manager is ClusterManager.ssh:
            return _own_address(self._hosts), port
        return _own_address([cluster.master_addr]), port  # names of nodes and pods may not resolve yet

    # Effects

    def start_agent(self, host: str, generation: int) -> None:
        """Start an agent on a host with its command."""
        first = self._is_guarded and host == next(iter(self.job.fleet.hosts))
        settings = self._config.supervise
        command = AgentCommand(
            host=host,
            generation=generation,
            address=self._address,
            run_folder=str(self._folder.absolute()),
            slots=self._hosts[host],
            preload=list(self._spec.preload),
            environment=self._spec.environment | credentials_in(os.environ) | {RUN: _name(self._folder)},
            heartbeat_s=settings.heartbeat_s,
            orphan_s=settings.setup_deadline_s,
            stop_s=self._config.checkpoint.signal_deadline_s + STOPS_S,
            launch=sum(event["event"] == "launch" for event in self._journal.past) + (not self._attach),
            parent=os.getpid() if settings.enabled is False else 0,
            driver=self._command("attach") if first else [],
            yields_s=self.job.fleet.hosts[host].yields_s,
        )
        early, self._early_is_due = self._early if self._early_is_due else None, False
        try:
            self._processes[host, generation] = (early.start if early else self._start)(command)
        except OSError as error:
            self.say(f"{host}: {error.strerror}: {error.filename}")
        else:
            if first and self._guard is not None:
                self._guard.release()

    @property
    def _is_guarded(self) -> bool:
        """True if another driver replaces one that ends too early. Kubernetes restarts the driver's pod itself."""
        return (
            self._config.cluster.manager is not ClusterManager.kubernetes
            and self._config.supervise.enabled is not False
        )

    def _command(self, word: str) -> list[str]:
        return [sys.executable, "-m", __spec__.name, word, str(self._folder.absolute())]

    def send_state(self, host: str, generation: int, state: DesiredState) -> None:
        """Send an agent the desired state of its host."""
        self._server.send(f"{host}#{generation}", to_fields(state), latest_of="wanted")

    def record(self, event: str, **fields: Any) -> None:
        """Append an event to the journal."""
        self._journal.record(event, **fields)

    def say(self, text: str) -> None:
        """Print a line for the user."""
        print_notice(text)

    def rows(self) -> JobRows | None:
        """Return the schedule rows from the plan that the ranks have written, or None if it cannot be read.

        Raises:
            StorageHangs: call this again later.
        """
        try:
            return read_rows(self._storage.call(Path.read_text, self._folder / "plan.json"))
        except StorageHangs:
            raise
        except (OSError, ValueError) as error:
            self.say(f"culprits of stalls are derived from their phase alone: {error}")
            return None

    def plan_time(self) -> int:
        """Return when ranks have last written the plan, or 0 if the run does not adapt."""
        return self._plan_written() if self._config.pipeline.adapt else 0

    def next_attempt(self) -> NextAttempt | None:
        """Return what ranks want to change at their next checkpoint, or None if the run does not adapt."""
        return self._next_attempt() if self._config.pipeline.adapt else None

    def differing_calls(self, stalled_s: float) -> str:
        """Return the collective call at which ranks differ, by torch's Flight Recorder, or empty if none is known."""
        with suppress(Exception):  # a diagnosis depends neither on what ranks have stored nor on an optional feature
            return str(self._calls.call(entry("watch").stored_difference, self._folder, stalled_s))
        return ""

    def denied(self) -> Mapping[str, str]:
        """Return the hosts on the deny-list with the reasons, or the last known ones while the list cannot be read."""
        return self._denied()

    def _read_denied(self) -> Mapping[str, str]:
        try:
            denied = self._deny_list.read()
        except ValueError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self.say(self._complaint)
            return self.job.fleet.away
        return {host: denial.reason for host, denial in denied.items() if host in self._hosts}

    def deny(self, host: str, reason: str) -> None:
        """Add a host to the deny-list, which other runs may share."""
        try:
            self._storage.call(self._deny_list.evict, host, reason, self._config.train.name)
        except (OSError, ValueError) as error:
            self.say(f"{host} is left out of this run alone: {error}")

    def newest_checkpoint(self) -> str:
        """Return the name of the complete checkpoint with the highest step, or empty if there is none."""
        return self._newest()

    def _read_newest(self) -> str:
        complete = (path.name for path in (self._folder / "checkpoints").glob("step-*") if not path.suffix)
        return max(complete, default="")

    # Attempts

    def _layout(self, attempt: int, away: Collection[str], before: Mapping[str, int] | None) -> Layout:
        """Choose the hosts of an attempt, and write its configuration next to the run's.

        Raises:
            ValueError: the hosts do not suffice, or storage hangs. The first attempt waits for storage instead.
        """
        limit_s = None if before is None else STORAGE_TIMEOUT_S
        return self._storage.call(self._layout_on_storage, attempt, away, before, limit_s=limit_s)

    def _layout_on_storage(self, attempt: int, away: Collection[str], before: Mapping[str, int] | None) -> Layout:
        chosen = choose_hosts(self._config, away=away, current=before, shortage=self._shortage)
        if self._laid_out is None or self._laid_out[0] != chosen:
            self._laid_out = chosen, *self._files(attempt, chosen)
        _, config, file = self._laid_out
        return Layout(
            slots=chosen.slots,
            master=(config.cluster.master_addr, config.cluster.master_port),
            arguments=("--config-file", str(file), *self._resume(config, before is not None)),
        )

    def _shortage(self, replicas: int) -> str:
        """Return why this number of replicas would not fit into memory, by the ranks' plan, or empty if it may."""
        try:
            plan = (self._folder / "plan.json").read_text()
        except OSError:
            return ""
        return shortage(plan, replicas, zero_stage=self._config.zero.stage)

    def _files(self, attempt: int, chosen: ChosenHosts) -> tuple[WeftConfig, Path]:
        """Return the configuration for these hosts, and its file. Ranks on standby read an unchanged file only once."""
        hostfile = self._folder / "supervisor" / f"hosts{attempt}"
        if self._config.cluster.hostfile:
            write_private(hostfile, hostfile_text(chosen.slots))
        config = config_for(self._config, chosen, hostfile)
        file = self._folder / "supervisor" / f"config{attempt}.yaml"
        write_private(file, to_yaml(config))
        return config, file

    def _resume(self, config: WeftConfig, again: bool) -> tuple[str, ...]:
        """Return the arguments with which attempts after the first resume from the run's own checkpoints."""
        if not again or config.checkpoint.resume == "auto":
            return ()
        return ("checkpoint.resume=auto",) if any((self._folder / "checkpoints").glob("*")) else ()


def _parts(peer: str) -> tuple[str, int]:
    host, _, generation = peer.rpartition("#")
    return host, int(generation) if generation.isdecimal() else -1


def _name(run_folder: Path) -> str:
    """Return the part of socket names that is unique to a run on this machine."""
    return hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:16]


def _own_address(hosts: Iterable[str]) -> str:
    """Return this machine's address on the route to the first other host.

    The machine's own name is unsuitable, because many machines resolve it to a local address.
    """
    others = [host for host in hosts if not is_loopback(host) and host != socket.gethostname()]
    if not others:
        return "127.0.0.1"
    try:
        family, kind, *_, address = socket.getaddrinfo(others[0], 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(address)  # sends nothing, only looks up the route
            return way.getsockname()[0]
    except OSError as error:
        raise ValueError(
            f"cluster.hostfile: {others[0]}: {error.strerror}; name hosts as this machine knows them"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
