"""A Python function that runs in a node, in a process forked from this one."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from weft.tools.netbed.bed import NetBed

_FORK = multiprocessing.get_context("fork")  # what is imported here is there at once
_PR_SET_PDEATHSIG = 1


class Job:
    """``function(say, hear, *args)`` running in a node.

    ``say(value)`` and ``hear()`` talk with the parent's `hear` and `say`; what the function
    returns is the parent's `result`.
    """

    def __init__(self, bed: NetBed, node: str, function: Callable[..., Any], *args: Any) -> None:
        """Start it."""
        self._name = f"{function.__name__} in node {node}"
        self._pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_run, args=(bed, node, function, args, theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def say(self, value: Any) -> None:
        """Give the function a value."""
        self._pipe.send(value)

    def hear(self, timeout_s: float = 60.0) -> Any:
        """The next value that the function says."""
        return self._next("said", timeout_s)

    def has_news(self) -> bool:
        """Whether `hear` or `result` would return at once."""
        return self._pipe.poll()

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`: a job is ready when it has news."""
        return self._pipe.fileno()

    def result(self, timeout_s: float = 60.0) -> Any:
        """What the function returns."""
        return self._next("returned", timeout_s)

    def kill(self) -> None:
        """End it now, as a crash would."""
        self.process.kill()
        self.process.join()

    def _next(self, wanted: str, timeout_s: float) -> Any:
        """The next message, which must be of the ``wanted`` kind.

        Raises:
            TimeoutError: nothing came.
            RuntimeError: the function raised, or its process has ended.
        """
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"{self._name}: nothing within {timeout_s:g} s")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._name}: its process has ended") from None
        if kind != wanted:
            raise RuntimeError(f"{self._name}: {kind}\n{value}")
        return value


def _run(
    bed: NetBed, node: str, function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection, parent: int
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we could ask to die with it
    try:
        bed.enter(node)
        result = function(lambda value: pipe.send(("said", value)), pipe.recv, *args)
        pipe.send(("returned", result))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("raised", traceback.format_exc()))
    finally:
        os._exit(0)  # forked: what the parent registered to run at exit is not ours
