"""NCCL's operations, and its rules for connections and communicators, for stand-ins on CPUs and emulated devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from weft.comm.python_group import PythonGroup

TIMEOUT = timedelta(seconds=600)
"""Timeout of gloo. A stand-in may give up earlier."""
Run = Callable[[Any, list[Tensor], list[Tensor]], Any]
"""Executes an operation by a gloo group, from tensors that it reads and those that it writes."""


class NcclOperations(PythonGroup):
    """Operations as ProcessGroupNCCL of torch 2.13 runs them; gloo moves the bytes.

    - The first collective of a group, and the first message each way of a pair, blocks the *host* until
      all who take part have come to it (NVIDIA/nccl issue 783).
    - What was launched on a communicator runs in launch order. A pair has a communicator of its own,
      unless the job has bound a device (``bound``): then everything in a group shares one.
    - Only tensors on the device are taken.

    Subclasses define what a stream, a tensor on the device and a wait of the host are.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], position: int, *, bound: bool = False) -> None:
        """Create a member; nothing is connected yet.

        Args:
            ranks: global ranks of the members.
            position: index of this rank among them.
        """
        super().__init__(ranks, position)
        self._store, self._bound = store, bound
        self._connections: dict[str, Any] = {}
        self._met: set[str] = set()

    def _is_on_host(self, tensor: Tensor) -> bool:
        raise NotImplementedError

    def _hold(self, key: str, what: str) -> None:
        """Block the host until the store has ``key``."""
        raise NotImplementedError

    def _launch(self, stream: str, what: str, reads: list[Tensor], writes: list[Tensor], run: Callable) -> Any:
        """Queue ``run(reads, writes)`` on a communicator's stream."""
        raise NotImplementedError

    # -- point to point --------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        """Launch a send; the first one to a peer blocks until that peer receives."""
        return self._pair(tensors, [], self._position, peer, lambda gloo, r, w, there: gloo.send(r, there, 0))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        """Launch a receive; the first one from a peer blocks until that peer sends."""
        return self._pair([], tensors, peer, self._position, lambda gloo, r, w, there: gloo.recv(w, there, 0))

    def _pair(self, reads: list[Tensor], writes: list[Tensor], source: int, target: int, run: Callable) -> Any:
        self._refuse_host([*reads, *writes])
        pair = sorted((source, target))
        key, here = f"{pair[0]}:{pair[1]}", pair.index(self._position)
        verb, other = ("send to", target) if source == self._position else ("receive from", source)
        what = f"the {verb} rank {self.ranks[other]} ({self._label()})"
        self._meet(f"{source}->{target}", 2, f"first exchange: {what}")
        gloo, stream = self._connection(key, here, 2), "group" if self._bound else key
        return self._launch(stream, what, reads, writes, lambda r, w: run(gloo, r, w, 1 - here).wait())

    # -- collectives -----------------------------------------------------------------------------

    def _collective(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Run) -> Any:
        self._refuse_host([*reads, *writes])
        count = sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in (*reads, *writes)}.values())
        what = f"{name} of {count} elements ({self._label()})"
        self._meet("group", self.size(), f"first exchange: {what}")
        gloo = self._connection("group", self._position, self.size())
        return self._launch("group", what, list(reads), list(writes), lambda r, w: run(gloo, r, w).wait())

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        opts = opts if opts is not None else dist.AllreduceOptions()
        return self._collective("allreduce", tensors, tensors, lambda gloo, _, w: gloo.allreduce(w, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        return self._collective("allreduce", tensors, tensors, lambda gloo, _, w: gloo.allreduce_coalesced(w, opts))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """See `ProcessGroup`."""
        reads, writes = (tensors, []) if opts.rootRank == self._position else ([], tensors)
        return self._collective("broadcast", reads, writes, lambda gloo, r, w: gloo.broadcast(r or w, opts))

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """See `ProcessGroup`."""
        return self._collective("reduce", tensors, tensors, lambda gloo, _, w: gloo.reduce(w, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        return self._collective("allgather", inputs, outputs[0], lambda gloo, r, w: gloo.allgather([w], r))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        return self._collective("allgather", [source], [output], lambda gloo, r, w: gloo._allgather_base(w[0], r[0]))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """See `ProcessGroup`."""
        return self._collective(
            "reduce_scatter", inputs[0], outputs, lambda gloo, r, w: gloo.reduce_scatter(w, [r], opts)
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        return self._collective(
            "reduce_scatter", [source], [output], lambda gloo, r, w: gloo._reduce_scatter_base(w[0], r[0], opts)
        )

    def all_to_all_single(self, output: Tensor, source: Tensor, *args: Any, **named: Any) -> Any:
        """See `ProcessGroup`."""
        splits = [list(sizes) for sizes in args[:2]] or [[], []]
        return self._collective(
            "all_to_all", [source], [output], lambda gloo, r, w: gloo.alltoall_base(w[0], r[0], *splits)
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """See `ProcessGroup`."""
        writes = outputs[0] if outputs else []
        return self._collective("gather", inputs, writes, lambda gloo, r, w: gloo.gather([w] if w else [], r, opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """See `ProcessGroup`."""
        reads = inputs[0] if inputs else []
        return self._collective("scatter", reads, outputs, lambda gloo, r, w: gloo.scatter(w, [r] if r else [], opts))

    # -- the rules -------------------------------------------------------------------------------

    def _label(self) -> str:
        return f"group {self._description or self._name} of ranks {list(self.ranks)}"

    def _refuse_host(self, tensors: Sequence[Tensor]) -> None:
        if any(map(self._is_on_host, tensors)):
            raise RuntimeError(f"{self._label()}: no backend for a tensor in host memory; move it to the device first")

    def _meet(self, key: str, count: int, what: str) -> None:
        """The first time, wait on the host until ``count`` ranks have come."""
        if key in self._met:
            return
        self._met.add(key)
        if self._store.add(f"meet/{key}", 1) == count:
            self._store.set(f"met/{key}", "")
        self._hold(f"met/{key}", what)

    def _connection(self, key: str, position: int, count: int) -> Any:
        if key not in self._connections:
            store = dist.PrefixStore(f"gloo/{key}", self._store)
            self._connections[key] = dist.ProcessGroupGloo(store, position, count, TIMEOUT)
        return self._connections[key]
