"""Two strands that switch at collectives: results, order, errors."""

import dataclasses
import threading
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C import _is_multithreading_enabled as is_multithreading_enabled

from tests.waiting import until
from weft.engine.parallel import functions
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.strands.pair import PairRunner, StrandThread
from weft.engine.strands.yielding_group import YieldingGroup, YieldPoint
from weft.pipeline.strands.plan import SegmentPlan, Step

CPU = torch.device("cpu")
LAYERS = 2


@pytest.fixture
def runner():
    thread = StrandThread(CPU)
    yield PairRunner(thread, YieldPoint())
    thread.close()


def steps(runner, log, name, count):
    """A strand that logs each segment and yields between them."""
    for number in range(count):
        log.append(f"{name}{number}")
        if number < count - 1:
            runner.yield_point.pause()
    return name


@given(order=st.permutations("FFFBBBWW"))
@settings(max_examples=50)
def test_strands_and_weight_gradients_run_in_the_plans_order(order):
    thread = StrandThread(CPU)
    runner, log = PairRunner(thread, YieldPoint()), []
    if order[0] == "W":
        order = [*order[1:], "W"] if order[1] != "W" else [*order[2:], "W", "W"]
    plan = SegmentPlan(tuple(map(Step, order)))
    results = runner.run(
        plan, lambda: steps(runner, log, "F", 3), lambda: steps(runner, log, "B", 3), lambda: log.append("W")
    )
    thread.close()
    assert results == ("F", "B")
    assert [name[0] for name in log] == list(order)


@pytest.mark.parametrize("failing", ["F", "B", "W"])
def test_an_error_in_either_strand_ends_both_with_that_error(runner, failing):
    log = []

    def fails():
        raise ValueError(f"in {failing}")

    def strand(name):
        steps(runner, log, name, 2)
        return fails() if name == failing else name

    before = threading.active_count()
    for _ in range(3):  # a pair that failed leaves the runner as it was
        with pytest.raises(ValueError, match=f"in {failing}"):
            runner.run(
                SegmentPlan.of("F B W F B"),
                lambda: strand("F"),
                lambda: strand("B"),
                fails if failing == "W" else lambda: None,
            )
    assert runner.run(SegmentPlan.of("F B"), lambda: 1, lambda: 2, lambda: None) == (1, 2)
    assert threading.active_count() == before


OTHERS = {
    "F B F": ("F0 B0 F1 B1", "the forward 2 where 2 are planned, the backward 2 where 1 are planned"),
    "F B B": ("F0 B0 B1 F1", "the forward 2 where 1 are planned, the backward 2 where 2 are planned"),
    "2F 3B": ("F0 F1 B0 B1", "the backward 2 where 3 are planned"),
    "3F B W B": ("F0 F1 B0 W B1", "the forward 2 where 3 are planned"),
    "F 2W": ("F0 W W B0 F1 B1", "the backward 2 where 0 are planned"),
}


