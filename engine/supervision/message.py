"""Messages from an agent to the driver: a heartbeat, the ends of ranks, and ranks on standby."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft.engine.supervision.faults import RankEnd
from weft.engine.supervision.report import HostReport, check_lengths


class AgentMessage(msgspec.Struct, frozen=True):
    """The state of a host, reported by its agent.

    Attributes:
        attempt: whose ranks it has, or 0 before the first.
        ready: whether ranks can start at once, because the imports are done.
        report: the ranks' progress.
        ends: failures, by rank.
        lines: last output of ranks that have failed.
        examined: the attempt after which the host was last examined, or 0 before the first examination.
        failed: the checks that failed then.
        leaving: whether the agent has received a signal to end, because its host shuts down.
    """

    attempt: int
    ready: bool
    report: HostReport
    ends: Mapping[int, RankEnd]
    parked: Mapping[int, str]
    """Ranks on standby, with the reason for which they left the attempt."""
    lines: Mapping[int, list[str]]
    examined: int
    failed: Sequence[str]
    leaving: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Return the message as JSON values."""
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
