"""Tests that an error on one rank reaches every rank; ranks are threads here."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from weft.comm.agreement import attempt


def ranks(actions, **options):
    """Outcomes of `attempt` with an action for each rank."""
    values, barrier = [None] * len(actions), Barrier(len(actions))

    def of_rank(rank):
        def gather(value):
            values[rank] = value
            barrier.wait(20)
            return list(values)

        return attempt(actions[rank], gather, **options)

    with ThreadPoolExecutor(len(actions)) as threads:
        return list(threads.map(of_rank, range(len(actions))))


def fail():
    raise ValueError("no space")


def test_every_rank_gets_its_result_or_all_of_them():
    assert [outcome.results for outcome in ranks([lambda: "a", lambda: "b"])] == [["a"], ["b"]]
    assert [outcome.results for outcome in ranks([lambda: "a", lambda: "b"], share=True)] == [["a", "b"]] * 2


def test_the_first_failure_is_everyones():
    outcomes = ranks([lambda: 1, fail, fail])
    for rank, outcome in enumerate(outcomes):
        assert outcome.results == []
        failure = outcome.failure
        assert (failure.rank, failure.kind, failure.text) == (1, "ValueError", "no space")
        assert (failure.cause is None) == (rank == 0)


def test_an_error_that_is_no_bad_input_ends_its_rank():
    with pytest.raises(ValueError, match="no space"):
        attempt(fail, lambda value: [value], catch=(OSError,))
