"""Whole answers, with prompts computed in bubbles, beside a stock vLLM server: first chunk, throughput, equality."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.results import finish, parse, show
from benchmarks.serving.report import at, prefills_of
from benchmarks.serving.served_model import write_model
from benchmarks.serving.servers import stock_server, until_ready, weft_server
from benchmarks.serving.training import Training, cores_apart, settings, train
from weft.conf.schema import WeftConfig
from weft.inference.worker.command import controller_url
from weft.inference.worker.decoder import decode_url
from weft.inference.worker.workers import workers_of
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

NUM_RANKS, SERVED = 4, (0, 3)
PROMPTS, OUTPUT = (16, 512), 16
"""Shortest and longest prompt, and tokens of each answer."""
IN_TURN = 20
"""Requests sent one after the other, in each round."""
PAUSE_S = 0.2
"""Longest pause before each of them, as between those of users: a server that was busy a moment ago is faster."""
WARM = "warm"
ANSWER_S = 600.0
RUN_S = 3600.0


@dataclass(frozen=True)
class Streamed:
    """A streamed answer.

    Attributes:
        name: the request's `X-Request-Id`.
        begin_s, first_s, end_s: when it was sent, its first chunk came, and its last.
        by_worker: True if a worker has computed the prompt.
    """

    name: str
    begin_s: float
    first_s: float
    end_s: float
    tokens: tuple[int, ...]
    by_worker: bool


def main(argv: Sequence[str]) -> int:
    """Ask both servers by turns, without and with training. Return 1 if answers differ or are missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks answers", description=__doc__)
    parser.add_argument("--python", required=True, type=os.path.abspath, help="a Python that has vLLM")
    parser.add_argument("--requests", type=int, default=200, help="requests that are sent at once")
    parser.add_argument("--rounds", type=int, default=3)
    args = parse(parser, argv)
    if min(args.requests, args.rounds) < 1:
        raise ValueError(f"--requests={args.requests} --rounds={args.rounds}: give numbers above 0")
    with tempfile.TemporaryDirectory(prefix="weft-answers-") as folder:
        return _Bench(args, Path(folder)).run()


