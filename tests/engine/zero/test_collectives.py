"""Tests of a bucket's requests to its communicators, and of the number formats in transit."""

import pytest
import torch
from torch import nn

from tests.comm.collectives.balanced import regular
from weft.comm.collectives import Primitive, Rewrite, Step, plain
from weft.engine.parallel.cut import Cut
from weft.engine.zero import Bucket
from weft.engine.zero.collectives import Collectives


class Twins:
    """A communicator of two replicas that hold the same; what it is asked for happens when it is waited for."""

    def __init__(self):
        self.group = regular(1, 2)
        self.started, self.waited, self.closed = [], 0, False

    def start(self, rewrite, source, target):
        wish = rewrite.collective
        assert wish.num_bytes == max(source.numel(), target.numel()) * source.itemsize
        self.started.append((wish.primitive, source.dtype))
        return Transfer(self, wish.primitive, source, target)

    def close(self):
        self.closed = True


class Transfer:
    def __init__(self, twins, primitive, source, target):
        self.twins, self.primitive, self.source, self.target = twins, primitive, source, target

    def wait(self):
        self.twins.waited += 1
        if self.primitive is Primitive.all_gather:
            return self.target.copy_(torch.cat([self.source, self.source]))
        return self.target.copy_(2 * self.source[: len(self.target)])


def pair(**options):
    gradients, weights = Twins(), Twins()
    return gradients, weights, Collectives(num_replicas=2, gradients=gradients, weights=weights, **options)


def test_gradients_and_weights_go_their_own_ways():
    gradients, weights, collectives = pair()
    whole, shard = torch.arange(4.0), torch.zeros(2)
    assert collectives.reduce(whole, shard).wait().tolist() == [0.0, 2.0]
    assert collectives.gather(shard, whole).wait().tolist() == [0.0, 2.0, 0.0, 2.0]
    assert collectives.reduce(whole, whole).wait().tolist() == [0.0, 4.0, 0.0, 4.0]
    collectives.sum(whole)
    assert whole.tolist() == [0.0, 8.0, 0.0, 8.0]
    assert [primitive for primitive, _ in gradients.started] == [
        *(Primitive.reduce_scatter, Primitive.all_reduce, Primitive.all_reduce),
    ]
    assert [primitive for primitive, _ in weights.started] == [Primitive.all_gather]
    assert collectives.group == gradients.group
    collectives.close()
    assert gradients.closed
    assert weights.closed


@pytest.mark.parametrize("length", [2, 4])
def test_gradients_are_sent_in_their_format(length):
    gradients, _, collectives = pair(gradient_format=torch.bfloat16)
    whole, target = torch.arange(4.0), torch.zeros(length)
    summed = collectives.reduce(whole, target).wait()
    assert [dtype for _, dtype in gradients.started] == [torch.bfloat16]
    assert summed.dtype is torch.bfloat16 and summed.tolist() == [0.0, 2.0, 4.0, 6.0][:length]
    low = torch.zeros(length, dtype=torch.bfloat16)
    assert collectives.reduce(whole.bfloat16(), low).wait() is low
    assert [dtype for _, dtype in gradients.started] == 2 * [torch.bfloat16]


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("zero_stage", "times"), [(0, 1), (1, 1), (2, 3)])
def test_buckets_accumulate_in_fp32_what_they_receive(zero_stage, times, sent):
    _, _, collectives = pair(gradient_format=sent)
    weight = nn.Parameter(torch.zeros(32))
    bucket = Bucket([("w", weight)], stages=frozenset({0}), zero_stage=zero_stage, collectives=collectives)
    for _ in range(times):
        weight.grad = torch.full((32,), 1 + 2**-8)  # rounds to 1 in bf16
        bucket.reduce()
    bucket.finish_gradient()
    each = 2 * float(torch.tensor(1 + 2**-8).to(sent))
    assert bucket.gradient.dtype is torch.float32
    assert bucket.gradient.tolist() == [times * each] * (16 if zero_stage else 32)


def test_a_shard_that_this_rank_sums_itself_is_not_rounded():
    """The last step adds the parts of all ranks, so that the sum needs no format of its own."""
    gradients, _, collectives = pair(gradient_format=torch.bfloat16)

    def summed_here(wish):
        return Rewrite(wish, wish.group.flat, (Step(Primitive.reduces, 0),))

    collectives.choose = summed_here
    assert collectives.reduce(torch.ones(4)).wait().dtype is torch.float32
    collectives.choose = plain
    assert collectives.reduce(torch.ones(4)).wait().dtype is torch.bfloat16
    assert [dtype for _, dtype in gradients.started] == 2 * [torch.bfloat16]


@pytest.mark.parametrize("overlap", [True, False])
def test_what_does_not_overlap_is_waited_for_at_once(overlap):
    gradients, weights, collectives = pair(overlap=overlap)
    collectives.reduce(torch.ones(4), torch.zeros(2))
    collectives.gather(torch.ones(2), torch.zeros(4))
    assert gradients.waited == weights.waited == (not overlap)


def test_a_single_replica_communicates_nothing():
    collectives = Collectives()
    whole = torch.arange(3.0)
    collectives.sum(whole)
    assert collectives.reduce(whole, whole).wait() is whole
    assert whole.tolist() == [0.0, 1.0, 2.0]
    collectives.close()


class Watch:
    """Notes when a wait begins and ends."""

    def __init__(self, twins):
        self.twins, self.noted = twins, []

    def begin_wait(self, what):
        self.noted.append(("begins", self.twins.waited))
        self.what = what

    def end_wait(self):
        self.noted.append(("ends", self.twins.waited))


def test_waits_are_reported_to_an_observer():
    gradients, _, collectives = pair()
    watch, whole = Watch(gradients), torch.arange(4.0)
    collectives.sum(whole)
    collectives.observe_waits(watch)
    handle = collectives.reduce(whole, torch.zeros(2))
    assert watch.noted == []
    assert handle.wait().tolist() == [0.0, 4.0]
    assert watch.noted == [("begins", 1), ("ends", 2)] and watch.what == "gradients"
    collectives.observe_waits(None)
    collectives.sum(whole)
    assert len(watch.noted) == 2


def test_collectives_of_other_parameters_are_observed_and_closed():
    kinds = [pair() for _ in range(3)]
    (*_, collectives), (*_, collectives.joint), (*_, collectives.expert) = kinds
    assert collectives.kinds == [of for *_, of in kinds]
    watch = Watch(kinds[2][0])
    collectives.observe_waits(watch)
    collectives.expert.sum(torch.ones(2))
    assert watch.noted == [("begins", 0), ("ends", 1)]
    collectives.close()
    assert all(gradients.closed and weights.closed for gradients, weights, _ in kinds)


def test_a_parameter_goes_with_those_that_hold_its_part():
    collectives, joint, expert = Collectives(), Collectives(), Collectives()
    matrix, of_expert = (Cut((4, 4), 0, 0, 2, axis=axis) for axis in ("tensor", "expert"))
    assert [collectives.of(cut) for cut in (None, matrix, of_expert)] == [collectives] * 3
    collectives.joint, collectives.expert = joint, expert
    assert [collectives.of(cut) for cut in (None, matrix, of_expert)] == [joint, collectives, expert]
