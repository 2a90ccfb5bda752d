"""An attempt of a rank to train: its resources, and values that its process keeps for later attempts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from time import monotonic, process_time, time
from typing import Any, TypeVar

from weft.comm.exchange import broadcast, gather
from weft.conf.host.private import append_private
from weft.engine.distributed import from_rank_zero


class SetUpTimes:
    """Durations of the consecutive parts of a rank's set-up, in seconds of wall time and of processor time."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin an attempt, and drop the durations of the previous one."""
        self.parts: dict[str, tuple[float, float]] = {}
        self._at = monotonic(), process_time()

    def done(self, part: str) -> None:
        """Add the time since the end of the previous part, or since the beginning, to the duration of ``part``."""
        now = monotonic(), process_time()
        passed, computed = self.parts.get(part, (0.0, 0.0))
        self.parts[part] = passed + now[0] - self._at[0], computed + now[1] - self._at[1]
        self._at = now

    @property
    def seconds(self) -> float:
        """Wall time of all parts so far."""
        return sum(passed_s for passed_s, _ in self.parts.values())

    def write(self, path: Path, **more: object) -> None:
        """Append the durations as a line of JSON to a file that several ranks write. ``more`` are further fields."""
        parts = {part: [round(each, 4) for each in seconds] for part, seconds in self.parts.items()}
        append_private(path, json.dumps({"at": time(), "pid": os.getpid(), **more, "parts": parts}) + "\n")


T = TypeVar("T")


class ReusedValues:
    """Cache of one value for each name. It is valid only for the inputs from which the value was computed.

    Attributes:
        keeps: whether to cache, as in a process that takes part in several attempts of one run. Off by default: a
            process that trains several models could hit a stale entry.
    """

    def __init__(self) -> None:
        self.keeps = False
        self._values: dict[str, tuple[Any, Any]] = {}

    def find(self, name: str, made_from: Any) -> Any:
        """Return the value of ``name`` if its inputs equal ``made_from``, otherwise None."""
        known = self._values.get(name)
        return known[1] if known is not None and known[0] == made_from else None

    def put(self, name: str, made_from: Any, value: Any) -> None:
        """Store a value for ``name``, computed from the inputs ``made_from``."""
        if self.keeps:
            self._values[name] = deepcopy(made_from), value

    def get(self, name: str, made_from: Any, make: Callable[[], T]) -> T:
        """Return the value of ``name`` if its inputs equal ``made_from``, otherwise store and return ``make()``."""
        found = self.find(name, made_from)
        if found is None:
            found = make()
            self.put(name, made_from, found)
        return found


def known_to_any(kept: ReusedValues, name: str, made_from: object, make: Callable[[], T], *kinds: type) -> T:
    """Return on every rank the value that some rank has cached under ``name``, otherwise ``make()`` of rank 0.

    Collective call. Errors as in `together`.

    Args:
        kept: this rank's cache.
        made_from: the value's inputs, equal on all ranks. A cached value with other inputs is ignored.
        kinds: dataclasses and enums that the result consists of.
    """
    mine = kept.find(name, made_from)
    has = gather(mine is not None)
    if not all(has):
        mine = broadcast(mine, src=has.index(True), kinds=kinds) if any(has) else from_rank_zero(make, *kinds)
        kept.put(name, made_from, mine)
    return mine


class Attempt(ExitStack):
    """The resources of an attempt, which are released at its end.

    Attributes:
        interrupt: makes this rank's waits for other ranks fail, from any thread.
        kept: values for later attempts of this process, which the stack does not release.
        set_up: durations of the parts of the set-up.
        where: returns the current step and the range of its batches in the data, or None outside training.
    """

    def __init__(self, kept: ReusedValues | None = None, set_up: SetUpTimes | None = None) -> None:
        super().__init__()
        self.kept, self.set_up = kept or ReusedValues(), set_up or SetUpTimes()
        self.interrupt: Callable[[], None] = do_nothing
        self.where: Callable[[], tuple[int, tuple[int, int]]] | None = None


def do_nothing() -> None:
    """Do nothing. This is `interrupt` before an attempt has waits and after its end."""
