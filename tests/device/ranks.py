"""Ranks on emulated devices, forked from a process that has the devices and has imported all else."""

from __future__ import annotations

import pickle
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from tests.device.lines import FOLDER, require
from weft.conf.host.processes import free_port

LOG_TAIL_CHARS = 4000
STACKS_S = 0.5
"""Time in which ranks that have not ended print their stacks."""
_servers: list[Any] = []
"""The running forkserver, if there is one."""


def run_on_devices(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 300.0,
    runs: str = "",
    first_device: int = 1,
) -> list[Any]:
    """Run ``function(*args)`` on every rank, and return each rank's result.

    Rank r has device r + ``first_device``. A thread that forgot to choose one works on device 0, by default no rank's.

    Args:
        function: an importable function. Results are plain data, whose pickles need no torch.
        runs: name in the list of device lines, whose lines have to run.

    Raises:
        RuntimeError: a rank failed or was not done in time, with the end of its output.
    """
    from weft.engine.supervision.agent.forkserver import ForkServer  # the core's tests load without supervision
    from weft.engine.supervision.messages import Fork, Forked, Signal, encode

    port, deadline = str(free_port()), monotonic() + timeout_s
    if _servers and _servers[0].process.poll() is not None:  # it is killed as what a module has left
        _servers.pop().close()
    if not _servers:
        _servers.append(ForkServer(["tests.device.preloaded"]))
    (server,) = _servers
    with tempfile.TemporaryDirectory(prefix="weft-device-") as folder, ExitStack() as stack:
        call, running = Path(folder, "call"), set(map(str, range(num_ranks)))
        call.write_bytes(pickle.dumps((function, args)))
        lines = Path(folder, "lines")
        lines.mkdir()
        for rank in running:
            environment = {
                FOLDER: str(lines),
                "RANK": rank,
                "LOCAL_RANK": str(int(rank) + first_device),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            output = stack.enter_context(Path(folder, f"{rank}.log").open("w")).fileno()
            arguments = [str(call), str(Path(folder, f"{rank}.result"))]
            fork = Fork(name=rank, target=f"{__name__}:run", arguments=arguments, environment=environment)
            socket.send_fds(server.socket, [encode(fork)], [output, output])
        while running:
            server.socket.settimeout(max(0.01, deadline - monotonic()))
            message = server.receive()
            code = message.code if isinstance(message, Forked) else None
            if message is None or code:  # no message in time, or a failed rank, whose peers wait for it
                for rank in running:
                    server.socket.send(encode(Signal(name=rank, number=signal.SIGUSR1)))
                sleep(STACKS_S)
                _servers.pop().close()
                tails = [log.read_text(errors="replace")[-LOG_TAIL_CHARS:] for log in Path(folder).glob("*.log")]
                raise RuntimeError(f"{message or f'ranks {running}: nothing in time'}:\n" + "\n-----\n".join(tails))
            running -= {message.name} if code is not None else set()
        if runs:
            require(runs, lines)
        return [pickle.loads(Path(folder, f"{rank}.result").read_bytes()) for rank in range(num_ranks)]


def run(arguments: Sequence[str]) -> int:
    """Call the pickled function in a forked rank and write its result."""
    import faulthandler
    import os

    from tests.device import instrument

    call, result = arguments
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    function, args = pickle.loads(Path(call).read_bytes())
    Path(result).write_bytes(pickle.dumps(function(*args)))
    instrument.save()
    os._exit(0)  # threads of streams and of process groups do not end
