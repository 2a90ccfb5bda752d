"""Behaviour of agents without a driver: they continue for a while, and the first host's agent restarts the driver."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from time import monotonic

from weft.conf.host.processes import STOPPED, process_state
from weft.conf.host.run_lock import RunLock
from weft.conf.host.storage import Storage, StorageHangs
from weft.engine.supervision.messages import AgentCommand

GUARD_S = 1.0
"""Seconds without a driver after which the first host's agent starts another."""
LOOK_S = 0.1


class LaunchGuard:
    """A process that launches again if the driver ends before it has started the agent that guards it."""

    def __init__(self, command: list[str]) -> None:
        """Fork the process, which replaces itself by ``command`` if this process ends before `release`."""
        reading, self._writing = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(reading)
            return
        try:
            os.setsid()  # so that Ctrl-C reaches the driver alone
            os.close(self._writing)
            if not os.read(reading, 1):
                os.execv(command[0], command)
        finally:
            os._exit(0)

    def release(self) -> None:
        """End the process, once."""
        if self._pid:
            os.write(self._writing, b".")
            os.close(self._writing)
            os.waitpid(self._pid, 0)
            self._pid = 0


class DriverGuard:
    """An agent's state of its driver, and its actions while the driver is away."""

    def __init__(self, command: AgentCommand) -> None:
        self._command, self._storage = command, Storage(Path(command.run_folder))
        self._lost_since: float | None = monotonic()
        self._starting: asyncio.subprocess.Process | None = None
        self._printed = set[str]()

    def met(self) -> None:
        """Record that the driver is connected."""
        self._lost_since = None

    def lost(self) -> None:
        """Record that the connection to the driver has ended."""
        self._lost_since = monotonic()

    async def watch(self) -> None:
        """Restart the driver if this agent is responsible. Return after ``orphan_s`` seconds without a driver."""
        while True:
            await asyncio.sleep(LOOK_S)
            away_s = 0.0 if self._lost_since is None else monotonic() - self._lost_since
            if away_s > self._command.orphan_s:
                print(f"weft: no driver for {away_s:.0f} s; ending the ranks of {self._command.host}", file=sys.stderr)
                return
            if self._starting is not None and self._starting.returncode is not None:
                self._starting = None  # it could not lock the run's folder, because another driver has the lock
                await asyncio.sleep(GUARD_S)
            elif away_s > GUARD_S and (stopped := self._stopped_driver()):
                self._say_once(
                    f"the driver (process {stopped}) is stopped by a signal; kill -CONT {stopped} has it go on, "
                    f"kill -KILL {stopped} has another take over; the ranks go on for {self._command.orphan_s:.0f} s"
                )
            elif away_s > GUARD_S and self._command.driver and self._starting is None:
                self._starting = await asyncio.create_subprocess_exec(
                    *self._command.driver, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
                )

    def _stopped_driver(self) -> int | None:
        """Return the pid of a driver on this machine that a signal has stopped and that has the run's lock, or None."""
        try:
            holder = self._storage.call(RunLock.holder, Path(self._command.run_folder) / "supervisor")
        except StorageHangs:
            return None
        state = None if holder is None else process_state(holder)
        return holder if state is not None and state.state in STOPPED else None

    def _say_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            print(f"weft: {text}", file=sys.stderr, flush=True)
