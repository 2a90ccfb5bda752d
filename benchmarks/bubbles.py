"""Training with real vLLM workers on the same ranks: gains and costs of prefill."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.on_one_gpu import TWO_SITES, run_on_one_gpu
from benchmarks.results import finish, parse
from benchmarks.serving.figures import steps_within
from benchmarks.serving.report import Findings, prefills_of, report_serving
from benchmarks.serving.requests import Answer, Request, read_trace, replay
from benchmarks.serving.served_model import write_model
from benchmarks.serving.servers import stock_server, until_ready, weft_server
from benchmarks.serving.training import Training, cores_apart, settings, train
from benchmarks.serving.watch import Watch, Windows
from weft.inference.board.layout import boards_folder
from weft.inference.model_sizes import model_bytes
from weft.inference.worker.vllm_weights import FOLDER_VARIABLE
from weft.inference.worker.workers import workers_of
from weft.recipes.serving.scoring import Scorer, likelihoods_of, with_weights
from weft.tools.netbed import NetBed, Topology
from weft.tools.ranks import run_ranks

NUM_RANKS, MICROBATCHES = 4, 4
SERVED = (0, 3)
"""Ranks with a worker: the first, whose bubble is in the middle, and the last, whose is at the end. A worker of two
stages spans them, one of four stages all ranks."""
LONGEST_PROMPT, LONGEST_DOCUMENT = 2048, 512
AGAIN = "again"
"""Folder of a copy of the workers' weights."""
MOST_SLOWER = 0.005
"""Goal of an evaluation: the share by which a step beside it may be longer."""
STATED = re.compile(r"stage (\d+) of \d+: (\d+) bytes of weights, (\d+) bytes of KV cache")
"""The memory that a stage logs."""
RUN_S = 1800.0
"""Allowance for the whole run."""


