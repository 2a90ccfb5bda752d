"""A run of 8 ranks on 4 hosts of 2 sites, all on this machine, as `benchmarks survive` sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import psutil

from benchmarks.survival.hosts import HOSTS, NUM_RANKS, OneMachine
from weft.conf import load
from weft.conf.host.json_records import JsonRecords
from weft.conf.host.processes import end_with_parent
from weft.engine.supervision.driver.files import JOURNAL, config_file, read_journal
from weft.engine.supervision.progress_page import ProgressReader, page_path

_POLL_S = 0.02
_AGENT = "weft.engine.supervision.agent.agent"


@dataclass(frozen=True)
class RankProcess:
    """A running rank.

    Attributes:
        local_rank: number of its record in the host's page.
    """

    rank: int
    host: str
    local_rank: int
    pid: int


class Metrics(JsonRecords):
    """Steps that a run has logged; steps that are repeated after a fault replace earlier ones."""

    def by_step(self) -> dict[int, dict[str, Any]]:
        """Return the records of training by step."""
        return {record["step"]: record for record in self.read() if record["kind"] == "train"}


class SupervisedRun:
    """A `weft launch` in its own session, with its journal, its losses and the progress of its ranks."""

    def __init__(self, folder: Path, settings: Sequence[str], hosts: OneMachine) -> None:
        """Start the run.

        Args:
            folder: existing folder for the run, and for the commands to its ranks.
            hosts: the hosts on which it runs.
        """
        self.folder, self.hosts = folder / "survive", hosts
        self.orders = folder / "orders"
        self.orders.mkdir()
        self._metrics = Metrics(self.folder / "metrics.jsonl")
        command = [sys.executable, "-m", "weft.tools.cli", "launch", *settings, *hosts.settings]
        command += [f"train.output_dir={folder}", "train.name=survive"]
        paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": paths, "WEFT_SURVIVE_ORDERS": str(self.orders)}
        self._log = open(folder / "output.log", "w")  # noqa: SIM115
        self.process = hosts.popen(
            command,
            os.environ | own | {"OMP_NUM_THREADS": "1"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    # -- what is seen ----------------------------------------------------------------------------

    def events(self, kind: str = "", *, since: float = 0.0) -> list[dict[str, Any]]:
        """Return the journal's events of one kind, from the time of day ``since`` on."""
        found = read_journal(self.folder / JOURNAL)
        return [event for event in found if event["at"] >= since and kind in ("", event["event"])]

    def losses(self) -> dict[int, float]:
        """Return the losses by step."""
        return {step: record["loss"] for step, record in self._metrics.by_step().items()}

    def step_seconds(self) -> dict[int, float]:
        """Return the seconds of each step, as rank 0 logged it."""
        return {step: record["step_seconds"] for step, record in self._metrics.by_step().items()}

    @property
    def step(self) -> int:
        """The last step that has ended, or 0."""
        return max(self._metrics.by_step(), default=0)

    @property
    def batch_size(self) -> int:
        """Sequences per step, of all replicas."""
        config = load([], recipe_file=str(config_file(self.folder)))
        replicas = NUM_RANKS // config.pipeline.stages
        return config.train.microbatch_size * config.pipeline.microbatches * replicas

    def num_ranks(self) -> int:
        """Return the number of ranks of the newest attempt."""
        return len(self.events("attempt")[-1]["ranks"])

    def ranks(self) -> list[RankProcess]:
        """Return the ranks that are running."""
        found = []
        for host in HOSTS:
            with suppress(ValueError):
                page = ProgressReader(page_path(self.folder, host))
                for local in range(len(page)):
                    reading = page.read(local)
                    if reading and psutil.pid_exists(reading.pid):
                        found.append(RankProcess(reading.rank, host, local, reading.pid))
        return sorted(found, key=lambda each: each.rank)

    def rank(self, number: int) -> RankProcess:
        """Return a running rank by its number."""
        return next(each for each in self.ranks() if each.rank == number)

    def page(self, host: str) -> ProgressReader:
        """Return the reader of a host's published progress."""
        return ProgressReader(page_path(self.folder, host))

    def agents(self, hosts: Sequence[str] = HOSTS) -> list[psutil.Process]:
        """Return the agents of hosts, which are ancestors of running ranks."""
        found = {}
        for each in self.ranks():
            if each.host in hosts:
                with suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(each.pid).parents():
                        if any(_AGENT in word for word in process.cmdline()):
                            found[process.pid] = process
        return list(found.values())

    # -- waiting ---------------------------------------------------------------------------------

    def wait_for(self, done: Callable[[], Any], what: str, *, timeout_s: float = 120.0) -> Any:
        """Wait until ``done`` returns a true value, and return it."""
        limit = monotonic() + timeout_s
        while True:
            if found := done():
                return found
            if self._has_ended() and not done():
                raise RuntimeError(f"the run has ended with {self.process.returncode}: {self.tail()}")
            if monotonic() > limit:
                raise RuntimeError(f"waited {timeout_s:g} s in vain for {what} at step {self.step}: {self.tail()}")
            sleep(_POLL_S)

    def _has_ended(self) -> bool:
        """Return True if the run has ended, because the driver of the benchmark may end earlier."""
        return self.process.poll() is not None and (bool(self.events("end")) or not self.ranks())

    def wait_for_step(self, step: int, *, timeout_s: float = 180.0) -> None:
        """Wait until the run has completed this step."""
        self.wait_for(lambda: self.step >= step, f"step {step}", timeout_s=timeout_s)

    def output(self) -> str:
        """Return the run's output."""
        return (self.folder.parent / "output.log").read_text(errors="replace")

    def tail(self) -> str:
        """Return the end of the run's output."""
        return self.output()[-1500:]

    # -- what is done to it ----------------------------------------------------------------------

    def order(self, rank: int, do: str, **arguments: Any) -> None:
        """Send a command to a rank. See `sitecustomize`."""
        draft = self.orders / f".{rank}"
        draft.write_text(json.dumps({"do": do, **arguments}))
        draft.replace(self.orders / str(rank))

    def close(self) -> None:
        """End the run and everything that it has started."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        self.signal_all(signal.SIGKILL)
        for group in Path("/sys/fs/cgroup").glob("**/weft-survive-*"):
            with suppress(OSError):
                group.rmdir()
        self._log.close()
        self.hosts.close()

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every process of the run."""
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("WEFT_SURVIVE_ORDERS") == str(self.orders):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


def now() -> float:
    """Return the time of day on the journal's clock."""
    return time()
