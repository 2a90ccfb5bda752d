"""How an agent gets onto its host: as a process of this machine, or by ssh."""

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

FORWARDED = ("DS_", "GLOO_", "HF_", "OMP_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_", "WANDB_", "WEFT_")
"""Beginnings of the names of variables that ranks on other hosts need, beyond what an own environment file names."""


class Starter(Protocol):
    """Starts agents; what they print comes to this process's terminal."""

    def start(self, host: str, order: str) -> subprocess.Popen[bytes]:
        """Start an agent, which outlives this process, with ``order`` on its standard input.

        Raises:
            OSError: it cannot be started.
        """
        ...


@dataclass(frozen=True)
class LocalStarter:
    """Every host is this machine."""

    def start(self, host: str, order: str) -> subprocess.Popen[bytes]:
        """Start a process here."""
        return _start([sys.executable, "-m", agent.__name__], order)


@dataclass(frozen=True)
class SshStarter:
    """Hosts are reached by ssh, without a password; this machine needs none.

    Attributes:
        port: of ssh; 0 leaves it to ssh's own configuration.
    """

    port: int = 0

    def start(self, host: str, order: str) -> subprocess.Popen[bytes]:
        """Start a process there, in the same folder and by the same Python; keys go by its standard input."""
        if is_loopback(host) or host == socket.gethostname():
            return LocalStarter().start(host, order)
        port = ["-p", str(self.port)] if self.port else []
        remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.quote(sys.executable)} -m {agent.__name__}"
        return _start(["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", *port, host, remote], order)


def starter_for(manager: ClusterManager, ssh_port: int = 0) -> Starter:
    """What starts agents under a cluster's manager.

    Raises:
        ValueError: that manager starts them itself.
    """
    match manager:
        case ClusterManager.local:
            return LocalStarter()
        case ClusterManager.ssh:
            return SshStarter(ssh_port)
        case _:
            raise ValueError(f"cluster.manager={manager.value}: it starts the agents itself")


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an agent on another host gets."""
    return {name: value for name, value in environment.items() if name.startswith(FORWARDED)}


def _start(command: list[str], order: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as inlet:  # it has ended at once, which is noticed later
        inlet.write(order.encode() + b"\n")
    return process