def main(argv: Sequence[str]) -> int:
    """Train on four ranks, with and without prefill in alternating windows. Return 1 if an evaluation slows steps."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks bubbles", description=__doc__)
    parser.add_argument("--python", required=True, type=os.path.abspath, help="a Python that has vLLM")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--trace", type=Path, help="CSV of an Azure LLM inference trace, whose requests are sent")
    work.add_argument("--evaluate", type=int, metavar="DOCUMENTS", help="load weights and score so many documents")
    parser.add_argument("--requests", type=int, default=200, help="requests of the trace")
    parser.add_argument("--rounds", type=int, default=3, help="windows without and with requests")
    parser.add_argument("--window", type=float, default=8.0, help="seconds of a window")
    parser.add_argument(
        "--stages", type=int, choices=(1, 2, 4), default=1, help="ranks that a worker's model is cut over"
    )
    parser.add_argument("--real", action="store_true", help="real compute on shared cores, instead of emulated on one")
    parser.add_argument("--wan", action="store_true", help="two ranks at each of two sites of cluster=two_sites")
    parser.add_argument("--schedule", default="1f1b", help="of the training step")
    parser.add_argument(
        "--gpu", action="store_true", help="a real pipeline of two ranks and a worker, all on the first GPU"
    )
    parser.add_argument("--shape", nargs="*", default=(), help="settings of the real model")
    args = parse(parser, argv)
    if args.evaluate is not None and (args.evaluate < 1 or args.stages > 1):
        raise ValueError(f"--evaluate={args.evaluate} --stages={args.stages}: give a number above 0, and one stage")
    args.real = args.real or args.gpu
    if args.gpu and (args.wan or args.stages > 1):
        raise ValueError("--gpu: has two ranks and one worker; leave out --wan and --stages")
    over_s = args.rounds * args.window
    trace = [] if args.evaluate else read_trace(args.trace, args.requests, most_tokens=LONGEST_PROMPT, over_s=over_s)
    with tempfile.TemporaryDirectory(prefix="weft-bubbles-") as folder:
        return _Bench(args, Path(folder)).run(trace)


class _Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.num_ranks, served = (2, SERVED[:1]) if args.gpu else (NUM_RANKS, SERVED)
        self.config = settings(
            f"bubbles-{os.getpid()}",
            ranks=self.num_ranks,
            microbatches=MICROBATCHES,
            schedule=args.schedule,
            sites=TWO_SITES if args.gpu else ["cluster=two_sites"] if args.wan else [],
        )
        prefill = self.config.inference.prefill
        prefill.model, prefill.python = str(folder / "model"), args.python
        prefill.cost_dir, prefill.stages = str(folder / "costs"), args.stages
        prefill.yield_cores = args.real  # otherwise training has a core of its own
        prefill.ranks = list(range(NUM_RANKS)) if args.stages > len(SERVED) else list(served)
        self.workers = workers_of(self.config)
        self.urls = [f"http://127.0.0.1:{worker.port}" for worker in self.workers]
        self.key = secrets.token_hex(8)
        self.training_cores, self.serving_cores = cores_apart()
        if args.real:
            self.training_cores, self.serving_cores = (), [*self.training_cores, *self.serving_cores]
        self.training = Training(self.config, args.real, folder, self.training_cores, tuple(args.shape))
        self.windows = Windows()
        self.answers: list[Answer] = []
        self.asked: list[tuple[list[Request], int]] = []
        self.memory: dict[str, dict[str, float]] = {}
        self.scored: list[str] = []
        self.more: dict[str, str] = {}

    def run(self, trace: Sequence[Request]) -> int:
        write_model(self.folder / "model")
        if self.args.evaluate:
            shutil.copytree(self.folder / "model", self.folder / AGAIN)
            os.environ[FOLDER_VARIABLE] = self.config.inference.prefill.model
        serving = weft_server(self.config, "--trace", str(self.folder), key=self.key)
        with self._bed() as bed, serving as serve:
            until_ready(self.urls, serve)
            with ThreadPoolExecutor(1) as threads:
                ranks = threads.submit(self._run_ranks, bed)
                watch = Watch(self.workers)
                try:
                    self.memory = self._memory()
                    self._alternate(trace, ranks, watch)
                finally:
                    self.training.stop.touch()
                    watch.end()
                ranks.result()
            same = self._compare() if self.args.stages > 1 else {}
            if self.scored:
                self.more[f"{self.args.evaluate} documents"] = "; ".join(self.scored)
            return self._report(watch, same)

    def _run_ranks(self, bed: NetBed | None) -> None:
        if bed is not None:
            run_ranks_in(bed, bed.nodes, train, self.training, timeout_s=RUN_S)
        elif self.args.gpu:
            run_on_one_gpu(self.num_ranks, train, self.training, timeout_s=RUN_S)
        else:
            run_ranks(self.num_ranks, train, self.training, timeout_s=RUN_S)

    def _memory(self) -> dict[str, dict[str, float]]:
        """Return the bytes of weights and KV cache of each stage, as its worker has logged them, and of all."""
        folder, prefill = boards_folder(self.config, os.getuid()), self.config.inference.prefill
        found = {
            f"stage {stage}": {"weights": float(weights), "cache": float(cache)}
            for worker in self.workers
            for stage, weights, cache in STATED.findall((folder / f"worker{worker.index}.log").read_text())
        }
        return found | {"whole": {"weights": model_bytes(Path(prefill.model)), "cache": prefill.kv_cache_bytes}}

    def _compare(self) -> dict[str, object]:
        """Send the same requests to a stock server, and return how many first tokens are equal."""
        port = self.workers[-1].port + 1
        with stock_server(self.config, port, self.folder / "stock.log") as process:
            until_ready([url := f"http://127.0.0.1:{port}"], process)
            stock = [answer for requests, seed in self.asked for answer in replay(requests, [url], key="", seed=seed)]
        pairs = [(ours.first, theirs.first) for ours, theirs in zip(self.answers, stock, strict=True)]
        equal = sum(ours is not None and ours == theirs for ours, theirs in pairs)
        self.more["first tokens equal to a stock server's"] = f"{equal} of {len(pairs)}"
        for name, sizes in self.memory.items():
            weights, cache = (f"{sizes[part] / 1e6:.2f} MB" for part in ("weights", "cache"))
            self.more[f"memory, {name}"] = f"weights {weights}, KV cache {cache}"
        return {"first tokens equal": [equal, len(pairs)], "memory": self.memory}

    @contextlib.contextmanager
    def _bed(self) -> Iterator[NetBed | None]:
        """Build a bed with one node per rank, and yield it, or None without a WAN.

        The bed's line runs on the training's core. This process, which sends the requests, moves to the workers' cores.
        """
        with contextlib.ExitStack() as stack:
            bed = None
            if self.args.wan:
                if self.training_cores:
                    os.sched_setaffinity(0, self.training_cores)
                topology = Topology.of_cluster(self.config.cluster, name=f"bubbles{os.getpid()}")
                bed = stack.enter_context(NetBed.up(topology))
            os.sched_setaffinity(0, self.serving_cores)
            yield bed

    def _alternate(self, trace: Sequence[Request], ranks: Future, watch: Watch) -> None:
        """Alternate windows with and without prefill. A window with prefill ends when all of it has been computed."""
        while not all(board.state().step > 3 for board in watch.boards.values()):
            if ranks.done():
                ranks.result()
            time.sleep(0.1)
        with self._window("warm"):
            if self.args.evaluate:
                self._score(1)
            replay(trace[: len(trace) // 8], self.urls, key=self.key, seed=10**6)
        each = -(-len(trace) // self.args.rounds)
        for part in range(self.args.rounds):
            requests = trace[part * each : (part + 1) * each]
            with self._window("off"):
                time.sleep(self.args.window)
            with self._window("on"):
                if self.args.evaluate:
                    self.scored.append(self._score(part))
                    continue
                shifted = [Request(r.after_s - requests[0].after_s, r.tokens) for r in requests]
                self.asked.append((shifted, 1000 * part))
                self.answers += replay(shifted, self.urls, key=self.key, seed=1000 * part)

    def _score(self, number: int) -> str:
        """Load weights into all workers, as after a checkpoint, and let them score documents of all lengths."""
        scorers = [Scorer(url, self.key, self.config.inference.prefill.model) for url in self.urls]
        draw, begin_s = random.Random(number), time.monotonic()
        lengths = [draw.randint(2, LONGEST_DOCUMENT) for _ in range(self.args.evaluate)]
        ready = with_weights(scorers, AGAIN if number % 2 else "model")
        loaded_s = time.monotonic() - begin_s
        likelihoods_of(ready, [[draw.randrange(256) for _ in range(length)] for length in lengths])
        return f"{sum(lengths)} tokens in {time.monotonic() - begin_s:.1f} s (weights {loaded_s:.1f} s)"

    @contextlib.contextmanager
    def _window(self, name: str) -> Iterator[None]:
        """Record a window, and print a line about its steps when it ends."""
        with self.windows.open(name):
            yield
        steps_s = steps_within(self.training.steps_s(), self.windows.spans[name][-1:])
        middle = f"median {1e3 * median(steps_s):.1f} ms" if steps_s else "none whole"
        print(f"{name}: {len(steps_s)} steps, {middle}", file=sys.stderr, flush=True)

    def _report(self, watch: Watch, more: dict[str, object]) -> int:
        found = Findings(
            workers=self.workers,
            watch=watch,
            windows=self.windows,
            steps=self.training.steps_s(),
            prefills=prefills_of(self.folder, self.workers),
            answers=self.answers,
            more=self.more,
        )
        figures = report_serving(found) | more
        met = figures["slower"] <= MOST_SLOWER if self.args.evaluate else None
        return finish(self.args, "bubbles", figures, met=met)
