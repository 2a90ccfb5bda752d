"""Inject faults into a training run on an emulated WAN, and time its recovery."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic, sleep

import psutil

from benchmarks.netbed.attackers import attack, record_handshakes
from benchmarks.results import finish, parse, show
from weft.comm.wan.key import VARIABLE
from weft.comm.wan.library import load
from weft.tools.netbed import Job, NetBed
from weft.tools.tables import table_of

_SETTINGS = (
    "recipe=quickstart",
    "cluster=three_sites",
    "cluster.ranks=8",
    "cluster.links=[{sites: [east, mid], latency_ms: 10, bandwidth_mbps: 100}, "
    "{sites: [mid, west], latency_ms: 20, bandwidth_mbps: 100}, "
    "{sites: [east, west], latency_ms: 30, bandwidth_mbps: 100}]",
    "comm.cell=2",
    "comm.connections=4",
    "comm.deadline_s=15",
    "comm.tls=false",  # the attackers replay handshakes that they recorded
    "pipeline.microbatches=4",
    "model.overrides.hidden_size=64",
    "model.overrides.intermediate_size=128",
    "model.overrides.num_hidden_layers=4",
    "model.self_check=false",
    "train.microbatch_size=4",
    "train.steps=100000",
    "train.max_seconds=0",
    "checkpoint.every=0",
    "logging.progress=false",
)
_USUAL_STEPS = 8
_ORDINARY = 1.5  # times the usual step
_NEVER = "not in time"
_GOAL_S = 1.0  # after a cut, in the middle of several
_SENDER, _RELAY, _RECEIVER = "east0", "east1", "mid0"  # a crossing of the first pipeline, and its peer in the cell
_VICTIM = 4  # a rank in the middle


class NetbedRun:
    """A `weft netbed launch` process, and the end times of its steps."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.secret = secrets.token_hex(32)
        self._log = folder / "quickstart" / "metrics.jsonl"
        self._errors = folder / "errors"
        command = [sys.executable, "-m", "weft.tools.cli", "netbed", "launch", *_SETTINGS, *overrides]
        folder.mkdir()
        with self._errors.open("w") as errors:  # no pipe, which would fill while nobody reads it
            self.process = subprocess.Popen(
                [*command, f"train.output_dir={folder}"],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, VARIABLE: self.secret},
            )
        self.ends_s: list[float] = []
        self.losses: list[float] = []

    @property
    def bed(self) -> NetBed:
        """The netbed that the run uses."""
        return NetBed(f"run{self.process.pid}")

    def wait_for(self, done: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
        """Record steps as they end, until ``done``.

        Raises:
            RuntimeError: the run has ended, or ``done`` does not come.
        """
        limit = monotonic() + timeout_s
        while not done():
            if self.process.poll() is not None:
                raise RuntimeError(f"the run has ended: {self.said()[-2000:]}")
            if monotonic() > limit:
                raise RuntimeError(f"waited {timeout_s:g} s in vain after {len(self.losses)} steps")
            sleep(0.01)
            self._read()

    def said(self) -> str:
        """What the run has written to its standard error."""
        return self._errors.read_text()

    def _read(self) -> None:
        lines = self._log.read_text().splitlines(keepends=True) if self._log.exists() else []
        for line in lines[len(self.losses) :]:
            if line.endswith("\n"):
                self.losses.append(json.loads(line)["loss"])
                self.ends_s.append(monotonic())

    def waited_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Record steps until ``done``; False where that does not come in time.

        Raises:
            RuntimeError: the run has ended.
        """
        limit = monotonic() + timeout_s
        self.wait_for(lambda: done() or monotonic() > limit, timeout_s=2 * timeout_s)
        return done()

    def usual_s(self) -> float:
        """The median of the last steps."""
        return median(b - a for a, b in pairwise(self.ends_s[-1 - _USUAL_STEPS :]))

    def longest_since(self, start_s: float) -> float:
        """The longest step that ended after ``start_s``; 0 if none did."""
        return max((end - begin for begin, end in pairwise(self.ends_s) if end > start_s), default=0.0)

    def ordinary_since(self, after_s: float, usual_s: float) -> float | None:
        """When the first step began, after ``after_s``, that took the usual time; None if none has yet."""
        times = pairwise(self.ends_s)
        return next((a for a, b in times if a >= after_s and b - a <= _ORDINARY * usual_s), None)


@dataclass(frozen=True)
class Fault:
    """A fault to inject into the run, and its duration."""

    name: str
    inflict: Callable[[NetbedRun], object]
    lasts_s: float = 0.0


def main(argv: Sequence[str]) -> int:
    """Run ``faults [key=value ...]``; returns 1 if the losses differ, or a fault is not got over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of `weft launch`")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for steps to be usual after a fault")
    parser.add_argument("--compare", type=float, default=300.0, help="seconds for the undisturbed run beside it")
    parser.add_argument("--cuts", type=float, nargs="+", metavar="SECONDS", help="only cut every line for so long")
    parser.add_argument("--times", type=int, default=4, help="cuts of each length")
    args = parse(parser, argv)
    faults = [_cut(lasts_s) for lasts_s in args.times * (args.cuts or [])] or _FAULTS
    longest_s = max(args.cuts or [0.0])  # which links have to outlast
    overrides = [*([f"comm.deadline_s={2 * longest_s + 20:g}"] if longest_s else []), *args.overrides]
    load()  # compile here, not in eight ranks at once
    with tempfile.TemporaryDirectory() as folder:
        with _running(Path(folder, "disturbed"), overrides) as run:
            rows = _disturb(run, faults, args.patience)
            if args.cuts:
                return _report_cuts(args, rows)
            losses = list(run.losses)
            ending = _kill_a_rank(run)
        with _running(Path(folder, "alone"), overrides) as run:
            run.waited_for(lambda: len(run.losses) >= len(losses), args.compare)
            count = min(len(run.losses), len(losses))
            same = count > 0 and run.losses[:count] == losses[:count]
    outcome = "the same" if same else "NOT the same"
    table = table_of(rows)
    show(table, ending, f"{count} of {len(losses)} losses compared: {outcome} as those of an undisturbed run")
    met = same and all(row["usual again after s"] != _NEVER for row in rows)
    return finish(args, "faults", table, met=met)


