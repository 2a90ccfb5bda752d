"""A burst of prompts while a worker is stopped, compared with a stock vLLM server."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from benchmarks.results import show, write_json
from benchmarks.serving.requests import Answer, send
from benchmarks.serving.servers import stock_server, until_ready, weft_server
from benchmarks.serving.training import Training, train
from benchmarks.serving.watch import Watch
from weft.conf.schema import WeftConfig
from weft.inference.worker.command import Worker, workers_of
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

PROMPTS, LONGEST = 100, 300
"""Prompts that are sent at once, and the tokens of the longest."""
STALL_AFTER_S, STALL_S, AFTERWARDS_S = 0.3, 5.0, 5.0
"""Seconds from the prompts to the stall, of the stall, and from its end to the next burst."""
DEADLINE_S = 60.0
RUN_S = 1800.0


def measure_stalls(args: argparse.Namespace, config: WeftConfig, folder: Path) -> int:
    """Run ``args.stalls`` rounds, print when prompts were answered here and by a stock server, and return 0."""
    prefill, front = config.inference.prefill, config.inference.controller
    prefill.yield_cores = False
    front.port, front.deadline_s, front.max_queue = prefill.first_port + 8, DEADLINE_S, 2 * PROMPTS
    workers, here, stock = (workers_of(config), f"http://127.0.0.1:{front.port}", f"http://127.0.0.1:{front.port + 1}")
    training = Training(config, True, folder, ())
    with (
        weft_server(config, "serve") as serve,
        stock_server(config, front.port + 1, folder / "stock.log") as other,
        ThreadPoolExecutor(1) as threads,
    ):
        until_ready([f"http://127.0.0.1:{worker.port}" for worker in workers], serve)
        until_ready([stock], other)
        ranks = threads.submit(run_ranks, config.cluster.ranks, train, training, timeout_s=RUN_S)
        watch = Watch(workers)
        try:
            with weft_server(config, "controller") as controller:
                until_ready([here], controller, "/ready")
                process = psutil.Process(other.pid)
                sides = {
                    "bubbles": (here, lambda: _processes(workers[0])),
                    "stock": (stock, lambda: [*process.children(recursive=True), process]),
                }
                for url, _ in sides.values():
                    send(url, LONGEST, seed=10**6)
                rows = [
                    {"round": number + 1, "side": side, "load": f"{os.getloadavg()[0]:.1f}"}
                    | _figures(_stalled(url, processes, seed=1000 * number))
                    for number in range(args.stalls)
                    for side, (url, processes) in sides.items()
                ]
        finally:
            training.stop.touch()
            watch.end()
        ranks.result()
    show(table_of(rows, f"{PROMPTS} prompts at once, one server stopped for {STALL_S:g} s; seconds", left=2))
    write_json(args, "bubbles", rows)
    return 0


def _processes(worker: Worker) -> list[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "weft.inference.worker.vllm_scheduler.BubbleScheduler" in line and str(worker.port) in line:
            return [*process.children(recursive=True), process]
    raise RuntimeError(f"worker {worker.index} does not run")


def _stalled(url: str, processes: Callable[[], Sequence[psutil.Process]], *, seed: int) -> list[Answer]:
    lengths, stopped = random.Random(seed).choices(range(1, LONGEST + 1), k=PROMPTS), processes()
    with ThreadPoolExecutor(PROMPTS) as senders:
        waiting = [senders.submit(send, url, tokens, seed=seed + n) for n, tokens in enumerate(lengths)]
        time.sleep(STALL_AFTER_S)
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        time.sleep(STALL_S)
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        answers = [answer.result() for answer in waiting]
    time.sleep(AFTERWARDS_S)
    return answers


def _figures(answers: Sequence[Answer]) -> dict[str, str]:
    """Return answers by HTTP status (0 means none within a minute), and quantiles of the first token's time."""
    times_s = sorted(answer.ttft_s for answer in answers if answer.status == 200)
    statuses = sorted(Counter(answer.status for answer in answers).items())
    return {"statuses": ", ".join(f"{count} x {status}" for status, count in statuses)} | {
        f"TTFT p{round(100 * share)}": f"{times_s[int(share * (len(times_s) - 1))]:.2f}" if times_s else "-"
        for share in (0.5, 0.99)
    }
