"""Primitives over gloo, by their definition; what the probe tells of them, and connections made early."""

import itertools
from math import inf

import pytest
import torch
import torch.distributed as dist

from tests.comm.collectives.balanced import balanced_meshes, regular
from tests.thread_ranks import run_in_threads
from weft.comm.collectives import Collective, Group, LinkClass, Primitive, Rewrite, Step, plain, primitives, probe
from weft.comm.collectives.cache import CostCache
from weft.comm.collectives.collective import EXECUTED
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.costs import CollectiveCosts
from weft.comm.collectives.primitives import PRIMITIVES, all_to_all, maximum
from weft.conf.host import measurements

CPU = torch.device("cpu")
REDUCING = {Primitive.reduce_scatter, Primitive.reduces}


def given(rank, shape, dtype):
    return torch.arange(torch.Size(shape).numel()).view(shape).mul(rank + 1).add(rank).to(dtype)


def carried_out(primitive, shape, dtype, members):
    """Return the result of a rank of ``members``; None for other ranks."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    whole = (len(members), *shape) if primitive in REDUCING | {Primitive.all_to_all} else shape
    return PRIMITIVES[primitive](given(dist.get_rank(), whole, dtype), group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("world", "members"), [(1, [0]), (3, [0, 1, 2]), (4, [1, 3])])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (1,)])
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_primitives_do_what_they_say(primitive, shape, world, members, dtype):
    if primitive is Primitive.all_reduce:
        expected = [sum(given(rank, shape, dtype) for rank in members)] * len(members)
    elif primitive in REDUCING:
        whole = (len(members), *shape)
        expected = list(sum(given(rank, whole, dtype) for rank in members))
    elif primitive is Primitive.all_to_all:
        rows = [given(rank, (len(members), *shape), dtype) for rank in members]
        expected = [torch.stack([row[index] for row in rows]) for index in range(len(members))]
    elif primitive is Primitive.shift:
        expected = [given(members[index - 1], shape, dtype) for index in range(len(members))]
    else:
        expected = [torch.stack([given(rank, shape, dtype) for rank in members])] * len(members)
    found = run_in_threads(world, carried_out, primitive, shape, dtype, members)
    assert [rank for rank, result in enumerate(found) if result is not None] == members
    for rank, result in zip(members, expected, strict=True):
        assert found[rank].dtype == dtype
        assert torch.equal(found[rank], result)


def summed_in_chunks(group):
    """Return a shard of bf16 parts that were sent in chunks and summed in fp32 here."""
    opened = Communicator.open([group], device=CPU, timeout_s=20, meshes={group: [group.flat]})
    wish = Collective.flat(Primitive.reduce_scatter, group, num_elements=24, itemsize=2)
    rewrite = Rewrite(wish, group.flat, (Step(Primitive.reduces, 0),), (0.4, 0.6))
    source = torch.full((24,), 1.0 if dist.get_rank() else 2.0**-12, dtype=torch.bfloat16)
    result = opened.start(rewrite, source, torch.zeros(8)).wait()
    with pytest.raises(ValueError, match="do not fit"):  # NCCL and gloo round their sums to the format sent
        opened.start(plain(wish), source, torch.zeros(8))
    opened.close()
    return result


def test_a_sum_of_received_parts_is_not_rounded_to_their_format():
    for shard in run_in_threads(3, summed_in_chunks, regular(3, 1)):
        assert shard.tolist() == [2 + 2.0**-12] * 8


def largest(shape):
    """Return the result of `maximum` of a tensor, which is that tensor."""
    mine = given(dist.get_rank(), shape, torch.float32).mul((-1) ** dist.get_rank())
    found = maximum(mine, dist.group.WORLD)
    assert found is mine
    return found


def test_the_maximum_is_elementwise_and_everyones():
    every = [given(rank, (2, 3), torch.float32).mul((-1) ** rank) for rank in range(3)]
    expected = torch.stack(every).amax(0)
    assert all(torch.equal(found, expected) for found in run_in_threads(3, largest, (2, 3)))


def uneven(counts):
    """Rows from all ranks, of which this one sends ``counts[rank][other]`` to each other."""
    rank = dist.get_rank()
    send, receive = counts[rank], [row[rank] for row in counts]
    rows = torch.full((sum(send), 2), float(rank))
    return all_to_all(rows, dist.group.WORLD, send=send, receive=receive)


def test_each_rank_sends_as_many_rows_as_it_says():
    counts = [[1, 2, 0], [0, 0, 3], [4, 0, 1]]
    for rank, found in enumerate(run_in_threads(3, uneven, counts)):
        assert found.shape == (sum(row[rank] for row in counts), 2)
        assert found[:, 0].tolist() == [float(other) for other in range(3) for _ in range(counts[other][rank])]


def probed(nodes, cache_dir):
    """Costs that a rank knows of its group, before and after; ranks are in pairs, and pairs measure at once."""
    world = dist.get_world_size()
    assert probe.nodes_of_world() == (0,) * world
    pairs = [Group((rank, rank + 1), tuple(nodes[rank : rank + 2])) for rank in range(0, world, 2)]
    communicator = Communicator.open(pairs, device=CPU, timeout_s=20)
    cache = CostCache.in_folder(cache_dir)
    first = probe.known_costs(communicator, device=CPU, cache=cache)
    dist.barrier()
    again = probe.known_costs(communicator, device=CPU, cache=cache)
    communicator.close()
    return first, again


def test_groups_that_are_alike_share_what_they_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "SIZES", (1 << 12, 1 << 14))
    for limit in ("BUSY", "WIDE"):  # noise would make the values doubtful, which are measured again
        monkeypatch.setattr(measurements, limit, inf)
    found = run_in_threads(6, probed, [0, 1, 2, 3, 4, 4], str(tmp_path))
    (first, again), *_ = found
    assert isinstance(first, CollectiveCosts)
    assert {link for link, _ in first.table} == {LinkClass.inter}
    assert {primitive for _, primitive in first.table} == set(EXECUTED)
    assert all(line.alpha_s >= 0 and line.beta_s >= 0 for line in first.table.values())
    for rank, (measured, cached) in enumerate(found):
        assert measured == (first if rank < 4 else None), "a group on one node is not measured"
        assert cached == (again if rank < 4 else None)
    assert again == first, "from the cache"


def sampled(axes):
    group = regular(*axes)
    communicator = Communicator.open(
        [group], device=CPU, timeout_s=20, meshes={group: (group.flat, *balanced_meshes(group))}
    )
    samples = probe.measure(communicator, device=CPU, sizes=(64, 4096), repeats=2)
    shapes = {mesh.shape for mesh, _ in communicator.axes()}
    communicator.close()
    return samples, shapes


def test_every_axis_of_every_mesh_is_measured_alike_on_all_ranks():
    results = run_in_threads(4, sampled, (2, 2))
    (samples, shapes), *others = results
    assert all(other == (samples, shapes) for other in others), "the slowest rank's times are everyone's"
    assert shapes == {(4,), (2, 2)}
    assert all(sample.seconds > 0 for sample in samples)
    found = {(s.link, s.primitive, s.size, s.num_bytes) for s in samples}
    lines = [((LinkClass.inter, LinkClass.intra), 2), ((LinkClass.mixed,), 4)]
    assert found == {case for links, size in lines for case in itertools.product(links, EXECUTED, (size,), (64, 4096))}
    assert len(samples) == len(found)


def connected(asked):
    """The primitives that were carried out over each group, by its size."""
    world = dist.get_world_size()
    pair, alone = dist.new_group([0, 1]), dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = [(dist.group.WORLD, asked), (alone, asked)]
    groups += [(pair, [Primitive.all_reduce])] if dist.get_rank() < 2 else []
    primitives.connect_groups(groups, CPU)
    return world


@pytest.mark.parametrize("on_host", [False, True])
def test_groups_of_several_ranks_on_devices_are_connected_for_what_they_are_used_for(monkeypatch, on_host):
    done = []

    def noted(primitive):
        def run(tensor, group):
            assert tensor.shape == (dist.get_world_size(group), 1) and not tensor.any()
            done.append((primitive, dist.get_world_size(group), dist.get_rank()))
            return PRIMITIVES[primitive](tensor, group)

        return run

    monkeypatch.setattr(primitives, "on_host", lambda group: on_host)
    monkeypatch.setattr(primitives, "PRIMITIVES", {primitive: noted(primitive) for primitive in PRIMITIVES})
    asked = [Primitive.broadcasts, Primitive.all_to_all]
    assert run_in_threads(3, connected, asked) == [3] * 3
    expected = {(primitive, 3, rank) for primitive in asked for rank in range(3)}
    expected |= {(Primitive.all_reduce, 2, rank) for rank in range(2)}
    assert set(done) == (set() if on_host else expected)
