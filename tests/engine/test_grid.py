"""The grid of a rank against DeepSpeed's own, rank by rank."""

from types import SimpleNamespace

import deepspeed
import pytest
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe import topology as deepspeed_topology
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from weft.engine.deepspeed import grid as ours
from weft.engine.deepspeed.grid import RankGrid, RankTopology, grid_of
from weft.engine.layout import RankLayout

ASKED = [
    "get_stage_id",
    "get_data_parallel_id",
    "get_global_rank",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_pipe_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_group_ranks",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_model_parallel_group",
    "get_slice_parallel_rank",
    "get_slice_parallel_world_size",
    "get_slice_parallel_group",
]
KEPT = [
    "is_first_stage",
    "is_last_stage",
    "p2p_groups",
    "dp_groups",
    "pipe_groups",
    "ds_model_world_size",
    "slice_parallel_size",
]


class _World:
    """Ranks without a network: a group is the tuple of its ranks."""

    def __init__(self, rank, size):
        self.rank, self.size, self.made = rank, size, []
        self.group = SimpleNamespace(WORLD="the world's")

    def get_rank(self):
        return self.rank

    def get_world_size(self):
        return self.size

    def new_group(self, ranks, **_):
        self.made.append(tuple(ranks))
        return tuple(ranks)


@pytest.fixture
def join(monkeypatch):
    def as_rank(rank, size):
        world = _World(rank, size)
        monkeypatch.setattr(deepspeed_topology, "dist", world)
        monkeypatch.setattr(ours, "dist", world)
        return world

    return as_rank


@pytest.mark.parametrize(
    "layout", [RankLayout((4,), 2), RankLayout((2, 1), 3), RankLayout((2,), 2, context=2, tensor=2)]
)
def test_grid_equals_deepspeeds_for_every_rank(join, layout):
    for rank in range(layout.world_size):
        join(rank, layout.world_size)
        theirs = PipelineParallelGrid(
            PipeModelDataParallelTopology(
                num_pp=layout.stages, num_dp=layout.replicas, num_mp=layout.context * layout.tensor
            )
        )
        mine = RankGrid(RankTopology(layout))
        for name in ASKED:
            assert getattr(mine, name)() == getattr(theirs, name)(), (rank, name)
        for name in KEPT:
            assert getattr(mine, name) == getattr(theirs, name), (rank, name)
        for stage in range(layout.stages):
            assert mine.stage_to_global(stage) == theirs.stage_to_global(stage)


def test_ranks_make_the_same_groups_in_one_order(join):
    layout, made = RankLayout((3,), 2, tensor=2), set()
    for rank in range(layout.world_size):
        world = join(rank, layout.world_size)
        RankGrid(RankTopology(layout))
        made.add(tuple(world.made))
    assert len(made) == 1


def test_the_groups_of_a_large_world_are_few(join):
    layout = RankLayout((64,), 160)
    world = join(737, layout.world_size)
    grid = RankGrid(RankTopology(layout))
    assert len(world.made) == 64 + 160
    assert grid.get_pipe_parallel_group() == tuple(range(737 % 160, 10_240, 160))
    assert grid.slice_proc_group == (737,)


def test_other_topologies_get_deepspeeds_own_grid(join):
    join(0, 2)
    RankTopology(RankLayout((2,)))
    assert pipe_module.PipelineParallelGrid is grid_of
    assert type(grid_of(topology=PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1))) is PipelineParallelGrid


def test_a_module_makes_no_second_group_of_the_world(join, monkeypatch):
    world = join(0, 2)
    RankTopology(RankLayout((2,)))
    monkeypatch.setattr(deepspeed.comm, "new_group", world.new_group)
    assert pipe_module.dist.new_group(ranks=range(2)) == "the world's"
    assert pipe_module.dist.new_group([1]) == (1,)
    assert world.made == [(1,)]
    assert pipe_module.dist.barrier is deepspeed.comm.barrier


def test_a_topology_of_another_size_is_refused(join):
    join(0, 3)
    with pytest.raises(ValueError, match="another number of ranks than the world's 3"):
        RankGrid(RankTopology(RankLayout((2,))))
    with pytest.raises(ValueError, match="rank 2 not found"):
        RankTopology(RankLayout((2,))).get_coord(2)
