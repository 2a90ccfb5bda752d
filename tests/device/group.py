"""A process group on the emulated device with NCCL's semantics and rules; gloo moves the bytes."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device import cuda, rules
from weft.comm.python_group import PythonGroup

Run = Callable[[Any, list[Tensor], list[Tensor]], Any]
"""Executes an operation by a gloo group, from tensors that it reads and those that it writes."""
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
            cuda.native.emulated_count_wait(b"wait(timeout)")
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

    global_ranks_in_group: Sequence[int] = ()


class EmulatedGroup(PythonGroup):
    """Operations as ProcessGroupNCCL of torch 2.13 runs them, on streams that wait for the current one.

    - The first collective of a group, and the first message each way of a pair, blocks the *host* until
      all who take part have come to it (NVIDIA/nccl issue 783).
    - What was launched on a communicator runs in launch order. A pair has a communicator of its own,
      unless the job has bound a device (`rules.bound`): then everything in a group shares one.
    - Only tensors on the device are taken.
    - A kernel that waits for a rank that has died spins until its communicator is aborted.
    """

    BACKEND = "nccl"
    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        """Create a member; nothing is connected yet."""
        super().__init__(options.global_ranks_in_group or range(size), rank)
        self._store, self._bound = store, rules.bound
        self._connections: dict[str, Any] = {}
        self._met: set[str] = set()
        self._streams: dict[str, Any] = {}
        self._aborted = False

    def _set_sequence_number_for_group(self) -> None:
        """Ignore the numbers by which the flight recorder compares ranks."""

    _device_types = property(lambda self: [torch.device("cuda")])

    def shutdown(self) -> None:
        """Release the streams."""
        self._streams.clear()

    def abort(self) -> None:
        """End at once what the streams run, with garbage; nothing can be launched any more."""
        self._aborted = True
        for stream in list(self._streams.values()):
            cuda.native.emulated_abort_stream(ctypes.c_int64(stream.stream_id))

    def barrier(self, opts: Any = None) -> EmulatedWork:
        """Block the host, as NCCL does."""
        work = self.allreduce([torch.zeros(1, device="cuda")])
        work.wait(rules.TIMEOUT)
        return work

    # -- point to point --------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> EmulatedWork:
        """Launch a send; the first one to a peer blocks until that peer receives."""
        return self._pair(tensors, [], self._position, peer, lambda gloo, r, w, there: gloo.send(r, there, 0))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> EmulatedWork:
        """Launch a receive; the first one from a peer blocks until that peer sends."""
        return self._pair([], tensors, peer, self._position, lambda gloo, r, w, there: gloo.recv(w, there, 0))

    def _pair(self, reads: list[Tensor], writes: list[Tensor], source: int, target: int, run: Callable) -> EmulatedWork:
        self._refuse_host([*reads, *writes])
        pair = sorted((source, target))
        key, here = f"{pair[0]}:{pair[1]}", pair.index(self._position)
        verb, other = ("send to", target) if source == self._position else ("receive from", source)
        what = f"the {verb} rank {self.ranks[other]} ({self._label()})"
        self._meet(f"{source}->{target}", 2, f"first exchange: {what}")
        gloo, stream = self._connection(key, here, 2), "group" if self._bound else key
        return self._launch(stream, what, reads, writes, lambda r, w: run(gloo, r, w, 1 - here).wait())

    # -- collectives -----------------------------------------------------------------------------

    def _collective(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Run) -> EmulatedWork:
        self._refuse_host([*reads, *writes])
        count = sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in (*reads, *writes)}.values())
        what = f"{name} of {count} elements ({self._label()})"
        self._meet("group", self.size(), f"first exchange: {what}")
        gloo = self._connection("group", self._position, self.size())
        return self._launch("group", what, list(reads), list(writes), lambda r, w: run(gloo, r, w).wait())

    def allreduce(self, tensors: Any, opts: Any = None) -> EmulatedWork:
        """See `ProcessGroup`."""
        opts = opts if opts is not None else dist.AllreduceOptions()
        return self._collective("allreduce", tensors, tensors, lambda gloo, _, w: gloo.allreduce(w, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> EmulatedWork:
        """See `ProcessGroup`."""
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        return self._collective("allreduce", tensors, tensors, lambda gloo, _, w: gloo.allreduce_coalesced(w, opts))

    def broadcast(self, tensors: Any, opts: Any) -> EmulatedWork:
        """See `ProcessGroup`."""
        reads, writes = (tensors, []) if opts.rootRank == self._position else ([], tensors)
        return self._collective("broadcast", reads, writes, lambda gloo, r, w: gloo.broadcast(r or w, opts))

    def reduce(self, tensors: Any, opts: Any) -> EmulatedWork:
        """See `ProcessGroup`."""
        return self._collective("reduce", tensors, tensors, lambda gloo, _, w: gloo.reduce(w, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        """See `ProcessGroup`."""
        return self._collective("allgather", inputs, outputs[0], lambda gloo, r, w: gloo.allgather([w], r))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> EmulatedWork:
        """See `ProcessGroup`."""
        return self._collective("allgather", [source], [output], lambda gloo, r, w: gloo._allgather_base(w[0], r[0]))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> EmulatedWork:
        """See `ProcessGroup`."""
        return self._collective(
            "reduce_scatter", inputs[0], outputs, lambda gloo, r, w: gloo.reduce_scatter(w, [r], opts)
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> EmulatedWork:
        """See `ProcessGroup`."""
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        return self._collective(
            "reduce_scatter", [source], [output], lambda gloo, r, w: gloo._reduce_scatter_base(w[0], r[0], opts)
        )

    def all_to_all_single(self, output: Tensor, source: Tensor, *args: Any, **named: Any) -> EmulatedWork:
        """See `ProcessGroup`."""
        splits = [list(sizes) for sizes in args[:2]] or [[], []]
        return self._collective(
            "all_to_all", [source], [output], lambda gloo, r, w: gloo.alltoall_base(w[0], r[0], *splits)
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> EmulatedWork:
        """See `ProcessGroup`."""
        writes = outputs[0] if outputs else []
        return self._collective("gather", inputs, writes, lambda gloo, r, w: gloo.gather([w] if w else [], r, opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> EmulatedWork:
        """See `ProcessGroup`."""
        reads = inputs[0] if inputs else []
        return self._collective("scatter", reads, outputs, lambda gloo, r, w: gloo.scatter(w, [r] if r else [], opts))

    # -- the rules -------------------------------------------------------------------------------

    def _label(self) -> str:
        return f"group {self._description or self._name} of ranks {list(self.ranks)}"

    def _refuse_host(self, tensors: Sequence[Tensor]) -> None:
        if not all(tensor.is_cuda for tensor in tensors):
            raise RuntimeError(f"{self._label()}: no backend for a tensor in host memory; move it to the device first")

    def _meet(self, key: str, count: int, what: str) -> None:
        """The first time, wait on the host until ``count`` ranks have come."""
        if key not in self._met:
            self._met.add(key)
            rules.meet(self._store, f"met/{key}", count, what)

    def _connection(self, key: str, position: int, count: int) -> Any:
        if key not in self._connections:
            store = dist.PrefixStore(f"gloo/{key}", self._store)
            self._connections[key] = dist.ProcessGroupGloo(store, position, count, rules.TIMEOUT)
        return self._connections[key]

    def _launch(self, stream: str, what: str, reads: list[Tensor], writes: list[Tensor], run: Callable) -> EmulatedWork:
        """Queue ``run(reads, writes)`` on a communicator's stream; it gets views of the tensors by the host."""
        if self._aborted:
            raise RuntimeError(f"{self._label()}: the communicator was aborted")
        device = (reads or writes)[0].device
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream(device)
        communicator = self._streams[stream]
        communicator.wait_stream(torch.cuda.current_stream(device))
        views = [[torch.ops.emulated.host_view(t) for t in some] for some in (reads, writes)]
        cuda.queue_call(communicator, reads, writes, what, lambda: _spin(lambda: run(*views)))
        with torch.cuda.device(device):
            end = communicator.record_event()
        return EmulatedWork(end, device, [*reads, *writes], writes or reads)


def _spin(run: Callable[[], Any]) -> None:
    """Run a kernel. If a peer has died it does not end: an abort goes on without it."""
    try:
        run()
    except RuntimeError as error:
        if "gloo/transport" not in str(error):
            raise
        threading.Event().wait()


def register() -> None:
    """Make the emulated group torch's NCCL, which a CPU build lacks."""
    torch_groups = dist.distributed_c10d
    torch_groups.ProcessGroupNCCL = dist.ProcessGroupNCCL = EmulatedGroup
    torch_groups._NCCL_AVAILABLE = True
    torch._C._nccl_version = lambda: 2 << 32  # in torch's messages of errors
    torch._C._nccl_version_suffix = lambda: b""
