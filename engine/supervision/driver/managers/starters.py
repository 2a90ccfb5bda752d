"""Starters of agents: requests of hosts by `weft launch`, and starts of agents by the driver."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from weft.conf.host.files import write_atomic
from weft.conf.host.private import make_run_folder
from weft.conf.hosts import is_loopback
from weft.conf.schema import ClusterManager, WeftConfig
from weft.engine.supervision.agent import agent
from weft.engine.supervision.driver.fleet import CONNECT_S
from weft.engine.supervision.driver.managers import kubernetes, slurm
from weft.engine.supervision.driver.managers.kubernetes import PodStarter
from weft.engine.supervision.messages import AgentCommand, encode

_OF_THE_BATCH = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NODELIST")


class AgentProcess(Protocol):
    """The driver's handle of an agent that it has started."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process is not known to have ended."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...


Starter = Callable[[AgentCommand], AgentProcess]
"""Starts an agent, which outlives this process, with its command, which contains keys, on standard input. The agent's
output appears on the driver's terminal. Raises OSError if the process cannot be started."""


def start_here(command: AgentCommand) -> subprocess.Popen[bytes]:
    """Start an agent on this machine. See `Starter`, also for the functions below."""
    return _start([sys.executable, "-m", agent.__name__], command)


def start_by_ssh(command: AgentCommand, port: int = 0) -> subprocess.Popen[bytes]:
    """Start an agent by ssh without a password, or directly on this machine, with the same folder and Python.

    Args:
        port: port of ssh. 0 leaves the choice to ssh's own configuration.
    """
    if is_loopback(command.host) or command.host == socket.gethostname():
        return start_here(command)
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.quote(sys.executable)} -m {agent.__name__}"
    options = ["BatchMode=yes", "ServerAliveInterval=5", f"ConnectTimeout={CONNECT_S:.0f}"]
    flags = [word for option in options for word in ("-o", option)]
    return _start(["ssh", *flags, *(["-p", str(port)] if port else []), command.host, remote], command)


def start_by_slurm(command: AgentCommand, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an agent as a Slurm step of its own, on a node of the allocation that ``environment`` describes.

    A step per host can be restarted alone, and survives failures of other nodes. A step may share its node with the
    batch script and with remaining processes of an earlier agent.
    """
    srun = ["srun", f"--jobid={_job_of(command.host, environment)}", f"--nodelist={command.host}", "--nodes=1"]
    srun += ["--ntasks=1", "--overlap", "--no-kill", "--mem=0", "--cpu-bind=none", "--mpi=none"]
    # Variables about the batch script's own tasks do not apply to a step of one task.
    kept = {name: value for name, value in environment.items() if name not in _OF_THE_BATCH}
    return _start([*srun, f"--chdir={os.getcwd()}", sys.executable, "-m", agent.__name__], command, kept)


def _job_of(host: str, environment: Mapping[str, str]) -> str:
    """Return the number of the heterogeneous job's component that has a node."""
    for number in range(int(environment.get("SLURM_HET_SIZE", "0"))):
        names = environment[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"]
        listed = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True, timeout=60)
        if host in listed.stdout.split():
            return environment[f"SLURM_JOB_ID_HET_GROUP_{number}"]
    return environment["SLURM_JOB_ID"]


def starter_for(manager: ClusterManager, ssh_port: int = 0) -> Starter:
    """Return the starter of agents under a cluster's manager.

    Raises:
        ValueError: the manager is Slurm, and this process is not in a Slurm job.
    """
    match manager:
        case ClusterManager.local:
            return start_here
        case ClusterManager.ssh:
            return partial(start_by_ssh, port=ssh_port)
        case ClusterManager.slurm if slurm.in_allocation(os.environ):
            return partial(start_by_slurm, environment=dict(os.environ))
        case ClusterManager.slurm:
            raise ValueError("cluster.manager=slurm: this is no job of Slurm; leave out cluster.hostfile to submit one")
        case ClusterManager.kubernetes:
            return PodStarter().start


def _start(words: list[str], command: AgentCommand, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, env=env)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as inlet:  # the process has ended already, which is detected later
        inlet.write(encode(command) + b"\n")
    return process


def hosts_or_request(
    config: WeftConfig, words: Sequence[str], folder: Path, write: str | None, environment: Mapping[str, str]
) -> WeftConfig | None:
    """Return the configuration on the hosts of the allocation, or None if hosts were requested instead.

    Args:
        config: a run whose hosts a manager chooses.
        words: arguments of `weft launch`, without ``--write``.
        write: file for the request, which is then not submitted. None submits the request.

    Raises:
        ValueError: the request cannot be made, or the manager refuses it.
    """
    match config.cluster.manager:
        case ClusterManager.slurm:
            if slurm.in_allocation(environment) and not write:
                return slurm.with_allocation(config, environment, folder / "hostfile")
            file = _write(slurm.script(config, words, sys.executable), write, folder / "job.sbatch")
            if not write:
                print(f"job {slurm.submit(file, folder)}: {file}; its output is in {folder}")
        case _:
            if not write:
                raise ValueError(
                    "cluster.manager=kubernetes: give --write job.yaml, and then `kubectl apply -f job.yaml`"
                )
            _write(kubernetes.job_set(config), write, folder)
    return None


def _write(text: str, named: str | None, usual: Path) -> Path:
    file = Path(named).expanduser() if named else usual
    if not named:
        make_run_folder(file.parent)
    write_atomic(file, text)
    if named:
        print(f"{os.fspath(file)} is written")
    return file
