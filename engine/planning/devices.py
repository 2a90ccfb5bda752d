"""The speed of a rank's device: floating-point operations per second."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from time import perf_counter

import torch

from weft.conf.host.measurements import Measurement, Measurements, spread_of
from weft.pipeline.hardware import EFFICIENCY, GpuKind, kind_of_device

log = logging.getLogger(__name__)


def usable_flops(device: torch.device, threads: int, cache: Measurements, run: str = "") -> tuple[float, str]:
    """Return the FLOP/s that a rank is assumed to reach, and their source.

    Measurements are cached, so that the dry run and every start of a run plan with the same number.

    Args:
        threads: number of threads of a rank, if the device is the host's processor.
        run: name of what is trained, for results of earlier runs. See `correct_reached`.
    """
    reached = cache.read().get(_name(f"{run}: ", device, threads)) if run else None
    if reached is not None and not reached.is_old and isinstance(reached.value, float) and reached.value > 0:
        return reached.value, f"reached by a run of {run}, cache {cache.path}: {reached}"
    if (sheet := data_sheet(device)) is not None:
        return EFFICIENCY * sheet.flops_per_s, f"estimated: {EFFICIENCY:.0%} of the data sheet"
    peak, known = _kept("", device, threads, cache, lambda: _measured_flops(device, threads))
    what = f"was measured, cache {cache.path}" if known else f"this machine's {device.type} was measured to do"
    return EFFICIENCY * peak, f"estimated: {EFFICIENCY:.0%} of what {what}"


def usable_memory(device: torch.device, threads: int, cache: Measurements) -> float:
    """Return the bytes that a rank reads and writes in a second: by the data sheet of known GPUs, otherwise by a copy.

    Args:
        threads: number of threads of a rank, if the device is the host's processor.
    """
    if (sheet := data_sheet(device)) is not None:
        return sheet.bytes_per_s
    return _kept("memory of ", device, threads, cache, partial(_measured_copy, device, threads, to_host=False))[0]


def host_copies(device: torch.device, threads: int, cache: Measurements) -> float:
    """Return the bytes per second of a copy from the device's memory to the host's."""
    measure = partial(_measured_copy, device, threads, to_host=True)
    return _kept("copies to host memory of ", device, threads, cache, measure)[0]


def _kept(
    what: str, device: torch.device, threads: int, cache: Measurements, measure: Callable[[], tuple[float, float]]
) -> tuple[float, bool]:
    """Return a value of a device from the cache, otherwise measure and store it. Also return True if it was cached."""
    name = _name(what, device, threads)
    known = cache.values().get(name)
    if isinstance(known, float) and known > 0 and not cache.is_due(name):
        return known, True
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, spread = measure()
    finally:
        torch.set_num_threads(before)
    try:
        cache.store({name: found}, spread)
    except OSError as error:
        log.warning("%s: %s; what this device does is measured anew at every start", cache.path, error.strerror)
    return found, False


def _name(what: str, device: torch.device, threads: int) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, threads={threads}"
    return f"{what}{name}, {os.uname().nodename}"


def correct(device: torch.device, found: float, cache: Measurements, *, load: float) -> None:
    """Replace the cached FLOP/s of a device if a run contradicts them. See `Measurement.refutes`.

    Args:
        found: FLOP/s that were measured with this process's number of threads.
        load: number of the run's threads for each processor.
    """
    name = _name("", device, torch.get_num_threads())
    known = cache.read().get(name)
    if data_sheet(device) is None and known is not None and isinstance(known.value, float):
        measured = Measurement.now(found, known.spread, load=load)
        if measured.refutes(known, found / known.value):
            with suppress(OSError):
                cache.put({name: measured})


def correct_reached(run: str, device: torch.device, planned: float, found: Measurement, cache: Measurements) -> None:
    """Cache the FLOP/s that a run's slots have reached, if they contradict the FLOP/s of the plan.

    Args:
        run: what was trained.
        planned: FLOP/s of the plan, from `usable_flops`.
        found: FLOP/s that were reached.
    """
    name = _name(f"{run}: ", device, torch.get_num_threads())
    known = cache.read().get(name) or Measurement(planned, found.at, 0.0)
    if found.refutes(known, found.value / planned):
        with suppress(OSError):
            cache.put({name: found})


def peak_flops(device: torch.device) -> float:
    """Return the FLOP/s of one device: by the data sheet of known GPUs, otherwise by a short measurement."""
    sheet = data_sheet(device)
    return _measured_flops(device, torch.get_num_threads())[0] if sheet is None else sheet.flops_per_s


def data_sheet(device: torch.device) -> GpuKind | None:
    """Return the data sheet of a device, or None for processors and GPUs that are not in the table."""
    return kind_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@cache
def _measured_flops(device: torch.device, threads: int) -> tuple[float, float]:
    """Return the FLOP/s of a matrix product and their spread, measured once in a process.

    Args:
        threads: number of threads that torch uses now, on which the result depends.
    """
    size = 512
    a = torch.ones(size, size, device=device)
    return _fastest(lambda: float((a @ a)[0, 0]), 2 * size**3, repeats=20)


@cache
def _measured_copy(device: torch.device, threads: int, *, to_host: bool) -> tuple[float, float]:
    """Return bytes per second of a copy and their spread. Arguments as in `_measured_flops`.

    Args:
        to_host: True for a copy to the host's memory, False for one inside the device's, which reads and writes it.
    """
    source = torch.ones(1 << 23, device=device)
    pinned = to_host and device.type == "cuda"
    target = torch.empty(source.shape, device="cpu" if to_host else device, pin_memory=pinned)

    def copy() -> None:
        target.copy_(source)
        float(source[0])  # waits for the device

    return _fastest(copy, source.nbytes if to_host else 2 * source.nbytes, repeats=5)


def _fastest(run: Callable[[], object], work: float, *, repeats: int) -> tuple[float, float]:
    """Return the highest rate of ``work`` per second over repeats, and the spread of rates."""
    rates = []
    for _ in range(repeats):
        start = perf_counter()
        run()
        rates.append(work / (perf_counter() - start))
    return max(rates), spread_of(rates, max(rates))
