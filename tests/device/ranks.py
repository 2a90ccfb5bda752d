"""Ranks on emulated devices: new processes, because the device has to be there before torch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

from weft.conf.host.processes import free_port

LOG_TAIL_CHARS = 4000


def run_on_devices(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Run ``function(*args)`` on every rank, and return each rank's result.

    Rank r has device r + 1. A thread that forgot to choose a device works on device 0, which is no rank's.

    Args:
        function: an importable function. Arguments and results are plain data, whose pickles need no torch.

    Raises:
        RuntimeError: a rank failed or was not done in time, with the end of its output.
    """
    port, deadline = str(free_port()), monotonic() + timeout_s
    call = pickle.dumps((num_ranks + 1, function.__module__, function.__name__, pickle.dumps(args)))
    with tempfile.TemporaryDirectory(prefix="weft-device-") as folder, ExitStack() as stack:
        ranks = []
        for rank in range(num_ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank + 1),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "DS_ACCELERATOR": "cuda",
                "OMP_NUM_THREADS": "1",
            }
            result, log = Path(folder, f"{rank}.result"), Path(folder, f"{rank}.log")
            output = stack.enter_context(log.open("w"))
            command = [sys.executable, "-X", "faulthandler", "-m", "tests.device.ranks", str(result), str(timeout_s)]
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdin is not None
            with process.stdin as given:
                given.write(call)
            ranks.append((process, result, log))
        for number, (process, _, _) in enumerate(ranks):
            try:
                code = process.wait(max(0.0, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                code = "nothing in time"
            if code:
                tails = [other.read_text(errors="replace")[-LOG_TAIL_CHARS:] for _, _, other in ranks]
                raise RuntimeError(f"rank {number} ended with {code}:\n" + "\n-----\n".join(tails))
        return [pickle.loads(result.read_bytes()) for _, result, _ in ranks]


def _main(result: Path, timeout_s: float) -> None:
    import faulthandler
    import importlib

    faulthandler.dump_traceback_later(0.95 * timeout_s)
    num_devices, module, name, args = pickle.load(sys.stdin.buffer)
    from tests.device import cuda

    cuda.install(num_devices)
    from tests.device import group  # imports torch

    group.register()
    value = getattr(importlib.import_module(module), name)(*pickle.loads(args))
    result.write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    try:
        _main(Path(sys.argv[1]), float(sys.argv[2]))
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # threads of streams and of process groups do not end
