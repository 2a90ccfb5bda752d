"""The pipeline module: one rank's virtual stages, in the form that DeepSpeed's engine expects."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from weft.comm.exchange import gather
from weft.comm.job import GatherPurpose
from weft.engine.deepspeed.grid import RankTopology, join
from weft.engine.layout import RankLayout
from weft.engine.stages.cutting.stage import Stage
from weft.pipeline.placement import Placement


class WeftModule(PipelineModule):
    """The virtual stages of one rank, with DeepSpeed's grid pipe x data x model from `RankTopology`."""

    def __init__(self, stages: Sequence[Stage], placement: Placement, layout: RankLayout) -> None:
        """Create the module from the stages that this rank holds.

        Args:
            stages: this rank's virtual stages, ascending.
        """
        topology = RankTopology(layout)
        mine = layout.position(dist.get_rank()).stage
        held = nn.ModuleList(stages)
        # For DeepSpeed the pipeline has one layer per rank, of which it builds only this rank's.
        layers = [held if rank == mine else nn.Identity() for rank in range(layout.stages)]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its seeds and layers
            super().__init__(layers=layers, topology=topology, partition_method="uniform", dynamic_shape=True)
        self.placement = placement
        self.stages: Mapping[int, Stage] = {stage.index: stage for stage in stages}
        self.tied = self._join_tied(layout)
        own = self._grid.get_data_parallel_group()
        every = range(layout.stages)
        data = [ranks for stage in every for ranks in layout.data_groups(stage)]
        self.data_group = own if layout.context == 1 else join(data)[1]
        """Ranks that hold the same parts of this rank's stages."""
        self.stage_group = own if layout.lines == layout.replicas else join(map(layout.lines_of, every))[1]
        """Group of all ranks of this rank's stages."""

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of this rank once, by its name in the whole Hugging Face model."""
        seen: set[nn.Parameter] = set()
        for stage in self.stages.values():
            for name, parameter in stage.named_global_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def _join_tied(self, layout: RankLayout) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Return tied parameters, each with the group of the ranks that hold it. Collective call.

        Gradients are summed over these groups. Only the first rank of a group counts the parameter in norms.
        """
        mine = {
            name: parameter
            for stage in self.stages.values()
            for name, parameter in stage.named_global_parameters()
            if name in stage.tied
        }
        names = gather(
            {name: p.requires_grad for name, p in mine.items()},
            group=self._grid.get_pipe_parallel_group(),
            purpose=GatherPurpose.tied,
        )
        joined = []
        for name in sorted(set().union(*names)):
            holders = [rank for rank, held in enumerate(names) if held.get(name)]
            if len(holders) < 2:
                continue
            for ranks in zip(*map(layout.lines_of, holders), strict=True):
                group = dist.new_group(list(ranks))
                if self.global_rank in ranks:
                    mine[name].ds_pipe_replicated = self.global_rank != ranks[0]
                    joined.append((mine[name], group))
        return joined

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Return the weights whose gradients DeepSpeed's engine sums before it reduces over replicas."""
        return self.tied

    def forward(self, *args: object, **kwargs: object) -> None:
        """Not supported, because stages run through a schedule."""
        raise RuntimeError("a pipeline has no single forward: call engine.train_batch() or engine.eval_batch()")
