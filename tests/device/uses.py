"""Uses of the device beside training steps: measurements, boards, heartbeats, checkpoints, diagnostics."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any
from unittest.mock import patch

import torch

from tests.device import cuda

SLEEP_MS = 30


def on_one_rank(folder: str) -> dict[str, Any]:
    """Return results of all uses that need one rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    results = {
        "bubbles": _bubbles(Path(folder), device),
        "timer": _timer(Path(folder), device),
        "failed device": _failed_device(),
        "diagnostics": _diagnostics(Path(folder), device),
        "dropout": _dropout(device),
        "kernels": _kernels(device),
        "profile": _profile(Path(folder)),
        "heartbeat": _heartbeat(Path(folder), device),
        "checkpoint": _checkpoint(Path(folder)),
    }
    torch.cuda.synchronize()
    return results | {kind: dict(cuda.observed(kind)) for kind in ("races", "errors")}


def _bubbles(folder: Path, device: torch.device) -> tuple[float, float, float]:
    """Return ms until the host has launched a step, until the device was busy, and for which it was, by the board."""
    from weft.conf.schema import WeftConfig
    from weft.inference.board import reader
    from weft.inference.board.observer import observe_bubbles
    from weft.pipeline.action import Op

    tied = patch.multiple("weft.engine.observability.clock", TIE_EVERY_NS=0, TIES=100)  # exactly, also on a busy host
    with patch("weft.inference.board.observer.boards_folder", lambda *_: folder / "boards"):
        observer = observe_bubbles(WeftConfig(), 0, device, predicted=[], longest_row=8)
    board = reader.BoardReader(observer.path)
    begun = monotonic()
    observer.step_begins(4)
    torch.cuda._sleep(int(SLEEP_MS * cuda.CYCLES_PER_MS))
    observer.slot_begins(_slot(Op.F))
    torch.cuda._sleep(int(SLEEP_MS * cuda.CYCLES_PER_MS))
    observer.slot_ends(_slot(Op.F))
    observer.replan([])
    observer.step_begins(4)
    launched_ms = 1e3 * (monotonic() - begun)
    with tied:
        while not board.work() and monotonic() - begun < 10:
            pass
    ((_, ((start_s, end_s),)),) = board.work()
    observer.close()
    return launched_ms, 1e3 * (start_s - begun), 1e3 * (end_s - start_s)


def _slot(op: Any) -> Any:
    from weft.pipeline.action import Action

    return (Action(op, 0, 0),)


def _timer(folder: Path, device: torch.device) -> int:
    """Return the number of host waits while a slot is timed."""
    from weft.engine.observability.event_timer import EventTimer
    from weft.pipeline.action import Op

    timer = EventTimer.open(folder, 0, 8, device)
    before = cuda.observed("waits").total()
    slot, begin = _slot(Op.F), timer._mark()
    timer.slot_begins(slot)
    timer.slot_ended(slot, begin, timer._mark())
    waits = cuda.observed("waits").total() - before
    timer.close(finished=True)
    return waits


def _failed_device() -> list[str]:
    """Return the calls of a board if the device fails while a mark is awaited."""
    import threading

    from weft.inference.board.observer import DeviceMarks

    class Device:
        def mark(self) -> None:
            pass

        def passed_ns(self, event: None) -> int:
            raise RuntimeError("the device has failed")

    calls: list[str] = []
    board = type("Board", (), {name: lambda self, *_, name=name: calls.append(name) for name in ("idle", "close")})()
    with patch.object(threading, "excepthook", lambda _: None):
        marks = DeviceMarks(board, Device())
        marks.idle()
        marks._thread.join(10)
    return calls


def _diagnostics(folder: Path, device: torch.device) -> dict[str, Any]:
    from weft.conf.host.measurements import Measurements
    from weft.tools.diagnostics import corruption, speed
    from weft.tools.diagnostics.judging import Judge
    from weft.tools.diagnostics.node import Node

    judge = Judge(Measurements(folder / "best.json"))
    with patch.object(torch, "matmul", lambda a, b, out: out.copy_(a)):  # the real one takes minutes on a CPU
        gemm = speed.check_gemm(device, judge)
    devices = Node(Path(), 1, judge).devices()
    return {
        "gemm": gemm.unit,
        "tiles": corruption._tiles(device, torch.bfloat16, 8),
        "devices": len(devices),
        "kind": speed.device_kind(device),
    }


def _dropout(device: torch.device) -> tuple[bool, int]:
    """Return whether two draws differ, and the number of host waits for them."""
    from weft.engine.parallel.dropout import _draw, _generator

    before = cuda.observed("waits").total()
    generator = _generator(torch.nn.Linear(2, 2, device=device))
    assert generator is not None
    return _draw(generator) != _draw(generator), cuda.observed("waits").total() - before


