"""Costs of watching: the first heat map and the collector of 10,000 ranks, timers, and bytes."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from urllib.request import urlopen

import numpy as np
import psutil
import torch

from benchmarks.results import finish, parse, show
from tests.tools.watch.large import record_large
from weft.engine.observability.event_ring import RECORD, RingWriter, encode, rings_folder
from weft.engine.observability.event_timer import EventTimer
from weft.pipeline.action import Action, Op
from weft.tools.tables import table_of
from weft.tools.watch import FOLDER
from weft.tools.watch.collector import POLL_S, Collector, allow_files, rounds

STAGES, MICROBATCHES = 8, 8
TRANSFERS = ("RECV_F", "F", "SEND_F", "RECV_B", "B", "SEND_B")
OTHERS = ("data", "sums", "gradients", "STEP", "REDUCE_GRAD", "step")
CAPACITY = 512
"""Records of a ring of the benchmark."""
MARKS, TURNS = 200, 400
"""Marks that are timed together, and how often: the fastest are the least disturbed."""
MOST_MAP_S, MOST_MAP_MIB, MOST_COLLECTOR_S = 2.0, 300.0, 1.0


def main(argv: Sequence[str]) -> int:
    """Run ``watch ...`` and return 0 if the goals are met."""
    args = parse(_parser(), argv)
    if args.ranks % STAGES or args.ranks < 2 * STAGES:
        raise ValueError(
            f"--ranks {args.ranks}: not a multiple of the {STAGES} stages; use {args.ranks // 8 * 8 or 16}"
        )
    figures: dict[str, float] = {}
    with TemporaryDirectory(prefix="weft-watch-") as folder:
        for part in (heat_map, collector, timer):
            figures |= part(Path(folder) / part.__name__, args)
    show(table_of(list(_rows(figures)), f"{args.ranks} ranks, {args.steps} steps"))
    met = (
        figures["map_cpu_s"] < MOST_MAP_S
        and figures["map_mib"] < MOST_MAP_MIB
        and figures["collector_cpu_s"] < MOST_COLLECTOR_S
        and not figures["lost_steps"]
    )
    return finish(args, "watch", figures, met=met)


def heat_map(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Serve a recorded run in a new process, and request the heat map while the run's limits are being computed."""
    run = record_large(folder, stages=STAGES, lines=args.ranks // STAGES, steps=100, slow={args.ranks // 2: 1.1})
    found = []
    for _ in range(args.rounds):
        with _served(run) as (server, address):
            opened_s = _cpu_s(server)
            with urlopen(f"{address}api/explain") as answer:
                assert answer.read() == b"null"  # it is being computed
            times = []
            for _ in range(2):
                before, begun = _cpu_s(server), perf_counter()
                with urlopen(f"{address}api/heat") as answer:
                    view = json.load(answer)
                times += [_cpu_s(server) - before, perf_counter() - begun]
            assert len(view["ranks"]) == args.ranks and [o["rank"] for o in view["outliers"]] == [args.ranks // 2]
            mib = _peak_mib(server)
            found.append((opened_s, *times, mib))
    names = ("start_cpu_s", "map_cpu_s", "map_wall_s", "next_map_cpu_s", "next_map_wall_s", "map_mib")
    return {name: median(values) for name, values in zip(names, zip(*found, strict=True), strict=True)}


@contextmanager
def _served(run: Path) -> Iterator[tuple[psutil.Process, str]]:
    line = [sys.executable, "-m", "weft.tools.cli", "watch", str(run), "--port", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield psutil.Process(server.pid), server.stdout.readline().strip().rpartition(" ")[2]
        finally:
            server.terminate()


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def _peak_mib(process: psutil.Process) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def collector(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Write steps to the rings of all ranks, and measure a second of the collector's rounds after each."""
    allow_files()
    (folder / FOLDER).mkdir(parents=True)
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write_rings, args=(folder, args.ranks, theirs))
    writer.start()
    used_s = 0.0
    try:
        ours.recv()
        collecting = Collector(folder, "host")
        each = rounds(collecting)
        next(each)  # maps the rings
        for step in range(1, args.steps + 1):
            ours.send(step)
            ours.recv()
            begun = process_time()
            for _ in range(round(1 / POLL_S)):
                next(each)
            used_s += process_time() - begun
        begun = process_time()
        collecting.close()
        used_s += process_time() - begun
    finally:
        ours.send(0)
        writer.join(60)
        shutil.rmtree(rings_folder(folder), ignore_errors=True)
    import pandas as pd

    table = pd.concat(map(pd.read_parquet, (folder / FOLDER).glob("steps-*.parquet")))
    events = args.ranks * (MICROBATCHES * len(TRANSFERS) + len(OTHERS))
    counts = table.groupby("step")["count"].sum().reindex(range(1, args.steps + 1), fill_value=0)
    size = sum(path.stat().st_size for path in (folder / FOLDER).glob("*.parquet"))
    return {
        "collector_cpu_s": used_s / args.steps,
        "lost_steps": float((counts != events).sum()),
        "file_bytes": size / args.ranks / args.steps,
        "events": events / args.ranks,
    }


def _write_rings(folder: Path, ranks: int, steps: Connection) -> None:
    """Write each step that is received to the rings of all ranks, until it is 0."""
    allow_files()
    rings = [RingWriter(rings_folder(folder), rank, CAPACITY) for rank in range(ranks)]
    steps.send(0)
    while step := steps.recv():
        _write_step(rings, step)
        steps.send(step)


def _write_step(rings: Sequence[RingWriter], step: int) -> None:
    now = perf_counter()
    micro = [(kind, m) for m in range(MICROBATCHES) for kind in TRANSFERS]
    codes = [
        [encode(kind, stage, m) for kind, m in micro] + [encode(k, stage if k.isupper() else -1) for k in OTHERS]
        for stage in range(STAGES)
    ]
    lengths = np.random.default_rng(step).uniform(0.001, 0.01, (97, len(codes[0]))).tolist()
    for rank, ring in enumerate(rings):
        at = now
        for code, seconds in zip(codes[rank * STAGES // len(rings)], lengths[rank % 97], strict=True):
            ring.write(code, 0, step, at, at + seconds)
            at += seconds


def timer(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Time slots and waits with and without the event timer, by turns."""
    folder.mkdir()
    slot = (Action(Op.F, 3, 5),)
    events = EventTimer(RingWriter(rings_folder(folder), 0, 4096), torch.device("cpu"))

    def timed(observed: Callable[[], None]) -> float:
        begun = perf_counter()
        for _ in range(MARKS):
            observed()
        return (perf_counter() - begun) / MARKS

    def marks() -> None:
        perf_counter()
        perf_counter()

    def observed() -> None:
        start = perf_counter()
        events.slot_begins(slot)
        events.slot_ended(slot, start, perf_counter())

    def wait() -> None:
        events.begin_wait("sums")
        events.end_wait()

    turns = [(timed(marks), timed(observed), timed(wait)) for _ in range(TURNS)]
    shutil.rmtree(rings_folder(folder))
    plain_s, slot_s, wait_s = (min(values) for values in zip(*turns, strict=True))
    return {"slot_s": slot_s - plain_s, "wait_s": wait_s, "ring_bytes": float(RECORD.size)}


def _rows(figures: dict[str, float]) -> Iterator[dict[str, str]]:
    texts = (
        ("first heat map, processor time", "map_cpu_s", "{:.2f} s", f"{MOST_MAP_S:.0f} s"),
        ("first heat map, until it is there", "map_wall_s", "{:.2f} s", ""),
        ("next heat map, processor time", "next_map_cpu_s", "{:.2f} s", ""),
        ("start of `weft watch`, processor time", "start_cpu_s", "{:.2f} s", ""),
        ("memory of `weft watch`", "map_mib", "{:.0f} MiB", f"{MOST_MAP_MIB:.0f} MiB"),
        ("collector, processor time per step", "collector_cpu_s", "{:.2f} s", f"{MOST_COLLECTOR_S:.0f} s"),
        ("steps of which events are missing", "lost_steps", "{:.0f}", "0"),
        ("events per rank and step", "events", "{:.0f}", ""),
        ("bytes per event in the ring", "ring_bytes", "{:.0f}", ""),
        ("bytes per rank and step in the files", "file_bytes", "{:.0f}", ""),
        ("timer, per slot", "slot_s", "{:.2e} s", ""),
        ("timer, per wait", "wait_s", "{:.2e} s", ""),
    )
    for what, name, form, goal in texts:
        yield {"what": what, "measured": form.format(figures[name]), "goal": goal}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks watch", description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000, help="ranks of the recorded run and of the collector")
    parser.add_argument("--steps", type=int, default=20, help="steps that the collector reads, one per second")
    parser.add_argument("--rounds", type=int, default=3, help="servers that are started; figures are medians")
    return parser
