"""`weft serve`: starts a vLLM server for each training rank or group of ranks, and restarts servers that end."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import weft
from weft.conf import load
from weft.conf.host.files import replacing
from weft.conf.host.private import private_folder
from weft.conf.host.processes import set_timer_slack
from weft.conf.schema import WeftConfig
from weft.inference.board.layout import boards_folder
from weft.inference.worker.command import Worker, command, devices_of, environment, workers_of
from weft.recipes.serving.checks import (
    check_engine,
    check_memory,
    check_ports,
    check_serving,
    least_gpu_bytes,
    reason_of,
    warnings_of,
)
from weft.tools.launch_arguments import visible_gpus

POLL_S = 0.5
STARTING_S = 600.0
"""Longest time in seconds from a worker's start to its first answer."""
PROBE_S = 5.0
"""Seconds between health probes of a worker, and the timeout of a probe."""
MISSED = 6
"""Number of consecutive failed probes after which a worker that had answered is restarted."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before an ended worker is restarted. They double while it keeps ending."""
MAX_STARTS = 3
"""Number of starts after which a worker that has never answered is not restarted."""
GRACE_S = 10.0
SLACK_S = 0.05
"""Timer slack of a worker in seconds.

A vLLM server on a CPU has a dozen gloo threads that poll every 10 ms, which is nearly all of its work while its gate is
closed.
"""
NICE = 5
"""Niceness of a worker that competes with ranks for cores, so that the ranks have priority."""
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before the fork, so that the child only calls into it


def main(argv: Sequence[str]) -> int:
    """Run ``[--trace FOLDER] [recipe=NAME] [key=value ...]`` until SIGINT or SIGTERM.

    It needs the same settings as `weft launch`, to locate the boards. It may be started before, during or after
    training, and stopped at any time.

    Raises:
        ValueError: the input is invalid, which is found before any process starts, or no worker could be started.
    """
    parser = argparse.ArgumentParser(
        prog="weft serve",
        usage="weft serve [--trace FOLDER] [recipe=NAME] [key=value ...]",
        description="Run vLLM prefill workers in the bubbles of a training run, until Ctrl-C. Pass the same settings "
        "as to `weft launch`.",
    )
    parser.add_argument(
        "--trace", metavar="FOLDER", help="write a record of every prefill step to worker<N>.jsonl in this folder"
    )
    known, overrides = parser.parse_known_args(argv)
    config = load(overrides)
    check_serving(config)
    check_ports(config)
    check_engine(config)
    if devices := visible_gpus():
        check_gpus(config, devices)
    processes = [_WorkerProcess(config, worker, known.trace) for worker in workers_of(config)]
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    try:
        while not stopped:
            for process in processes:
                process.check()
            if all(process.failure for process in processes):
                raise ValueError(processes[0].failure)
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for process in processes:
            process.end(deadline)
    return 0


def check_gpus(config: WeftConfig, devices: Sequence[str]) -> None:
    """Print the GPU memory of a worker and of training, and warnings about settings that slow training down.

    Raises:
        ValueError: worker and training do not fit into a GPU's memory, or a rank has no GPU on this host.
    """
    for worker in workers_of(config):
        devices_of(config, worker, devices)
    if total := least_gpu_bytes(devices):
        print(check_memory(config, total, _training_bytes(config)), flush=True)
    for warning in warnings_of(os.environ):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _training_bytes(config: WeftConfig) -> float:
    from weft.tools.dry_run import most_bytes  # imports torch, which serving on CPUs does not need

    try:
        return most_bytes(config)
    except ValueError as error:
        print(f"warning: cannot predict the memory of training: {error}", file=sys.stderr, flush=True)
        return 0.0


