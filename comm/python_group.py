"""The interface that torch requires of a process group in Python: its members and its names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

_SUM = dist.ReduceOp(dist.ReduceOp.SUM)


class PythonGroup(dist.ProcessGroup):
    """A process group without operations; subclasses add them under torch's own names."""

    BACKEND: str
    """Name of the backend of `torch.distributed`."""

    def __init__(self, ranks: Sequence[int], position: int) -> None:
        super().__init__(position, len(ranks))
        self.ranks, self._position = tuple(ranks), position
        self._name = self._description = ""

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return this rank's index among the members."""
        return self._position

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return self.BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        """Torch's name."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Return the group's description."""
        return self._description

    # -- one operation under two names -----------------------------------------------------------

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        return self.allreduce(tensors, opts)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """See `ProcessGroup.all_gather_single`. Torch 2.11's name."""
        return self.all_gather_single(output, source, opts)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """See `ProcessGroup.reduce_scatter_single`. Torch 2.11's name."""
        return self.reduce_scatter_single(output, source, opts)

    def alltoall_base(self, output: Tensor, source: Tensor, *splits_and_opts: Any) -> dist.Work:
        """See `ProcessGroup.all_to_all_single`. Torch 2.11's name."""
        return self.all_to_all_single(output, source, *splits_and_opts)


def reduction(opts: Any) -> Any:
    """Return the reduction in an operation's options, or a sum if ``opts`` is None."""
    return _SUM if opts is None else opts.reduceOp
