"""A process group with one real member: the delay model determines when collectives end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.emulated.operation_log import Operation
from weft.comm.python_group import PythonGroup, reduction

if TYPE_CHECKING:
    from weft.comm.emulated.world import EmulatedWorld

BACKEND = "weft_emulated"
"""Name of the backend of torch.distributed."""


class EmulatedWork(dist.Work):
    """An operation whose end is computed when it begins."""

    def __init__(
        self, world: EmulatedWorld, ended: Callable[[float], None], at_s: float, outputs: list[Tensor]
    ) -> None:
        """Create the work. `wait` calls ``ended`` after the operation has ended at ``at_s``."""
        super().__init__()
        self._world, self._ended, self._at_s, self._outputs = world, ended, at_s, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block the host until the operation ends."""
        self._world.clock.until(self._at_s)
        self._ended(self._at_s)
        return True

    def is_completed(self) -> bool:
        """True if the operation has ended."""
        return self._world.clock.now() >= self._at_s

    def is_success(self) -> bool:
        """True: emulated operations do not fail."""
        return True

    def result(self) -> list[Tensor]:
        """Return the operation's output."""
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Return a future that is already completed, for callers that do not call `wait`."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class EmulatedGroup(PythonGroup):
    """The interface of gloo's and NCCL's groups, for one rank among emulated ones.

    Every emulated member holds the same values as this rank: a sum is this rank's value times the group's size, a
    maximum is unchanged, and emulated members send zeros. A group's operations end in order. An operation's begin is
    recorded before its results are written, so that writing them adds nothing to its duration.
    """

    BACKEND = BACKEND

    def __init__(self, world: EmulatedWorld, ranks: Sequence[int], name: str = "") -> None:
        super().__init__(ranks, tuple(ranks).index(world.rank))
        self.job = self.world = world
        self._called, self._free_s = name, 0.0

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> EmulatedGroup | None:
        """Create a group without rendezvous and connections; return None if this rank is not a member."""
        if self.world.rank not in ranks:
            return None
        made = self.world.group(ranks)
        made._name, made._description = group_name or "", group_desc or ""
        return made

    def shutdown(self) -> None:
        """No-op: there is nothing to release."""

    def abort(self) -> None:
        """No-op: there is nothing to abort."""

    # -- collectives -----------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        op = reduction(opts)
        work = self._begin("all_reduce", tensors, tensors, detail=_named(op))
        if op == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self.size())
        return work

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        return self._begin("reduce", tensors, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See `ProcessGroup`."""
        return self._begin("broadcast", tensors, tensors, root=self.ranks[opts.rootRank])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        work = self._begin("all_gather", outputs[0], outputs[0])
        for parts, source in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(source)
        return work

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        work = self._begin("all_gather", [output], [output])
        output.view(self.size(), -1).copy_(source.reshape(1, -1).expand(self.size(), -1))
        return work

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        work = self._begin("gather", inputs * self.size(), outputs[0] if outputs else [])
        for part in outputs[0] if outputs else []:
            part.copy_(inputs[0])
        return work

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        work = self._begin("reduce_scatter", inputs[0], outputs)
        for output, parts in zip(outputs, inputs, strict=True):
            torch.mul(parts[self._position], self._factor(opts), out=output)
        return work

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        work = self._begin("reduce_scatter", [source], [output])
        mine = source.view(self.size(), -1)[self._position].view_as(output)
        torch.mul(mine, self._factor(opts), out=output)
        return work

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """See `ProcessGroup`."""
        work = self._begin("scatter", outputs * self.size(), outputs, root=self.ranks[opts.rootRank])
        for output in outputs:
            output.copy_(inputs[0][self._position]) if inputs else output.zero_()
        return work

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        work = self._begin("all_to_all", inputs, outputs)
        mine = inputs[self._position]
        for output in outputs:
            output.copy_(mine.view_as(output)) if output.numel() == mine.numel() else output.zero_()
        return work

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """See `ProcessGroup`."""
        work = self._begin("all_to_all", [source], [output])
        if output_splits or input_splits or not source.numel():
            output.zero_()
        else:
            parts = source.view(self.size(), -1)
            output.view(self.size(), -1).copy_(parts[self._position].expand_as(parts))
        return work

    def barrier(self, opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        return self._begin("barrier", [], [])

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Send to a member."""
        return self._begin("send", tensors, tensors, root=self.ranks[peer])

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Receive zeros."""
        work = self._begin("recv", tensors, tensors, root=self.ranks[peer])
        for tensor in tensors:
            tensor.zero_()
        return work

    def _factor(self, opts: Any) -> int:
        return self.size() if reduction(opts) == dist.ReduceOp.SUM else 1

    def _begin(
        self,
        operation: str,
        moved: Sequence[Tensor],
        outputs: list[Tensor],
        *,
        root: int | None = None,
        detail: str = "",
    ) -> dist.Work:
        """Begin an operation of the group whose whole tensor consists of ``moved``."""
        world = self.world
        elements = sum(tensor.numel() for tensor in moved)
        form = f"{elements} {str(moved[0].dtype).removeprefix('torch.')}" if moved else ""
        world.recorder.record(self.ranks, self._called, Operation(f"{operation} {detail}".strip(), form))
        num_bytes = sum(tensor.nbytes for tensor in moved)
        start_s = max(world.clock.now(), self._free_s)
        self._free_s = world.ends_s(operation, self.ranks, num_bytes, root, start_s)
        return EmulatedWork(world, partial(world.step.ended, operation, self.ranks), self._free_s, outputs)


def _named(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]
