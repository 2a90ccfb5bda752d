"""A rank among emulated ones, as torch.distributed, channels and small values meet them."""

import pytest
import torch
import torch.distributed as dist

from weft.comm.channel import TensorSpec
from weft.comm.collectives.probe import nodes_of_world
from weft.comm.emulated.operation_log import EmulationError, Recorder
from weft.comm.emulated.world import EmulatedWorld
from weft.comm.exchange import broadcast, gather
from weft.comm.job import current_job
from weft.engine.distributed import from_rank_zero, together

SIZE, RANK = 10_240, 737


class Clock:
    """A clock that runs when somebody waits."""

    def __init__(self):
        self.at_s = 100.0

    def now(self):
        return self.at_s

    def until(self, at_s):
        self.at_s = max(self.at_s, at_s)

    def left_out(self):
        return torch.no_grad()  # any context


class Step:
    """Others are ready at 105 seconds, and what they send is here at 103."""

    def __init__(self):
        self.calls = []

    def sent(self, peer, tag, num_bytes, at_s):
        self.calls.append((peer, tag, num_bytes, at_s))

    def arrival_s(self, peer, tag):
        return 103.0

    def ready_s(self, operation, ranks, root):
        return 105.0

    def ended(self, operation, ranks, at_s):
        self.calls.append((operation, len(ranks), at_s))


@pytest.fixture
def world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # puts back what `join` replaces
    made = EmulatedWorld(rank=RANK, size=SIZE, hosts=lambda rank: rank // 8, sites=lambda rank: rank // 5120)
    made.clock = Clock()
    made.join()
    yield made
    dist.destroy_process_group()


def test_a_large_world_is_there_at_once(world):
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
    assert current_job() is world
    assert dist.get_process_group_ranks(dist.new_group([1, RANK, 9000])) == [1, RANK, 9000]
    assert dist.new_group([1, 2]) is dist.GroupMember.NON_GROUP_MEMBER


def test_emulated_ranks_hold_what_this_one_holds(world):
    group = dist.new_group([700, RANK, 800, 900])
    tensor = torch.arange(4.0)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [0.0, 4.0, 8.0, 12.0]
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    assert tensor.tolist() == [0.0, 4.0, 8.0, 12.0]
    gathered = torch.empty(8)
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]), group=group)
    assert gathered.tolist() == [1.0, 2.0] * 4
    shard = torch.empty(1)
    dist.reduce_scatter_tensor(shard, torch.arange(4.0), group=group)
    assert shard.tolist() == [4.0]  # this rank is the second
    everyones = torch.empty(4)
    dist.all_to_all_single(everyones, torch.arange(4.0), group=group)
    assert everyones.tolist() == [1.0] * 4
    whole = torch.arange(2.0)
    dist.broadcast(whole, src=900, group=group)
    assert whole.tolist() == [0.0, 1.0]
    dist.barrier(group)


def test_small_values_are_answered(world):
    assert nodes_of_world()[RANK - 1 : RANK + 8] == (92,) * 8 + (93,)
    assert gather("x") == ["x"] * SIZE
    assert broadcast({"plan": 1}, src=0) == {"plan": 1}
    assert from_rank_zero(lambda: RANK) == RANK
    with pytest.raises(ValueError, match="no such file"):
        together(lambda: (_ for _ in ()).throw(ValueError("no such file")))


def test_collectives_end_when_the_last_has_come_and_the_model_says(world):
    world.step, calls = Step(), []
    world.collective_s = lambda call: calls.append(call) or 2.0
    group = dist.new_group([RANK, 9000])
    work = dist.all_reduce(torch.zeros(8), group=group, async_op=True)
    assert not work.is_completed()
    later = dist.all_reduce(torch.zeros(8), group=group, async_op=True)
    later.wait()
    assert world.clock.now() == 109.0  # one after the other
    assert work.is_completed()
    (call, _) = calls
    assert (call.operation, call.num_hosts, call.crosses, call.num_bytes) == ("all_reduce", 2, True, 32)
    assert world.step.calls == [("all_reduce", 2, 109.0)]


def test_messages_have_tag_size_and_time(world):
    world.step = Step()
    ends = world.channels(dict, {(RANK, 738), (738, RANK), (1, 2)})
    assert set(ends) == {(RANK, 738), (738, RANK)}
    sent = ends[RANK, 738].send("3RECV_F7", torch.ones(3))
    assert sent.ended()
    assert sent.wait().tolist() == [1.0] * 3
    assert world.step.calls == [(738, "3RECV_F7", 12, 100.0)]
    coming = ends[738, RANK].recv("2RECV_B7", TensorSpec((2, 2), torch.bfloat16))
    assert world.clock.now() == 100.0
    assert coming.wait().dtype is torch.bfloat16
    assert world.clock.now() == 103.0


def test_outside_of_steps_nothing_takes_time_and_no_rank_sends(world):
    world.collective_s = lambda call: 5.0
    dist.all_reduce(torch.zeros(1))
    assert world.clock.now() == 100.0
    ends = world.channels(dict, {(RANK, 738), (738, RANK)})
    with pytest.raises(EmulationError, match="sends 3RECV_F7 to rank 738, which is in no step"):
        ends[RANK, 738].send("3RECV_F7", torch.ones(3))
    with pytest.raises(EmulationError, match="waits for 2RECV_B7 of rank 738, which is in no step"):
        ends[738, RANK].recv("2RECV_B7", TensorSpec((1,), torch.float32)).wait()


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(EmulationError, match="--real 8: there is no such rank; the job has ranks 0 to 7"):
        EmulatedWorld(rank=8, size=8, hosts=int)


def test_what_is_known_already_is_not_made_again(world):
    world.recorder = Recorder(RANK, recorded_answers={"values": ["plan"]})
    assert from_rank_zero(lambda: pytest.fail("it is known")) == "plan"
    assert from_rank_zero(lambda: "made") == "made"
    assert world.recorder.log.answers["values"] == ["plan", "made"]