class _WorkerProcess:
    """A worker's process, kept running across restarts."""

    def __init__(self, config: WeftConfig, worker: Worker, trace: str | None) -> None:
        self._config, self._worker, self._trace = config, worker, trace
        self._process: subprocess.Popen | None = None
        self._begun_s = self._probed_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._start_at_s = 0.0
        self._answered = self._ever_answered = False
        self._missed = self._starts = 0
        self._log, self._log_begin = Path(), 0
        self.failure = ""
        """Reason for which the worker is not restarted, or an empty string if it is."""

    def check(self) -> None:
        """Start the worker if it is due, or check its health."""
        now_s = time.monotonic()
        if self.failure:
            return
        if self._process is None:
            if now_s >= self._start_at_s:
                self._start(now_s)
            return
        code = self._process.poll()
        if code is not None:
            self._restart(f"ended with code {code}", now_s)
        elif now_s - self._probed_s >= PROBE_S:
            self._probed_s = now_s
            self._probe(now_s)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker's processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def end(self, deadline_s: float) -> None:
        """Wait until the deadline for the worker to end, and then kill it."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        self.send_signal(signal.SIGKILL)
        self._process.wait()

    def _start(self, now_s: float) -> None:
        config, worker = self._config, self._worker
        folder = private_folder(boards_folder(config, os.getuid()))
        python = (
            str(Path(config.inference.prefill.python).expanduser())
            if config.inference.prefill.python
            else sys.executable
        )
        devices = visible_gpus()
        trace = str(Path(self._trace, f"worker{worker.index}.jsonl").absolute()) if self._trace else ""
        env = environment(config, worker, os.environ, package=_package(folder), devices=devices)
        self._log = folder / f"worker{worker.index}.log"
        with open(self._log, "ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                command(config, worker, python=python, num_gpus=len(devices), trace_file=trace),
                env=env,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
                preexec_fn=_become_willing_worker
                if devices or not config.inference.prefill.yield_cores
                else _become_idle_worker,
            )
        self._begun_s = self._probed_s = now_s
        self._starts += 1
        self._answered, self._missed = False, 0
        ranks = ", ".join(map(str, worker.ranks))
        print(f"worker {worker.index} (rank {ranks}): starting on port {worker.port}, log {log.name}", flush=True)

    def _probe(self, now_s: float) -> None:
        try:
            url = f"http://{self._config.inference.prefill.host}:{self._worker.port}/health"
            with urllib.request.urlopen(url, timeout=PROBE_S):
                pass
        except OSError:
            self._missed += 1
            limit = MISSED if self._answered else STARTING_S / PROBE_S
            if self._missed > limit:
                self._restart("does not answer", now_s)
            return
        if not self._answered:
            print(f"worker {self._worker.index}: ready after {now_s - self._begun_s:.0f} s", flush=True)
        self._answered, self._missed, self._pause_s = True, 0, FIRST_PAUSE_S
        self._ever_answered = True

    def _restart(self, why: str, now_s: float) -> None:
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._process = None
        why = "; ".join(filter(None, (f"worker {self._worker.index}: {why}", reason_of(self._log, self._log_begin))))
        if self._starts >= MAX_STARTS and not self._ever_answered:
            self.failure = f"{why}; it has not answered once in {self._starts} starts, log {self._log}"
            print(self.failure, file=sys.stderr, flush=True)
            return
        print(f"{why}; again in {self._pause_s:.0f} s", file=sys.stderr, flush=True)
        self._start_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


def _become_idle_worker() -> None:
    """Run only on idle cores, wake up rarely, and end when the parent process ends.

    A rank that wakes up preempts such a process at once.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    set_timer_slack(SLACK_S)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _become_willing_worker() -> None:
    """Run with lower priority than the ranks, but also on busy cores, and end when the parent process ends."""
    os.nice(NICE)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _package(folder: Path) -> Path:
    """Return a folder that has only a link named `weft` to this package, from which workers import it."""
    link = private_folder(folder / "package") / "weft"
    with replacing(link) as draft:
        draft.symlink_to(Path(weft.__file__).parent.absolute(), target_is_directory=True)
    return link.parent