def _kernels(device: torch.device) -> list[str]:
    """Return which kernels run ring attention's blocks of bf16 and fp32."""
    from weft.engine.parallel.blocks import kernel_for

    queries = (torch.zeros(1, 1, 1, 8, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    return [type(kernel_for(query, masked=False)).__name__ for query in queries]


def _profile(folder: Path) -> int:
    """Return the number of layers that `weft profile` measures on the device."""
    from weft.pipeline.profile import load_pieces
    from weft.tools import cli

    out = folder / "profile.yaml"
    model = ["vocab_size=64", "num_hidden_layers=4", "hidden_size=32", "intermediate_size=32"]
    overrides = [*(f"model.overrides.{one}" for one in model), "data.sequence_length=16", "model.self_check=false"]
    command = ["profile", "--seconds", "0.1", "--no-links", "--out", str(out), "recipe=quickstart", *overrides]
    assert cli.main(command) == 0
    return len(load_pieces(out).stages)


def _heartbeat(folder: Path, device: torch.device) -> tuple[int, int]:
    """Return the memory that a heartbeat publishes, and what the allocator counts."""
    from weft.engine.supervision.progress_page import Word, make_page
    from weft.engine.supervision.rank.agent_link import Heartbeat

    page = folder / "private" / "page"
    make_page(page, 1)
    held = torch.ones(1 << 20, device=device)
    heartbeat = Heartbeat(page, local_rank=0, rank=0, attempt=0)
    heartbeat.follow(device, None, ())
    end = monotonic_ns() + 5_000_000_000
    while not heartbeat._words[Word.DEVICE] and monotonic_ns() < end:
        pass
    published = int(heartbeat._words[Word.DEVICE])
    allocated = torch.cuda.memory_allocated(device)
    heartbeat.close()
    del held
    return published, allocated


def _checkpoint(folder: Path) -> tuple[list[float], list[float]]:
    """Return losses of a run after its first step, and those of a run that resumes there."""
    from tests.engine.tiny import batches, tiny_config
    from weft.engine.checkpoint.exporting import export
    from weft.engine.initialize import initialize

    config = tiny_config(stages=1, layers=2, precision="bf16")
    engine, *_ = initialize(config=config)
    engine.set_dataiterator(batches(0, 1))
    engine.train_batch()
    engine.save_checkpoint(str(folder / "checkpoint"))
    expected = [float(engine.train_batch()) for _ in range(2)]
    assert engine.usage().peak_bytes == torch.cuda.max_memory_allocated()
    assert all(span.end_s >= span.start_s for timeline in engine.measured_timelines() for span in timeline.spans)
    export(engine, folder / "exported", dtype=torch.float32)
    engine.destroy()
    engine, *_ = initialize(config=config)
    data = batches(0, 1)
    for _ in range(config.pipeline.microbatches):
        next(data)
    engine.set_dataiterator(data)
    engine.load_checkpoint(str(folder / "checkpoint"))
    found = [float(engine.train_batch()) for _ in range(2)]
    engine.destroy()
    return expected, found


def on_two_ranks() -> dict[str, Any]:
    """Return results of measurements among two ranks."""
    from tests.engine.tiny import batches, tiny_config
    from weft.comm.collectives import probe
    from weft.engine.initialize import initialize
    from weft.engine.parallel.communicated import communicators_of
    from weft.engine.strands import overlap_cache, overlap_probe
    from weft.pipeline.strands.segments import LinkScope
    from weft.tools.diagnostics import exchange

    engine, *_ = initialize(config=tiny_config(stages=1, layers=2, tensor=2))
    engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
    engine.train_batch()
    device = engine.device
    small = {kind: kernel for kind, kernel in overlap_probe.usual_kernels(device).items() if kind.name == "memory"}
    links = {LinkScope.inside_host: engine.axes.tensor}
    (communicator,) = communicators_of(engine.axes)
    exchanged = exchange._exchange(device, -1, -1)
    found = {
        "overlap key": overlap_cache.overlap_key(device),
        "overlap": len(
            overlap_probe.measure_overlap(links, device, num_bytes=1 << 12, repeats=1, kernels=small).compute
        ),
        "exchanged": [each.wrong_from for each in exchanged],
        "samples": len(probe.measure(communicator, device=device, sizes=(1 << 10, 1 << 11), repeats=1)),
    }
    torch.cuda.synchronize()
    engine.destroy()
    return found | {kind: dict(cuda.observed(kind)) for kind in ("races", "errors")}


def over_sites(cases: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return losses of two ranks that are sites, and what the device observed."""
    import torch.distributed as dist

    from tests.engine.tiny import tiny_config, weft_losses
    from weft.comm.links import Sites
    from weft.conf.schema import CommConfig
    from weft.engine.distributed import init_distributed

    rank = int(os.environ["RANK"])
    device = init_distributed(60.0, sites=Sites((0, 1), CommConfig(connections=2, timeout_s=60.0), reduce=True))
    message = torch.full((3,), float(rank), device=device)
    dist.recv(message, 0) if rank else dist.send(message, 1)
    torch.cuda.synchronize()
    assert message.tolist() == [0.0] * 3
    configs = [tiny_config(**case) for case in cases]
    configs[0].comm.connections = 0  # the first run probes the link
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = {"losses": [weft_losses(config, steps) for config in configs]}
    torch.cuda.synchronize()
    return found | {kind: dict(cuda.observed(kind)) for kind in ("races", "errors", "contexts")}


def strand_pairs(shape: list[str]) -> dict[str, Any]:
    """Return losses and gradient norms of two ranks' steps without and with pairs, and what the device observed."""
    from benchmarks.strands import compare  # needs the feature emulation, without which these are collected

    cuda.lag(other_ms=1.0)
    values = compare(1, shape)["values"]
    torch.cuda.synchronize()
    return {"values": values} | {kind: dict(cuda.observed(kind)) for kind in ("races", "errors", "contexts")}
