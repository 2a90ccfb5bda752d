"""Two strands that take turns: results, order, errors."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weft.engine.parallel import functions
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.strands.pair import PairRunner
from weft.engine.strands.thread import StrandThread
from weft.engine.strands.turns import Turns, TurnTakingGroup
from weft.pipeline.strands.plan import SegmentPlan, Step

CPU = torch.device("cpu")
LAYERS = 2


@pytest.fixture
def runner():
    thread = StrandThread(CPU)
    yield PairRunner(thread, Turns())
    thread.close()


def steps(runner, log, name, count):
    """A strand that logs each segment and gives the turn away between them."""
    for number in range(count):
        log.append(f"{name}{number}")
        if number < count - 1:
            runner.turns.pause()
    return name


@given(order=st.permutations("FFFBBBWW"))
@settings(max_examples=50)
def test_strands_and_weight_gradients_run_in_the_plans_order(order):
    thread = StrandThread(CPU)
    runner, log = PairRunner(thread, Turns()), []
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


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("F B F", "backward has more segments than the 1 of its plan"),
        ("F B B", "forward has more segments than the 1 of its plan"),
        ("2F 3B", "backward ended 1 segments before its plan did"),
    ],
)
def test_a_plan_for_other_strands_ends_the_pair(runner, plan, message):
    with pytest.raises(RuntimeError, match=message):
        runner.run(
            SegmentPlan.of(plan),
            lambda: steps(runner, [], "F", 2),
            lambda: steps(runner, [], "B", 2),
            lambda: None,
        )


def test_outside_of_a_pair_nothing_pauses(runner):
    runner.turns.pause()


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
        thread, turns = StrandThread(CPU), Turns()
        inputs = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(groups.tensor.index))
        outcomes = []
        for interleaved in (False, True):
            one = Layers(TurnTakingGroup(groups.tensor, turns))
            other = Layers(TurnTakingGroup(groups.tensor, turns), dropout)
            before = one(inputs[0].clone().requires_grad_())
            weights = torch.ones_like(before) * 0.5
            if interleaved:
                after, _ = PairRunner(thread, turns).run(
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


def test_generators_of_strands_can_be_kept_apart(runner):
    """A strand that sets the generator back, as a recomputation does, leaves the other's numbers as they are."""

    def draws():
        first = torch.rand(2)
        runner.turns.pause()
        return torch.cat([first, torch.rand(2)])

    def recomputes():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            torch.rand(1)
            runner.turns.pause()
            torch.rand(1)

    torch.manual_seed(1)
    alone = torch.rand(4)
    torch.manual_seed(1)
    plan = SegmentPlan.of("F B F B")
    together, _ = runner.run(plan, draws, recomputes, lambda: None, separate_generators=True)
    assert torch.equal(alone, together)
