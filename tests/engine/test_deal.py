"""Micro-batches that are moved between replicas: each step reads the same ones, and all end at one position."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.data.test_loader import SOURCES, Blocks, rows, share
from weft.engine.deal import StepDeal, dealt


@st.composite
def shared_counts(draw, replicas=None, rounds=None):
    """Micro-batches of each replica, of which each has at least one."""
    replicas, rounds = replicas or draw(st.integers(1, 4)), rounds or draw(st.integers(1, 5))
    counts = [1] * replicas
    for _ in range((rounds - 1) * replicas):
        counts[draw(st.integers(0, replicas - 1))] += 1
    return tuple(counts)


@given(shared_counts())
def test_each_micro_batch_of_a_step_has_one_reader(counts):
    own, total = dealt(counts), sum(counts)
    assert [len(numbers) for numbers in own] == list(counts)
    assert sorted(number for numbers in own for number in numbers) == list(range(total))
    assert all(list(numbers) == sorted(numbers) for numbers in own)


@given(shared_counts())
def test_replicas_end_a_step_with_their_own_micro_batch_of_the_last_round(counts):
    replicas = len(counts)
    for replica, numbers in enumerate(dealt(counts)):
        assert numbers[-1] == sum(counts) - replicas + replica


@given(shared_counts())
def test_as_few_micro_batches_as_possible_are_moved(counts):
    replicas = len(counts)
    stay = sum(number % replicas == r for r, numbers in enumerate(dealt(counts)) for number in numbers)
    assert stay == sum(min(count, sum(counts) // replicas) for count in counts)


@pytest.mark.parametrize("counts", [(0, 2), (1, 2), (-1, 3)])
def test_counts_that_cannot_be_dealt_are_refused(counts):
    with pytest.raises(ValueError, match=r"counts=\["):
        dealt(counts)


@settings(deadline=None, max_examples=40)
@given(SOURCES, st.integers(1, 2), st.data())
def test_steps_read_the_same_sequences_whatever_was_moved(blocks, size, data):
    replicas, rounds = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    alike = shared_counts(replicas, rounds)
    source, steps = Blocks(*blocks), data.draw(st.lists(alike, min_size=1, max_size=4))
    alone = rows(share(source, size=1), (len(steps) + 1) * size * replicas * rounds)
    loaders = [share(source, size=size, replica=r, replicas=replicas) for r in range(replicas)]
    for step, counts in enumerate(steps):
        first = step * size * replicas * rounds
        for loader, numbers in zip(loaders, dealt(counts), strict=True):
            loader.deal(counts)
            expected = [alone[first + number * size + row] for number in numbers for row in range(size)]
            assert rows(loader, len(numbers)) == expected
        states = [json.dumps(loader.state_dict()) for loader in loaders]
        assert len(set(states)) == 1 and loaders[0].consumed == first + size * replicas * rounds
    resumed = share(source, size=1)
    resumed.load_state_dict(json.loads(states[0]))
    assert rows(resumed, size * replicas * rounds) == alone[-size * replicas * rounds :]


def test_prepared_micro_batches_of_an_earlier_deal_are_read_again():
    source = Blocks([8] * 24)
    alone = rows(share(source, size=1), 12)
    loader = share(source, size=1, replica=1, replicas=2)
    next(loader), loader.peek(3)
    loader.deal((1, 3))
    loader.deal((1, 3))
    assert rows(loader, 3) == [alone[n] for n in (2, 3, 5)]
    loader.deal((2, 2))
    assert rows(loader, 2) == [alone[n] for n in (7, 9)]


def test_counts_for_other_replicas_are_refused():
    with pytest.raises(ValueError, match="there are 2 replicas"):
        share(Blocks([8]), replicas=2).deal((1, 2, 3))


class Dealable:
    """Data that stores how it was dealt."""

    def __init__(self):
        self.dealt = []

    def deal(self, counts):
        self.dealt.append(tuple(counts))


def test_a_step_whose_data_cannot_be_dealt_is_the_usual_one():
    deal, data = StepDeal(1, 2), Dealable()
    deal.counts = (1, 3)
    assert deal.begin(iter(()), 2) == 2 and not deal.is_possible and deal.excess == 1.0
    assert [deal.number_of(m) for m in range(2)] == [1, 3]
    assert deal.begin(data, 2) == 3 and deal.is_possible and deal.excess == 1.5
    assert [deal.number_of(m) for m in range(4)] == [0, 1, 3, 7]  # an evaluation may have more
    assert deal.begin(data, 3) == 3 and deal.excess == 1.0  # a step of another number of micro-batches
    assert [deal.number_of(m) for m in range(3)] == [1, 3, 5]
    assert data.dealt == [(1, 3), (3, 3)]
