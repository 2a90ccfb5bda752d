"""A bucket: how long it is, what it holds of weights and of their masters, and for how long."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.engine.zero.replicas import SmallStage
from weft.comm.collectives import Group
from weft.conf.schema import ZeroConfig
from weft.engine.zero import Bucket, Collectives, Sharding
from weft.pipeline.action import Action, Op
from weft.pipeline.memory import ALIGNMENT


class Alone(Collectives):
    """One replica's view of several: a gather finds this one's shard everywhere."""

    def gather(self, shard, whole):
        self.gathers = getattr(self, "gathers", 0) + 1
        return Filled(shard, whole)


class Filled:
    def __init__(self, shard, whole):
        self.shard, self.whole = shard, whole

    def wait(self):
        return self.whole.copy_(self.shard.repeat(self.whole.numel() // self.shard.numel()))


def bucket(zero_stage, sizes=(6, 5), *, replica=0, num_replicas=1, dtype=torch.float32, trained=True):
    parameters = [(str(n), nn.Parameter(torch.ones(size, dtype=dtype), trained)) for n, size in enumerate(sizes)]
    collectives = Alone(replica=replica, num_replicas=num_replicas)
    return Bucket(parameters, stages=frozenset({0}), zero_stage=zero_stage, collectives=collectives)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_replicas_have_equal_aligned_shards_and_no_more_than_it_takes(sizes, num_replicas, zero_stage):
    found = bucket(zero_stage, sizes, num_replicas=num_replicas)
    unit = 8 * num_replicas
    assert found.length % unit == 0 and ALIGNMENT == 8
    assert sum(sizes) <= found.length < max(1, sum(sizes)) + unit
    held = found.length if zero_stage == 0 else found.length // num_replicas
    assert found.held_weights[0].numel() == held


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_only_16_bit_weights_that_learn_have_masters(dtype, trained, zero_stage):
    found = bucket(zero_stage, num_replicas=2, dtype=dtype, trained=trained)
    doubled = trained and dtype.itemsize == 2
    assert [held.dtype for held in found.held_weights] == [dtype] + [torch.float32] * doubled
    assert {fragment.tensor.dtype for fragment in found.fragments} == {torch.float32 if doubled else dtype}
    assert {fragment.trained for fragment in found.fragments} == {trained}


@pytest.mark.parametrize(("zero_stage", "num_replicas"), [(0, 2), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_full_weights_are_there_from_the_start_unless_they_are_gathered_on_demand(zero_stage, num_replicas):
    found = bucket(zero_stage, (8, 8), num_replicas=num_replicas)
    on_demand = zero_stage == 3 and num_replicas > 1
    nbytes = found.length * 4

    def held():
        return {member.parameter.untyped_storage().nbytes() for member in found.members}

    assert found.sharded == on_demand
    assert held() == {0 if on_demand else nbytes}
    found.wait((0, False))
    found.wait((0, True))
    found.wait()
    assert held() == {nbytes} and all(bool((m.parameter == 1).all()) for m in found.members)
    assert getattr(found._collectives, "gathers", 0) == on_demand
    found.release()
    found.release((0, True))
    assert held() == {nbytes}, "a forward still uses them"
    found.release((0, False))
    assert held() == {0 if on_demand else nbytes}
    found.gather()
    found.release()
    assert found.is_settled, "nothing comes any more into memory that is given back"
    assert held() == {0 if on_demand else nbytes}


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_model_gets_what_was_stepped_or_restored(dtype, num_replicas, zero_stage):
    """Rounded where masters are finer, and from other replicas at once, unless weights are gathered on demand."""
    found = bucket(zero_stage, (8, 8), num_replicas=num_replicas, dtype=dtype)
    stepped = torch.tensor(3 + 2**-20)
    for fragment in found.fragments:
        fragment.tensor.data.fill_(stepped)
    found.publish()
    if num_replicas > 1:
        assert getattr(found._collectives, "gathers", 0) == (zero_stage in (1, 2))
    found.wait()
    assert all(bool((member.parameter == stepped.to(dtype)).all()) for member in found.members)
    assert all(bool((fragment.tensor == stepped).all()) for fragment in found.fragments), "masters stay as they are"


def test_a_single_replica_is_a_group_of_its_rank_alone(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert Collectives().group == Group((5,), (0,))


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_autograd_adds_16_bit_gradients_in_fp32_without_a_call_of_python(zero_stage, monkeypatch):
    """At stage 2 the first gradient of a step makes the buffer; after that no hook is left."""
    stage, calls = SmallStage(dtype=torch.bfloat16), []
    sharding = Sharding([stage], ZeroConfig(stage=zero_stage))
    arrived = sharding._gradient_arrived
    monkeypatch.setattr(sharding, "_gradient_arrived", lambda *args: calls.append(args) or arrived(*args))
    whole = dict.fromkeys(stage.parameters(), 0.0)
    for _ in range(2):
        sharding.begin_step([Action(op, 0, m) for m in range(3) for op in (Op.F, Op.B)])
        calls.clear()
        for m in range(3):
            with sharding.around(Action(Op.F, 0, m)):
                loss = stage.layers[0](stage.embed(torch.tensor([[1, 2, m]]))).float().square().sum()
            with sharding.around(Action(Op.B, 0, m)):
                loss.backward(retain_graph=True)
            for parameter, gradient in zip(
                whole, torch.autograd.grad(loss, list(whole), allow_unused=True), strict=True
            ):
                whole[parameter] = whole[parameter] if gradient is None else whole[parameter] + gradient.float()
        sharding.reduce(0)
        sharding.finish_gradients()
        assert len(calls) == (0 if zero_stage == 1 else len(sharding.trained))
        for bucket in sharding.trained:
            present = {member.parameter for member in bucket.present}
            assert present == {m.parameter for m in bucket.members if isinstance(whole[m.parameter], torch.Tensor)}
            for member in bucket.members:
                assert torch.equal(
                    member.of(bucket.gradient), torch.zeros(member.parameter.shape) + whole[member.parameter]
                )
            assert all(member.parameter.grad is None for member in bucket.members)
            bucket.drop_gradient()
        whole = dict.fromkeys(whole, 0.0)
