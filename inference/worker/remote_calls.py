"""Calls of an object's methods in a process of another host, over an authenticated connection.

Arguments and results are pickled. Only peers that have proved ``WEFT_KEY`` get so far.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.comm.message_stream import MessageStream

Handler = Callable[[str, Sequence[Any], Mapping[str, Any]], Any]
"""Executes a call, given the method's name and its arguments."""


class RemoteCalls:
    """The caller's end."""

    def __init__(self, stream: MessageStream, name: str) -> None:
        """Call an object over ``stream``, which errors refer to by ``name``."""
        self._stream, self._name = stream, name

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, and return its result.

        Raises:
            Exception: what the method has raised, with its traceback as a note.
            ConnectionError: the connection is lost.
        """
        request = pickle.dumps((name, args, kwargs), pickle.HIGHEST_PROTOCOL)
        try:
            self._stream.send(request)
            reply = self._stream.receive()
        except OSError as error:
            raise ConnectionError(f"lost {self._name}: {error}") from error
        has_failed, value = pickle.loads(reply)
        if has_failed:
            raise value
        return value


def serve_calls(stream: MessageStream, handler: Handler) -> None:
    """Execute calls one after the other, until the connection is lost.

    Raises:
        OSError: the connection is lost.
    """
    while True:
        message = stream.receive()
        try:
            name, args, kwargs = pickle.loads(message)
            reply = pickle.dumps((False, handler(name, args, kwargs)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            reply = pickle.dumps((True, _portable(error)), pickle.HIGHEST_PROTOCOL)
        stream.send(reply)


def _portable(error: Exception) -> Exception:
    """Return the error with its traceback as a note, or a RuntimeError with its text if it cannot be pickled."""
    note = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if not isinstance(copy, Exception):
            raise TypeError(copy)
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(note)
    return copy
