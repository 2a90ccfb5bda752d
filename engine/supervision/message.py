"""Messages from an agent to the driver: a heartbeat, the ends of ranks, and ranks on standby."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft.engine.supervision.faults import RankEnd
from weft.engine.supervision.report import HostReport, check_lengths


class AgentMessage(msgspec.Struct, frozen=True):
    """A host, as its agent sees it.

    Attributes:
        attempt: whose ranks it has; 0 before the first.
        ready: whether ranks can start at once, because what they import is imported.
        report: where they are.
        ends: of those that have ended badly.
        parked: why ranks have left the attempt and keep their process.
        lines: what ranks that have ended badly printed last.
        examined: the attempt after which the host has been examined last; 0 before the first time.
        failed: what was wrong with it then.
        leaving: whether a signal has asked the agent itself to end, because its host goes away.
    """

    attempt: int
    ready: bool
    report: HostReport
    ends: Mapping[int, RankEnd]
    parked: Mapping[int, str]
    lines: Mapping[int, list[str]]
    examined: int
    failed: Sequence[str]
    leaving: bool = False

    def to_wire(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return msgspec.to_builtins(self, str_keys=True)

    @classmethod
    def from_wire(cls, message: Mapping[str, Any]) -> AgentMessage:
        """Return the message that `to_wire` converted, after JSON.

        Raises:
            ValueError: it has another form.
        """
        check_lengths(message.get("report"))
        try:
            return msgspec.convert(message, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"a report: {error}; driver and agents need the same Weft") from error
