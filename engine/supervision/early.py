"""The agent of this host, started before the run's settings are read, because its imports take longest.

It reads lines of JSON from its standard input, a socket. The first lines name functions to run in forks of its
forkserver, and each is answered with a line with the exit code. The last line is the agent's command. If the socket
closes before that, the agent ends. This module does not import torch.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from weft.engine.supervision.forkserver import ForkServer

TARGET = "weft.recipes.train:run"
PRELOAD = ("torch", "deepspeed", "transformers", "weft.recipes.preloaded")


class EarlyAgent:
    """An agent that runs checks until it receives its command. It is a `Starter` of this host's first agent.

    Attributes:
        process: the agent's.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, with a forkserver that imports ``modules``."""
        self._socket, theirs = socket.socketpair()
        self._has_order = False
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.agent", *modules],
                stdin=theirs.fileno(),
                start_new_session=True,
                env=environment,
            )

    def run(self, target: str, arguments: Sequence[str]) -> int:
        """Run a function in a fork of the forkserver, with this process's output, and return its exit code."""
        with self._socket.makefile("r") as answers:
            self._send(json.dumps({"target": target, "arguments": list(arguments)}))
            answer = answers.readline()
        return int(answer) if answer else 1  # the imports have failed, and have printed why

    def start(self, host: str, order: str) -> subprocess.Popen[bytes]:
        """Send the agent its command, once. See `Starter`."""
        assert not self._has_order, "another agent is another process"
        self._send(order)
        self._has_order = True
        self._socket.close()
        return self.process

    def close(self) -> None:
        """End the agent, unless it has a command."""
        if not self._has_order:
            self._socket.close()
            self.process.kill()
            self.process.wait()

    def _send(self, line: str) -> None:
        try:
            self._socket.sendall(line.encode() + b"\n")
        except OSError as error:
            raise ValueError(
                f"the agent of this host has ended (exit code {self.process.wait()}); what it printed tells why"
            ) from error


def read_order(modules: Sequence[str]) -> tuple[str, ForkServer | None]:
    """Return the command on standard input, and the forkserver that was started meanwhile, if there are ``modules``.

    The command is empty if the other end has closed.
    """
    if not modules:
        return sys.stdin.readline(), None
    server = ForkServer(modules)
    with socket.socket(fileno=sys.stdin.fileno()) as driver, driver.makefile("r") as lines:
        for line in lines:
            asked = json.loads(line)
            if "target" not in asked:
                driver.detach()
                return line, server
            code = server.run(asked["target"], asked["arguments"])
            if code is None:
                break
            driver.sendall(f"{code}\n".encode())
    server.close()
    return "", None
