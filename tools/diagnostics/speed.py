"""Speed of a host's device: memory bandwidth and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from weft.conf.host.diagnosis import CheckResult
from weft.engine.planning.devices import data_sheet
from weft.pipeline.hardware import GpuKind
from weft.tools.diagnostics.judging import Judge

SHEET_SHARE = 0.5
"""Minimum share of a data sheet's figure: a healthy GPU reaches two thirds or more with these sizes."""
OWN_SHARE = 0.5
"""Minimum share of the best figure of this host."""
_REPEATS = 5


def check_memory(device: torch.device, judge: Judge, slow: float = 1.0) -> CheckResult:
    """Measure the bytes per second that a copy on the device reads and writes.

    Args:
        slow: for tests: factor by which the result is slower.
    """
    mebibytes = 1024 if device.type == "cuda" else 64  # beyond every cache
    source = torch.zeros(mebibytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def measure() -> float:
        return 2 * source.numel() / _seconds(device, lambda: target.copy_(source)) / 1e9 / slow

    return _judged("memory", device, judge, measure, "GB/s", lambda sheet: sheet.bytes_per_s / 1e9)


def check_gemm(device: torch.device, judge: Judge, slow: float = 1.0) -> CheckResult:
    """Measure the floating-point operations per second of a large product: bf16 on GPUs, fp32 elsewhere.

    Args:
        slow: for tests: factor by which the result is slower.
    """
    size, form = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a = torch.ones(size, size, device=device, dtype=form)
    out = torch.empty_like(a)

    def measure() -> float:
        return 2 * size**3 / _seconds(device, lambda: torch.matmul(a, a, out=out)) / 1e12 / slow

    return _judged("GEMM", device, judge, measure, "TFLOP/s", lambda sheet: sheet.flops_per_s / 1e12)


def device_kind(device: torch.device) -> str:
    """Return a name under which measurements are comparable: GPU or processor, threads, and torch's build."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, GPU {device.index or 0}, torch {torch.__version__}"
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


def _judged(
    check: str,
    device: torch.device,
    judge: Judge,
    measure: Callable[[], float],
    unit: str,
    peak: Callable[[GpuKind], float],
) -> CheckResult:
    sheet = data_sheet(device)
    if sheet is not None:
        return judge.by_data_sheet(check, measure, peak=peak(sheet), share=SHEET_SHARE, unit=unit)
    return judge.by_own_best(check, device_kind(device), measure, share=OWN_SHARE, unit=unit)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the shortest of several times; on CPUs it is processor time, which other processes do not affect."""
    work()
    best = float("inf")
    for _ in range(_REPEATS):
        if device.type == "cuda":  # the first time includes the work before, and is not the shortest
            begun = time.perf_counter()
            work()
            torch.cuda.synchronize(device)
            took = time.perf_counter() - begun
        else:
            begun = time.process_time()
            work()
            took = (time.process_time() - begun) / torch.get_num_threads()
        best = min(best, took)
    return best
