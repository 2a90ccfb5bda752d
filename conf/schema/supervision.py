"""Supervision: detection of faults and restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from weft.conf.schema.ranges import NATURAL, POSITIVE, Range


@dataclass(kw_only=True)
class SuperviseConfig:
    """The supervisor: it notices faults, names the culprit and restarts the run."""

    enabled: bool | None = None
    """Supervise the run: restart it after faults; null does so if it has more than one host."""
    port: Annotated[int, Range(0, 65535)] = 0
    """TCP port of the driver, at which the hosts' agents report; 0 takes `cluster.master_port`, which it shares with
    the ranks of its host."""
    heartbeat_s: Annotated[float, POSITIVE] = 1.0
    """Seconds between an agent's heartbeats."""
    silence_s: Annotated[float, POSITIVE] = 5.0
    """Seconds without a heartbeat after which a host counts as lost."""
    least_deadline_s: Annotated[float, POSITIVE] = 4.0
    """Minimum time in seconds that ranks may stand still in steady training before the culprit is looked for;
    slow steps raise it."""
    setup_deadline_s: Annotated[float, POSITIVE] = 600.0
    """Seconds that imports, set-up or the first step may stand still."""
    max_restarts: Annotated[int, NATURAL] = 100
    """Restarts after which the run ends; the same fault at the same step three times ends it sooner."""
    backoff_s: Annotated[float, NATURAL] = 0.0
    """Seconds before the second restart in a row without a good step between; each further one doubles them."""
    in_process: bool = True
    """Let the ranks that survive a fault keep their process, and build only the groups and the state anew."""
    max_skips: Annotated[int | None, NATURAL] = None
    """Steps in a row with a loss or gradient norm that is not finite, or a spike, to skip before the run goes
    back to a checkpoint and leaves their batches out; 0 ends the run at the first. null is 3 in a supervised
    run, and 0 otherwise."""
    spike: Annotated[float, NATURAL] = 0.0
    """Skip a step whose gradient norm is this many times the median of the last 32; 0 looks for no spikes."""
    compare_every: Annotated[int, NATURAL] = 0
    """Steps between comparisons of the replicas' weights by checksum; 0 compares none. ZeRO stage 3 has none to
    compare."""
