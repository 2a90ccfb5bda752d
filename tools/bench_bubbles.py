"""`weft bench bubbles`: training and real vLLM workers side by side; what prefill gains and what it costs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

from weft.conf.boards import boards_folder
from weft.conf.schema import WeftConfig
from weft.inference.board import BoardWriter, board_path
from weft.inference.board_reader import BoardReader
from weft.inference.prefill_cost import PrefillCost
from weft.inference.worker_command import Worker, cost_file, workers_of
from weft.tools.bubbles.faults import FAULTS, Target
from weft.tools.bubbles.picture import draw
from weft.tools.bubbles.reckoning import histogram, slowdown, steps_within, use_of
from weft.tools.bubbles.requests import Answer, read_trace, replay
from weft.tools.bubbles.served_model import write_model
from weft.tools.bubbles.training import RankLog, settings, train
from weft.tools.ranks import run_ranks

NUM_RANKS, MICROBATCHES = 4, 4
SERVED = (0, 3)
"""Ranks with a worker: the first, whose bubble is in the middle, and the last, whose is at the end."""
LONGEST_PROMPT = 2048
START_S = 150.0
"""In which the workers have to answer."""
MARKED_STEPS = 1000
BETWEEN_S = 3.0
"""Pause after a fault."""


def main(argv: Sequence[str]) -> int:
    """Four ranks train all along; windows with requests alternate with windows without. Returns 0."""
    parser = argparse.ArgumentParser(prog="weft bench bubbles", description=__doc__)
    parser.add_argument("--python", required=True, help="a Python that has vLLM")
    parser.add_argument("--trace", type=Path, required=True, help="CSV of an Azure LLM inference trace")
    parser.add_argument("--requests", type=int, default=200, help="requests of the trace")
    parser.add_argument("--rounds", type=int, default=3, help="windows without and with requests")
    parser.add_argument("--window", type=float, default=8.0, help="seconds of a window")
    parser.add_argument("--real", action="store_true", help="real compute on shared cores, instead of emulated on one")
    parser.add_argument("--faults", action="store_true", help="then break the workers in every way we know")
    parser.add_argument("--picture", metavar="FILE", help="draw two ranks over two steps here")
    parser.add_argument("--json", metavar="FILE", help="also write every figure here")
    args = parser.parse_args(argv)
    trace = read_trace(args.trace, args.requests, most_tokens=LONGEST_PROMPT, over_s=args.rounds * args.window)
    with tempfile.TemporaryDirectory(prefix="weft-bubbles-") as folder:
        return _Bench(args, Path(folder)).run(trace)


class _Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.config = settings(f"bubbles-{os.getpid()}", ranks=NUM_RANKS, microbatches=MICROBATCHES)
        self.config.inference.prefill.model = str(folder / "model")
        self.config.inference.prefill.python = args.python
        self.config.inference.prefill.cost_dir = str(folder / "costs")
        self.workers = _with_ranks(self.config)
        self.urls = [f"http://127.0.0.1:{worker.port}" for worker in self.workers]
        cores = sorted(os.sched_getaffinity(0))
        apart = not args.real and len(cores) > 1
        self.training_cores = (cores[0],) if apart else ()
        self.serving_cores = cores[1:] if apart else cores

    def run(self, trace: Sequence) -> int:
        write_model(self.folder / "model")
        serve = self._serve()
        try:
            _until_ready(self.urls, serve)
            with ThreadPoolExecutor(2) as threads:
                stop = self.folder / "stop"
                ranks = threads.submit(self._train, stop)
                watch = _Watch(self.config, self.workers)
                try:
                    self._alternate(trace, ranks, watch)
                finally:
                    stop.touch()
                    watch.end()
                return self._report(ranks.result(), watch)
        finally:
            serve.terminate()
            serve.wait(30)
            shutil.rmtree(boards_folder(self.config, os.getuid()), ignore_errors=True)

    def _serve(self) -> subprocess.Popen:
        prefill = self.config.inference.prefill
        given = {
            "train.name": self.config.train.name,
            "inference.prefill.model": prefill.model,
            "inference.prefill.python": prefill.python,
            "inference.prefill.ranks": f"[{','.join(map(str, SERVED))}]",
            "inference.prefill.cost_dir": prefill.cost_dir,
            "inference.prefill.first_port": prefill.first_port,
            "inference.prefill.arguments": "['--dtype','float32','--no-enable-prefix-caching']",
            "cluster.ranks": NUM_RANKS,
            "pipeline.stages": NUM_RANKS,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "weft.tools.cli", "serve", "--trace", str(self.folder)]
            + [f"{name}={value}" for name, value in given.items()],
            preexec_fn=lambda: os.sched_setaffinity(0, self.serving_cores),
        )

    def _train(self, stop: Path) -> list[RankLog]:
        args = self.config, self.args.real, str(stop), self.training_cores
        return run_ranks(NUM_RANKS, train, *args, timeout_s=600.0)

    def _alternate(self, trace: Sequence, ranks: Future, watch: _Watch) -> None:
        """Windows off and on; ``on`` ends when its requests are answered."""
        self.answers: list[Answer] = []
        self.windows: dict[str, list[tuple[float, float]]] = {"warm": [], "off": [], "on": []}
        while not all(board.state().step > 3 for board in watch.boards.values()):
            if ranks.done():
                ranks.result()
            time.sleep(0.1)
        with self._window("warm"):
            replay(trace[: len(trace) // 8], self.urls, seed=10**6)
        each = -(-len(trace) // self.args.rounds)
        for part in range(self.args.rounds):
            requests = trace[part * each : (part + 1) * each]
            with self._window("off"):
                time.sleep(self.args.window)
            with self._window("on"):
                shifted = [type(r)(r.after_s - requests[0].after_s, r.tokens) for r in requests]
                self.answers += replay(shifted, self.urls, seed=1000 * part)
        self.said: dict[str, str] = {}
        target = Target(self.urls, self.workers)
        for name, fault in FAULTS.items() if self.args.faults else ():
            with self._window(name):
                self.said[name] = fault(target)
            with self._window("between"):
                time.sleep(BETWEEN_S)

    def _window(self, name: str) -> _Window:
        return _Window(self.windows.setdefault(name, []))

    def _report(self, logs: list[RankLog], watch: _Watch) -> int:
        steps = logs[0].steps_s
        off_s, on_s = (steps_within(steps, self.windows[name]) for name in ("off", "on"))
        prefills = {worker.index: _prefills(self.folder / f"worker{worker.index}.jsonl") for worker in self.workers}
        figures: dict[str, object] = {"off_steps": len(off_s), "on_steps": len(on_s), "slowdown": slowdown(on_s, off_s)}
        print(f"\na mark on the board: {_mark_ns(self.folder):.0f} ns, {2 * len(watch.last(self.workers[0]))} a step")
        print(f"training step: {_spread(off_s)} without requests, {_spread(on_s)} with: {slowdown(on_s, off_s):+.2%}")
        for worker in self.workers:
            spans = [(record["start_s"], record["end_s"]) for record in prefills[worker.index]]
            use = use_of(watch.work(worker), spans, self.windows["on"])
            figures[f"rank{worker.ranks[0]}"] = vars(use)
            print(
                f"rank {worker.ranks[0]}: utilisation {use.trained:.1%} without prefill, "
                f"{use.trained + use.prefilled:.1%} with; {use.bubbles_used:.1%} of bubble time used, "
                f"{use.outside:.2%} of prefill time outside of bubbles"
            )
        for worker in self.workers:
            cost = PrefillCost.load(cost_file(self.config, worker), quantile=self.config.inference.prefill.quantile)
            print(f"worker {worker.index} learnt from {cost.steps} steps: {cost}")
        late = [record["late_s"] for records in prefills.values() for record in records if self._is_on(record)]
        print("prefill steps by lateness: " + ", ".join(f"{name}: {count}" for name, count in histogram(late)))
        good = sorted(answer.ttft_s for answer in self.answers if answer.status == 200)
        split = _bubbles_per_request(prefills.values())
        print(
            f"{len(good)} of {len(self.answers)} requests answered; TTFT p50 {_at(good, 0.5):.2f} s, "
            f"p90 {_at(good, 0.9):.2f} s; bubbles per prompt: median {median(split):g}, most {max(split)}"
        )
        figures |= {"late_s": late, "ttft_s": good, "bubbles_per_prompt": split}
        calm_s = off_s + steps_within(steps, self.windows.get("between", []))
        for name, said in self.said.items():
            hit_s = steps_within(steps, self.windows[name])
            change = slowdown(hit_s, calm_s) if hit_s else float("nan")
            figures[name] = {"said": said, "slowdown": change, "steps": len(hit_s)}
            print(f"{name:<16} step {change:+.2%} over {len(hit_s)} steps; {said}")
        if self.args.json:
            Path(self.args.json).write_text(json.dumps(figures, indent=1))
        if self.args.picture:
            shown = {w.ranks[0]: [(r["start_s"], r["end_s"]) for r in prefills[w.index]] for w in self.workers}
            work = {worker.ranks[0]: watch.work(worker) for worker in self.workers}
            cells = {rank: logs[rank].cells for rank in shown}
            draw(Path(self.args.picture), cells, work, shown, steps, self.windows["on"])
        return 0

    def _is_on(self, record: dict) -> bool:
        return any(low <= record["start_s"] <= high for low, high in self.windows["on"])


class _Window:
    """Notes when it was."""

    def __init__(self, spans: list[tuple[float, float]]) -> None:
        self._spans = spans

    def __enter__(self) -> None:
        self._begin_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._begin_s, time.monotonic()))


class _Watch:
    """Collects the work of each served rank from its board, which remembers a few steps only."""

    def __init__(self, config: WeftConfig, workers: Sequence[Worker]) -> None:
        self.boards = {worker.index: BoardReader(worker.boards[0]) for worker in workers}
        self._steps: dict[int, dict[int, list[tuple[float, float]]]] = {index: {} for index in self.boards}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def work(self, worker: Worker) -> list[tuple[float, float]]:
        """Everything that the rank computed, in order."""
        return [span for _, spans in sorted(self._steps[worker.index].items()) for span in spans]

    def last(self, worker: Worker) -> list[tuple[float, float]]:
        """The rank's work in the last step that was seen."""
        steps = self._steps[worker.index]
        return steps[max(steps)]

    def end(self) -> None:
        """Stop collecting."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.3):
            for index, board in self.boards.items():
                board.state()
                self._steps[index].update(board.work())


def _mark_ns(folder: Path) -> float:
    """Nanoseconds that the engine spends on a mark."""
    writer = BoardWriter(board_path(folder / "marks", 0), rank=0, plan=[], max_edges=64)
    begin_ns = time.perf_counter_ns()
    for _ in range(MARKED_STEPS):
        writer.begin(1)
        for _ in range(15):
            writer.busy()
            writer.idle()
    end_ns = time.perf_counter_ns()
    writer.close()
    return (end_ns - begin_ns) / (MARKED_STEPS * 31)


def _with_ranks(config: WeftConfig) -> tuple[Worker, ...]:
    config.inference.prefill.ranks = list(SERVED)
    return workers_of(config)


def _until_ready(urls: Sequence[str], serve: subprocess.Popen) -> None:
    deadline_s = time.monotonic() + START_S
    for url in urls:
        while True:
            if serve.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{url}: the worker did not start; its log lies beside the boards")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.5)


def _prefills(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _bubbles_per_request(records: object) -> list[int]:
    """In how many bubbles each prompt was computed."""
    found: dict[str, set] = {}
    for worker in records:  # type: ignore[attr-defined]
        for record in worker:
            for request in record["tokens"]:
                found.setdefault(request, set()).add((record["step"], record["bubble"]))
    return [len(bubbles) for bubbles in found.values()] or [0]


def _spread(values: Sequence[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle * 1e3:.1f} ms ({(high - low) / middle:.2%} between quartiles, {len(values)} steps)"


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
