"""Weights are there when a block computes, the next block's come meanwhile, and those that are sharded go after it."""

import copy
from itertools import pairwise, product

import pytest
import torch
from torch import nn

from weft.engine.zero.weights import StageWeights

WIDTH = 3


class Recorded:
    """A bucket that notes what it is asked for."""

    def __init__(self, name, sharded, log):
        self.name, self.sharded, self.log, self.users = name, sharded, log, set()
        self.gathers = True

    def gather(self, user=None):
        self.log.append(("gather", self.name, user))

    def wait(self, user):
        self.log.append(("wait", self.name, user))

    def release(self, user=None):
        self.log.append(("release", self.name, user))


class Block(nn.Linear):
    """Notes when it computes; its output is nested, as those of Hugging Face's layers are."""

    def __init__(self, name, log):
        super().__init__(WIDTH, WIDTH)
        self.name, self.log = name, log

    def forward(self, x):
        self.log.append(("compute", self.name, None))
        return {"hidden": (super().forward(x), "a word")}


class Stage(nn.Module):
    """Blocks, with a scale outside of them."""

    index = 5

    def __init__(self, count, log):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Block(str(number), log) for number in range(count))

    def named_global_parameters(self):
        return self.named_parameters()

    def blocks(self):
        return list(self.layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x * self.scale)["hidden"][0]
        return x


def made(sharded):
    """A stage with a bucket for each block, and one for the rest, which is never sharded."""
    log = []
    stage = Stage(len(sharded), log)
    buckets = [Recorded(str(number), one, log) for number, one in enumerate(sharded)]
    rest = Recorded("rest", False, log)
    bucket_of = {stage.scale: rest}
    for block, bucket in zip(stage.layers, buckets, strict=True):
        bucket_of |= dict.fromkeys(block.parameters(), bucket)
    return stage, StageWeights(stage, bucket_of), log, [rest, *buckets]


@pytest.mark.parametrize("sharded", product([False, True], repeat=3), ids=str)
def test_each_block_has_its_weights_and_lets_them_go(sharded):
    stage, weights, log, buckets = made(sharded)
    forward, backward = (5, False), (5, True)
    assert weights.buckets == buckets

    weights.begin(backward=False)
    assert log == [("gather", "rest", forward), ("gather", "0", forward), ("wait", "rest", forward)]
    log.clear()
    output = stage(torch.ones(2, WIDTH))
    expected = []
    for here, following in [*pairwise("012"), ("2", None)]:
        expected.append(("wait", here, forward))
        if following:
            expected.append(("gather", following, forward))
        expected.append(("compute", here, None))
        if any(sharded):  # a bucket that is not ignores it
            expected.append(("release", here, forward))
    assert log == expected

    log.clear()
    weights.begin(backward=True)
    output.sum().backward()
    expected = [("gather", "rest", backward), ("gather", "2", backward), ("wait", "rest", backward)]
    if any(sharded):
        expected += [("wait", "2", backward), ("gather", "1", backward)]
        expected += [("release", "2", backward), ("wait", "1", backward), ("gather", "0", backward)]
        expected += [("release", "1", backward), ("wait", "0", backward)]
    assert log == expected


def test_a_block_that_runs_again_in_the_backward_gathers_and_releases_nothing():
    stage, weights, log, _ = made((True, True))
    weights.begin(backward=True)
    log.clear()
    stage(torch.ones(2, WIDTH)).sum().backward()
    backward = (5, True)
    assert log == [
        ("wait", "0", backward),
        ("compute", "0", None),
        ("wait", "1", backward),
        ("compute", "1", None),
    ]


def test_the_end_of_a_computation_is_the_end_of_its_use():
    _, weights, log, buckets = made((True, True))
    for bucket in buckets:
        bucket.users = {(5, False), (5, True), (6, False)}
    weights.end(backward=False)
    assert all(bucket.users == {(5, True), (6, False)} for bucket in buckets)
    weights.end(backward=True)
    assert all(bucket.users == {(6, False)} for bucket in buckets)
    assert log == []


@pytest.mark.parametrize(("backward", "first"), [(False, "0"), (True, "2")])
def test_what_is_used_first_is_gathered_ahead_and_all_is_released_on_demand(backward, first):
    _, weights, log, _ = made((True, True, True))
    weights.prefetch(backward=backward)
    assert log == [("gather", "rest", None), ("gather", first, None)]
    log.clear()
    weights.release()
    assert log == [("release", name, None) for name in ("rest", "0", "1", "2")]


def test_a_stage_without_blocks_has_the_rest():
    _, weights, log, (rest,) = made(())
    weights.begin(backward=True)
    assert weights.buckets == [rest]
    assert log == [("gather", "rest", (5, True)), ("wait", "rest", (5, True))]


def test_a_copy_made_in_a_backward_begins_anew():
    stage, weights, log, _ = made((True, True))
    weights.begin(backward=True)
    copied = copy.deepcopy(stage)
    log.clear()
    copied(torch.ones(2, WIDTH))
    assert log == [], "it has hooks, buckets and notes of its own"
    own = next(iter(copied.layers[0]._forward_pre_hooks.values())).func.__self__
    assert own is not weights and own.buckets[1].log[-2:] == [("wait", "1", (5, True)), ("compute", "1", None)]
    own.begin(backward=False)
    assert weights._user == (5, True) and own._user == (5, False)
