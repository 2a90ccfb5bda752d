"""Run a process group: signals reach every member, and none outlives the command."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

import psutil

POLL_S = 0.1
GRACE_S = 30.0
"""Seconds that ranks have to end when their launcher has."""
LAUNCHER = "WEFT_LAUNCHER"
"""Environment variable of ranks: process and host of the `weft launch` that they end with."""


def run_group(command: Sequence[str], *, env: Mapping[str, str], grace_s: float) -> int:
    """Run ``command`` in a new process group until the last member has ended.

    The first SIGINT or SIGTERM is sent to the ranks among the members as SIGTERM. Without ranks it is sent to every
    member. (Launchers are spared, because a launcher ends its ranks soon after its own end.) A second signal, or
    ``grace_s`` seconds, sends SIGKILL to every member. Members that outlive the command are ended in the same way.

    Returns:
        The command's exit code; 128 plus the signal's number if a signal ended it; 1 if it succeeded but left members
        behind.
    """
    # DeepSpeed's outer launcher ends on SIGTERM without stopping its ranks, hence the group.
    own = {LAUNCHER: f"{os.getpid()} {socket.gethostname()}"}
    group = _Group(subprocess.Popen(list(command), env={**env, **own}, start_new_session=True), grace_s)
    before = {number: signal.signal(number, group.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return group.wait()
    finally:
        group.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """End this rank when the `weft launch` that started it ends for any reason.

    DeepSpeed's launcher is the process between them, and outlives a killed `weft launch`.
    """
    pid, _, host = environment.get(LAUNCHER, "").partition(" ")
    if not pid or host != socket.gethostname():
        return
    try:
        launcher = os.pidfd_open(int(pid))
    except OSError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        select.select([launcher], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="weft-launcher", daemon=True).start()


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


class _Group:
    def __init__(self, leader: subprocess.Popen, grace_s: float) -> None:
        self.leader = leader
        self.grace_s = grace_s
        self.signal = 0
        self.deadline = float("inf")

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:
            self.kill()
            return
        self.signal = number
        print("weft: stopping every rank; once more to kill them", file=sys.stderr, flush=True)
        self.deadline = time.monotonic() + self.grace_s
        self._send(signal.SIGTERM, list(self._ranks()))

    def wait(self) -> int:
        code = None
        while code is None or any(self._members()):
            if code is None:
                code = self.leader.poll()
                if code is not None and not self.signal and any(self._members()):
                    print("weft: the launcher ended before its ranks; stopping them", file=sys.stderr, flush=True)
                    code = code or 1
                    self.deadline = time.monotonic() + min(self.grace_s, GRACE_S)
                    self._send(signal.SIGTERM)
            if time.monotonic() > self.deadline:
                self.kill()
            time.sleep(POLL_S)
        if self.signal:
            return 128 + self.signal
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _ranks(self) -> Iterator[psutil.Process]:
        """Yield the members that a launcher has started as ranks, without their child processes."""
        for process in self._members():
            parent = process.parent()
            if "LOCAL_RANK" in _environment(process) and parent and "LOCAL_RANK" not in _environment(parent):
                yield process

    def _send(self, number: signal.Signals, processes: Sequence[psutil.Process] = ()) -> None:
        for process in processes or self._members():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def _members(self) -> Iterator[psutil.Process]:
        """Yield the members that are running, without zombies."""
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self.leader.pid and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
