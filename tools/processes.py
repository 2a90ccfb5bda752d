"""Run a process group: signals reach every member, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

import psutil

POLL_S = 0.1


def run_group(command: Sequence[str], *, env: Mapping[str, str], grace_s: float) -> int:
    """Run ``command`` in a new process group, until the last member has ended.

    The first SIGINT or SIGTERM goes to every member as SIGTERM; a second one, or ``grace_s``
    seconds later, as SIGKILL. Members that outlive the command itself are ended alike.

    Returns:
        The command's exit code; 128 plus the signal's number where a signal ended it, and 1
        where it ended well but left members behind.
    """
    # DeepSpeed's outer launcher ends on SIGTERM without stopping its ranks, hence the group.
    group = _Group(subprocess.Popen(list(command), env=dict(env), start_new_session=True), grace_s)
    before = {number: signal.signal(number, group.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return group.wait()
    finally:
        group.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


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
        self._end()

    def wait(self) -> int:
        code = None
        while code is None or any(self._members()):
            if code is None:
                code = self.leader.poll()
                if code is not None and not self.signal and any(self._members()):
                    print("weft: the launcher ended before its ranks; stopping them", file=sys.stderr, flush=True)
                    code = code or 1
                    self._end()
            if time.monotonic() > self.deadline:
                self.kill()
            time.sleep(POLL_S)
        if self.signal:
            return 128 + self.signal
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _end(self) -> None:
        self.deadline = time.monotonic() + self.grace_s
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        for process in self._members():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def _members(self) -> Iterator[psutil.Process]:
        """Members that still run, without zombies."""
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self.leader.pid and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
