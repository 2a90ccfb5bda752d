"""Detection of a rank that was started with other settings than the others."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from weft.comm.emulated.conversation import EmulationError, Mismatch
from weft.tools.emulation.job import EmulatedJob
from weft.tools.emulation.session import Setting
from weft.tools.emulation.turns import RealRank

STEPS = 1
"""Measured steps that a rank is compared over, after those that warm up."""


def check_rank(job: EmulatedJob, other: EmulatedJob, rank: int, size: int, setting: Setting, settings: str) -> None:
    """Run ``rank`` as all others are set up, then with other settings among others that expect the first.

    Args:
        other: the job as this rank takes it to be.
        settings: the differing settings, for the message.

    Raises:
        Mismatch: it does something that another rank does not expect; names both.
        ValueError: it refuses its settings itself.
    """
    with closing(RealRank(job, rank, size, setting)) as right:
        costs = right.ask("collectives", right.prepared.plan.costs)
        heard = right.ask("run", STEPS, costs, setting.what_if).heard
    try:
        with closing(RealRank(other, rank, size, replace(setting, expected=heard))) as wrong:
            wrong.ask("run", STEPS, costs, setting.what_if)
    except Mismatch as error:
        raise Mismatch(f"{error}; rank {rank} was started with {settings}, the others were not") from None
    except EmulationError as error:
        raise EmulationError(f"{error}; rank {rank} was started with {settings}, the others were not") from None
