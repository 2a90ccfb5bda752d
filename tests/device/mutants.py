"""Waits of the engine that are removed, one at a time, to show that the emulated device notices each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch


def _result_without_wait(result: Any) -> Any:
    return result._tensor


def _receive_without_wait(receive: Any) -> Any:
    import torch

    _, tensor = receive.launched.result(receive.timeout_s)
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _receive_without_record(receive: Any) -> Any:
    work, tensor = receive.launched.result(receive.timeout_s)
    work.wait()
    return tensor


def _copy_without_wait(copy: Any, wait: Callable[[], Any]) -> None:
    import torch

    with patch.object(torch.cuda.Stream, "wait_stream", lambda *_: None):
        _send(copy, wait)


LAG_MS = 5.0
"""Delay of what a removed wait waits for, so that the host does not learn of its end by other means."""
LATE_COMPUTE = ("memory of a receive", "copy of the norm to the host")
_send: Any = None
MUTANTS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "result of a collective": (
        "weft.comm.collectives.executors.StreamResult",
        "result",
        _result_without_wait,
        {"stages": 1, "zero": 1},
    ),
    "receive": ("weft.comm.rts_channel.RtsReceive", "wait", _receive_without_wait, {"stages": 2}),
    "memory of a receive": ("weft.comm.rts_channel.RtsReceive", "wait", _receive_without_record, {"stages": 2}),
    "copy of the norm to the host": ("weft.engine.zero.finite.HostCopy", "send", _copy_without_wait, {"stages": 2}),
}
"""Class, method, the method without its wait, and keywords of `tiny_config` for a run that uses it."""


def races_without_waits() -> dict[str, dict[str, int]]:
    """Return the races in one step without each wait, and in one step with all of them."""
    global _send
    from tests.device import cuda
    from tests.device.training import train_one
    from weft.engine.zero.finite import HostCopy

    _send = HostCopy.send
    found = {"none": dict(train_one({"stages": 2}, 1).races)}
    for name, (owner, method, mutant, keywords) in MUTANTS.items():
        cuda.lag(**{"default_ms" if name in LATE_COMPUTE else "other_ms": LAG_MS})
        with patch(f"{owner}.{method}", mutant):
            found[name] = dict(train_one(keywords, 1).races)
    return found
