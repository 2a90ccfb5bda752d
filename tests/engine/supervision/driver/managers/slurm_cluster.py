"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each of a few nodes."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from weft.conf.host.processes import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONF = """\
ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={node_timeout_s}
MessageTimeout=60
SlurmdParameters=config_overrides
"""


def missing() -> str:
    """Return the missing programs, as a reason to skip; empty if everything is installed."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"Slurm is not installed (no {lacking[0]}); apt-get install slurm-wlm munge" if lacking else ""


class SlurmCluster:
    """Nodes by name, each with a feature and a partition of its site's name; a context manager."""

    def __init__(self, nodes: Mapping[str, str], node_timeout_s: int = 3600) -> None:
        """Nothing runs yet.

        Args:
            nodes: site by name.
            node_timeout_s: after which the controller takes a silent node for down; on a busy machine a
                short one fails healthy nodes.
        """
        self.nodes, self._timeout_s = dict(nodes), node_timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="weft-slurm-", dir="/tmp"))  # its sockets need a short path
        self.folder.chmod(0o711)
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, *command: str) -> str:
        """Return the output of a command of Slurm."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """A job's state; empty when it is forgotten."""
        done = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job], env=self.env, capture_output=True, text=True, timeout=120
        )
        states = [word.partition("=")[2] for word in done.stdout.split() if word.startswith("JobState=")]
        return states[0] if states else ""

    def lose(self, node: str) -> None:
        """Kill everything of a node at once, as when it loses its power."""
        self._daemons[node].kill()
        for process in self._processes():
            try:
                if process.environ().get("SLURMD_NODENAME") == node or self._logs_for(process, node):
                    process.kill()
            except (psutil.Error, OSError):
                continue

    def stop(self) -> None:
        """End everything, and remove the folder."""
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=self.env, capture_output=True, timeout=120)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        for process in self._processes():
            try:
                process.kill()
            except psutil.Error:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        ports = [free_port() for _ in range(len(self.nodes) + 1)]
        names = {"folder": self.folder, "user": getpass.getuser(), "node_timeout_s": self._timeout_s}
        text = CONF.format(host=socket.gethostname().split(".")[0], port=ports[0], **names)
        for (node, site), port in zip(self.nodes.items(), ports[1:], strict=True):
            where = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port}"
            text += f"NodeName={node} {where} CPUs=2 RealMemory=100 Feature={site} State=UNKNOWN\n"
        text += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        for site in dict.fromkeys(self.nodes.values()):
            members = ",".join(node for node, its in self.nodes.items() if its == site)
            text += f"PartitionName={site} Nodes={members} MaxTime=INFINITE State=UP\n"
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "seed"}
        files["log-file"] = "munged.log"
        self._run("munged", "--foreground", "--force", *(f"--{name}={self.folder}/{at}" for name, at in files.items()))
        self._wait(lambda: (self.folder / "munge.sock").exists(), "munged to listen")
        self._run("slurmctld", "-D", "-c")
        for node in self.nodes:
            self._run("slurmd", "-D", "-N", node, name=node)
        self._wait(lambda: self._idle() == len(self.nodes), "all nodes to be idle")

    def _run(self, *command: str, name: str = "") -> None:
        with open(self.folder / f"{name or command[0]}.out", "w") as out:
            self._daemons[name or command[0]] = subprocess.Popen(
                command, env=self.env, stdout=out, stderr=out, start_new_session=True
            )

    def _idle(self) -> int:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=all"],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout.count(" idle")

    def _wait(self, done: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = {path.name: path.read_text()[-800:] for path in self.folder.glob("*.out")}
                raise RuntimeError(f"waited for {what}; ended: {dead}; {logs}")
            time.sleep(0.1)

    def _processes(self) -> list[psutil.Process]:
        """Everything that Slurm or a job of it has started."""
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            ours = process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]
            return ours or any(self._logs_for(process, node) for node in self.nodes)
        except (psutil.Error, OSError):
            return False

    def _logs_for(self, process: psutil.Process, node: str) -> bool:
        """True if a process is a step's manager on ``node``: it writes to that daemon's log."""
        log = str(self.folder / f"slurmd.{node}.log")
        return process.name() == "slurmstepd" and any(file.path == log for file in process.open_files())
