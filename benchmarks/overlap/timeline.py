"""A pair of strands in time: what the processor and the links do, as spans and as a picture in text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.plan import SegmentPlan, Step, take
from weft.pipeline.strands.segments import Kind, LinkScope, StrandPair
from weft.pipeline.strands.state import PairState

PROCESSOR = "compute"
"""Lane of what is computed; the others are named as their links."""


@dataclass(frozen=True)
class StrandSpan:
    """Something that takes its time.

    Attributes:
        lane: the processor, or a link.
        step: the strand that it is of; a weight gradient is of neither.
    """

    lane: str
    step: Step
    start_s: float
    end_s: float


def predicted_spans(pair: StrandPair, plan: SegmentPlan, table: OverlapTable) -> tuple[StrandSpan, ...]:
    """What a plan is predicted to do, in order."""
    spans: list[StrandSpan] = []
    at, step = dict.fromkeys(Step, 0), Step.forward

    class Watched(PairState):
        """Notes what runs between one state and the next."""

        def until_next_end(self, table: OverlapTable, kind: Kind | None, left_s: float) -> tuple[PairState, float]:
            later, left_s = super().until_next_end(table, kind, left_s)
            if kind is not None:
                spans.append(StrandSpan(PROCESSOR, step, self.now_s, later.now_s))
            for transfer, owner in ((self.forward, Step.forward), (self.backward, Step.backward)):
                if transfer.left_s > 0 and not transfer.second and transfer.link is not None:
                    spans.append(StrandSpan(transfer.link.value, owner, self.now_s, later.now_s))
            return later, left_s

    state: PairState = Watched()
    for step in plan.steps:
        state = take(state, pair, step, at[step], table)
        at[step] += 1
    state.ended(table)
    return _merged(spans)


def _merged(spans: Iterable[StrandSpan]) -> tuple[StrandSpan, ...]:
    """With parts of one thing put together."""
    last: dict[tuple[str, Step], int] = {}
    found: list[StrandSpan] = []
    for span in spans:
        key = span.lane, span.step
        if key in last and found[last[key]].end_s == span.start_s:
            before = found[last[key]]
            found[last[key]] = StrandSpan(span.lane, span.step, before.start_s, span.end_s)
        else:
            last[key] = len(found)
            found.append(span)
    return tuple(found)


def strands_text(rows: Mapping[str, Sequence[StrandSpan]], width: int = 100) -> str:
    """Rows of letters under each other, on one time scale: F, B and W where something runs, a dot where nothing does.

    Args:
        rows: spans by a title, such as predicted and measured.
        width: characters for the longest.
    """
    end_s = max((span.end_s for spans in rows.values() for span in spans), default=0.0)
    links = [link.value for link in LinkScope if any(s.lane == link.value for spans in rows.values() for s in spans)]
    lines = []
    for title, spans in rows.items():
        lines.append(f"{title}: {max((span.end_s for span in spans), default=0.0) * 1e3:.1f} ms")
        for lane in (PROCESSOR, *links):
            cells = [
                _cell([span for span in spans if span.lane == lane], column, end_s / width) for column in range(width)
            ]
            lines.append(f"{lane:<14}{''.join(cells).rstrip()}")
    return "\n".join(lines)


def _cell(spans: Sequence[StrandSpan], column: int, each_s: float) -> str:
    """The letter of what runs longest in a column."""
    start_s, end_s = column * each_s, (column + 1) * each_s
    inside: dict[str, float] = {".": 0.0}
    for span in spans:
        shared_s = min(span.end_s, end_s) - max(span.start_s, start_s)
        if shared_s > 0:
            inside[span.step.value] = inside.get(span.step.value, 0.0) + shared_s
    inside["."] = each_s - sum(inside.values())
    return max(inside, key=lambda letter: inside[letter])
