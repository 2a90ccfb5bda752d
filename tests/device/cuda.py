"""The Python side of the emulated device: `install` makes torch.cuda work; call it before anything imports torch."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import Counter
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from tests.device.build import library, torch_folder

LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so")
MEMORY_BYTES = 80 << 30
CYCLES_PER_MS = 1.5e6
native: Any = None
"""The library, by ctypes."""


def install(num_devices: int) -> None:
    """Give this process emulated devices.

    Torch looks for CUDA's hooks once, while it is imported. So the library has to be there before.
    """
    global native
    if "torch" in sys.modules:
        raise RuntimeError("install the emulated device before torch is imported")
    for name in LIBRARIES:
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    native = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    for name, result in {
        "emulated_current_stream": ctypes.c_int64,
        "emulated_initial_seed": ctypes.c_uint64,
        "emulated_random_offset": ctypes.c_uint64,
        "emulated_usage": ctypes.c_uint64,
        "emulated_num_launched": ctypes.c_uint64,
        "emulated_observations": ctypes.c_void_p,
        "emulated_elapsed_ms": ctypes.c_double,
    }.items():
        getattr(native, name).restype = result
    native.emulated_start(num_devices)
    os.environ["DS_ACCELERATOR"] = "cuda"
    os.environ["TRITON_INTERPRET"] = "1"  # there is nothing that Triton could compile for
    import torch

    _fill_bindings(num_devices)
    _patch_module(num_devices)
    torch.set_num_threads(1)


def observed(kind: str) -> Counter[str]:
    """Return what was observed of a kind since `forget`. docs/device.md lists the kinds."""
    pointer = native.emulated_observations()
    lines = ctypes.string_at(pointer).decode(errors="replace").splitlines()
    ctypes.CDLL(None).free(ctypes.c_void_p(pointer))
    rows = (line.split("\t", 2) for line in lines)
    return Counter({text: int(number) for of, number, text in rows if of == kind})


def forget() -> None:
    """Drop all observations."""
    native.emulated_forget()


def lag(default_ms: float = 0.0, other_ms: float = 0.0) -> None:
    """Delay every operation after its launch, on default streams and on others, to widen the windows of races."""
    native.emulated_set_lag(ctypes.c_double(default_ms), ctypes.c_double(other_ms))


def _fill_bindings(num_devices: int) -> None:
    """Define the functions of torch._C that torch.cuda calls."""
    import torch

    def stream(device: int) -> tuple[int, int, int]:
        return native.emulated_current_stream(device), device, 1

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        if native.emulated_get_device() != device_index:
            native.emulated_set_device(device_index, b"torch.cuda.set_stream")
        native.emulated_set_stream(ctypes.c_int64(stream_id), device_index)

    def exchange(device: int) -> int:
        before = native.emulated_get_device()
        if device >= 0:
            native.emulated_guard_device(device)
        return before

    def memory(device: int) -> dict[str, Any]:
        allocated, peak, reserved, total = (native.emulated_usage(device, which) for which in range(4))
        return {
            "allocated_bytes": {"all": {"current": allocated, "peak": peak, "allocated": total}},
            "reserved_bytes": {"all": {"current": reserved, "peak": reserved}},
        }

    for name, value in {
        "setDevice": lambda device: native.emulated_set_device(device, b"torch.cuda.set_device"),
        "getDevice": lambda: native.emulated_get_device(),
        "getDeviceCount": lambda: num_devices,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "getCurrentStream": stream,
        "getDefaultStream": lambda device: (0, device, 1),
        "getCurrentRawStream": lambda device: native.emulated_current_stream(device),
        "setStream": set_stream,
        "synchronize": lambda: torch._C._accelerator_synchronizeDevice(native.emulated_get_device()),
        "sleep": lambda cycles: native.emulated_sleep(ctypes.c_double(cycles / CYCLES_PER_MS)),
        "isInBadFork": lambda: False,
        "isCurrentStreamCapturing": lambda: False,
        "set_sync_debug_mode": lambda mode: native.emulated_set_sync_debug_mode(mode),
        "get_sync_debug_mode": lambda: native.emulated_get_sync_debug_mode(),
        "memoryStats": memory,
        "resetPeakMemoryStats": lambda device: native.emulated_reset_peak(device),
        "resetAccumulatedMemoryStats": lambda device: None,
        "emptyCache": lambda: None,
        "ipc_collect": lambda: None,
    }.items():
        setattr(torch._C, f"_cuda_{name}", value)


def _patch_module(num_devices: int) -> None:
    import torch

    from tests.device.streams import Event, Generator, Stream

    def register(pointer: int, size: int, flags: int) -> int:
        native.emulated_call_runtime(b"cudaHostRegister")
        native.emulated_register_pinned(ctypes.c_void_p(pointer), ctypes.c_size_t(size))
        return 0

    def unregister(pointer: int) -> int:
        native.emulated_unregister_pinned(ctypes.c_void_p(pointer))
        return 0

    runtime = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaMemGetInfo=lambda device: (MEMORY_BYTES - native.emulated_usage(device, 2), MEMORY_BYTES),
    )
    properties = SimpleNamespace(
        name="emulated", total_memory=MEMORY_BYTES, multi_processor_count=132, major=9, minor=0, gcnArchName=""
    )
    cuda = torch.cuda
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "default_generators": tuple(Generator(index) for index in range(num_devices)),
        "is_available": lambda: True,
        "device_count": lambda: num_devices,
        "cudart": lambda: runtime,
        "_cudart": runtime,
        "_initialized": True,
        "_exchange_device": torch._C._cuda_exchangeDevice,
        "_maybe_exchange_device": torch._C._cuda_maybeExchangeDevice,
        "_get_device_properties": lambda index: properties,
        "check_error": lambda result: None,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
    }.items():
        setattr(cuda, name, value)
    cuda.memory.is_initialized = lambda: True
    resize, clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def in_bytes(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        torch.ops.emulated.resize_storage(in_bytes(storage), int(size))
        return storage

    def clone_(storage: Any) -> Any:
        return in_bytes(storage).clone().untyped_storage() if storage.device.type == "cuda" else clone(storage)

    torch.UntypedStorage.resize_, torch.UntypedStorage.clone = resize_, clone_
    import_module("tests.device.kernels")


def queue_call(stream: Any, reads: list[Any], writes: list[Any], name: str, function: Any) -> None:
    """Run ``function()`` on a stream; it must hold no tensor of the device."""
    import torch

    number = stream.stream_id or stream.device_index
    call = ctypes.CFUNCTYPE(None)(lambda: _run(name, function, key))
    key = id(call)
    with _calls_lock:
        _calls[key] = call
    torch.ops.emulated.queue_call(number, reads, writes, name, ctypes.cast(call, ctypes.c_void_p).value)


def _run(name: str, function: Any, key: int) -> None:
    try:
        function()
    except BaseException as error:
        errors.append(f"{name}: {error}")
    with _calls_lock:
        _done.append(_calls.pop(key))
        del _done[:-_KEPT]


errors: list[str] = []
"""Errors of functions on streams."""
_calls: dict[int, Any] = {}
_done: list[Any] = []
_KEPT = 64
"""Number of functions that are kept after they have returned, because a callback must not free itself."""
_calls_lock = threading.Lock()
