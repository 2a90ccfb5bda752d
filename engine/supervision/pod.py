"""The program of each pod of a JobSet: the agent that the driver's command in the run's folder describes.

Kubernetes starts pods, so that the driver cannot. It writes an order for a host instead, into the folder
that all pods share, and this process starts that agent, and the next when there is a newer order.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.conf.private import write_private
from weft.engine.supervision import agent

ALIVE = Path("/tmp/weft-pod-alive")
"""File that is touched all the time, for probes."""
_LOOK_S = 0.5
_END_S = 10.0


@dataclass(frozen=True)
class PodProcess:
    """An agent in a pod, as far as the driver has to do with it: an order, which it can withdraw."""

    order: Path

    def poll(self) -> int | None:
        """Nothing tells this driver that it has ended but its silence."""
        return None if self.order.exists() else 0

    def kill(self) -> None:
        """Withdraw the order; the pod ends the agent."""
        self.order.unlink(missing_ok=True)


@dataclass(frozen=True)
class PodStarter:
    """Hosts are pods that wait for orders."""

    def start(self, host: str, order: str) -> PodProcess:
        """Leave an order for a pod, in the place of the one before."""
        file = order_file(Path(json.loads(order)["run_folder"]), host)
        write_private(file, order)
        return PodProcess(file)


def order_file(run_folder: Path, host: str) -> Path:
    """Where a pod finds its order; it holds keys."""
    return run_folder / "supervisor" / "orders" / f"{host}.json"


def main(argv: list[str]) -> int:
    """Run ``RUN_FOLDER HOST``: start agents by their orders, until this process is ended."""
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
    except (OSError, ValueError):  # not there yet, or the shared folder is away
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
