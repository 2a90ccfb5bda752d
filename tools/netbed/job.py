"""A Python function that runs in a node, in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from weft.tools.netbed.bed import NetBed
from weft.tools.ranks import PRELOADED, end_with_parent

_CONTEXT = multiprocessing.get_context("forkserver")


class Job:
    """``function(say, hear, *args)`` running in a node.

    ``say(value)`` and ``hear()`` talk with the parent's `hear` and `say`; what the function
    returns is the parent's `result`.

    Its process is forked from a server that has imported torch and DeepSpeed and done nothing
    else, as those of `weft.tools.ranks.run_ranks` are. It must not be forked from this one: a process
    group that nobody holds here any more would be collected there, and wait for its threads,
    which a fork does not carry over. It has this process's environment variables.
    """

    def __init__(self, bed: NetBed, node: str, function: Callable[..., Any], *args: Any) -> None:
        """Start it.

        Args:
            function: importable, and its arguments can be pickled.
        """
        self._name = f"{function.__name__} in node {node}"
        _CONTEXT.set_forkserver_preload(PRELOADED)
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_run, args=(dict(os.environ), bed, node, function, args, theirs), daemon=True
        )
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
    environment: dict[str, str],
    bed: NetBed,
    node: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    pipe: Connection,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        bed.enter(node)
        end_with_parent()
        result = function(lambda value: pipe.send(("said", value)), pipe.recv, *args)
        pipe.send(("returned", result))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("raised", traceback.format_exc()))
    finally:
        os._exit(0)  # destructors of a process group may wait for peers that have ended
