"""Servers that `weft serve` keeps running: started, probed, restarted and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from weft.conf.host.processes import end_with_parent, give_way, set_timer_slack
from weft.recipes.serving.checks import reason_of

STARTING_S = 600.0
"""Longest time in seconds from a server's start to its first answer, unless it waits for processors."""
PROBE_S = 5.0
"""Seconds between health probes of a server, and the timeout of a probe."""
MISSED = 6
"""Number of consecutive failed probes after which a server that had answered is restarted, unless it waits likewise."""
COMPUTING_CPU_S = 300.0
"""Processor seconds that a server may take on a busy host until it answers."""
LEAST_CPU_S = 1.0
"""Processor seconds in the last `WATCHED` probes from which a server makes progress. Threads that poll take less."""
WATCHED = 12
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before an ended server is restarted. They double while it keeps ending within the longest."""
MAX_STARTS = 3
"""Number of starts after which a server that has never answered is not restarted."""
SLACK_S = 0.05
"""Timer slack of a worker in seconds.

A vLLM server on a CPU has a dozen gloo threads that poll every 10 ms, which is nearly all of its work while its gate is
closed.
"""
NICE, MOST_NICE = 5, 19
"""Niceness of a server that competes with ranks for cores, so that the ranks have priority, and of one that yields."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start a server.

    Attributes:
        folder: working folder, or None for that of this process.
        log: file to which its output is appended.
        become: called in the new process before the command.
    """

    words: Sequence[str]
    env: Mapping[str, str]
    folder: Path | None
    log: Path
    become: Callable[[], None]


@cache
def own_servers() -> ssl.SSLContext:
    """Return the trust in this user's own servers, whose certificates may name another host."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class ServerProcess:
    """A server's process, kept running across restarts."""

    def __init__(
        self, name: str, url: str, launch: Callable[[], Launch], *, note: str = "", max_starts: int = MAX_STARTS
    ) -> None:
        """Create the process without starting it.

        Args:
            url: URL at which it listens. Empty for a process that serves nothing.
            launch: returns how to start it. Called at each start.
            note: addition to messages about the server.
        """
        self.name, self._url, self._launch, self._note, self._max_starts = name, url, launch, note, max_starts
        self._process: subprocess.Popen | None = None
        self._begun_s = self._probed_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._start_at_s = 0.0
        self._answered = False
        self._starts = 0
        self._computed_s: list[float] = []
        """Processor seconds at each of the consecutive failed probes."""
        self._log, self._log_begin = Path(), 0
        self.ever_answered = False
        self.failure = ""
        """Reason for which the server is not restarted, or an empty string if it is."""

    @property
    def is_running(self) -> bool:
        """True if its process lives."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Start the server if it is due, or check its health."""
        now_s = time.monotonic()
        if self.failure:
            return
        if self._process is None:
            if now_s >= self._start_at_s:
                self.start(now_s)
            return
        code = self._process.poll()
        if code is not None:
            self.restart(f"ended with code {code}", now_s)
        elif self._url and now_s - self._probed_s >= PROBE_S:
            self._probed_s = now_s
            self._probe(now_s)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the server's processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def end(self, deadline_s: float) -> None:
        """Wait until the deadline for the server to end, and then kill it."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        self.send_signal(signal.SIGKILL)
        self._process.wait()

    def start(self, now_s: float) -> None:
        """Start the process."""
        launch = self._launch()
        self._log = launch.log
        with open(self._log, "ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                launch.words,
                env=launch.env,
                stdout=log,
                stderr=log,
                cwd=launch.folder,
                start_new_session=True,
                preexec_fn=launch.become,
            )
        self._begun_s = self._probed_s = now_s
        self._starts += 1
        self._answered = False
        self._computed_s.clear()
        where = f" on port {self._url.rpartition(':')[2]}" if self._url else ""
        print(f"{self.name}{self._note}: starting{where}, log {log.name}", flush=True)

    def _probe(self, now_s: float) -> None:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=PROBE_S, context=own_servers()):
                pass
        except OSError:
            assert self._process is not None
            self._computed_s.append(processor_seconds(self._process.pid))
            limit = MISSED if self._answered else STARTING_S / PROBE_S
            if len(self._computed_s) > limit and not self._is_computing():
                self.restart("does not answer", now_s)
            return
        if not self._answered:
            print(f"{self.name}: ready after {now_s - self._begun_s:.0f} s", flush=True)
        self._answered = self.ever_answered = True
        self._pause_s = FIRST_PAUSE_S
        self._computed_s.clear()

    def _is_computing(self) -> bool:
        """True if it makes progress, and has taken less processor time than it may since it last answered."""
        first_s, *_, last_s = self._computed_s
        return last_s - first_s < COMPUTING_CPU_S and last_s - self._computed_s[-WATCHED:][0] >= LEAST_CPU_S

    def restart(self, why: str, now_s: float) -> None:
        """End the process, and start it again after a pause, or never."""
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._process = None
        why = "; ".join(filter(None, (f"{self.name}: {why}", reason_of(self._log, self._log_begin))))
        if self._starts >= self._max_starts and not self.ever_answered:
            times = f"{self._starts} start{'s' * (self._starts > 1)}"
            self.failure = f"{why}; it has not answered once in {times}, log {self._log}"
            print(self.failure, file=sys.stderr, flush=True)
            return
        if now_s - self._begun_s > LONGEST_PAUSE_S:
            self._pause_s = FIRST_PAUSE_S
        print(f"{why}; again in {self._pause_s:.0f} s", file=sys.stderr, flush=True)
        self._start_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants that live."""
    total_s = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total_s += sum(each.cpu_times()[:2])
    return total_s


def run_on_idle_cores() -> None:
    """Run only on idle cores, wake up rarely, and end when the parent process ends.

    A rank that wakes up preempts such a process at once.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    give_way(MOST_NICE)
    set_timer_slack(SLACK_S)
    end_with_parent()


def run_below_ranks() -> None:
    """Run with lower priority than the ranks, but also on busy cores, and end when the parent process ends."""
    give_way(NICE)
    end_with_parent()
