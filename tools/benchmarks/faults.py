"""`weft bench faults`: inject faults into a training run on an emulated WAN, and time its recovery."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic, sleep

import psutil
from rich.table import Table

from weft.comm.wan.key import VARIABLE
from weft.comm.wan.library import load
from weft.tools.benchmarks.results import parse, write_json
from weft.tools.netbed import Job, NetBed
from weft.tools.netbed.attackers import attack, record_handshakes
from weft.tools.tables import show, table_of

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
_SENDER, _RELAY, _RECEIVER = "east0", "east1", "mid0"  # a crossing of the first pipeline, and its peer in the cell
_VICTIM = 4  # a rank in the middle


class Run:
    """A `weft netbed launch` process, and the end times of its steps."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.secret = secrets.token_hex(32)
        self._log = folder / "quickstart" / "metrics.jsonl"
        command = [sys.executable, "-m", "weft.tools.cli", "netbed", "launch", *_SETTINGS, *overrides]
        self.process = subprocess.Popen(
            [*command, f"train.output_dir={folder}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
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
                raise RuntimeError(f"the run has ended: {self.process.stderr.read()[-2000:]}")  # type: ignore[union-attr]
            if monotonic() > limit:
                raise RuntimeError(f"waited {timeout_s:g} s in vain after {len(self.losses)} steps")
            sleep(0.01)
            self._read()

    def _read(self) -> None:
        lines = self._log.read_text().splitlines(keepends=True) if self._log.exists() else []
        for line in lines[len(self.losses) :]:
            if line.endswith("\n"):
                self.losses.append(json.loads(line)["loss"])
                self.ends_s.append(monotonic())

    def longest_since(self, start_s: float) -> float:
        """The longest step that ended after ``start_s``."""
        return max(self.ends_s[i] - self.ends_s[i - 1] for i in range(1, len(self.ends_s)) if self.ends_s[i] > start_s)

    def ordinary(self, usual_s: float, after_s: float) -> bool:
        """Whether the last three steps began after ``after_s`` and took the usual time."""
        last = self.ends_s[-4:]
        if len(last) < 4 or last[0] < after_s:
            return False
        return all(b - a <= _ORDINARY * usual_s for a, b in pairwise(last))


@dataclass(frozen=True)
class Fault:
    """A fault to inject into the run, and its duration."""

    name: str
    inflict: Callable[[Run], object]
    lasts_s: float = 0.0


def main(argv: Sequence[str]) -> int:
    """Run ``weft bench faults [key=value ...]``; returns 1 if the losses differ."""
    parser = argparse.ArgumentParser(prog="weft bench faults", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of `weft launch`")
    args = parse(parser, argv)
    overrides = args.overrides
    load()  # compile here, not in eight ranks at once
    with tempfile.TemporaryDirectory() as folder:
        with _running(Path(folder, "disturbed"), overrides) as run:
            table, usual_s = _disturb(run)
            losses = list(run.losses)
            ending = _kill_a_rank(run)
        with _running(Path(folder, "alone"), overrides) as run:
            run.wait_for(lambda: len(run.losses) >= len(losses), timeout_s=300 + 3 * usual_s * len(losses))
            same = run.losses[: len(losses)] == losses
    outcome = "the same" if same else "NOT the same"
    show(table, ending, f"{len(losses)} losses: {outcome} as of a run that nothing was done to")
    write_json(args, "faults", table, met=same)
    return 0 if same else 1


@contextmanager
def _running(folder: Path, overrides: Sequence[str]) -> Iterator[Run]:
    run = Run(folder, overrides)
    try:
        yield run
    finally:
        run.process.terminate()  # and the bed with all its ranks
        run.process.communicate(timeout=30)


def _disturb(run: Run) -> tuple[Table, float]:
    """Inject the faults one by one, each once steps take their usual time; returns the rows and that time."""
    run.wait_for(lambda: len(run.losses) > 2 + _USUAL_STEPS, timeout_s=300.0)
    usual_s = median(b - a for a, b in pairwise(run.ends_s[2:]))
    rows = []
    for fault in _FAULTS:
        start_s = monotonic()
        count = len(run.ends_s)
        fault.inflict(run)
        run.wait_for(lambda: monotonic() > start_s + fault.lasts_s)  # noqa: B023
        end_s = monotonic() if fault.lasts_s else start_s
        steps = len(run.ends_s) - count
        run.wait_for(lambda: run.ordinary(usual_s, end_s), timeout_s=90.0)  # noqa: B023
        healed_s = max(0.0, run.ends_s[-4] - end_s)
        figures = {
            "steps ended meanwhile": steps,
            "longest step s": f"{run.longest_since(start_s):.2f}",
            "usual again after s": f"{healed_s:.2f}",
        }
        rows.append({"fault": fault.name, **figures})
        print(f"{fault.name}: {figures}", file=sys.stderr, flush=True)
    return table_of(rows, f"a step takes {usual_s:.2f} s"), usual_s


def _kill_a_rank(run: Run) -> str:
    """How a run ends when one of its ranks is killed."""
    ranks = [p for p in psutil.Process(run.process.pid).children(recursive=True) if "weft.recipes.train" in p.cmdline()]
    (victim,) = (p for p in ranks if p.environ()["RANK"] == str(_VICTIM))
    start_s = monotonic()
    victim.kill()
    _, said = run.process.communicate(timeout=120)
    _, alive = psutil.wait_procs(ranks, timeout=0)
    told = [line for line in said.splitlines() if line.startswith("weft train: ")]
    return (
        f"rank {_VICTIM} killed: all ended after {monotonic() - start_s:.1f} s, {len(alive)} left, exit code "
        f"{run.process.returncode}; {len(told)} message(s): {' | '.join(told)}"
    )


# ---- the faults


def _cut_all(run: Run) -> None:
    for site in ("east", "mid", "west"):
        run.bed.cut(site, for_s=5.0)


def _flap_all(run: Run) -> None:
    for site in ("east", "mid"):
        run.bed.flap(site, every_s=0.2, for_s=10.0)


def _lose_packets(run: Run) -> None:
    for site in ("east", "mid"):
        run.bed.drop(site, share=0.01, for_s=5.0)


def _port_of(run: Run) -> tuple[int, list[str]]:
    """The receiver's WAN port, and the sender's ports on its connections to it."""
    seen = run.bed.run(_SENDER, ["ss", "-tnH", "dst", run.bed.address(_RECEIVER)], capture_output=True, text=True)
    pairs = re.findall(r"\S+:(\d+)\s+\S+:(\d+)\s*$", seen.stdout, re.MULTILINE)
    port, _ = Counter(port for _, port in pairs).most_common(1)[0]
    return int(port), [local for local, remote in pairs if remote == port]


def _kill_connection(run: Run) -> None:
    _, locals_ = _port_of(run)
    run.bed.run(_SENDER, ["ss", "-K", "-tnH", "sport", f"= :{locals_[0]}"], check=True, capture_output=True)


def _attack(run: Run) -> None:
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
    Fault("every line between sites cut for 5 s", _cut_all, 5.0),
    Fault("every line cut and healed by turns of 200 ms for 10 s", _flap_all, 10.0),
    Fault("1 % of packets lost for 5 s", _lose_packets, 5.0),
    Fault("one relay's uplink 5 times slower for 5 s", lambda run: run.bed.slow(_RELAY, by=5.0, for_s=5.0), 5.0),
    Fault("a byte flipped in a payload, each way", lambda run: run.bed.flip(_SENDER, _RECEIVER)),
    Fault("unauthenticated peers: nonsense, no key, replayed handshakes, 4 GiB, a scan of all ports", _attack),
)
