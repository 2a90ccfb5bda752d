"""The speed of a rank's device: floating-point operations per second."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from time import perf_counter

import torch

from weft.conf.files import JsonCache
from weft.conf.measurements import keep, measured
from weft.pipeline.planner.hardware import EFFICIENCY, GpuKind, kind_of_device

CONTRADICTION = 0.25
"""Share by which a run has to find a device faster than what is kept, to replace it."""
log = logging.getLogger(__name__)


def usable_flops(device: torch.device, threads: int, cache: JsonCache) -> tuple[float, str]:
    """FLOP/s that a rank is taken to reach, and where that is known from.

    What is measured is kept, so that the dry run and every start of a run plan with one figure.

    Args:
        threads: of a rank, where the device is the host's processor.
    """
    if (sheet := data_sheet(device)) is not None:
        return EFFICIENCY * sheet.flops_per_s, f"estimated: {EFFICIENCY:.0%} of the data sheet"
    peak, known = _kept("", device, threads, cache, lambda: _measured_flops(device, threads))
    what = f"was measured, cache {cache.path}" if known else f"this machine's {device.type} was measured to do"
    return EFFICIENCY * peak, f"estimated: {EFFICIENCY:.0%} of what {what}"


def usable_memory(device: torch.device, threads: int, cache: JsonCache) -> float:
    """Bytes that a rank reads and writes in a second: its data sheet's on known GPUs, a copy's elsewhere.

    Args:
        threads: of a rank, where the device is the host's processor.
    """
    if (sheet := data_sheet(device)) is not None:
        return sheet.bytes_per_s
    return _kept("memory of ", device, threads, cache, lambda: _measured_copy(device, threads))[0]


def _kept(
    what: str, device: torch.device, threads: int, cache: JsonCache, measure: Callable[[], float]
) -> tuple[float, bool]:
    """A figure of a device from the cache, or measured and kept there; and whether it was known."""
    name = _name(what, device, threads)
    known = measured(cache).get(name)
    if isinstance(known, float) and known > 0:
        return known, True
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = measure()
    finally:
        torch.set_num_threads(before)
    try:
        keep(cache, {name: found})
    except OSError as error:
        log.warning("%s: %s; what this device does is measured anew at every start", cache.path, error.strerror)
    return found, False


def _name(what: str, device: torch.device, threads: int) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, threads={threads}"
    return f"{what}{name}, {os.uname().nodename}"


def correct(device: torch.device, found: float, cache: JsonCache) -> None:
    """Replace the kept FLOP/s of a device if a run has found more: other work can only slow a measurement down.

    Args:
        found: FLOP/s that were measured with this process's number of threads.
    """
    name = _name("", device, torch.get_num_threads())
    known = cache.read().get(name)
    if data_sheet(device) is None and isinstance(known, float) and found > (1 + CONTRADICTION) * known:
        with suppress(OSError):
            keep(cache, {name: found}, spread=1 - known / found)


def peak_flops(device: torch.device) -> float:
    """FLOP/s of one device: its data sheet's on known GPUs, a short measurement elsewhere."""
    sheet = data_sheet(device)
    return _measured_flops(device, torch.get_num_threads()) if sheet is None else sheet.flops_per_s


def data_sheet(device: torch.device) -> GpuKind | None:
    """Return the data sheet of a device; None for processors and GPUs that are not in the table."""
    return kind_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@cache
def _measured_flops(device: torch.device, threads: int) -> float:
    """Measured once in a process.

    Args:
        threads: that torch uses now, of which the answer depends.
    """
    size, repeats = 512, 20
    a = torch.ones(size, size, device=device)
    best = 0.0
    for _ in range(repeats):
        start = perf_counter()
        float((a @ a)[0, 0])
        best = max(best, 2 * size**3 / (perf_counter() - start))
    return best


@cache
def _measured_copy(device: torch.device, threads: int) -> float:
    """Measured once in a process; arguments as of `_measured_flops`."""
    source = torch.ones(1 << 23, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        start = perf_counter()
        target.copy_(source)
        float(target[0])
        best = max(best, 2 * source.nbytes / (perf_counter() - start))
    return best
