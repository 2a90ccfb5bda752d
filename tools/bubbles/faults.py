"""Ways in which a worker or its callers go wrong, while training goes on."""

from __future__ import annotations

import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from weft.inference.board_reader import BoardReader
from weft.inference.worker_command import Worker
from weft.tools.bubbles.requests import Answer, post, send

LASTS_S = 4.0
FLOOD_PER_S, FLOOD_S = 500, 30.0


@dataclass(frozen=True)
class Target:
    """The workers that are broken."""

    urls: Sequence[str]
    workers: Sequence[Worker]

    def processes(self, number: int = 0) -> list[psutil.Process]:
        """Those of a worker, its engine included."""
        port = str(self.workers[number].port)
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "weft.inference.vllm_scheduler.BubbleScheduler" in line and port in line:
                return [*process.children(recursive=True), process]
        return []

    def until_bubble(self) -> None:
        """Return inside a bubble of the first worker's rank."""
        board = BoardReader(self.workers[0].boards[0])
        deadline_s = time.monotonic() + 5.0
        while board.state().bubble is None and time.monotonic() < deadline_s:
            time.sleep(0.001)


def _killed(target: Target) -> str:
    with ThreadPoolExecutor(1) as sender:
        waiting = sender.submit(send, target.urls[0], 2000)
        time.sleep(0.5)
        target.until_bubble()
        for process in target.processes():
            process.kill()
        time.sleep(LASTS_S)
        return _answers([waiting.result()])


def _stopped(target: Target) -> str:
    processes = target.processes()
    with ThreadPoolExecutor(1) as sender:
        waiting = sender.submit(send, target.urls[0], 2000)
        time.sleep(0.3)
        target.until_bubble()
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(LASTS_S)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        return _answers([waiting.result()])


def _huge(target: Target) -> str:
    found = send(target.urls[1], 10**6)
    time.sleep(LASTS_S)
    return _answers([found])


def _nested(target: Target) -> str:
    body = b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b', "max_tokens": 1}'
    found = [post(target.urls[1], body) for _ in range(5)]
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
    found = send(target.urls[1], 100)
    for client in clients:
        client.close()
    return f"beside 50 slow clients: {_answers([found])}"


def _flood(target: Target) -> str:
    begin_s, found = time.monotonic(), []
    with ThreadPoolExecutor(64) as senders:
        for number in range(int(FLOOD_PER_S * FLOOD_S)):
            pause_s = begin_s + number / FLOOD_PER_S - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            if time.monotonic() - begin_s > FLOOD_S:
                break
            found.append(senders.submit(post, target.urls[1], b'{"prompt": "hello", "max_tokens": 5}'))
        done = [answer.result() for answer in found]
    return f"{len(done) / FLOOD_S:.0f} requests/s: {_answers(done)}"


def _board_deleted(target: Target) -> str:
    board = target.workers[1].boards[0]
    processes = target.processes(1)
    board.unlink()
    with ThreadPoolExecutor(4) as senders:
        waiting = [senders.submit(send, target.urls[1], 500) for _ in range(4)]
        time.sleep(1.0)
        before_s = _cpu_s(processes)
        time.sleep(LASTS_S)
        share = (_cpu_s(processes) - before_s) / LASTS_S
        granted = sum(answer.done() for answer in waiting)
        said = [line for line in _log(board) if "nothing is granted" in line]
        for process in processes:
            process.kill()
    reason = said[-1].partition("] ")[2] if said else "silent"
    return f"{granted} of 4 granted, the closed gate takes {share:.2%} of a core; log: {reason}"


def _log(board: Path) -> list[str]:
    return board.with_name("worker1.log").read_text(errors="replace").splitlines()


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _answers(found: Sequence[Answer]) -> str:
    counts = Counter("no answer" if not answer.status else f"HTTP {answer.status}" for answer in found)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


FAULTS: dict[str, Callable[[Target], str]] = {
    "SIGKILL": _killed,
    "10^6 tokens": _huge,
    "nested JSON": _nested,
    "slow clients": _slow_client,
    "flood": _flood,
    "SIGSTOP": _stopped,
    "board deleted": _board_deleted,
}
