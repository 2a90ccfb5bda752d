"""The program of each pod of a JobSet: the agent that the driver's command in the run's folder describes.

Kubernetes starts the pods, so the driver cannot. Instead it writes the agent's command into the folder that all pods
share. This process starts that agent, and another one for each newer command.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.conf.host.private import write_private
from weft.engine.supervision import agent

ALIVE = Path("/tmp/weft-pod-alive")
"""File that is touched regularly, for liveness probes."""
_LOOK_S = 0.5
_END_S = 10.0


@dataclass(frozen=True)
class PodProcess:
    """The driver's handle of an agent in a pod: a command file, which it can remove."""

    order: Path

    def poll(self) -> int | None:
        """Return 0 once the command is removed. The end of the agent itself shows only by missing reports."""
        return None if self.order.exists() else 0

    def kill(self) -> None:
        """Remove the command, whereupon the pod ends the agent."""
        self.order.unlink(missing_ok=True)


@dataclass(frozen=True)
class PodStarter:
    """Starts agents on hosts that are pods and wait for commands."""

    def start(self, host: str, order: str) -> PodProcess:
        """Write a pod's command, which replaces the previous one."""
        file = order_file(Path(json.loads(order)["run_folder"]), host)
        write_private(file, order)
        return PodProcess(file)


def order_file(run_folder: Path, host: str) -> Path:
    """Return the path of a pod's command, which contains keys."""
    return run_folder / "supervisor" / "orders" / f"{host}.json"


def main(argv: list[str]) -> int:
    """Run ``RUN_FOLDER HOST``: start agents by their commands, until this process is ended."""
    folder, host = argv
    file = order_file(Path(folder), host)
    running: subprocess.Popen[bytes] | None = None
    order: Mapping[str, object] = {}
    while True:
        ALIVE.touch()
        wanted = _read(file)
        if wanted.get("generation") != order.get("generation"):
            if running is not None:
                _end(running)
            running, order = (_start(wanted) if wanted else None), wanted
        time.sleep(_LOOK_S)


def _read(file: Path) -> Mapping[str, object]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):  # not written yet, or the shared folder is unavailable
        return {}
    return found if isinstance(found, dict) else {}


def _start(order: Mapping[str, object]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", agent.__name__], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as inlet:
        inlet.write(json.dumps(order).encode() + b"\n")
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
