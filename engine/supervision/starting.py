"""Starters of agents: as a process of this machine, by ssh, or as a step of a Slurm job."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from weft.conf.hosts import is_loopback
from weft.conf.schema import ClusterManager
from weft.engine.supervision import agent
from weft.engine.supervision.fleet import CONNECT_S
from weft.engine.supervision.messages import AgentCommand, encode
from weft.engine.supervision.pod import PodStarter

_OF_THE_BATCH = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NODELIST")


class AgentProcess(Protocol):
    """The driver's handle of an agent that it has started."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process is not known to have ended."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...


class Starter(Protocol):
    """Starts agents, whose output appears on the driver's terminal."""

    def start(self, command: AgentCommand) -> AgentProcess:
        """Start an agent, which outlives this process, with its command on standard input.

        Raises:
            OSError: the process cannot be started.
        """
        ...


@dataclass(frozen=True)
class LocalStarter:
    """Starts the agents of all hosts on this machine."""

    def start(self, command: AgentCommand) -> subprocess.Popen[bytes]:
        """Start a process on this machine."""
        return _start([sys.executable, "-m", agent.__name__], command)


@dataclass(frozen=True)
class SshStarter:
    """Starts agents by ssh without a password, or directly on this machine.

    Attributes:
        port: port of ssh. 0 leaves the choice to ssh's own configuration.
    """

    port: int = 0

    def start(self, command: AgentCommand) -> subprocess.Popen[bytes]:
        """Start a process on the agent's host, with the same folder and Python. Keys are sent by standard input."""
        if is_loopback(command.host) or command.host == socket.gethostname():
            return LocalStarter().start(command)
        port = ["-p", str(self.port)] if self.port else []
        remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.quote(sys.executable)} -m {agent.__name__}"
        options = ["BatchMode=yes", "ServerAliveInterval=5", f"ConnectTimeout={CONNECT_S:.0f}"]
        flags = [word for option in options for word in ("-o", option)]
        return _start(["ssh", *flags, *port, command.host, remote], command)


@dataclass(frozen=True)
class SlurmStarter:
    """Starts each agent as a Slurm step of its own, on the nodes of this process's allocation.

    A step per host can be restarted alone, and survives failures of other nodes. A step may share its node with the
    batch script and with remaining processes of an earlier agent.

    Attributes:
        environment: this process's environment, which describes the allocation.
    """

    environment: Mapping[str, str]

    def start(self, command: AgentCommand) -> subprocess.Popen[bytes]:
        """Start a step. Keys are sent by standard input."""
        srun = [
            "srun",
            f"--jobid={self._job_of(command.host)}",
            f"--nodelist={command.host}",
            "--nodes=1",
            "--ntasks=1",
        ]
        srun += ["--overlap", "--no-kill", "--mem=0", "--cpu-bind=none", "--mpi=none", f"--chdir={os.getcwd()}"]
        # Variables about the batch script's own tasks do not apply to a step of one task.
        kept = {name: value for name, value in self.environment.items() if name not in _OF_THE_BATCH}
        return _start([*srun, sys.executable, "-m", agent.__name__], command, kept)

    def _job_of(self, host: str) -> str:
        """Return the number of the heterogeneous job's component that has a node."""
        for number in range(int(self.environment.get("SLURM_HET_SIZE", "0"))):
            names = self.environment[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"]
            listed = subprocess.run(
                ["scontrol", "show", "hostnames", names], capture_output=True, text=True, timeout=60
            )
            if host in listed.stdout.split():
                return self.environment[f"SLURM_JOB_ID_HET_GROUP_{number}"]
        return self.environment["SLURM_JOB_ID"]


def starter_for(manager: ClusterManager, ssh_port: int = 0) -> Starter:
    """Return the starter of agents under a cluster's manager.

    Raises:
        ValueError: the manager is Slurm, and this process is not in a Slurm job.
    """
    match manager:
        case ClusterManager.local:
            return LocalStarter()
        case ClusterManager.ssh:
            return SshStarter(ssh_port)
        case ClusterManager.slurm if "SLURM_JOB_ID" in os.environ:
            return SlurmStarter(dict(os.environ))
        case ClusterManager.slurm:
            raise ValueError("cluster.manager=slurm: this is no job of Slurm; leave out cluster.hostfile to submit one")
        case ClusterManager.kubernetes:
            return PodStarter()


def _start(words: list[str], command: AgentCommand, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, env=env)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as inlet:  # the process has ended already, which is detected later
        inlet.write(encode(command) + b"\n")
    return process
