"""Each kind of parameter is summed and gathered over exactly the ranks that hold the same part of it."""

import pytest
import torch
import torch.distributed as dist

from tests.thread_ranks import run_in_threads
from weft.comm.collectives import AlphaBeta, CollectiveCosts, LinkClass
from weft.comm.collectives.cache import CostCache, topology_key
from weft.conf.schema import Partition, ZeroConfig
from weft.engine.layout import RankLayout
from weft.engine.parallel.cut import Cut
from weft.engine.zero import Collectives, collectives

CPU = torch.device("cpu")
CUTS = {"": None, "tensor": Cut((4, 4), 0, 0, 2), "expert": Cut((4, 4), 0, 0, 2, axis="expert")}
COSTS = CollectiveCosts.of_links({LinkClass.intra: AlphaBeta(1e-5, 1e-9)})


def opened(layout, cache_dir, partition=Partition.none):
    return Collectives.open(layout, CPU, ZeroConfig(partition=partition), cache_dir=cache_dir, timeout_s=20.0)


def bits_summed(layout, cache_dir):
    """The ranks whose numbers a rank gets, by the axis along which a parameter is cut."""
    made, found = opened(layout, cache_dir), {}
    for axis, cut in CUTS.items():
        of = made.of(cut)
        bits = torch.tensor([2.0 ** dist.get_rank()])
        of.sum(bits)
        shards = torch.zeros(of.num_replicas)
        of.gather(torch.tensor([float(dist.get_rank())]), shards).wait()
        if of.num_replicas == 1:
            assert of.group.ranks == (dist.get_rank(),)
            shards[0] = dist.get_rank()
        assert of.group.ranks == tuple(shards.int().tolist())
        assert of.group.ranks[of.replica] == dist.get_rank() and of.group.size == of.num_replicas
        assert int(bits) == sum(1 << rank for rank in of.group.ranks)
        found[axis] = of.group.ranks
    kinds = len(made.kinds)
    made.close()
    return found, kinds


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        (RankLayout(sites=(1,)), 1),
        (RankLayout(sites=(1,), replicas=3), 1),
        (RankLayout(sites=(1, 1), replicas=2), 1),
        (RankLayout(sites=(1,), replicas=2, tensor=2), 2),
        (RankLayout(sites=(2,), tensor=2), 2),
        (RankLayout(sites=(1,), replicas=4, expert=2), 2),
        (RankLayout(sites=(1,), replicas=2, expert=2), 2),
        (RankLayout(sites=(1,), context=2, replicas=2, tensor=2, expert=2), 3),
    ],
    ids=str,
)
def test_parameters_are_summed_over_the_ranks_that_hold_the_same_part(layout, kinds, tmp_path):
    found = run_in_threads(layout.world_size, bits_summed, layout, str(tmp_path))
    for rank, (of_rank, number) in enumerate(found):
        holders = layout.holders(rank)
        if layout.expert == 1:
            holders["expert"] = holders["tensor"]  # cut along nothing of its own
        assert of_rank == holders
        assert number == kinds


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("partition", [Partition.none, Partition.workload])
def test_costs_are_asked_for_where_collectives_may_be_divided(tmp_path, monkeypatch, partition, known):
    """And where they come from is said."""

    def run():
        with_group = opened(RankLayout(sites=(1,), replicas=2), str(tmp_path), partition)
        with_group.close()
        return with_group.costs, with_group.source

    asked = []
    monkeypatch.setattr(collectives, "known_costs", lambda of, *, device, cache: asked.append(of.group.ranks) or COSTS)
    cache = CostCache.in_folder(str(tmp_path))
    if known:
        (group,) = {made.group for made in run_in_threads(2, opened, RankLayout(sites=(1,), replicas=2), str(tmp_path))}
        cache.write(topology_key(group, "cpu"), COSTS)
    divided = partition is not Partition.none
    source = f"cache {cache.path}" if known else "measured by the probe of collectives"
    assert run_in_threads(2, run) == [(COSTS if divided else None, source)] * 2
    assert asked == [(0, 1)] * 2 * divided
