"""Faults of a worker, of its callers, and of the trainer."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.serving.requests import Answer, post, send
from weft.inference.board.reader import BoardReader
from weft.inference.worker.command import Worker

LASTS_S = 20.0
FLOOD_PER_S, FLOOD_S = 500, 30.0
LONG = 2000
"""Tokens of a prompt that takes several bubbles."""


@dataclass(frozen=True)
class Target:
    """The processes and files on which a fault acts.

    Attributes:
        traces: folder with the workers' records of their steps.
        key: API key of the workers.
    """

    urls: Sequence[str]
    workers: Sequence[Worker]
    traces: Path
    key: str

    def processes(self, number: int) -> list[psutil.Process]:
        """Return the processes of a worker, including its engine.

        Raises:
            RuntimeError: the worker is not running.
        """
        port = str(self.workers[number].port)
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "weft.inference.worker.vllm_scheduler.BubbleScheduler" in line and port in line:
                return [*process.children(recursive=True), process]
        raise RuntimeError(f"worker {number} does not run")

    def board(self, number: int) -> BoardReader:
        """Return the board of a worker's first rank."""
        return BoardReader(self.workers[number].boards[0])

    def until_bubble(self, number: int) -> None:
        """Wait until the worker's rank is in a bubble, at most 5 s."""
        board = self.board(number)
        deadline_s = time.monotonic() + 5.0
        while board.state().bubble is None and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def ask(self, number: int, tokens: int) -> Answer:
        """Request the prefill of a prompt from a worker."""
        return send(self.urls[number], tokens, key=self.key)

    def post(self, body: bytes) -> Answer:
        """Send a request body to the last worker, unchanged."""
        return post(self.urls[-1], body, key=self.key)


def _killed(target: Target) -> str:
    with ThreadPoolExecutor(1) as sender:
        waiting = sender.submit(target.ask, 0, LONG)
        time.sleep(0.5)
        target.until_bubble(0)
        for process in target.processes(0):
            process.kill()
        time.sleep(LASTS_S)
        return _answers([waiting.result()])


def _stopped(target: Target) -> str:
    processes = target.processes(1)
    with ThreadPoolExecutor(1) as sender:
        waiting = sender.submit(target.ask, 1, LONG)
        time.sleep(0.3)
        target.until_bubble(1)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(LASTS_S)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        return f"{_answers([waiting.result()])}, after it went on"


def _huge(target: Target) -> str:
    found = target.ask(1, 10**6)
    time.sleep(LASTS_S)
    return _answers([found])


def _nested(target: Target) -> str:
    body = b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b', "max_tokens": 1}'
    found = [target.post(body) for _ in range(5)]
    time.sleep(LASTS_S)
    return _answers(found)


def _slow_client(target: Target) -> str:
    host, port = target.urls[1].removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100000\r\n\r\n".encode()
    clients = [socket.create_connection((host, int(port))) for _ in range(50)]
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < LASTS_S:
        for client in clients:
            client.send(head[:1])
        head = head[1:] or b" "
        time.sleep(0.05)
    found = target.ask(1, 100)
    for client in clients:
        client.close()
    return f"alongside 50 slow clients: {_answers([found])}"


def _flood(target: Target) -> str:
    begin_s, found = time.monotonic(), []
    with ThreadPoolExecutor(64) as senders:
        for number in range(int(FLOOD_PER_S * FLOOD_S)):
            pause_s = begin_s + number / FLOOD_PER_S - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            if time.monotonic() - begin_s > FLOOD_S:
                break
            found.append(senders.submit(target.post, b'{"prompt": "hello", "max_tokens": 5}'))
        done = [answer.result() for answer in found]
    return f"{len(done) / FLOOD_S:.0f} requests/s: {_answers(done)}"


def _board_deleted(target: Target) -> str:
    board = target.workers[1].boards[0]
    processes = target.processes(1)
    board.unlink()
    with ThreadPoolExecutor(4) as senders:
        waiting = [senders.submit(target.ask, 1, 500) for _ in range(4)]
        time.sleep(1.0)
        before_s = _cpu_s(processes)
        time.sleep(LASTS_S)
        share = (_cpu_s(processes) - before_s) / LASTS_S
        granted = sum(answer.done() for answer in waiting)
        for process in processes:
            process.kill()
    return f"{granted} of 4 granted, the closed gate takes {share:.2%} of a core; log: {_reason(board, 1)}"


def _without_key(target: Target) -> str:
    found = [post(target.urls[1], b'{"prompt": "hello", "max_tokens": 1}') for _ in range(100)]
    time.sleep(LASTS_S)
    return _answers(found)


def _trainer_killed(target: Target) -> str:
    trace, writer = target.traces / "worker0.jsonl", target.board(0).writer
    assert writer is not None
    with ThreadPoolExecutor(8) as senders:
        waiting = [senders.submit(target.ask, 0, LONG) for _ in range(8)]
        time.sleep(0.5)
        target.until_bubble(0)
        os.kill(writer, signal.SIGKILL)
        killed_s = time.monotonic()
        time.sleep(LASTS_S)
        answered = sum(answer.done() for answer in waiting)
        for process in target.processes(0):
            process.kill()
    starts_s = [json.loads(line)["start_s"] - killed_s for line in trace.read_text().splitlines()]
    return (
        f"{sum(start_s > 0 for start_s in starts_s)} prefill steps began after it, the last {max(starts_s):+.3f} s; "
        f"{answered} of 8 requests had been answered; log: {_reason(target.workers[0].boards[0], 0)}"
    )


def _reason(board: Path, number: int) -> str:
    """Return the last line of a worker's log that explains why it grants no prefill, or ``silent`` without one."""
    log = board.with_name(f"worker{number}.log").read_text(errors="replace").splitlines()
    said = [line for line in log if "nothing is granted" in line]
    return said[-1].partition("] ")[2] if said else "silent"


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _answers(found: Sequence[Answer]) -> str:
    counts = Counter("no answer" if not answer.status else f"HTTP {answer.status}" for answer in found)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


LAST = "trainer SIGKILLed"
"""Ends the run."""
FAULTS: dict[str, Callable[[Target], str]] = {
    "worker SIGKILLed": _killed,
    "10^6 tokens": _huge,
    "nested JSON": _nested,
    "slow clients": _slow_client,
    "500 requests/s": _flood,
    "no API key": _without_key,
    "worker SIGSTOPped": _stopped,
    "board deleted": _board_deleted,
    LAST: _trainer_killed,
}