class _Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.config = _settings(folder, args.python)
        self.stock_url = f"http://127.0.0.1:{self.config.inference.decode.port + 1}"
        self.key = secrets.token_hex(8)
        self.training_cores, self.serving_cores = cores_apart()
        self.found: dict[str, list[list[Streamed]]] = {}

    def run(self) -> int:
        write_model(self.folder / "model")
        os.sched_setaffinity(0, self.serving_cores)
        options = "--with-decode", "--trace", str(self.folder)
        port = int(self.stock_url.rpartition(":")[2])
        with (
            weft_server(self.config, *options, key=self.key) as serving,
            stock_server(self.config, port, self.folder / "stock.log") as stock,
        ):
            until_ready([decode_url(self.config.inference.decode)], serving)
            until_ready([self.stock_url], stock)
            self._alternate("without training")
            training = Training(self.config, real=False, folder=self.folder, cores=self.training_cores)
            with ThreadPoolExecutor(1) as threads:
                ranks = threads.submit(run_ranks, NUM_RANKS, train, training, timeout_s=RUN_S)
                try:
                    while not ranks.done() and not self._is_prefilling():
                        time.sleep(0.5)
                    self._alternate("beside training")
                finally:
                    training.stop.touch()
                ranks.result()
        return self._report()

    def _is_prefilling(self) -> bool:
        answer = httpx.get(f"{controller_url(self.config)}/ready", timeout=10)
        return bool(answer.json().get("serving"))

    def _alternate(self, when: str) -> None:
        """Ask both servers the same, by turns: one request after the other, and all at once."""
        asyncio.run(self._ask(WARM, self.stock_url, 10**6, 1, 8))
        asyncio.run(self._ask(WARM, controller_url(self.config), 10**6, 1, 8))
        for number in range(self.args.rounds):
            for kind, at_once, count in (
                ("one by one", 1, IN_TURN),
                ("at once", self.args.requests, self.args.requests),
            ):
                for server, url in (("stock", self.stock_url), ("weft", controller_url(self.config))):
                    asyncio.run(self._ask(f"{server}, {when}, {kind}", url, 1000 * number, at_once, count))

    async def _ask(self, name: str, url: str, seed: int, at_once: int, count: int) -> None:
        limit = asyncio.Semaphore(at_once)
        headers = {"Authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_S, limits=limits) as client:
            pause_s = PAUSE_S if at_once == 1 else 0.0
            asked = (self._stream(client, limit, seed + number, pause_s) for number in range(count))
            self.found.setdefault(name, []).append(await asyncio.gather(*asked))

    async def _stream(self, client: httpx.AsyncClient, limit: asyncio.Semaphore, seed: int, pause_s: float) -> Streamed:
        draw, name = random.Random(seed), secrets.token_hex(8)
        body = {
            "prompt": [draw.randrange(256) for _ in range(draw.randint(*PROMPTS))],
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with limit:
            await asyncio.sleep(draw.uniform(0.0, pause_s))
            begin_s, first_s, tokens, rest = time.monotonic(), 0.0, list[int](), b""
            async with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as answer:
                async for part in answer.aiter_bytes():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            first_s = first_s or time.monotonic()
                            for choice in json.loads(line[6:]).get("choices", ()):
                                tokens += choice.get("token_ids") or ()
        by_worker = "x-weft-worker" in answer.headers
        return Streamed(name, begin_s, first_s, time.monotonic(), tuple(tokens), by_worker)

    def _report(self) -> int:
        records = prefills_of(self.folder, workers_of(self.config))
        steps = [step for of_worker in records.values() for step in of_worker]
        figures, equal = {}, True
        for name, rounds in self.found.items():
            if name != WARM:
                asked = [answer for each in rounds for answer in each]
                stock = [answer for each in self.found[name.replace("weft", "stock")] for answer in each]
                figures[name] = found = _figures(asked, stock, steps)
                found["tokens/s"] = [_rate(each) for each in rounds]
                equal &= found["equal"] == len(asked)
        rows = [_row(name, found) for name, found in figures.items()]
        show(table_of(rows, f"Streamed answers of {OUTPUT} tokens, {NUM_RANKS} ranks, {len(SERVED)} workers"))
        return finish(self.args, "answers", figures, met=equal)


def _figures(answers: Sequence[Streamed], stock: Sequence[Streamed], steps: Sequence[dict]) -> dict[str, Any]:
    """Compare answers with a stock server's to the same requests."""
    waits = [_wait_s(answer, steps) for answer in answers]
    later = [
        one.first_s - one.begin_s - wait_s - (other.first_s - other.begin_s)
        for one, other, wait_s in zip(answers, stock, waits, strict=True)
        if one.by_worker
    ]
    return {
        "answers": len(answers),
        "equal": sum(one.tokens == other.tokens for one, other in zip(answers, stock, strict=True)),
        "in bubbles": sum(answer.by_worker for answer in answers),
        "first_s": sorted(answer.first_s - answer.begin_s for answer in answers),
        "wait_s": sorted(waits),
        "no_wait_s": sorted(one.first_s - one.begin_s - wait_s for one, wait_s in zip(answers, waits, strict=True)),
        "later_s": sorted(later),
    }


def _row(name: str, found: Mapping[str, Any]) -> dict[str, object]:
    def times(which: str) -> str:
        values = found[which]
        return f"{1e3 * at(values, 0.5):.0f} / {1e3 * at(values, 0.9):.0f}" if any(values) else "-"

    return {
        "server": name,
        **{part: found[part] for part in ("answers", "equal", "in bubbles")},
        "first chunk, ms (p50 / p90)": times("first_s"),
        "wait": times("wait_s"),
        "first chunk without the wait": times("no_wait_s"),
        "later than stock and wait": times("later_s"),
        "tokens/s": f"{median(found['tokens/s']):.0f}",
    }


def _rate(answers: Sequence[Streamed]) -> float:
    """Return the tokens per second of all answers, from the first request to the last token."""
    taken_s = max(answer.end_s for answer in answers) - min(answer.begin_s for answer in answers)
    return sum(len(answer.tokens) for answer in answers) / taken_s


def _settings(folder: Path, python: str) -> WeftConfig:
    config = settings(f"answers-{os.getpid()}", ranks=NUM_RANKS, microbatches=4, schedule="1f1b")
    prefill = config.inference.prefill
    prefill.model, prefill.python, prefill.ranks = str(folder / "model"), python, list(SERVED)
    prefill.cost_dir, prefill.yield_cores = str(folder / "costs"), False
    config.inference.decode.enabled = True
    config.inference.controller.max_queue = 256
    return config


def _wait_s(answer: Streamed, steps: Sequence[dict]) -> float:
    """Return how long a prompt waited before and between the steps that computed it."""
    spans = [step["spans"][-1] for step in steps if any(answer.name in request for request in step["tokens"])]
    if not spans:
        return 0.0
    return max(end for _, end in spans) - answer.begin_s - sum(end - begin for begin, end in spans)
