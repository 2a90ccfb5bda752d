"""Tests that work submitted to a thread ends, whatever happens to the thread."""

import threading

import pytest

from weft.comm.progress import Progress

LIMIT_S = 20.0


def test_all_that_was_submitted_before_the_end_is_done_in_order():
    done, progress = [], Progress("some")
    futures = [progress.submit(lambda n=n: done.append(n)) for n in range(100)]
    progress.close()
    for future in futures:
        future.result(LIMIT_S)
    assert done == list(range(100)) and progress.error is None


def test_what_comes_after_the_end_fails_and_is_not_waited_for():
    """As a checkpoint's thread may, whose rank gives its groups back meanwhile."""
    progress, ended = Progress("some"), threading.Event()
    progress.close(ended.set)
    assert ended.wait(LIMIT_S)
    with pytest.raises(RuntimeError, match="some is closed"):
        progress.submit(lambda: None).result(LIMIT_S)
    assert progress.error is None, "an end in order is no error"


def test_however_close_to_the_end_it_comes_it_ends():
    for _ in range(300):
        progress, outcomes = Progress("some"), []
        start = threading.Barrier(2)

        def submit(progress=progress, outcomes=outcomes, start=start):
            start.wait()
            outcomes.append(progress.submit(lambda: "done"))

        thread = threading.Thread(target=submit)
        thread.start()
        start.wait()
        progress.close()
        thread.join()
        (future,) = outcomes
        assert future.exception(LIMIT_S) is not None or future.result() == "done"


def test_after_an_error_nothing_is_done_but_the_last():
    progress, last = Progress("some"), threading.Event()
    with pytest.raises(ZeroDivisionError):
        progress.submit(lambda: 1 / 0).result(LIMIT_S)
    with pytest.raises(ZeroDivisionError):
        progress.submit(lambda: None).result(LIMIT_S)
    progress.close(last.set)
    assert last.wait(LIMIT_S)
    with pytest.raises(ZeroDivisionError):
        progress.submit(lambda: None).result(LIMIT_S)


def test_what_is_under_way_fails_at_once():
    progress, free = Progress("some"), threading.Event()
    futures = [progress.submit(lambda: free.wait(LIMIT_S)), progress.submit(lambda: None)]
    progress.fail(ValueError("left"))
    for future in futures:
        with pytest.raises(ValueError, match="left"):
            future.result(LIMIT_S)
    free.set()
    progress.close()
