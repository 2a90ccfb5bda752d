"""Durations of the primitives that a communicator has carried out, to compare with what plans took them for."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.costs import Sample
from weft.comm.collectives.group import LinkClass

KEPT = 8
"""Durations to keep of each primitive, link and size."""

Kind = tuple[LinkClass, Primitive, int, int]
"""Fields of a `Sample` but for the seconds."""


class Times:
    """Marks before and after the last primitives; on a GPU events, which are read on demand."""

    def __init__(self) -> None:
        self._marks: dict[Kind, deque[tuple[Any, Any]]] = defaultdict(partial(deque, maxlen=KEPT))

    @contextmanager
    def of(self, kind: Kind, tensor: Tensor) -> Iterator[None]:
        """Mark the beginning and the end of a primitive on the device of ``tensor``."""
        begin = _mark(tensor)
        yield
        self._marks[kind].append((begin, _mark(tensor)))

    def samples(self) -> list[Sample]:
        """Return the shortest duration of each kind: the others include waits for late ranks."""
        return [Sample(*kind, min(_seconds(begin, end) for begin, end in marks)) for kind, marks in self._marks.items()]


def _mark(tensor: Tensor) -> Any:
    if not tensor.is_cuda:
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
