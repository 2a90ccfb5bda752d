"""Threads that work on the GPU of the thread that starts them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any


class Thread(threading.Thread):
    """A daemon thread whose current GPU is that of the thread that starts it.

    CUDA's current device belongs to a thread, and is GPU 0 in a new one. A call of CUDA there, or the end of a
    ``torch.cuda.stream`` block, would create a context on GPU 0, several hundred MB for each rank of a host.
    """

    def __init__(self, target: Callable[..., object], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._choose_device = _do_nothing

    def start(self) -> None:
        """Start the thread."""
        self._choose_device = device_of_caller()
        super().start()

    def run(self) -> None:
        """Run the target."""
        self._choose_device()
        super().run()


def executor(name: str, threads: int = 1) -> ThreadPoolExecutor:
    """Return an executor whose threads have the caller's current GPU."""
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=device_of_caller())


def device_of_caller() -> Callable[[], None]:
    """Return a function that makes the caller's current GPU that of another thread. Does not import torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return _do_nothing
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def _do_nothing() -> None:
    """Choose no device, because this process uses none."""
