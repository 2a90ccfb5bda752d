"""Peers of Weft's supervisor under the same eight faults: seconds until training continues, or how it ends."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep, time

import psutil

from benchmarks.survival import peer_training
from benchmarks.survival.faults import (
    Fault,
    Inflicted,
    damaged,
    exhaust_memory,
    hold_lock,
    kill_agent,
    kill_hosts,
    kill_in,
    kill_in_save,
    shrink_memory,
    stop,
    truncate,
)
from benchmarks.survival.hosts import LocalHosts
from benchmarks.survival.outcome import Survival
from benchmarks.survival.peer_training import CHECKPOINT_EVERY, HOLD_LOCK, PAD_S
from benchmarks.survival.run import SupervisedRun
from benchmarks.survival.session import inflict, running
from benchmarks.survival.sitecustomize import PAD
from weft.pipeline.action import Op

NODES, RANKS_PER_NODE = 2, 2
HOSTS = tuple(f"east{node}" for node in range(NODES))
SETTINGS = (
    "recipe=quickstart",
    "cluster.master_port=29521",
    "pipeline.stages=1",
    "pipeline.microbatches=1",
    "train.microbatch_size=4",
    "zero.stage=0",
    "model.overrides.hidden_size=64",
    "model.overrides.intermediate_size=128",
    "model.overrides.num_hidden_layers=4",
    "model.self_check=false",
    "data.sequence_length=64",
    "train.steps=1000000",
    "train.max_seconds=0",
    "train.export=false",
    "train.timeline=false",
    "train.sample=''",
    "logging.progress=false",
)
MARK = "WEFT_PEER_JOB"
"""Environment variable that marks a job's processes."""
STEADY = 4
"""Number of steps of one process after which training counts as recovered."""
_FIRST_STEPS_S = 180.0
_COMES_BACK_S = 2.0
"""Seconds after which the cluster has restarted a dead agent."""


@dataclass(frozen=True)
class Peer:
    """A launcher that starts and restarts ranks.

    Attributes:
        command: returns the command of a node, from its number, a port and its folder.
        environment: additional environment variables.
    """

    name: str
    command: Callable[[int, int, Path], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)


def _torchrun(node: int, port: int, folder: Path) -> list[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={RANKS_PER_NODE}"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=1", "--max-restarts=3"]
    return [*agent, *meeting, peer_training.__file__, str(folder)]


def _nvrx(node: int, port: int, folder: Path) -> list[str]:
    """Return the command with a heartbeat per step, as its documentation requires, and intervals of a second."""
    module = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    limits = ["--ft-initial-rank-heartbeat-timeout=120", "--ft-rank-heartbeat-timeout=5"]
    often = ["--ft-workload-check-interval=1", "--ft-restart-check-interval=1", "--ft-enable-nic-monitor=False"]
    return [*module, *limits, *often, *_torchrun(node, port, folder)[3:]]


def _deepspeed(node: int, port: int, folder: Path) -> list[str]:
    world = {f"node{number}": list(range(RANKS_PER_NODE)) for number in range(NODES)}
    info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    launcher = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={info}", f"--node_rank={node}"]
    elastic = ["--enable_elastic_training", "--min_elastic_nodes=1", f"--max_elastic_nodes={NODES}"]
    meeting = ["--master_addr=127.0.0.1", f"--master_port={port}"]
    return [*launcher, *meeting, *elastic, peer_training.__file__, str(folder)]


NVRX = "NVRx ft_launcher"
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PEERS = (
    Peer("torchrun --max-restarts", _torchrun),
    Peer("torchrun --max-restarts, own store", _torchrun, OWN_STORE),
    Peer("DeepSpeed elastic agent", _deepspeed),
    Peer(NVRX, _nvrx, OWN_STORE),
)
WEFT = "weft launch"
NAMES = (WEFT, *(peer.name for peer in PEERS))


def is_here(name: str) -> bool:
    """True if a peer is installed."""
    return name != NVRX or find_spec("nvidia_resiliency_ext") is not None


