"""The program of each pod of a JobSet: the agent that the driver's command in the run's folder describes.

Kubernetes, not the driver, starts the pods. The driver writes the agent's command into the folder that all pods share.
This process starts that agent, and another one for each newer command.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from weft.conf.host.private import write_private
from weft.engine.supervision import agent
from weft.engine.supervision.messages import AgentCommand, decode, encode
from weft.engine.supervision.run_files import Storage

ALIVE = Path("/tmp/weft-pod-alive")
"""File that is touched regularly, for liveness probes."""
_LOOK_S = 0.5
_END_S = 10.0


@dataclass
class PodProcess:
    """The driver's handle of an agent in a pod: a command file, which the driver can remove."""

    command: Path
    killed: bool = False

    def poll(self) -> int | None:
        """Return 0 after `kill`, or None. An ended agent shows only by missing reports."""
        return 0 if self.killed else None

    def kill(self) -> None:
        """Remove the command file, whereupon the pod ends the agent."""
        self.command.unlink(missing_ok=True)
        self.killed = True


class PodStarter:
    """Starts agents on hosts that are pods and wait for commands."""

    def __init__(self) -> None:
        """Write nothing yet."""
        self._storage = Storage(Path("supervisor", "orders"))

    def start(self, command: AgentCommand) -> PodProcess:
        """Write a pod's command, which replaces the previous one.

        Raises:
            OSError: the file cannot be written, or storage hangs.
        """
        file = command_file(Path(command.run_folder), command.host)
        self._storage.call(write_private, file, encode(command).decode())
        return PodProcess(file)


def command_file(run_folder: Path, host: str) -> Path:
    """Return the path of a pod's command file, which contains keys."""
    return run_folder / "supervisor" / "orders" / f"{host}.json"


def main(argv: list[str]) -> int:
    """Run ``RUN_FOLDER HOST``: start agents according to their command files, until this process is killed."""
    folder, host = argv
    file = command_file(Path(folder), host)
    running: subprocess.Popen[bytes] | None = None
    command: AgentCommand | None = None
    while True:
        ALIVE.touch()
        wanted = _read(file)
        if (wanted and wanted.generation) != (command and command.generation):
            if running is not None:
                _end(running)
            running, command = (_start(wanted) if wanted else None), wanted
        time.sleep(_LOOK_S)


def _read(file: Path) -> AgentCommand | None:
    try:
        return decode(file.read_text(), AgentCommand)
    except (OSError, ValueError):  # not written yet, or the shared folder is unavailable
        return None


def _start(command: AgentCommand) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", agent.__name__], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as inlet:
        inlet.write(encode(command) + b"\n")
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
