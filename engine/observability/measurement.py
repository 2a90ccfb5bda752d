"""One rank's measurements of a step, and the timeline of a pipeline that is computed from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from weft.comm.exchange import gather
from weft.comm.job import GatherPurpose
from weft.engine.observability.clock import Clock
from weft.engine.observability.event_timer import EventTimer
from weft.pipeline.action import Slot, parse_slot, slot_text
from weft.pipeline.schedule import Schedule
from weft.pipeline.timeline import COMPUTE_LANE, MEASURED_LANES, Span, Timeline

RECORDS_KEPT = 8
"""Steps whose measurements are kept."""


@dataclass(frozen=True)
class Mark:
    """An executed slot, with the clock's marks at its beginning and end."""

    slot: Slot
    start: object
    end: object


class SlotTrace:
    """An observer that marks every slot of a step. See `weft.engine.observability.watcher.SlotObserver`."""

    def __init__(self, clock: Clock, timer: EventTimer | None = None) -> None:
        """Begin the trace now, with marks of ``clock``, which ``timer`` also receives."""
        self._clock, self._timer = clock, timer
        self.start = clock.mark()
        self.marks: list[Mark] = []

    def step_begins(self, num_microbatches: int) -> None:
        """Do nothing, because the trace begins at its creation."""

    def slot_begins(self, slot: Slot) -> None:
        """Mark the beginning."""
        if self._timer is not None:
            self._timer.slot_begins(slot)
        self._begun = self._clock.mark()

    def slot_ends(self, slot: Slot) -> None:
        """Mark the end."""
        end = self._clock.mark()
        self.marks.append(Mark(slot, self._begun, end))
        if self._timer is not None:
            self._timer.slot_ended(slot, self._begun, end)


@dataclass(frozen=True)
class StepRecord:
    """One rank's marks of one step.

    Attributes:
        start: the clock's mark at which the step began.
        marks: every slot in the order of execution.
        peak_bytes: highest sum of saved activation bytes.
        peak_chunks: most chunk activations alive at once.
    """

    start: object
    marks: Sequence[Mark]
    peak_bytes: int
    peak_chunks: int

    def idle_share(self, clock: Clock) -> float:
        """Return the share of the step in which this rank did not compute."""
        return 1.0 - self.busy_s(clock) / clock.seconds(self.start, self.marks[-1].end)

    def busy_s(self, clock: Clock) -> float:
        """Return the seconds of the step in which this rank computed."""
        return sum(
            clock.seconds(mark.start, mark.end)
            for mark in self.marks
            if MEASURED_LANES.get(mark.slot[0].op) == COMPUTE_LANE
        )


class StepRecords:
    """One rank's measurements of its last steps, `RECORDS_KEPT` at most. The last one is ``records[-1]``.

    Attributes:
        timer: receives the marks, too, if events are timed.
    """

    timer: EventTimer | None = None

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> StepRecord:
        return self._records[index]

    def begin(self) -> SlotTrace:
        """Return an observer for the step that begins now."""
        return SlotTrace(self.clock, self.timer)

    def add(self, trace: SlotTrace, peak_bytes: int, peak_chunks: int) -> None:
        """Store the measurements of a step. For ``peak_bytes`` and ``peak_chunks`` see `StepRecord`."""
        self._records.append(StepRecord(trace.start, trace.marks, peak_bytes, peak_chunks))

    def busy_before_last(self) -> float:
        """Return the seconds in which this rank computed in the step before the last, which the device has finished."""
        return self._records[-2].busy_s(self.clock)

    def idle_share(self) -> float:
        """Return the share of the last step in which this rank did not compute. Waits for the device."""
        return self._records[-1].idle_share(self.clock)

    def timelines(self, schedule: Schedule, rank: int, group: dist.ProcessGroup | None) -> list[Timeline]:
        """Return the timelines of the stored steps by `gather_timeline`, the oldest first. Collective call."""
        return [gather_timeline(record, self.clock, schedule, rank, group) for record in self._records]


def gather_timeline(
    record: StepRecord, clock: Clock, schedule: Schedule, rank: int, group: dist.ProcessGroup | None
) -> Timeline:
    """Return the measured timeline of one pipeline. Collective call over its ranks.

    The hosts' wall clocks at the beginning of the step align the ranks. Waits for transfers have no span. They are
    the bubbles between spans.

    Args:
        group: the pipeline's ranks, or None for a pipeline of one.
    """
    mine = [
        (slot_text(mark.slot), clock.seconds(record.start, mark.start), clock.seconds(record.start, mark.end))
        for mark in record.marks
        if mark.slot[0].op in MEASURED_LANES
    ]
    entry = (rank, clock.wall_s(record.start), mine, record.peak_bytes, record.peak_chunks)
    entries = [entry]
    if group is not None:
        entries = gather(entry, group=group, purpose=GatherPurpose.timeline)
    entries.sort()
    origin = min(started_at for _, started_at, *_ in entries)
    spans = tuple(
        Span(number, MEASURED_LANES[slot[0].op], slot, started_at - origin + start_s, started_at - origin + end_s)
        for number, started_at, spans_of_rank, *_ in entries
        for text, start_s, end_s in spans_of_rank
        for slot in [parse_slot(text)]
    )
    return Timeline(
        name=f"{schedule.name} measured",
        num_ranks=schedule.num_ranks,
        spans=spans,
        peak_bytes=tuple(float(peak) for *_, peak, _ in entries),
        live_microbatches=tuple(chunks for *_, chunks in entries),
    )
