"""A process group on the emulated device with NCCL's semantics; gloo moves the bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device import cuda
from tests.nccl_rules.operations import TIMEOUT, NcclOperations

_unwaited: deque[tuple[Any, Sequence[Tensor]]] = deque()


class EmulatedWork(dist.Work):
    """An operation on a communicator's stream. Keeps its tensors until a stream waits for it, or it has ended."""

    def __init__(self, end: Any, device: torch.device, tensors: Sequence[Tensor], outputs: list[Tensor]) -> None:
        super().__init__()
        self._end, self._device, self._tensors, self._outputs = end, device, tensors, outputs

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait; with a timeout, ProcessGroupNCCL blocks the host."""
        torch.cuda.current_stream(self._device).wait_event(self._end)
        if timeout is not None:
            self._end.synchronize()
        self._tensors = ()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """True if the device has executed it."""
        return self._end.query()

    is_success = is_completed

    def exception(self) -> None:
        """Return no error: kernels do not fail."""

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Return a future of the outputs, which the current stream waits for."""
        future: torch.futures.Future = torch.futures.Future()
        self.wait()
        future.set_result(self._outputs)
        return future

    def __del__(self) -> None:
        if self._tensors:
            _unwaited.append((self._end, self._tensors))
            while _unwaited and _unwaited[0][0].query():
                _unwaited.popleft()


class Options:
    """See `ProcessGroupNCCL.Options`."""


class EmulatedGroup(NcclOperations):
    """NCCL's rules on the emulated device: a communicator's stream waits for the current one."""

    BACKEND = "nccl"
    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(store, range(size), rank)
        self._streams: dict[str, Any] = {}

    def _set_sequence_number_for_group(self) -> None:
        """Ignore the numbers by which the flight recorder compares ranks."""

    _device_types = property(lambda self: [torch.device("cuda")])

    def shutdown(self) -> None:
        """Release the streams."""
        self._streams.clear()

    abort = shutdown

    def barrier(self, opts: Any = None) -> EmulatedWork:
        """Block the host, as NCCL does."""
        work = self.allreduce([torch.zeros(1, device="cuda")])
        work.wait(TIMEOUT)
        return work

    def _is_on_host(self, tensor: Tensor) -> bool:
        return not tensor.is_cuda

    def _hold(self, key: str, what: str) -> None:
        self._store.wait([key], TIMEOUT)

    def _launch(self, stream: str, what: str, reads: list[Tensor], writes: list[Tensor], run: Callable) -> EmulatedWork:
        """Queue ``run``, which gets views of the tensors by the host."""
        device = (reads or writes)[0].device
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream(device)
        communicator = self._streams[stream]
        communicator.wait_stream(torch.cuda.current_stream(device))
        views = [[torch.ops.emulated.host_view(t) for t in some] for some in (reads, writes)]
        cuda.queue_call(communicator, reads, writes, what, lambda: run(*views))
        with torch.cuda.device(device):
            end = communicator.record_event()
        return EmulatedWork(end, device, [*reads, *writes], writes or reads)


def register() -> None:
    """Make the emulated group torch's NCCL, which a CPU build lacks."""
    torch_groups = dist.distributed_c10d
    torch_groups.ProcessGroupNCCL = dist.ProcessGroupNCCL = EmulatedGroup
    torch_groups._NCCL_AVAILABLE = True
