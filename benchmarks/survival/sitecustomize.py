"""Faults inside a rank in `benchmarks survive`: Python imports this first in every process of the run.

A fault inside of a process, such as a held interpreter lock or a flipped bit, cannot be caused from outside.
The benchmark puts this file's folder on PYTHONPATH, and writes a command for a rank into a folder. A thread of
the rank executes it. Weft itself does not use this file.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = "WEFT_SURVIVE_ORDERS"
"""Environment variable with the folder of the orders."""
_POLL_S = 0.02


def _listen() -> None:
    threading.Thread(target=_obey, name="orders", daemon=True).start()


def _obey() -> None:
    while True:
        time.sleep(_POLL_S)
        engine_module = sys.modules.get("weft.engine.engine")
        path = Path(os.environ[FOLDER], os.environ.get("RANK", "none"))
        if engine_module is None or not path.exists():
            continue
        order = json.loads(path.read_text())
        path.unlink()
        globals()[f"_{order.pop('do')}"](engine_module, **order)


def _hold_lock(_: Any, seconds: int) -> None:
    """Hold the interpreter's lock, as every function of a PyDLL does while it runs."""
    ctypes.PyDLL(None).sleep(seconds)


def _hold_lock_in_save(module: Any, seconds: int) -> None:
    """Hold the lock when the main thread next saves a checkpoint."""
    engine = _engine(module)
    save = engine.save_checkpoint

    def held(*args: Any, **keywords: Any) -> Any:
        Path(os.environ[FOLDER], "saves").touch()
        _hold_lock(module, seconds)
        return save(*args, **keywords)

    engine.save_checkpoint = held


def _engine(module: Any) -> Any:
    """Return the engine of this rank's current attempt, from the main thread's stack."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while True:
        for value in frame.f_locals.values():
            if isinstance(value, module.WeftEngine):
                return value
        assert frame.f_back is not None, "the rank is training"
        frame = frame.f_back


class _FlipInBackward:
    """An observer that flips a bit of a replica's weights when the next backward begins.

    Between the update of a step and the next forward, shards of other replicas are still being gathered. A bit that
    flips then is overwritten without effect. During a backward all weights are complete.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._has_flipped = False

    def step_begins(self, num_microbatches: int) -> None:
        """Do nothing."""

    def slot_begins(self, slot: Any) -> None:
        from weft.pipeline.action import Op

        if self._has_flipped or not {Op.B, Op.I} & {action.op for action in slot}:
            return
        import torch

        self._has_flipped = True
        # Without a trace in autograd's count of versions.
        next(iter(self._module.parameters())).data.view(-1).view(torch.int32)[0] ^= 1 << 20

    def slot_ends(self, slot: Any) -> None:
        """Do nothing."""


def _flip(module: Any) -> None:
    engine = _engine(module)
    engine.slot_observers.append(_FlipInBackward(engine.module))


def _poison(module: Any, times: int) -> None:
    """Make the backwards of the next ``times`` steps begin with NaN."""
    import torch

    engine = _engine(module)
    compute = engine.executor.compute
    seed, left, seen = compute.seed_gradient, [times], [-1]
    first = Path(os.environ[FOLDER], "poisoned")

    def poisoned(loss: torch.Tensor) -> torch.Tensor:
        if engine.global_steps != seen[0]:
            seen[0] = engine.global_steps
            left[0] -= 1
            if not first.exists():
                first.write_text(str(engine.global_steps + 1))
        return seed(loss) * (float("nan") if left[0] >= 0 else 1.0)

    compute.seed_gradient = poisoned


def _leave_out(_: Any, first: int, after: int) -> None:
    """Make loaders that are created from now on leave out these sequences of the data."""
    from weft.engine.data import MicrobatchLoader

    begin = MicrobatchLoader.__init__

    def begin_without(loader: Any, *args: Any) -> None:
        begin(loader, *args)
        loader.leave_out(first, after)

    MicrobatchLoader.__init__ = begin_without  # type: ignore[method-assign,assignment]


def _shift_clock(_: Any, seconds: float) -> None:
    true = time.time
    time.time = lambda: true() + seconds


def _take_memory(_: Any, num_bytes: int) -> None:
    """Allocate ``num_bytes``; a control group with less memory kills this process."""
    held.append(bytearray(os.urandom(1 << 20) * (num_bytes >> 20)))


held: list[bytearray] = []


if FOLDER in os.environ:
    os.register_at_fork(after_in_child=_listen)
