"""The command that an agent receives when it starts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AgentOrder:
    """The command that an agent receives when it starts, as one line of JSON on its standard input.

    Attributes:
        host: name of its host.
        generation: number of this agent; the driver hears one of a host.
        address: where the driver listens.
        run_folder: of the run.
        slots: most ranks of this host.
        preload: modules for the forkserver.
        environment: variables to set, some of them secret.
        heartbeat_s: seconds between reports.
        orphan_s: seconds without a driver after which it ends its ranks and itself.
        stop_s: seconds that ranks have to end after a signal that asks this agent to.
        launch: number of this start of the run; memory that an earlier one has left is given back.
        parent: process with which this agent and its ranks end; 0 if the run outlives it.
        driver: command that starts the driver again; empty if another agent does.
        yields_s: seconds that another of this host, which has everything imported, has to come back first if it is
            alive; 0 if there is none.
    """

    host: str
    generation: int
    address: str | tuple[str, int]
    run_folder: str
    slots: int
    preload: list[str]
    environment: dict[str, str]
    heartbeat_s: float
    orphan_s: float
    stop_s: float = 300.0
    launch: int = 0
    parent: int = 0
    driver: list[str] = field(default_factory=list)
    yields_s: float = 0.0

    @classmethod
    def read(cls, line: str) -> AgentOrder:
        """The order in a line of JSON."""
        fields = json.loads(line)
        if not isinstance(fields["address"], str):
            fields["address"] = tuple(fields["address"])
        return cls(**fields)

    @property
    def peer(self) -> str:
        """Return the name that the driver uses for this agent."""
        return f"{self.host}#{self.generation}"
