"""Events, streams and random generators of the emulated device, in torch's form. Needs the device: see `install`."""

from __future__ import annotations

import ctypes
from math import isnan
from typing import Any

import torch

from tests.device import cuda


class Event(torch.Event):
    """See `torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(
            cls, torch.device("cuda", cuda.native.emulated_get_device()), enable_timing=enable_timing, blocking=blocking
        )

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end: Any) -> float:
        elapsed = cuda.native.emulated_elapsed_ms(ctypes.c_void_p(self.event_id), ctypes.c_void_p(end.event_id))
        if isnan(elapsed):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return elapsed


class Stream(torch.Stream):
    """See `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **existing: int) -> Stream:
        if existing:
            return super().__new__(cls, **existing)
        index = torch._utils._get_device_index(device, optional=True)
        return super().__new__(cls, torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class Generator:
    """The generator of a device: a seed and the number of random kernels since."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def get_state(self) -> Any:
        numbers = self.initial_seed(), self.get_offset()
        return torch.tensor(list(b"".join(n.to_bytes(8, "little") for n in numbers)), dtype=torch.uint8)

    def set_state(self, state: Any) -> None:
        data = bytes(state.tolist())
        self._set(int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little"))

    def manual_seed(self, seed: int) -> Generator:
        self._set(seed % 2**64, 0)
        return self

    def initial_seed(self) -> int:
        return cuda.native.emulated_initial_seed()

    def get_offset(self) -> int:
        return cuda.native.emulated_random_offset()

    def set_offset(self, offset: int) -> None:
        self._set(self.initial_seed(), offset)

    def _set(self, seed: int, offset: int) -> None:
        cuda.native.emulated_seed(ctypes.c_uint64(seed), ctypes.c_uint64(offset))
