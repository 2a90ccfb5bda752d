"""What an agent tells the driver: a heartbeat, how ranks have ended, and which have parked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.engine.supervision.faults import FaultKind, RankEnd
from weft.engine.supervision.report import HostReport


@dataclass(frozen=True)
class AgentMessage:
    """A host, as its agent sees it.

    Attributes:
        attempt: whose ranks it has; 0 before the first.
        report: where they are.
        ends: of those that have ended badly.
        parked: why ranks have left the attempt and keep their process.
        lines: what ranks that have ended badly printed last.
        examined: the attempt after which the host has been examined last; 0 before the first time.
        failed: what was wrong with it then.
    """

    attempt: int
    report: HostReport
    ends: Mapping[int, RankEnd]
    parked: Mapping[int, str]
    lines: Mapping[int, list[str]]
    examined: int = 0
    failed: Sequence[str] = ()

    def to_wire(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "attempt": self.attempt,
            "report": self.report.to_wire(),
            "ends": {str(rank): {**vars(end), "kind": end.kind.value} for rank, end in self.ends.items()},
            "parked": {str(rank): reason for rank, reason in self.parked.items()},
            "lines": {str(rank): lines for rank, lines in self.lines.items()},
            "examined": self.examined,
            "failed": list(self.failed),
        }

    @classmethod
    def from_wire(cls, message: Mapping[str, Any]) -> AgentMessage:
        """What `to_wire` made, after a way through JSON.

        Raises:
            ValueError: it has another form.
        """
        try:
            return cls(
                attempt=int(message["attempt"]),
                report=HostReport.from_wire(message["report"]),
                ends={int(rank): _end(end) for rank, end in message["ends"].items()},
                parked={int(rank): str(reason) for rank, reason in message["parked"].items()},
                lines={int(rank): [str(line) for line in lines] for rank, lines in message["lines"].items()},
                examined=int(message["examined"]),
                failed=[str(line) for line in message["failed"]],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"a report is not of this form ({error!r}); driver and agents need the same Weft"
            ) from error


def _end(fields: Mapping[str, Any]) -> RankEnd:
    data = fields["data"]
    return RankEnd(
        kind=FaultKind(fields["kind"]),
        message=str(fields["message"]),
        step=None if fields["step"] is None else int(fields["step"]),
        data=None if data is None else (int(data[0]), int(data[1])),
        ranks=tuple(map(int, fields["ranks"])),
        status=int(fields["status"]),
    )
