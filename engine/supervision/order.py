"""The command that an agent receives when it starts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AgentOrder:
    """The command that an agent receives when it starts, as one line of JSON on its standard input.

    Attributes:
        host: name of its host.
        generation: number of this agent. The driver accepts one agent of a host.
        address: the driver's.
        run_folder: of the run.
        slots: most ranks of this host.
        preload: modules for the forkserver.
        environment: variables to set, some of them secret.
        heartbeat_s: seconds between reports.
        orphan_s: seconds without a driver after which it ends its ranks and itself.
        stop_s: seconds in which ranks must end after a signal to this agent.
        launch: number of this start of the run. Memory checkpoints of earlier starts are removed.
        parent: process with which this agent and its ranks end, or 0 if the run outlives it.
        driver: command that starts the driver again, or empty if another agent does.
        yields_s: seconds that another agent of this host, which has done its imports, has to reconnect first if it
            is alive, or 0 if there is no other.
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
        """Parse a command from a line of JSON."""
        fields = json.loads(line)
        if not isinstance(fields["address"], str):
            fields["address"] = tuple(fields["address"])
        return cls(**fields)

    @property
    def peer(self) -> str:
        """Return the name that the driver uses for this agent."""
        return f"{self.host}#{self.generation}"
