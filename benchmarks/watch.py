"""Costs of watching: the event timer by turns, 10,000 ranks in the collector and in a browser, clocks, a trace."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pandas as pd
import psutil

from benchmarks.memory import QUICKSTART, random_batches
from benchmarks.results import finish, parse, show
from tests.tools.watch.browser import CHROMIUM, Browser
from tests.tools.watch.large import record_large
from tests.tools.watch.recorded import Recording
from weft.conf.compose import compose
from weft.conf.host.processes import allow_files
from weft.engine.observability.event_ring import RECORD, RingReader, RingWriter, encode, rings_folder
from weft.engine.observability.event_timer import EventTimer
from weft.pipeline.costs import LinkCost
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of
from weft.tools.watch import FOLDER
from weft.tools.watch import collector as collecting
from weft.tools.watch.collector import Collector, rounds
from weft.tools.watch.record import RunRecord

STAGES, CAPACITY, WAN_S, AHEAD_S = 8, 512, 0.004, 2.0
KINDS = [(kind, m) for m in range(8) for kind in ("RECV_F", "F", "SEND_F", "RECV_B", "B", "SEND_B")]
KINDS += [(kind, -1) for kind in ("data", "sums", "gradients", "STEP", "REDUCE_GRAD", "step")]
"""Events of a rank's step, with their micro-batches."""
TINY = (
    "model.overrides.hidden_size=32",
    "model.overrides.intermediate_size=64",
    "model.overrides.num_hidden_layers=1",
    "data.sequence_length=16",
)
ROWS = (
    ("timer: share of a quickstart step, by turns", "timer_share", "{:+.3%}", 0.002),
    ("the same without the timer in both turns", "control_share", "{:+.3%}", None),
    ("timer: share by its events and their cost", "events_share", "{:.3%}", 0.002),
    ("timer: processor time of an event, µs", "event_us", "{:.2f}", None),
    ("timer: events of that step", "step_events", "{:.0f}", None),
    ("ring: bytes per rank and step of 54 events", "ring_bytes", "{:.0f}", None),
    ("files: bytes per rank and step of 54 events", "file_bytes", "{:.0f}", None),
    ("collector: processor seconds per step of all ranks", "collector_s", "{:.2f}", 1.0),
    ("collector: steps of which events are missing", "lost_steps", "{:.0f}", 0.0),
    ("heat map in chromium: seconds until it obeys a key", "heat_s", "{:.2f}", None),
    ("heat map: processor seconds of server and chromium", "heat_cpu_s", "{:.2f}", 2.0),
    ("heat map: peak MiB of `weft watch`", "server_mib", "{:.0f}", 300.0),
    ("heat map: MiB of the page's JavaScript", "page_mib", "{:.0f}", 300.0),
    ("clocks of two hosts over a WAN of 4 ms: bound, ms", "bound_ms", "{:.2f}", None),
    ("clocks of two hosts over a WAN of 4 ms: error, ms", "error_ms", "{:.2f}", "bound_ms"),
    ("OpenTelemetry: spans of a step in the SDK's exporter, of its events", "span_share", "{:.0%}", None),
)
"""Texts, names, forms and greatest values of the figures. A goal may be another figure."""


