"""A rank of emulated strands: compute is a sleep, collectives are real and also occupy their emulated links."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

from benchmarks.peers.emulated_stage import WAKE_UP_S, pause
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.plan import Step
from weft.pipeline.strands.segments import Kind, LinkScope

PROCESSOR = "compute"
"""Lane of computations; other lanes have the names of their links."""


@dataclass(frozen=True)
class StrandSpan:
    """A computation or a transfer of a strand, with its times.

    Attributes:
        lane: the processor, or a link.
    """

    lane: str
    step: Step
    start_s: float
    end_s: float


@dataclass
class _Transfer:
    """A transfer on a link.

    Attributes:
        end_s: when it ends if nothing more slows it down.
        carried: the real collective, or None if only its time is emulated.
    """

    link: LinkScope
    step: Step
    start_s: float
    end_s: float
    carried: Any
    machine: Machine

    def wait(self) -> Any:
        """Wait until the real collective and the link's emulated time have ended."""
        begin_s = perf_counter()
        result = None if self.carried is None else self.carried.wait()
        came_s = perf_counter()
        pause(self.end_s - came_s)
        self.machine.spans.append(StrandSpan(self.link.value, self.step, self.start_s, self.end_s))
        self.machine.stood_still(max(self.end_s, came_s) if came_s - begin_s > WAKE_UP_S else self.end_s)
        return result


class Machine:
    """A processor and a queue per link; concurrent operators slow each other down according to a table.

    If the host runs ahead, as with a GPU, its time between two computations is hidden: a computation begins when the
    previous one and its dependencies have ended.
    """

    def __init__(self, table: OverlapTable, *, runs_ahead: bool = False) -> None:
        self._table, self._runs_ahead = table, runs_ahead
        self._transfers: list[_Transfer] = []
        self._free_s = 0.0
        self.spans: list[StrandSpan] = []
        self.hurries = False
        """True if nothing takes time, as in a step that only warms up."""

    def compute(self, seconds: float, kind: Kind, step: Step) -> None:
        """Compute for ``seconds``; while links are busy, both the compute and the transfers are slowed down."""
        begin_s, seconds = self._now_s, 0.0 if self.hurries else seconds
        busy = [t for t in self._transfers if t.end_s > begin_s]
        self._transfers = busy
        slow = self._table.slowdown(kind, tuple({transfer.link for transfer in busy})) - 1.0 if busy else 0.0
        beside_s = min(seconds, max((transfer.end_s for transfer in busy), default=begin_s) - begin_s)
        for transfer in busy:
            transfer.end_s += slow * min(beside_s, transfer.end_s - begin_s)
        end_s = begin_s + seconds + slow * beside_s
        pause(end_s - perf_counter())
        self._free_s = end_s if self._runs_ahead else perf_counter()
        self.spans.append(StrandSpan(PROCESSOR, step, begin_s, self._free_s))

    def start(self, seconds: float, link: LinkScope, step: Step, carried: Any = None) -> _Transfer:
        """Occupy a link for ``seconds`` as soon as it is free and return immediately."""
        seconds = 0.0 if self.hurries else seconds
        start_s = max([self._now_s, *(t.end_s for t in self._transfers if t.link is link)])
        transfer = _Transfer(link, step, start_s, start_s + seconds, carried, self)
        self._transfers.append(transfer)
        return transfer

    def stood_still(self, until_s: float) -> None:
        """Record that the processor had nothing to compute until ``until_s``."""
        self._free_s = max(self._free_s, until_s)

    @property
    def _now_s(self) -> float:
        return self._free_s if self._runs_ahead else perf_counter()
