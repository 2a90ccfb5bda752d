"""Single collectives of two ranks, real and emulated (NeuronaBox table 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import cast

import psutil
import torch
import torch.distributed as dist

from weft.comm.emulated.meeting import Step
from weft.comm.emulated.world import EmulatedWorld
from weft.engine.distributed import init_distributed
from weft.tools.ranks import run_ranks

RANKS = 2
SIZES = (2**10, 2**14, 2**18, 2**21, 2**24, 2**27, 2**30)
"""Bytes: of the sum, or of all members' parts together."""
TIMEOUT_S = 280.0
COPIES = 4
"""Of a collective's bytes, that a real rank and its transport hold at most."""
_FEWEST, _MOST, _BYTES = 3, 200, 2**31
"""Calls of one size, and what they move at most, but for the fewest."""
_WARM_UP = 2

Seconds = Mapping[tuple[str, int], float]
"""Of an operation and a size, the middle call."""


@dataclass(frozen=True, kw_only=True)
class CallBeside:
    """A collective, both ways.

    Attributes:
        real_s: seconds of a call, before the emulation and after it.
        emulated_s: with the first of those as what the delay model says.
    """

    operation: str
    num_bytes: int
    real_s: list[float]
    emulated_s: float

    @property
    def name(self) -> str:
        """For a file that is added to."""
        return f"{self.operation} {self.num_bytes}"

    @property
    def over(self) -> float:
        """Emulated seconds over those that the delay model was told."""
        return self.emulated_s / self.real_s[0]


class _Ready:
    """A step whose other ranks come to every collective when this one does; see `weft.comm.emulated.meeting.Step`."""

    def ready_s(self, operation: str, ranks: Sequence[int], root: int | None) -> float:
        """At once."""
        return 0.0

    def ended(self, operation: str, ranks: Sequence[int], at_s: float) -> None:
        """Nothing follows from it."""


def sizes_that_fit(sizes: Sequence[int] = SIZES) -> list[int]:
    """Those for which there is memory."""
    free = psutil.virtual_memory().available
    return [size for size in sizes if COPIES * RANKS * size <= free]


def compare_calls(sizes: Sequence[int]) -> list[CallBeside]:
    """Real, emulated, and real again."""
    real = [_real(sizes)]
    emulated: Seconds = run_ranks(1, emulated_calls, sizes, real[0], timeout_s=TIMEOUT_S)[0]
    real.append(_real(sizes))
    return [
        CallBeside(
            operation=operation,
            num_bytes=size,
            real_s=[run[operation, size] for run in real],
            emulated_s=emulated[operation, size],
        )
        for operation, size in real[0]
    ]


def _real(sizes: Sequence[int]) -> Seconds:
    return run_ranks(RANKS, real_calls, sizes, timeout_s=TIMEOUT_S)[0]


def real_calls(sizes: Sequence[int]) -> Seconds:
    """Of one rank of two."""
    init_distributed(TIMEOUT_S)
    return _timed(sizes)


def emulated_calls(sizes: Sequence[int], delays: Seconds) -> Seconds:
    """Of one rank whose other is emulated; calls take ``delays``."""
    world = EmulatedWorld(rank=0, size=RANKS, hosts=lambda _: 0)
    world.join()
    world.collective_s = lambda call: delays[call.operation, call.num_bytes]
    world.step = cast(Step, _Ready())
    return _timed(sizes)


def _timed(sizes: Sequence[int]) -> Seconds:
    found = {}
    for size in sizes:
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // RANKS)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
        }
        for operation, call in calls.items():
            found[operation, size] = median(_seconds(call, size)[_WARM_UP:])
    return found


def _seconds(call: Callable[[], object], size: int) -> list[float]:
    seconds = []
    for _ in range(_WARM_UP + max(_FEWEST, min(_MOST, _BYTES // size))):
        begun = perf_counter()
        call()
        seconds.append(perf_counter() - begun)
    return seconds
