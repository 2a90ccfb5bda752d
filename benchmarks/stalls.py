"""A hundred prompts at once while training, and one of two workers stops for a while."""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from benchmarks.results import parse, show, write_json
from benchmarks.serving.faults import Target
from benchmarks.serving.requests import Answer, send
from benchmarks.serving.served_model import write_model
from benchmarks.serving.servers import stock_server, until_ready, weft_server
from benchmarks.serving.training import Training, settings, train
from benchmarks.serving.watch import Watch
from weft.inference.worker.command import workers_of
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

NUM_RANKS, MICROBATCHES = 4, 4
SERVED = [0, 3]
FIRST_PORT = 28300
LONGEST = 300
"""Tokens of the longest prompt."""
STALL_AFTER_S = 0.3
"""Seconds after the prompts were sent."""
AFTERWARDS_S = 5.0
"""Seconds after the stall's end at which single prompts follow."""
SINGLE = 10
"""Number of prompts, one after the other, before and after the stalls."""
RUN_S = 1800.0


def main(argv: Sequence[str]) -> int:
    """Print how many prompts were answered and when, here and by a stock server; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks stalls", description=__doc__)
    parser.add_argument("--python", required=True, help="a Python that has vLLM")
    parser.add_argument("--requests", type=int, default=100, help="prompts that are sent at once")
    parser.add_argument("--rounds", type=int, default=5, help="stalls, of each side in turns")
    parser.add_argument("--stall", type=float, default=5.0, help="seconds for which a server is stopped")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds; the controller refuses what is later")
    parser.add_argument("--yield-cores", action="store_true", help="workers run on idle cores only, as by default")
    args = parse(parser, argv)
    with tempfile.TemporaryDirectory(prefix="weft-stalls-") as folder:
        return _run(args, Path(folder))


def _run(args: argparse.Namespace, folder: Path) -> int:
    config = settings(f"stalls-{os.getpid()}", ranks=NUM_RANKS, microbatches=MICROBATCHES, schedule="1f1b", wan=False)
    prefill, controller = config.inference.prefill, config.inference.controller
    prefill.model, prefill.python, prefill.ranks = str(folder / "model"), args.python, SERVED
    prefill.cost_dir, prefill.first_port = str(folder / "costs"), FIRST_PORT + 1
    prefill.yield_cores = args.yield_cores
    controller.port, controller.deadline_s, controller.max_queue = FIRST_PORT, args.deadline, 2 * args.requests
    write_model(Path(prefill.model))
    workers, port = workers_of(config), FIRST_PORT + 9
    here, stock = (f"http://127.0.0.1:{each}" for each in (controller.port, port))
    training = Training(config, False, folder, (), bed="")
    with (
        weft_server(config, "serve") as serve,
        stock_server(config, port, folder / "stock.log") as other,
        ThreadPoolExecutor(1) as threads,
    ):
        until_ready([f"http://127.0.0.1:{worker.port}" for worker in workers], serve)
        until_ready([stock], other)
        ranks = threads.submit(run_ranks, NUM_RANKS, train, training, timeout_s=RUN_S)
        watch = Watch(workers)
        try:
            with weft_server(config, "controller") as front:
                until_ready([here], front, "/ready")
                target = Target([here], workers, folder, "")
                sides: dict[str, tuple[str, Callable[[], list[psutil.Process]]]] = {
                    "bubbles": (here, lambda: target.processes(0)),
                    "stock": (stock, lambda: _family(other.pid)),
                }
                rows = _rounds(args, sides)
        finally:
            training.stop.touch()
            watch.end()
        ranks.result()
    show(table_of(rows, f"{args.requests} prompts at once, one server stopped for {args.stall:g} s; seconds", left=2))
    write_json(args, "stalls", rows)
    return 0


def _rounds(
    args: argparse.Namespace, sides: dict[str, tuple[str, Callable[[], list[psutil.Process]]]]
) -> list[dict[str, object]]:
    rows = []
    for url, _ in sides.values():  # the first prompts of all
        _singles(url, seed=10**6)
    for number in range(args.rounds):
        for side, (url, processes) in sides.items():
            before = _singles(url, seed=number)
            answers = _stalled(args, url, processes(), seed=1000 * number)
            time.sleep(AFTERWARDS_S)
            after = _singles(url, seed=number)
            rows.append(
                {
                    "round": number + 1,
                    "side": side,
                    "statuses": _statuses(answers),
                    "TTFT p50": _at(answers, 0.5),
                    "p99": _at(answers, 0.99),
                    "predicted p99": _at(answers, 0.99, "predicted_s"),
                    "past the deadline": sum(a.status == 200 and a.ttft_s > args.deadline for a in answers),
                    "single before": _at(before, 0.5),
                    "single after": _at(after, 0.5),
                }
            )
    return rows


def _stalled(args: argparse.Namespace, url: str, processes: Sequence[psutil.Process], *, seed: int) -> list[Answer]:
    draw = random.Random(seed)
    lengths = [draw.randint(1, LONGEST) for _ in range(args.requests)]
    with ThreadPoolExecutor(args.requests) as senders:
        waiting = [senders.submit(send, url, tokens, seed=seed + n) for n, tokens in enumerate(lengths)]
        time.sleep(STALL_AFTER_S)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(args.stall)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        return [answer.result() for answer in waiting]


def _singles(url: str, *, seed: int) -> list[Answer]:
    return [send(url, LONGEST, seed=seed + number) for number in range(SINGLE)]


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [*process.children(recursive=True), process]


def _statuses(answers: Sequence[Answer]) -> str:
    """Number of answers by HTTP status; 0 is none within a minute."""
    return ", ".join(f"{count} x {status}" for status, count in sorted(Counter(a.status for a in answers).items()))


def _at(answers: Sequence[Answer], share: float, field: str = "ttft_s") -> str:
    ordered = sorted(getattr(answer, field) for answer in answers if answer.status == 200)
    return f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.2f}" if ordered else "-"