def main(argv: Sequence[str]) -> int:
    """Run ``watch`` and return 0 if the goals are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks watch", description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000, help=f"of large runs; a multiple of {STAGES}")
    parser.add_argument("--steps", type=int, default=20, help="steps that the collector reads, one per second")
    parser.add_argument("--rounds", type=int, default=200, help="steps with the timer, and as many without")
    args = parse(parser, argv)
    if args.ranks % STAGES or args.ranks < STAGES or CHROMIUM is None:
        raise ValueError(f"--ranks {args.ranks}: take a multiple of {STAGES}, and install chromium (apt-get)")
    figures: dict[str, float] = {}
    with TemporaryDirectory(prefix="weft-watch-") as folder:
        figures |= timer(Path(folder) / "timer", args.rounds)
        for part in (collector, heat_map, clocks_and_trace):
            figures |= part(Path(folder) / part.__name__, args)
    goals = {name: figures[most] if isinstance(most, str) else most for _, name, _, most in ROWS}
    rows = [
        {
            "what": text,
            "measured": form.format(figures[name]),
            "at most": "" if goals[name] is None else form.format(goals[name]),
        }
        for text, name, form, _ in ROWS
    ]
    show(table_of(rows, f"{args.ranks} ranks, {args.steps} steps; {args.rounds} turns of the timer"))
    return finish(
        args, "watch", figures, met=all(figures[name] <= most for name, most in goals.items() if most is not None)
    )


def timer(folder: Path, num_rounds: int) -> dict[str, float]:
    """Return the share that timing adds to the main thread's processor time of a quickstart step on one rank.

    What it adds is measured with and without it by turns, with layers so small that the host's work is all, because
    computations of large ones vary by more. A third turn, without it again, shows how much those vary.
    """
    folder.mkdir()
    tiny, real = (
        run_ranks(1, _turns, folder / name, settings, count, timeout_s=600.0)[0]
        for name, settings, count in (("tiny", TINY, num_rounds), ("real", (), 3))
    )
    step_s = real["step_s"]
    shares = {f"{name}_share": tiny[name] / step_s for name in ("timer", "timer_error", "control")}
    return tiny | shares | {"step_s": step_s, "events_share": tiny["step_events"] * tiny["event_us"] * 1e-6 / step_s}


def _turns(folder: Path, settings: Sequence[str], count: int) -> dict[str, float]:
    from weft.engine.initialize import initialize

    config = compose([*QUICKSTART, "pipeline.stages=1", *settings])
    engine, *_ = initialize(config=config)
    engine.set_dataiterator(random_batches(config))
    events = EventTimer.open(folder, 0, max(map(len, engine.schedule.rows)), engine.device)
    ring, order = RingReader(rings_folder(folder) / "rank0"), np.random.default_rng(0)
    used = np.zeros((count + 1, 3))
    for turn in used:
        for mode in order.permutation(3):
            engine.watcher.timer = events if mode == 1 else None
            engine.time_events()
            begun_s = time.thread_time()
            engine.train_batch()
            turn[mode] = time.thread_time() - begun_s
    num_events, event_s = len(ring.read()) / len(used), float(str(ring.current()["event_s"]))
    engine.watcher.timer = None
    engine.destroy()
    shutil.rmtree(rings_folder(folder), ignore_errors=True)
    plain, timed, again = used[1:].T  # the first steps are slow
    found = {"step_s": np.median(plain), "timer": np.median(timed - plain), "control": np.median(again - plain)}
    found["timer_error"] = 1.25 * np.std(timed - plain) / count**0.5  # of the median
    return {name: float(value) for name, value in found.items()} | {
        "event_us": event_s * 1e6,
        "step_events": num_events,
    }


def collector(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Write a step per second to the rings of all ranks, and measure the collector's rounds.

    Its clock counts its processor time and its pauses, so that writing and other programs take no time.
    """
    allow_files()
    (folder / FOLDER).mkdir(parents=True)
    context = get_context("spawn")  # each process may keep so many files open, and each mapped ring is one
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write_rings, args=(folder, args.ranks, theirs), daemon=True)
    writer.start()
    ours.recv()
    pauses: list[float] = []

    def clock() -> float:
        return time.process_time() + sum(pauses)

    with mock.patch.multiple(collecting, monotonic=clock, sleep=pauses.append):
        found = Collector(folder, "host")
        each = rounds(found)
        next(each)  # maps the rings
        begun_s, used_s = clock(), time.process_time()
        for step in range(1, args.steps + 1):
            ours.send(step)
            ours.recv()
            next(each)
            while clock() < begun_s + step:
                next(each)
        found.close()
        used_s = time.process_time() - used_s
    ours.send(0)
    writer.join(60)
    table = pd.concat(map(pd.read_parquet, (folder / FOLDER).glob("steps-*.parquet")))
    counts = table.groupby("step")["count"].sum().reindex(range(1, args.steps + 1), fill_value=0)
    size = sum(path.stat().st_size for path in (folder / FOLDER).glob("*.parquet"))
    return {
        "collector_s": used_s / args.steps,
        "lost_steps": float((counts != len(KINDS) * args.ranks).sum()),
        "file_bytes": size / args.ranks / args.steps,
        "ring_bytes": float(RECORD.size * len(KINDS)),
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
    codes = [[encode(kind, s if kind.isupper() else -1, m) for kind, m in KINDS] for s in range(STAGES)]
    lengths = np.random.default_rng(step).uniform(0.001, 0.01, (97, len(KINDS))).tolist()
    now = time.perf_counter()
    for rank, ring in enumerate(rings):
        at = now
        for code, seconds in zip(codes[rank * STAGES // len(rings)], lengths[rank % 97], strict=True):
            ring.write(code, 0, step, at, at + seconds)
            at += seconds


def heat_map(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Open the heat map of a recorded run in chromium three times, each time with a new server."""
    run = record_large(folder, stages=STAGES, lines=args.ranks // STAGES, steps=100, slow={args.ranks // 2: 1.1})
    return dict(
        zip(
            ("heat_s", "heat_cpu_s", "server_mib", "page_mib"),
            map(median, zip(*_opened(run, args), strict=True)),
            strict=True,
        )
    )


def _opened(run: Path, args: argparse.Namespace) -> Iterator[tuple[float, ...]]:
    line = [sys.executable, "-m", "weft.tools.cli", "watch", str(run), "--port", "0"]
    for number in range(3):
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server, Browser(run / f"{number}") as browser:
            try:
                assert server.stdout is not None
                address = server.stdout.readline().strip().rpartition(" ")[2]
                begun_s, used_s = time.perf_counter(), _used_s()
                browser.call("Page.navigate", url=f"{address}#heat?rank=7")
                browser.wait("document.body?.dataset.view === 'heat'", 120.0)
                browser.run("document.getElementById('heat').focus()")
                browser.press("ArrowDown")
                browser.wait("document.getElementById('cell').textContent.startsWith('rank 8, ')")
                heat_s, heat_cpu_s = time.perf_counter() - begun_s, _used_s() - used_s
                named = browser.run("document.querySelector('#outliers li').textContent")
                assert f"rank {args.ranks // 2} " in named and not browser.errors, (named, browser.errors)
                status = Path(f"/proc/{server.pid}/status").read_text()
                peak_kib = next(int(text.split()[1]) for text in status.splitlines() if text.startswith("VmHWM"))
                yield heat_s, heat_cpu_s, peak_kib / 1024, browser.call("Runtime.getHeapUsage")["usedSize"] / 2**20
            finally:
                server.terminate()


def _used_s() -> float:
    """Return the processor seconds of this process's living children and theirs."""
    used = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in used)


def clocks_and_trace(folder: Path, _: argparse.Namespace) -> dict[str, float]:
    """Line up two hosts' clocks over a WAN, and export a step to OpenTelemetry's in-memory exporter."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from weft.tools.watch.otlp import send

    recording = Recording(folder, sites={"east": 2, "west": 2}, wan=LinkCost(latency_s=WAN_S))
    recording.run(4)
    record, exporter = (
        RunRecord(recording.write({"a": (range(4), 0.0), "b": (range(4, 8), AHEAD_S)})),
        InMemorySpanExporter(),
    )
    spans = record.spans(3)  # on one clock; here on their own again
    own = spans.assign(**{name: spans[name] + AHEAD_S * (spans.host == "b") for name in ("start_s", "end_s")})
    clock = record.clocks(own)["b"]
    send(record, exporter, 3)
    found = sum("weft.section" in (each.attributes or {}) for each in exporter.get_finished_spans())
    return {
        "bound_ms": 1e3 * clock.bound_s,
        "error_ms": 1e3 * abs(clock.ahead_s - AHEAD_S),
        "span_share": found / int((spans.section != "step").sum()),
    }
