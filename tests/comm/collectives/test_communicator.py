"""Every rewrite carried out by threads in the place of ranks: each comes to what the plain collective is."""

import threading
from dataclasses import dataclass

import pytest
import torch

from tests.comm.collectives.balanced import regular
from tests.engine.zero.replicas import Meeting, in_threads
from weft.comm.channel import ChannelError
from weft.comm.collectives import Collective, Group, Mesh, Primitive, Rewrite, Step, communicator, plain
from weft.comm.collectives.collective import GATHERING, REDUCING
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.space import space

CPU = torch.device("cpu")
WHOLE = (Primitive.all_reduce, Primitive.reduce_scatter, Primitive.all_gather)


@dataclass
class Line:
    """A thread's place among those of an axis."""

    meeting: Meeting
    number: int

    def exchange(self, tensor):
        return torch.stack(self.meeting.exchange(self.number, tensor))


REDUCED = {
    Primitive.reduce_scatter: lambda tensor, line: line.exchange(tensor).sum(0)[line.number],
    Primitive.all_gather: lambda tensor, line: line.exchange(tensor),
    Primitive.all_reduce: lambda tensor, line: tensor.copy_(line.exchange(tensor).sum(0)),
}
BY_LINES = (
    REDUCED
    | dict.fromkeys(REDUCING, REDUCED[Primitive.reduce_scatter])
    | dict.fromkeys(GATHERING, REDUCED[Primitive.all_gather])
)


@pytest.fixture
def ranks(monkeypatch):
    """``ranks(count, run)`` is what ``run(rank)`` returns in each of ``count`` threads."""
    here, meetings, lock = threading.local(), {}, threading.Lock()

    def new_group(members, *, group_desc, **_):
        with lock:
            meeting = meetings.setdefault((tuple(members), group_desc), Meeting(len(members)))
        return Line(meeting, members.index(here.rank)) if here.rank in members else None

    def run_all(count, run):
        def one(_, rank):
            here.rank = rank
            return run(rank)

        return in_threads(count, one)

    monkeypatch.setattr(communicator.dist, "new_group", new_group)
    monkeypatch.setattr(communicator.dist, "get_rank", lambda: here.rank)
    monkeypatch.setattr(communicator, "connect_groups", lambda groups, device: list(groups))
    monkeypatch.setattr(communicator, "PRIMITIVES", BY_LINES)
    return run_all


