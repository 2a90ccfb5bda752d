"""Training steps without one of the product's waits, to show that the emulated device notices each.

`python -m tests.device.mutants [CASE ...]` removes all waits of all cases, in ten minutes on a quiet host, and writes
what noticed them. That depends on lags of milliseconds, so a busy host may fail to notice some.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic_ns, perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.device import waits
from tests.device.lines import UNKNOWN
from weft.comm.key import VARIABLE

LAG_MS = 4.0
"""Delay of what a removed wait waits for, so that the host does not learn of its end by other means."""
LAGS = [{"other_ms": LAG_MS}, {"default_ms": LAG_MS}]
LONG_LAGS = [{"other_ms": 1000.0}]
"""Lags with memory checkpoints, because their thread has to wait until the next step writes what they copy."""
PART_LAG_MS = 200.0
KERNEL_MS = 15.0
"""Duration of a kernel that is measured."""
HANG_S = 240
"""A run without a wait ends after these seconds."""
FAILURE = "failure"
"""An error of a rank, a crash or a hang."""
NOTHING = "nothing"
SMALL = {"layers": 2, "microbatches": 2}
CASES: dict[str, dict[str, Any]] = {
    "parts": {},
    "replicas": {"stages": 1, **SMALL},
    "pipeline": {"stages": 2, **SMALL},
    "offload": {"stages": 2, "offload_cap": 1_600_000, **SMALL},
    "ZeRO-1": {"stages": 1, "zero": 1, "compare_every": 1, **SMALL},
    "ZeRO-1, Lamb": {"stages": 1, "zero": 1, "optimizer": "lamb", **SMALL},
    "ZeRO-3": {"stages": 1, "zero": 3, **SMALL},
    "tensor 2": {"stages": 1, "tensor": 2, **SMALL},
    "context 2, ring": {"stages": 1, "context": 2, "exchange": "ring", **SMALL},
    "memory checkpoints": {"stages": 1, "zero": 1, **SMALL},
}
"""Keywords of `tiny_config` by the name of a run; `_parts` has none."""
ROUTES = [["site0"], ["site1"]]
AT_SITES: dict[str, dict[str, Any]] = {
    "pipeline over sites": {"stages": 2, "sites": (1, 1), **SMALL},
    "replicas over sites": {"stages": 1, "zero": 1, "sites": (1, 1), "routes": ROUTES, **SMALL},
}


def without_each_wait(case: str, keywords: dict[str, Any], folder: str, known: list[str], sites: bool = False) -> None:
    """Note what notices the removal of each wait that a case executes: races, wrong losses or an error.

    Args:
        keywords: keywords of `tiny_config`.
        folder: for memory checkpoints, and for the notes: a line for each wait when it begins, and one for its result.
        known: waits that are left out.
        sites: True if each rank is a site.
    """
    import faulthandler

    import torch.distributed as dist

    from tests.device import instrument
    from weft.comm.links import Sites
    from weft.conf.schema import CommConfig
    from weft.engine.distributed import init_distributed

    over = Sites((0, 1), CommConfig(connections=2, timeout_s=60.0), reduce=True) if sites else None
    init_distributed(60.0, sites=over)
    store = dist.distributed_c10d._get_default_store()
    lags = LONG_LAGS if case == "memory checkpoints" else LAGS
    run = partial(_run, case, keywords, Path(folder, "memory"), lags=lags)
    expected, faults = run("")
    assert not faults, (case, faults)
    store.set(f"waits {dist.get_rank()}", json.dumps(sorted(instrument.waited)))
    by_rank = (json.loads(store.get(f"waits {rank}")) for rank in range(dist.get_world_size()))
    removed = sorted(set().union(*by_rank) - set(known))
    dist.barrier()  # rank 0 has the store
    with Path(folder, f"{dist.get_rank()}.notes").open("a", buffering=1) as notes:
        for wait in removed:
            print(wait, case, FAILURE, sep="\t", file=notes)
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            try:
                losses, faults = run(wait)
            except Exception as error:  # ends the rank, and this note remains
                what = f"{FAILURE}: {type(error).__name__}: {str(error).partition(os.linesep)[0]}"
                print(wait, case, what, sep="\t", file=notes)
                raise
            wrong = ["wrong values"] * (losses != expected[: len(losses)])
            print(wait, case, ", ".join(faults + wrong) or NOTHING, sep="\t", file=notes)
            faulthandler.cancel_dump_traceback_later()


def _run(
    case: str, keywords: dict[str, Any], folder: Path, wait: str, lags: list[dict[str, float]]
) -> tuple[list[Any], list[str]]:
    """Run a case without a wait, with each of the lags; return losses or errors of the engine, and faults.

    The wait is removed when the engine is complete.
    """
    import torch

    from tests.device import cuda, instrument
    from tests.device.training import train_one
    from weft.engine.supervision.memory.checkpoints import attach_memory
    from weft.engine.supervision.memory.slots import HostMemory

    def attach(lag: dict[str, float], engine: Any) -> Any:
        cuda.lag(**lag)
        instrument.waited.clear()
        instrument.remove(wait)
        return attach_memory(engine, HostMemory(folder)) if case == "memory checkpoints" else None

    results: list[Any] = []
    faults: list[str] = []
    for lag in lags:
        cuda.lag()
        try:
            if case == "parts":
                cuda.forget()
                instrument.waited.clear()
                instrument.remove(wait)
                results += _parts()
                torch.cuda.synchronize()
            else:
                with patch("weft.engine.zero.finite.isfinite", lambda _: True):  # an error of one rank leaves others
                    results += train_one(keywords, 2, partial(attach, lag)).losses
        finally:
            instrument.remove("")
        faults += [kind for kind in ("races", "errors") if cuda.observed(kind) and kind not in faults]
        if faults and not keywords:  # ranks that train together need the same number of runs
            break
    return results, faults


def _parts() -> list[bool]:
    """Return whether parts that copy between host and device yield the right values, although the device is late."""
    import torch

    from tests.device import cuda
    from weft.comm.collectives.executors import StreamExecutor, completed
    from weft.comm.wan.sites import work
    from weft.engine.execution.step_state import LabelCount
    from weft.engine.zero.finite import HostCopy

    cuda.lag(default_ms=PART_LAG_MS, other_ms=PART_LAG_MS)
    device = torch.device("cuda", torch.cuda.current_device())
    copy, value = HostCopy(device), torch.ones(2, device=device)
    copy.send(lambda: value)
    results = [bool((copy.read() == 1).all()), _staged()]
    copy.send(lambda: value)  # never read
    del value
    torch.zeros(2, device=device)
    count = LabelCount(torch.zeros((), device=device), None)
    count.wait()
    with suppress(ValueError):
        count.check()
        results.append(False)
    value, side = torch.ones(2, device=device), torch.cuda.Stream()
    across = work.HostCopy(value)  # the result of a sum between sites, for two streams
    across.wait()
    across.host.fill_(2)
    across.give_back()
    with torch.cuda.stream(side):
        across.give_back()
        results.append(bool((value == 2).all()))
    executor = StreamExecutor(device)
    result = executor.submit(lambda tensor: tensor + 1, completed(value)).result()
    total = result.sum()
    del result
    executor.submit(lambda tensor: tensor + 7, completed(value))  # takes the freed memory
    results += [float(total) == 6.0, _decided(device)]
    for timed in (_durations, partial(_device_times, device)):
        try:
            results.append(timed())
        except RuntimeError:  # an event was not complete
            results.append(False)
    cuda.lag()
    return results + [1e3 * seconds >= KERNEL_MS for seconds in _measured_s(device)]


def _decided(device: Any) -> bool:
    """Return whether a rank computes the scores that another rank lacks."""
    import torch
    import torch.distributed as dist

    from weft.engine.scores.step_scores import Score, StepScores, _Decision

    settings = SimpleNamespace(zero=SimpleNamespace(stage=0), comm=SimpleNamespace(cell=1))
    engine: Any = SimpleNamespace(layout=SimpleNamespace(expert=1), weft=settings, holds_loss=True)
    score = Score(
        "scores", of_batches=lambda batches: [torch.zeros(1)] * len(batches), of_tokens=lambda tokens, _: tokens
    )
    scores, lacking = StepScores(engine, score), torch.tensor([dist.get_rank()], device=device)
    transfer = dist.all_reduce(lacking, dist.ReduceOp.MAX, async_op=True)
    scores._decision = _Decision(lacking, transfer, {0: torch.zeros(1)})
    scores.attach([{"input_ids": torch.zeros(1, 1)}])
    return scores.num_in_line == 1


def _measured_s(device: Any) -> list[float]:
    """Return the seconds of a kernel of `KERNEL_MS` by everything that measures kernels."""
    import torch
    import torch.distributed as dist

    from tests.device import cuda
    from weft.comm.channel import Completed
    from weft.comm.collectives import Primitive, probe
    from weft.engine.planning import layer_costs
    from weft.engine.strands import overlap_probe
    from weft.tools import links
    from weft.tools.diagnostics import exchange, speed

    def run(*_: Any) -> Any:
        torch.cuda._sleep(int(KERNEL_MS * cuda.CYCLES_PER_MS))
        return Completed(torch.zeros(1))

    def finish() -> None:
        run()
        overlap_probe._finish(device)

    world, started = dist.group.WORLD, perf_counter()
    finish()
    found = [perf_counter() - started]
    with patch.dict(probe.PRIMITIVES, {Primitive.all_reduce: run}):
        found.append(probe._slowest_s(Primitive.all_reduce, 64, world, world, device, 1))
    found.append(layer_costs._timed(device, run)[0])
    found += [speed._seconds(device, run), exchange._best(device, 2, run)]
    with patch.object(links, "ROUND_TRIPS", 1):
        found.append(2 * links._one_way_s(run, run, 4, 0.0, on=device, ahead=False))
    return found


def _durations() -> bool:
    """Return whether durations between events are positive."""
    import torch

    from weft.comm.collectives import primitives
    from weft.engine.observability.clock import CudaClock

    clock, value = CudaClock(), torch.ones(1, device="cuda")
    timed_s = primitives._seconds(primitives._mark(value), primitives._mark(value))
    return timed_s >= 0 and clock.seconds(clock.mark(), clock.mark()) >= 0 and clock.wall_s(clock.mark()) > 0


def _device_times(device: Any) -> bool:
    """Return whether the host time at which the device passed an event is as late as the device."""
    from weft.engine.observability.clock import DeviceTimes

    times, launched_ns = DeviceTimes(device), monotonic_ns()
    passed_ns = times.passed_ns(times.mark())
    return launched_ns + 0.5e6 * PART_LAG_MS < passed_ns <= monotonic_ns()


def _staged() -> bool:
    """Return whether a tensor that the caller drops arrives in host memory as it was."""
    import torch

    from weft.comm.wan.staging import CudaStaging

    copies: list[torch.Tensor] = []

    def submit(host: torch.Tensor) -> list[int]:
        copies.append(host.clone())
        return []

    staging = CudaStaging(torch.device("cuda", torch.cuda.current_device()))
    done = staging.outward((torch.ones(64, 32, device="cuda") * 2).T, submit)
    torch.zeros(64, 32, device="cuda")
    done.result(60)
    staging.close()
    return bool((copies[0] == 2).all())


def noticed(case: str, keywords: dict[str, Any], folder: Path, found: dict[str, str], *, sites: bool = False) -> None:
    """Add what notices the removal of each wait in a case, on any rank, to ``found``.

    Args:
        keywords: keywords of `tiny_config`.
        folder: for memory checkpoints and notes.
        found: what has noticed waits, which are left out.
        sites: True if each of the two ranks is a site.
    """
    from tests.device.ranks import run_on_devices

    (folder / "memory").mkdir(0o700, exist_ok=True)
    failed, before = "at first", None
    while failed:
        known = [wait for wait, what in found.items() if not what.startswith(NOTHING) or what.endswith(f"({case})")]
        if known == before:
            raise RuntimeError(failed)
        before, failed, arguments = known, "", (case, keywords, str(folder), known, sites)
        runs = "mutants" if case == "parts" else ""
        try:
            run_on_devices(2, without_each_wait, *arguments, runs=runs, first_device=int(not sites), timeout_s=1500.0)
        except RuntimeError as error:  # without a wait, memory of a call in a thread can be freed
            failed = str(error)
        signal = re.search(r"code=-(\d+)", failed)
        _read_notes(folder, found, FAILURE + (f": signal {signal[1]}" if signal else ""))


def _read_notes(folder: Path, found: dict[str, str], failure: str) -> None:
    """Add what ranks have noted to ``found``, and remove the notes. ``failure`` describes the end of a rank."""
    for path in folder.glob("*.notes"):
        last = {wait: (what, case) for wait, case, what in (line.split("\t") for line in path.read_text().splitlines())}
        path.unlink()
        for wait, (what, case) in last.items():
            if found.get(wait, NOTHING).startswith(NOTHING):
                found[wait] = f"{failure if what == FAILURE else what} ({case})"
        print(*(f"{wait}: {found[wait]}" for wait in last), sep="\n", file=sys.stderr, flush=True)


def unnoticed(found: dict[str, str]) -> set[str]:
    """Return the waits whose removal nothing noticed, without those for which the list has a reason."""
    nothing = {wait for wait, what in found.items() if what.startswith(NOTHING)}
    return {wait for wait in nothing if not waits.listed().get(wait, UNKNOWN).startswith("(")}


def main(names: Sequence[str]) -> int:
    """Remove every wait of the cases in turn, and write what noticed it."""
    os.environ.setdefault(VARIABLE, secrets.token_hex(32))  # of links between sites
    cases = {name: keywords for name, keywords in (CASES | AT_SITES).items() if not names or name in names}
    others = {
        name: what
        for name, what in waits.listed().items()
        if names and not what.endswith(tuple(f"({name})" for name in cases))
    }
    found = {wait: what for wait, what in others.items() if what[0] not in f"({UNKNOWN}"}
    for case, keywords in cases.items():
        with TemporaryDirectory() as folder:
            noticed(case, keywords, Path(folder), found, sites=case in AT_SITES)
        waits.update({wait: what for wait, what in found.items() if not what.startswith(NOTHING)})
    left = unnoticed(found)
    print(f"{len(found)} waits; not noticed and without a reason:", ", ".join(sorted(left)) or "none")
    return 1 if left else 0


if __name__ == "__main__":
    from tests.device import mutants  # ranks import functions by this name, and not from `__main__`

    sys.exit(mutants.main(sys.argv[1:]))
