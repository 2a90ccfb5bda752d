"""Small programs with known faults, and what the emulated device observes of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.device import cuda

LAG_MS = 20.0
LONG_LAG_MS = 500.0
"""Longer than a busy host needs to start the thread of another stream."""


def observe(program: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, list[str]]]:
    """Run ``program`` behind everything that was launched before, and return its result and the observations."""
    torch.cuda.synchronize()
    cuda.forget()
    result = program(*args)
    kinds = {kind: list(cuda.observed(kind)) for kind in ("races", "waits", "contexts", "errors")}
    torch.cuda.synchronize()
    cuda.lag()
    return result, kinds


def observations() -> dict[str, Any]:
    """Return the result and the observations of every program."""
    torch.cuda.set_device(1)
    programs: dict[str, tuple] = {
        "read without an event": (_read_on_another_stream, False),
        "read behind an event": (_read_on_another_stream, True),
        "other columns": (_write_columns, 0, 2),
        "same columns": (_write_columns, 1, 2),
        "freed without record_stream": (_free_early, False),
        "freed with record_stream": (_free_early, True),
        "item": (_item,),
        "nonzero": (_nonzero,),
        "to pageable memory": (_copy_to, False),
        "to pinned memory": (_copy_to, True),
        "from pageable memory": (_copy_from_pageable,),
        "an event not reached": (_synchronize_event,),
        "a thread without a device": (_stream_in_thread, False),
        "a thread with a device": (_stream_in_thread, True),
        "memory": (_memory,),
        "random numbers": (_random_numbers,),
        "backward": (_backward,),
    }
    return {name: observe(*program) for name, program in programs.items()}


def _ones() -> torch.Tensor:
    return torch.ones(1 << 12, device="cuda")


def _read_on_another_stream(ordered: bool) -> float:
    cuda.lag(default_ms=LONG_LAG_MS)
    source, side = _ones(), torch.cuda.Stream()
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = source.sum()
        source.record_stream(side)
    side.synchronize()
    return float(total.isfinite())


def _write_columns(first: int, second: int) -> None:
    both = torch.zeros(8, 4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    both[:, first : first + 2].fill_(1)
    with torch.cuda.stream(side):
        both[:, second : second + 2].fill_(2)
    torch.cuda.current_stream().wait_stream(side)


def _free_early(recorded: bool) -> float:
    cuda.lag(other_ms=LAG_MS)
    source, side = _ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = source.sum()
    if recorded:
        source.record_stream(side)
    del source
    side.synchronize()
    return float(total.isfinite())


def _item() -> float:
    return _ones().sum().item()


def _nonzero() -> int:
    return len(_ones().nonzero())


def _copy_to(pinned: bool) -> None:
    host = torch.empty(1 << 12, pin_memory=pinned)
    host.copy_(_ones(), non_blocking=True)


def _copy_from_pageable() -> float:
    large, small = torch.ones(1 << 16), torch.ones(4)
    large.to("cuda", non_blocking=True)
    total = small.to("cuda", non_blocking=True).sum()
    small.zero_()  # the copy was staged
    return float(total)


def _synchronize_event() -> None:
    cuda.lag(default_ms=LAG_MS)
    _ones()
    torch.cuda.current_stream().record_event().synchronize()


def _stream_in_thread(chooses: bool) -> None:
    stream = torch.cuda.Stream()

    def work() -> None:
        if chooses:
            torch.cuda.set_device(1)
        with torch.cuda.stream(stream):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _memory() -> tuple[int, int, int]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first = torch.empty(1000, device="cuda")
    del first
    second = torch.empty(500, device="cuda")
    now = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    return *now, int(second.is_cuda)


def _random_numbers() -> tuple[list[float], list[float], list[float]]:
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first, second = torch.rand(3, device="cuda"), torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    return first.tolist(), second.tolist(), torch.rand(3, device="cuda").tolist()


def _backward() -> bool:
    torch.manual_seed(0)
    weight, data = torch.randn(6, 5), torch.randn(4, 6)
    gradients = []
    for device in ("cpu", "cuda"):
        moved = weight.detach().to(device).requires_grad_()
        torch.nn.functional.cross_entropy(data.to(device) @ moved, torch.arange(4, device=device)).backward()
        assert moved.grad is not None
        gradients.append(moved.grad.cpu())
    return torch.equal(*gradients)
