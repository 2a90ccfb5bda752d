"""DeepSpeed's grid of ranks, with only the groups of this rank.

DeepSpeed 0.19.8's own grid takes minutes at 10,000 ranks. It searches every rank in every group (the world squared),
finds coordinates by iterating over the whole world, makes a process group of every single rank, and makes the groups
of each model twice. Here each rank makes the same groups in the same order, except for unused ones. A pipeline module
takes its grid class from a name in its Python module. That name is bound to `grid_of`, once, which returns DeepSpeed's
grid for other topologies. The pipeline module also makes a second group of the whole world, for which each rank queries
the store about every other. So its `deepspeed.comm` is bound to `_OneWorld`, which returns the existing group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from weft.engine.layout import RankLayout


class RankTopology(PipeModelDataParallelTopology):
    """Coordinates of ranks along the axes pipe, data and model. In a route, the model coordinate changes fastest."""

    def __init__(self, layout: RankLayout) -> None:
        """Name the axes for DeepSpeed: replicas are "data", ranks that share the work of one micro-batch are
        "model"."""
        pipe_module.PipelineParallelGrid, pipe_module.dist = grid_of, _OneWorld()
        super().__init__(num_pp=layout.stages, num_dp=layout.replicas, num_mp=layout.context * layout.tensor)
        self._layout = layout
        if layout.routes > 1:
            self.mapping = {self.get_coord(rank): rank for rank in range(layout.world_size)}

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank."""
        layout = self._layout
        if not 0 <= rank < layout.world_size:
            raise ValueError(f"rank {rank} not found in topology.")
        at = layout.position(rank)
        return self.ProcessCoord(at.stage, at.replica, at.context * layout.tensor + at.tensor)


class RankGrid(PipelineParallelGrid):
    """The part of `PipelineParallelGrid` that DeepSpeed uses, for this rank."""

    def __init__(self, topology: RankTopology) -> None:
        """Create the groups. Collective call over the world."""
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topo = topology
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = topology.dims
        self.slice_parallel_size = self.model_parallel_size
        if not self._is_grid_valid():
            raise ValueError(
                f"a grid of {topology.dims} has another number of ranks than the world's {self.world_size}"
            )
        at = topology.get_coord(self.global_rank)
        self.stage_id, self.data_parallel_id = at.pipe, at.data
        self.is_first_stage, self.is_last_stage = at.pipe == 0, at.pipe == self.pipe_parallel_size - 1
        self.dp_groups = topology.get_axis_comm_lists("data")
        self.dp_group, self.dp_proc_group = join(self.dp_groups)
        self.pipe_groups = topology.get_axis_comm_lists("pipe")
        self.pp_group, self.pp_proc_group = join(self.pipe_groups)
        model, self.ds_model_proc_group = self.pp_group, self.pp_proc_group
        if self.model_parallel_size > 1:
            self.model_groups = topology.get_axis_comm_lists("model")
            self.slice_group, self.slice_proc_group = join(self.model_groups)
            model, self.ds_model_proc_group = join(self._models())
        else:
            self.slice_group = [self.global_rank]
        self.ds_model_world_size, self.ds_model_rank = len(model), model.index(self.global_rank)

    @cached_property
    def slice_proc_group(self) -> dist.ProcessGroup:
        """The group of the ranks that share this rank's micro-batches. For a single rank it is created on first use."""
        return dist.new_group(self.slice_group, use_local_synchronization=True)

    @cached_property
    def p2p_groups(self) -> list[list[int]]:
        """Pairs of each rank and the next of its pipeline. DeepSpeed uses them only with older versions of torch."""
        after = {rank: line[(at + 1) % len(line)] for line in self.pipe_groups for at, rank in enumerate(line)}
        return [[rank, after[rank]] for rank in range(self.world_size)]

    def _models(self) -> list[list[int]]:
        """Return the ranks of each replica."""
        each, size = self.pipe_parallel_size * self.model_parallel_size, self.model_parallel_size
        at = [divmod(place, size) for place in range(each)]
        return [
            [self._topo.get_rank(pipe=stage, data=replica, model=part) for stage, part in at]
            for replica in range(self.data_parallel_size)
        ]


def join(groups: Iterable[Sequence[int]]) -> tuple[list[int], dist.ProcessGroup]:
    """Create this rank's group among ``groups``, which contain every rank once. Return its ranks, too. Collective call.

    For the other groups this rank only increases torch's counter, from which names of groups are derived. That takes
    10 to 20 microseconds, without the store.
    """
    mine: tuple[list[int], dist.ProcessGroup] | None = None
    for ranks in map(list, groups):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = ranks, group
    assert mine is not None, "every rank is in one of the groups"
    return mine


def grid_of(process_group: dist.ProcessGroup | None = None, topology: Any = None) -> PipelineParallelGrid:
    """Return the grid of a topology: `RankGrid` for Weft's, DeepSpeed's for others."""
    if isinstance(topology, RankTopology):
        return RankGrid(topology)
    return PipelineParallelGrid(topology=topology, process_group=process_group)


class _OneWorld:
    """`deepspeed.comm`, except that a group of all ranks is the existing default group."""

    def __getattr__(self, name: str) -> Any:
        return getattr(deepspeed.comm, name)

    def new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        return deepspeed.comm.new_group(ranks)