class PeerJob:
    """A job that a peer has started on nodes that are all on this machine."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        """Start the job, with its checkpoints and logs in ``folder``."""
        folder.mkdir(parents=True)
        self.folder, self._peer, self._port = folder, peer, _free_port()
        self._nodes = [self._start(node) for node in range(NODES)]

    def _start(self, node: int) -> subprocess.Popen:
        own = {
            MARK: f"{self.folder}:{node}",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = self._peer.command(node, self._port, self.folder)
        with open(self.folder / f"node{node}.log", "a") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | own | dict(self._peer.environment),
            )

    def restart(self, node: int) -> None:
        """Restart a node's agent, as a cluster manager would."""
        self._nodes[node] = self._start(node)

    @property
    def over(self) -> bool:
        """True if every node's agent has ended."""
        return all(node.poll() is not None for node in self._nodes)

    def steps(self) -> list[tuple[float, int, int]]:
        """Return the time of day, the process of rank 0 and the number of each step."""
        path = self.folder / "steps"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(float(line[0]), int(line[1]), int(line[2])) for line in lines if len(line) == 4]

    def rank(self, number: int) -> int:
        """Return the process id of a rank."""
        return int((self.folder / f"rank{number}").read_text())

    def agent(self, node: int) -> int:
        """Return the process id with which a node was started."""
        return self._nodes[node].pid

    def processes(self, node: int | None = None) -> list[psutil.Process]:
        """Return the processes of a node, or of all."""
        wanted = {f"{self.folder}:{each}" for each in (range(NODES) if node is None else [node])}
        found = []
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get(MARK) in wanted:
                found.append(process)
        return found

    def close(self) -> None:
        """End all processes of the job."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for node in self._nodes:
            node.wait()


# ---- the eight faults, done to a peer's job; the same are done to Weft's


def _signal(job: PeerJob, rank: int, number: signal.Signals) -> None:
    os.kill(job.rank(rank), number)


def _kill_in_save(job: PeerJob) -> None:
    limit = monotonic() + 60.0
    while not (job.folder / "saving").exists() and monotonic() < limit:
        sleep(0.01)
    _signal(job, 0, signal.SIGKILL)


def _exhaust_memory(job: PeerJob) -> None:
    shrink_memory(job.rank(3))
    _signal(job, 3, peer_training.TAKE_MEMORY)


def _kill_node(job: PeerJob) -> None:
    for process in job.processes(1):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    sleep(_COMES_BACK_S)
    job.restart(1)


def _kill_agent(job: PeerJob) -> None:
    os.kill(job.agent(1), signal.SIGKILL)
    sleep(_COMES_BACK_S)
    job.restart(1)


def _truncate(job: PeerJob) -> None:
    newest = max(job.folder.glob("step-*.pt"))
    os.truncate(newest, newest.stat().st_size // 2)
    _signal(job, 3, signal.SIGKILL)


Pair = tuple[Callable[[PeerJob], None], Callable[[SupervisedRun], Inflicted]]
FAULTS: Mapping[str, Pair] = {
    "SIGKILL of a rank": (lambda job: _signal(job, 3, signal.SIGKILL), lambda run: kill_in(run, 3, Op.F, Op.B)),
    "SIGKILL in a save": (_kill_in_save, lambda run: kill_in_save(run, 0)),
    "SIGSTOP for good": (lambda job: _signal(job, 3, signal.SIGSTOP), lambda run: stop(run, 3)),
    "interpreter lock held for 60 s": (lambda job: _signal(job, 3, HOLD_LOCK), lambda run: hold_lock(run, 3)),
    "out of memory in a control group": (_exhaust_memory, lambda run: exhaust_memory(run, 3)),
    "a whole host killed": (_kill_node, lambda run: kill_hosts(run, HOSTS[1])),
    "an agent killed": (_kill_agent, lambda run: kill_agent(run, HOSTS[1])),
    "newest checkpoint truncated, and a rank killed": (_truncate, lambda run: damaged(truncate, run, 3)),
}
"""The functions that cause a fault in a peer's job and in Weft's."""


def survive(name: str, fault: str, folder: Path, patience_s: float) -> str:
    """Cause a fault; return the seconds until training continues, or a description of how it ends."""
    if name == WEFT:
        return _weft(fault, folder)
    (peer,) = (peer for peer in PEERS if peer.name == name)
    with closing(PeerJob(peer, folder)) as job:
        limit = monotonic() + _FIRST_STEPS_S
        while len(job.steps()) < 2 * CHECKPOINT_EVERY + 2:
            if job.over or monotonic() > limit:
                return f"does not start: {_last_line(job)}"
            sleep(0.05)
        before, begun = job.steps()[-1][1], time()
        FAULTS[fault][0](job)
        return _goes_on(job, before, begun, patience_s)


def _goes_on(job: PeerJob, before: int, begun: float, patience_s: float) -> str:
    """Wait until training continues, and return the seconds since ``begun`` as text, or how the job ended.

    Training continues once a process has logged `STEADY` steps. It is usually another process than ``before``. If
    it is the same process after half of ``patience_s``, the text adds "unwatched": ranks continue, but no agent may
    supervise them.
    """
    while time() < begun + patience_s:
        later = [(at, pid) for at, pid, _ in job.steps() if at > begun]
        newest = [at for at, pid in later if later and pid == later[-1][1]]
        others_left = job.over or (later and later[-1][1] != before)
        if len(newest) >= STEADY and (others_left or time() - begun > patience_s / 2):
            return f"{newest[0] - begun:.1f} s{'' if others_left else ', unwatched'}"
        if job.over and len(newest) < STEADY:
            return f"dies after {time() - begun:.0f} s"
        sleep(0.05)
    return f"hangs > {patience_s:.0f} s"


def _last_line(job: PeerJob) -> str:
    text = (job.folder / "node0.log").read_text(errors="replace").strip()
    return text.splitlines()[-1][:100] if text else "it said nothing"


def _weft(fault: str, folder: Path) -> str:
    outcome = Survival(fault)
    settings = [*SETTINGS, f"checkpoint.every={CHECKPOINT_EVERY}"]
    os.environ[PAD] = str(PAD_S)
    with running(folder, settings, lambda path: LocalHosts(path, dict.fromkeys(HOSTS, RANKS_PER_NODE))) as run:
        try:
            run.wait_for_step(2 * CHECKPOINT_EVERY + 2, timeout_s=_FIRST_STEPS_S)
            inflict(run, Fault(fault, FAULTS[fault][1]), outcome)
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return f"{outcome.next_step_s:.1f} s"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