@pytest.mark.parametrize("plan", OTHERS)
def test_plan_for_other_strands_is_followed_while_it_fits_and_logged_once(runner, plan, caplog):
    order, message = OTHERS[plan]
    for _ in range(2):
        log = []
        runner.run(
            SegmentPlan.of(plan),
            lambda log=log: steps(runner, log, "F", 2),
            lambda log=log: steps(runner, log, "B", 2),
            lambda log=log: log.append("W"),
        )
        assert log == order.split()
    assert [message in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("plan", OTHERS)
def test_where_strict_it_is_an_error(runner, plan):
    strict = dataclasses.replace(runner, strict=True)
    with pytest.raises(RuntimeError, match=OTHERS[plan][1]):
        strict.run(SegmentPlan.of(plan), lambda: steps(runner, [], "F", 2), lambda: steps(runner, [], "B", 2))


def test_without_a_plan_strands_alternate_and_the_backward_begins(runner):
    log = []
    runner.run(SegmentPlan(()), lambda: steps(runner, log, "F", 2), lambda: steps(runner, log, "B", 4))
    assert log == ["B0", "F0", "B1", "F1", "B2", "B3"]


def test_outside_of_a_pair_nothing_pauses(runner):
    runner.yield_point.pause()


class Layers(nn.Module):
    """Blocks under tensor and sequence parallelism, over one member's group."""

    def __init__(self, group, dropout=0.0):
        super().__init__()
        self.group = group
        generator = torch.Generator().manual_seed(group.index)
        self.up = nn.ParameterList(torch.randn(8, 4, generator=generator) / 4 for _ in range(LAYERS))
        self.down = nn.ParameterList(torch.randn(4, 8, generator=generator) / 4 for _ in range(LAYERS))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden):
        for up, down in zip(self.up, self.down, strict=True):
            wide = torch.relu(functions.gather(self.group, hidden, 1) @ up.T)
            hidden = hidden + self.dropout(functions.scatter_sum(self.group, wide @ down.T, 1))
        return hidden


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("size", [2, 4])
@given(data=st.data())
@settings(max_examples=8)
def test_pairs_interleaved_and_not_are_equal_bit_by_bit(size, dropout, data):
    """Any plan that all members share: every collective meets its own, whichever thread launches it."""
    segments = "F" * (2 * LAYERS + 1) + "B" * (2 * LAYERS + 1)
    plan = SegmentPlan(tuple(map(Step, data.draw(st.permutations(segments)))))

    def member(groups):
        thread, yield_point = StrandThread(CPU), YieldPoint()
        inputs = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(groups.tensor.index))
        outcomes = []
        for interleaved in (False, True):
            one = Layers(YieldingGroup(groups.tensor, yield_point))
            other = Layers(YieldingGroup(groups.tensor, yield_point), dropout)
            before = one(inputs[0].clone().requires_grad_())
            weights = torch.ones_like(before) * 0.5
            if interleaved:
                after, _ = PairRunner(thread, yield_point).run(
                    plan, lambda o=other: o(inputs[1]), lambda b=before, w=weights: b.backward(w), lambda: None
                )
            else:
                before.backward(weights)
                after = other(inputs[1])
            if dropout:
                outcomes.append(gradients(one))
                continue
            after.square().sum().backward()
            outcomes.append([after.detach(), *gradients(one), *gradients(other)])
        thread.close()
        return outcomes

    for alone, together in run_in_threads({"tensor": size}, member):
        assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("plan", ["F B F B", "B F B F", "2F 2B", "2B 2F", "B 2F B", "F 2B F", ""])
def test_each_strand_goes_on_with_its_own_random_numbers(runner, plan):
    """A strand that sets the generator back, as a recomputation does, leaves the other's numbers as they are."""

    def draws():
        first = torch.rand(2)
        runner.yield_point.pause()
        return torch.cat([first, torch.rand(2)])

    def recomputes():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            first = torch.rand(1)
            runner.yield_point.pause()
            return torch.cat([first, torch.rand(1)])

    torch.manual_seed(5)
    again = torch.rand(2)
    torch.manual_seed(1)
    alone, after = torch.rand(4), torch.rand(3)
    torch.manual_seed(1)
    drawn, redrawn = runner.run(SegmentPlan.of(plan), draws, recomputes)
    assert torch.equal(drawn, alone) and torch.equal(redrawn, again)
    assert torch.equal(torch.rand(3), after), "the next micro-batch has the numbers that it has without pairs"


def test_an_idle_thread_keeps_no_tensors(runner):
    kept = torch.zeros(3)
    storage = weakref.ref(kept)
    runner.run(SegmentPlan(()), lambda: None, partial(kept.sum))
    del kept
    until(lambda: storage() is None)


def test_a_rank_that_is_interrupted_frees_the_backward(runner):
    """As by Ctrl-C while the forward runs."""

    def interrupted():
        runner.yield_point.pause()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(SegmentPlan(()), interrupted, lambda: steps(runner, [], "B", 9))
    assert runner.run(SegmentPlan(()), lambda: 1, lambda: 2) == (1, 2)


def test_gradients_are_recorded_by_a_thread_of_its_own_and_autograd_starts_none(runner):
    """So that a strand that waits inside of a backward holds no other process's."""
    seen = []
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 2).sum()
    weight.register_hook(lambda gradient: seen.append((threading.current_thread().name, is_multithreading_enabled())))
    runner.run(SegmentPlan(()), lambda: None, loss.backward)
    assert seen == [("weft strand", False)] and is_multithreading_enabled()