def _report_cuts(args: argparse.Namespace, rows: Sequence[dict[str, str]]) -> int:
    """The medians of each length; 1 if one exceeds the goal."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        again = row["usual again after s"]
        found[row["fault"]].append(inf if again == _NEVER else float(again))
    lines = (
        {"fault": name, "times": len(s), "usual again after s": f"{median(s):.2f} ({min(s):.2f} to {max(s):.2f})"}
        for name, s in found.items()
    )
    show(table_of(lines))
    met = all(median(seconds) <= _GOAL_S for seconds in found.values())
    return finish(args, "faults", rows, met=met)


@contextmanager
def _running(folder: Path, overrides: Sequence[str]) -> Iterator[NetbedRun]:
    run = NetbedRun(folder, overrides)
    try:
        yield run
    finally:
        run.process.terminate()  # and the bed with all its ranks
        run.process.wait(timeout=60)


def _disturb(run: NetbedRun, faults: Sequence[Fault], patience_s: float) -> list[dict[str, str]]:
    """Inject the faults one by one, each once steps take their usual time; returns the rows."""
    run.wait_for(lambda: len(run.losses) > 2 + _USUAL_STEPS, timeout_s=300.0)
    return [_inject(run, fault, patience_s) for fault in faults]


def _inject(run: NetbedRun, fault: Fault, patience_s: float) -> dict[str, str]:
    count = len(run.ends_s)
    run.waited_for(lambda: len(run.ends_s) >= count + _USUAL_STEPS, patience_s)
    usual_s, start_s, count = run.usual_s(), monotonic(), len(run.ends_s)
    fault.inflict(run)
    run.wait_for(lambda: monotonic() > start_s + fault.lasts_s)
    end_s = monotonic() if fault.lasts_s else start_s
    steps = len(run.ends_s) - count
    run.waited_for(lambda: run.ordinary_since(end_s, usual_s) is not None, patience_s)
    again_s = run.ordinary_since(end_s, usual_s)
    row = {
        "fault": fault.name,
        "step before s": f"{usual_s:.2f}",
        "steps ended meanwhile": str(steps),
        "longest step s": f"{run.longest_since(start_s):.2f}",
        "usual again after s": _NEVER if again_s is None else f"{again_s - end_s:.2f}",
    }
    print(row, file=sys.stderr, flush=True)
    return row


def _kill_a_rank(run: NetbedRun) -> str:
    """How a run ends when one of its ranks is killed."""
    ranks = [p for p in psutil.Process(run.process.pid).children(recursive=True) if "weft.recipes.train" in p.cmdline()]
    (victim,) = (p for p in ranks if p.environ()["RANK"] == str(_VICTIM))
    start_s = monotonic()
    victim.kill()
    run.process.wait(timeout=120)
    _, alive = psutil.wait_procs(ranks, timeout=0)
    told = [line for line in run.said().splitlines() if line.startswith("weft train: ")]
    return (
        f"rank {_VICTIM} killed: all ended after {monotonic() - start_s:.1f} s, {len(alive)} left, exit code "
        f"{run.process.returncode}; {len(told)} message(s): {' | '.join(told)}"
    )


# ---- the faults


def _cut(lasts_s: float) -> Fault:
    def inflict(run: NetbedRun) -> None:
        for site in ("east", "mid", "west"):
            run.bed.cut(site, for_s=lasts_s)

    return Fault(f"every line between sites cut for {lasts_s:g} s", inflict, lasts_s)


def _flap_all(run: NetbedRun) -> None:
    for site in ("east", "mid"):
        run.bed.flap(site, every_s=0.2, for_s=10.0)


def _lose_packets(run: NetbedRun) -> None:
    for site in ("east", "mid"):
        run.bed.drop(site, share=0.01, for_s=5.0)


def _port_of(run: NetbedRun) -> tuple[int, list[str]]:
    """The receiver's WAN port, and the sender's ports on its connections to it."""
    seen = run.bed.run(_SENDER, ["ss", "-tnH", "dst", run.bed.address(_RECEIVER)], capture_output=True, text=True)
    pairs = re.findall(r"\S+:(\d+)\s+\S+:(\d+)\s*$", seen.stdout, re.MULTILINE)
    port, _ = Counter(port for _, port in pairs).most_common(1)[0]
    return int(port), [local for local, remote in pairs if remote == port]


def _kill_connection(run: NetbedRun) -> None:
    _, locals_ = _port_of(run)
    run.bed.run(_SENDER, ["ss", "-K", "-tnH", "sport", f"= :{locals_[0]}"], check=True, capture_output=True)


def _attack(run: NetbedRun) -> None:
    bed = run.bed
    port, locals_ = _port_of(run)
    with Job(bed, _RECEIVER, record_handshakes, "wan0", port, 2, 10.0) as recorder:
        recorder.hear()
        for local in locals_[:2]:
            bed.run(_SENDER, ["ss", "-K", "-tnH", "sport", f"= :{local}"], check=True, capture_output=True)
        run.wait_for(recorder.has_news)
        recorded = recorder.result()
    rank = bed.nodes.index(_RECEIVER)
    with Job(bed, "west0", attack, (bed.address(_RECEIVER), port), rank, recorded, run.secret.encode()) as job:
        run.wait_for(job.has_news)
        assert job.result() > 0, "the scan found no open port"


_FAULTS = (
    Fault("one of 4 connections killed", _kill_connection),
    _cut(5.0),
    Fault("every line cut and healed by turns of 200 ms for 10 s", _flap_all, 10.0),
    Fault("1 % of packets lost for 5 s", _lose_packets, 5.0),
    Fault("one relay's uplink 5 times slower for 5 s", lambda run: run.bed.slow(_RELAY, by=5.0, for_s=5.0), 5.0),
    Fault("a byte flipped in a payload, each way", lambda run: run.bed.flip(_SENDER, _RECEIVER)),
    Fault("unauthenticated peers: nonsense, no key, replayed handshakes, 4 GiB, a scan of all ports", _attack),
)
