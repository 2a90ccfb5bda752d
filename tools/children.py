"""Functions that run in separate processes, forked from a server with shared imports."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

PRELOADED = ("weft.tools.rank_server",)
"""Modules to import once before forking, because they take seconds and are the same for every rank."""
LOG_TAIL_CHARS = 3000
"""Maximum number of characters of a failed child's output to show."""
_CONTEXT = multiprocessing.get_context("forkserver")
_FORK = multiprocessing.get_context("fork")


class Child:
    """A process that runs ``function(send, receive, *args)``.

    In the function, ``send(value)`` sends a value that the parent receives by `receive`, and ``receive()`` receives a
    value that the parent sends by `send`. The function's return value is `result`. The process ends if its parent dies.

    It is forked from a server that has only imported torch and DeepSpeed. It must not be forked from a process that has
    created process groups: the child would garbage-collect an unreferenced group, and wait for the group's threads,
    which a fork does not copy.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        enter: Callable[[], object] | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        preload: Sequence[str] = PRELOADED,
        from_here: bool = False,
    ) -> None:
        """Start the process.

        Args:
            name: name of the process in errors.
            function: an importable function; its arguments must be picklable.
            enter: called in the process before ``function``.
            environment: environment variables; None takes the server's.
            log: file for its output; errors include the end of it.
            preload: modules that the server imports when it starts.
            from_here: fork from this process, which saves the server's imports. Requires that this process has imported
                the same modules and has no other thread, GPU or process group.
        """
        self.name, self._log = name, log
        context = _FORK if from_here else _CONTEXT
        if not from_here:
            _CONTEXT.set_forkserver_preload(list(preload))
        self._pipe, theirs = _CONTEXT.Pipe()
        arguments = environment and dict(environment), log, enter, function, args, theirs
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def send(self, value: Any) -> None:
        """Send a value to the function, which receives it by its ``receive``."""
        self._pipe.send(value)

    def receive(self, timeout_s: float | None = 60.0) -> Any:
        """Receive the next value that the function sends. Wait without limit if ``timeout_s`` is None."""
        return self._next("sent", timeout_s)

    def fileno(self) -> int:
        """Return the descriptor for `multiprocessing.connection.wait`.

        It is ready when the child has sent something.
        """
        return self._pipe.fileno()

    def result(self, timeout_s: float = 60.0) -> Any:
        """Wait for the function's return value."""
        return self._next("returned", timeout_s)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()

    def output(self) -> str:
        """Return the end of the process's output on a new line, or an empty text without a log."""
        if self._log is None or not self._log.exists():  # the child makes it, which takes long on a busy machine
            return ""
        return f"\n{self._log.read_text(errors='replace')[-LOG_TAIL_CHARS:]}"

    def _next(self, wanted: str, timeout_s: float | None) -> Any:
        """Return the next message, which must be of the ``wanted`` kind."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"{self.name}: nothing within {timeout_s:g} s")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} failed: its process has ended{self.output()}") from None
        if kind != wanted:
            raise RuntimeError(f"{self.name} {kind}: {value}{self.output()}")
        return value


def with_news(children: Sequence[Child], timeout_s: float) -> list[Child]:
    """Return the children that have sent something, as soon as one has; empty after the timeout."""
    files = multiprocessing.connection.wait([child.fileno() for child in children], timeout_s)
    return [child for child in children if child.fileno() in files]


def results_of(children: Sequence[Child], timeout_s: float, meanwhile: Callable[[], object] | None = None) -> list[Any]:
    """Return the result of each child.

    Args:
        meanwhile: called repeatedly until the first child has ended.

    Raises:
        RuntimeError: a child failed, or the time was up. If several failed, the first one is named, because its failure
            usually causes the others.
    """
    deadline = monotonic() + timeout_s
    while meanwhile is not None and not with_news(children, 0.0) and monotonic() < deadline:
        meanwhile()
    results: dict[Child, Any] = {}
    while waiting := [child for child in children if child not in results]:
        if not (ready := with_news(waiting, max(0.0, deadline - monotonic()))):
            numbers = [number for number, child in enumerate(children) if child in waiting]
            raise RuntimeError(f"ranks {numbers} had not ended after {timeout_s:g} s{waiting[0].output()}")
        results |= {child: child.result(0.0) for child in ready}
    return [results[child] for child in children]


def _run(
    environment: dict[str, str] | None,
    log: Path | None,
    enter: Callable[[], object] | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    pipe: Connection,
) -> None:
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    if log is not None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
    try:
        if enter is not None:
            enter()
        end_with_parent()
        result = function(lambda value: pipe.send(("sent", value)), pipe.recv, *args)
        pipe.send(("returned", result))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))
    finally:
        os._exit(0)  # destructors of a process group may wait for peers that have ended


def end_with_parent() -> None:
    """End this process as soon as its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