def tensors(primitive, elements, rank, size):
    """Return a rank's input, and the tensor for its result."""
    whole = torch.arange(elements) * (rank + 1)
    if primitive is Primitive.all_reduce:
        return whole, whole
    shard = whole[: elements // size].clone()
    return (whole, shard) if primitive is Primitive.reduce_scatter else (shard, whole)


def expected(primitive, elements, position, ranks):
    given = [tensors(primitive, elements, rank, len(ranks))[0].clone() for rank in ranks]
    if primitive is Primitive.all_gather:
        return torch.cat(given)
    return sum(given) if primitive is Primitive.all_reduce else sum(given).chunk(len(ranks))[position]


@pytest.mark.parametrize("primitive", WHOLE)
@pytest.mark.parametrize("named", [False, True])
def test_every_rewrite_is_the_plain_collective(ranks, primitive, named):
    group = regular(2, 2)
    elements = 13 if primitive is Primitive.all_reduce else 20
    wish = Collective.flat(primitive, group, num_elements=elements, itemsize=8)
    shapes = [(4,), (2, 2)]
    rewrites = list(
        space(wish, meshes=[Mesh(group, shape) for shape in shapes], granularities=[(1.0,), (0.2, 0.3, 0.5)])
    )
    assert len(rewrites) > 3
    if primitive is Primitive.all_reduce:  # what the search does not try: shards along one axis, a sum along the other
        mixed = Step(Primitive.reduce_scatter, 1), Step(Primitive.all_reduce, 0), Step(Primitive.all_gather, 1)
        rewrites.append(Rewrite(wish, Mesh(group, (2, 2)), mixed, (0.4, 0.6)))

    def run(rank):
        meshes = {group: [Mesh(group, shape) for shape in shapes]} if named else None
        opened = Communicator.open([group], device=CPU, timeout_s=1.0, meshes=meshes)
        handles = [opened.start(rewrite, *tensors(primitive, elements, rank, 4)) for rewrite in rewrites]
        results = [handle.wait() for handle in handles]
        opened.close()
        with pytest.raises(RuntimeError, match="shutdown"):
            opened.start(plain(wish), *tensors(primitive, elements, rank, 4))
        return results

    for rank, results in enumerate(ranks(4, run)):
        for rewrite, result in zip(rewrites, results, strict=True):
            assert torch.equal(result, expected(primitive, elements, rank, group.ranks)), rewrite


def test_a_rank_has_the_communicator_of_its_own_group_or_none(ranks):
    groups = [Group((0, 1), (0, 1)), Group((2, 4), (0, 1))]

    def run(rank):
        opened = Communicator.open(groups, device=CPU, timeout_s=1.0)
        if opened is None:
            return None
        wish = Collective.flat(Primitive.all_reduce, opened.group, num_elements=3, itemsize=8)
        tensor = torch.full((3,), rank)
        return opened.group.ranks, opened.start(plain(wish), tensor, tensor).wait().tolist()

    assert ranks(5, run) == [((0, 1), [1] * 3)] * 2 + [((2, 4), [6] * 3), None, ((2, 4), [6] * 3)]


def test_what_does_not_fit_is_refused(ranks):
    group = Group((0, 1), (0, 1))

    def run(rank):
        opened = Communicator.open([group], device=CPU, timeout_s=1.0)
        for primitive, source, target, part in [
            (Primitive.all_reduce, torch.ones(4), torch.ones(4), "in place"),
            (Primitive.reduce_scatter, torch.ones(4), torch.ones(4), "a shard 1/2"),
            (Primitive.reduce_scatter, torch.ones(6), torch.ones(3), "do not fit"),
            (Primitive.all_gather, torch.ones(2), torch.ones(4, dtype=torch.int32), "do not fit"),
            (Primitive.all_gather, torch.ones(2, 2)[:, 0], torch.ones(4), "contiguous"),
        ]:
            wish = Collective.flat(primitive, group, num_elements=4, itemsize=4)
            with pytest.raises(ValueError, match=part):
                opened.start(plain(wish), source, target)

    ranks(2, run)


def test_meshes_and_groups_that_were_not_opened_are_refused(ranks):
    group, other = regular(2, 2), Group((0, 1, 2, 3), (0, 0, 0, 1))

    def run(rank):
        opened = Communicator.open([group], device=CPU, timeout_s=1.0, meshes={group: [group.flat]})
        tensor = torch.ones(4)
        wish = Collective.flat(Primitive.all_reduce, group, num_elements=4, itemsize=4)
        *_, fine = space(wish, meshes=[Mesh(group, (2, 2))], granularities=[(1.0,)])
        with pytest.raises(ValueError, match=r"mesh \(2, 2\) of that group was not opened; pass it to `open`"):
            opened.start(fine, tensor, tensor)
        wish = Collective.flat(Primitive.all_reduce, other, num_elements=4, itemsize=4)
        with pytest.raises(ValueError, match=r"mesh \(4,\) of that group was not opened"):
            opened.start(plain(wish), tensor, tensor)

    ranks(4, run)


def test_what_fails_says_whose_and_on_which_rank(ranks):
    def fails(tensor, group):
        raise RuntimeError("torn")

    def run(rank):
        opened = Communicator.open([Group((1, 2), (0, 1))], device=CPU, timeout_s=1.0, name="loss")
        if opened is None:
            return None
        double = opened.start_whole(lambda tensor, group: tensor * 2, torch.ones(2), "twice")
        torn = opened.start_whole(fails, torch.ones(2), "sum of losses")
        with pytest.raises(ChannelError) as caught:
            torn.wait()
        return double.wait().tolist(), str(caught.value)

    told = [f"loss of ranks 1, 2, on rank {rank}: sum of losses failed: torn" for rank in (1, 2)]
    assert ranks(3, run) == [None, ([2.0, 2.0], told[0]), ([2.0, 2.0], told[1])]


def test_what_is_closed_takes_no_more_and_waits_for_nothing(ranks):
    def run(rank):
        opened = Communicator.open([Group((0, 1), (0, 1))], device=CPU, timeout_s=1.0)
        closed = threading.Event()
        handle = opened.start_whole(lambda tensor, group: tensor * closed.wait(20), torch.ones(1), "a long one")
        opened.close()
        closed.set()
        return handle.wait().tolist()

    assert ranks(2, run) == [[1.0]] * 2, "it was under way when the communicator was closed"


def test_a_chunk_that_is_done_keeps_the_target_alone(ranks):
    """The output of its last step is released before anything waits."""
    wish = Collective.flat(Primitive.all_gather, regular(2, 1), num_elements=8, itemsize=4)

    def run(rank):
        opened = Communicator.open([wish.group], device=CPU, timeout_s=1.0)
        target = torch.zeros(8)
        handle = opened.start(plain(wish).chunked((0.5, 0.5)), torch.ones(4), target)
        return len(handle.chunks), all(chunk.result() is target for chunk in handle.chunks), target.tolist()

    assert ranks(2, run) == [(2, True, [1.0] * 8)] * 2


@pytest.mark.parametrize("asked", [None, [Primitive.broadcasts]])
def test_each_axis_of_a_ranks_own_group_is_connected_for_what_it_is_used_for(ranks, monkeypatch, asked):
    groups, connected = [regular(2, 2), Group((4, 5), (2, 3))], {}

    def connect(axes, device):
        assert device == CPU
        connected[communicator.dist.get_rank()] = [(line.meeting.count, tuple(named)) for line, named in axes]

    monkeypatch.setattr(communicator, "connect_groups", connect)
    more = {} if asked is None else {"primitives": asked}
    ranks(7, lambda rank: Communicator.open(groups, device=CPU, timeout_s=1.0, **more) is None)
    named = tuple(asked or WHOLE)
    assert {rank: sorted(axes, key=lambda axis: axis[0]) for rank, axes in connected.items()} == {
        **{rank: sorted([(4, named), (2, named), (2, named)], key=lambda axis: axis[0]) for rank in range(4)},
        **{rank: [(2, named)] for rank in (4, 5)},
    }


def test_a_rewrite_that_fails_is_named(ranks, monkeypatch):
    wish = Collective.flat(Primitive.all_gather, Group((1, 3), (0, 1)), num_elements=4, itemsize=4)

    def fails(tensor, group):
        raise RuntimeError("torn")

    monkeypatch.setattr(communicator, "PRIMITIVES", dict.fromkeys(BY_LINES, fails))

    def run(rank):
        opened = Communicator.open([wish.group], device=CPU, timeout_s=1.0, name="weights")
        if opened is None:
            return None
        handle = opened.start(plain(wish).chunked((0.5, 0.5)), torch.ones(2), torch.ones(4))
        with pytest.raises(ChannelError) as caught:
            handle.wait()
        return str(caught.value)

    what = "all_gather of [4] x 4 B over 2 ranks on 2 nodes: all_gather inter 2 | 2 chunks failed: torn"
    assert ranks(4, run) == [
        None if rank in (0, 2) else f"weights of ranks 1, 3, on rank {rank}: {what}" for rank in range(4)
    ]


@pytest.mark.parametrize("at_sites", [False, True])
def test_a_host_is_held_by_what_goes_between_sites_alone(ranks, monkeypatch, at_sites):
    """Nodes that are sites have axes that join several; hosts have none."""
    made = []

    def executor(device, name, *, holds_host):
        made.append((communicator.dist.get_rank(), name, holds_host))
        return communicator_executor(device, name)

    communicator_executor = communicator.executor_for
    monkeypatch.setattr(communicator, "executor_for", executor)
    group = Group((0, 1, 2, 3), (0, 0, 1, 1), at_sites=at_sites)
    ranks(4, lambda rank: Communicator.open([group], device=CPU, timeout_s=1.0, name="sums") is None)
    # In order: all four, the axis between nodes, the one inside of them.
    for rank in range(4):
        assert [holds for mine, _, holds in made if mine == rank] == [at_sites, at_sites, False]
        assert [name for mine, name, _ in made if mine == rank] == ["weft-sums-0", "weft-sums-0", "weft-sums-1"]


@pytest.mark.parametrize("primitive", WHOLE)
def test_chunks_have_their_shares_of_what_each_rank_gives_or_gets(ranks, monkeypatch, primitive):
    """A shard's for gathers and scatters, the whole tensor's for sums."""
    seen = {}

    def noted(run):
        def call(tensor, line):
            seen.setdefault(line.number, []).append(tensor.numel())
            return run(tensor, line)

        return call

    monkeypatch.setattr(communicator, "PRIMITIVES", {key: noted(run) for key, run in BY_LINES.items()})
    wish = Collective.flat(primitive, Group((0, 1), (0, 1)), num_elements=20, itemsize=8)

    def run(rank):
        opened = Communicator.open([wish.group], device=CPU, timeout_s=1.0)
        opened.start(plain(wish).chunked((0.2, 0.3, 0.5)), *tensors(primitive, 20, rank, 2)).wait()

    ranks(2, run)
    each = {
        Primitive.all_reduce: [4, 6, 10],
        Primitive.all_gather: [2, 3, 5],
        Primitive.reduce_scatter: [4, 6, 10],  # of both ranks' shards
    }[primitive]
    assert seen == {0: each, 1: each}
