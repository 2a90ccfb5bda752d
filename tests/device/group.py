"""A process group on the emulated device with NCCL's semantics; gloo moves the bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device import cuda

TIMEOUT = timedelta(seconds=600)
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


class EmulatedGroup(dist.ProcessGroup):
    """Operations as ProcessGroupNCCL of torch 2.13 runs them, without a bound device.

    - A collective runs on a stream of the group's communicator, a message on one of the pair's. That stream waits for
      the current one.
    - The first collective, and the first message of a pair in each direction, blocks the host until the peers have
      come to it.
    - Tensors in host memory are refused.
    """

    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=TIMEOUT)
        self._streams: dict[str, Any] = {}
        self._connected: set[str] = set()
        self._name = self._description = ""

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def rank(self) -> int:
        """Return this rank's index."""
        return self._rank

    def getBackendName(self) -> str:
        return "nccl"

    def _set_sequence_number_for_group(self) -> None:
        """Ignore the numbers by which the flight recorder compares ranks."""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    _device_types = property(lambda self: [torch.device("cuda")])
    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)

    def shutdown(self) -> None:
        """Release the streams."""
        self._streams.clear()

    abort = shutdown

    def _connect(self, key: str, count: int) -> None:
        """Block the host until ``count`` ranks have come, the first time."""
        if key in self._connected:
            return
        self._connected.add(key)
        if self._store.add(f"come/{key}", 1) == count:
            self._store.set(f"connected/{key}", "")
        self._store.wait([f"connected/{key}"], TIMEOUT)

    def _launch(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Callable[[list[Tensor], list[Tensor]], Any],
        *,
        stream: str = "group",
        connection: tuple[str, int] | None = None,
    ) -> EmulatedWork:
        """Queue ``run(reads, writes)``, which gets views of the tensors by the host."""
        tensors = [*reads, *writes]
        if any(not tensor.is_cuda for tensor in tensors):
            raise RuntimeError(f"{name}: no backend for a tensor in host memory; move it to the device first")
        self._connect(*(connection or ("group", self._size)))
        device = tensors[0].device
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream(device)
        communicator = self._streams[stream]
        communicator.wait_stream(torch.cuda.current_stream(device))
        views = [[torch.ops.emulated.host_view(t) for t in some] for some in (reads, writes)]
        what = f"{name} of {self._description or self._name}"
        cuda.queue_call(communicator, list(reads), list(writes), what, lambda: run(*views))
        with torch.cuda.device(device):
            end = communicator.record_event()
        return EmulatedWork(end, device, tensors, list(writes) or list(reads))

    def allreduce(self, tensors: Any, opts: Any = None) -> EmulatedWork:
        """See `ProcessGroup`."""
        opts, gloo = opts or dist.AllreduceOptions(), self._gloo
        return self._launch("all_reduce", tensors, tensors, lambda r, w: gloo.allreduce(w, opts).wait())

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> EmulatedWork:
        """See `ProcessGroup`."""
        gloo = self._gloo
        return self._launch("reduce", tensors, tensors, lambda r, w: gloo.reduce(w, opts).wait())

    def broadcast(self, tensors: Any, opts: Any) -> EmulatedWork:
        """See `ProcessGroup`."""
        reads, writes = (tensors, []) if opts.rootRank == self._rank else ([], tensors)
        gloo = self._gloo
        return self._launch("broadcast", reads, writes, lambda r, w: gloo.broadcast(r or w, opts).wait())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        """See `ProcessGroup`."""
        gloo = self._gloo
        return self._launch("all_gather", inputs, outputs[0], lambda r, w: gloo.allgather([w], r).wait())

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> EmulatedWork:
        """See `ProcessGroup`."""
        gloo = self._gloo
        return self._launch("all_gather", [source], [output], lambda r, w: gloo._allgather_base(w[0], r[0]).wait())

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> EmulatedWork:
        """See `ProcessGroup`."""
        opts, gloo = opts or dist.ReduceScatterOptions(), self._gloo
        return self._launch(
            "reduce_scatter", [source], [output], lambda r, w: gloo._reduce_scatter_base(w[0], r[0], opts).wait()
        )

    def all_to_all_single(self, output: Tensor, source: Tensor, *args: Any, **named: Any) -> EmulatedWork:
        """See `ProcessGroup`."""
        splits, gloo = [list(sizes) for sizes in args[:2]] or [[], []], self._gloo
        return self._launch(
            "all_to_all", [source], [output], lambda r, w: gloo.alltoall_base(w[0], r[0], *splits).wait()
        )

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def barrier(self, opts: Any = None) -> EmulatedWork:
        """Block the host, as NCCL does."""
        work = self.allreduce([torch.zeros(1, device="cuda")])
        work.wait(TIMEOUT)
        return work

    def send(self, tensors: Any, peer: int, tag: int = 0) -> EmulatedWork:
        """See `ProcessGroup`."""
        gloo = self._gloo
        return self._message("send", self._rank, peer, tensors, [], lambda r, w: gloo.send(r, peer, tag).wait())

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> EmulatedWork:
        """See `ProcessGroup`."""
        gloo = self._gloo
        return self._message("recv", peer, self._rank, [], tensors, lambda r, w: gloo.recv(w, peer, tag).wait())

    def _message(self, name: str, source: int, target: int, *rest: Any) -> EmulatedWork:
        pair = "{}:{}".format(*sorted((source, target)))
        return self._launch(name, *rest, stream=pair, connection=(f"{source}->{target}", 2))


def register() -> None:
    """Make the emulated group torch's NCCL, which a CPU build lacks."""
    torch_groups = dist.distributed_c10d
    torch_groups.ProcessGroupNCCL = dist.ProcessGroupNCCL = EmulatedGroup
    torch_groups._NCCL_AVAILABLE = True
