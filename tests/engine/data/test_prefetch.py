from __future__ import annotations

import gc
import threading
from itertools import count, islice

import pytest

from weft.engine.data import prefetch
from weft.engine.data.prefetch import Prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weft-prefetch"]


def test_items_come_in_order_and_the_end_stays_the_end():
    items = Prefetch(range(100), 3)
    assert list(items) == list(range(100))
    assert next(items, None) is None


def test_at_most_depth_items_wait():
    made: list[int] = []
    enough, freed = threading.Event(), threading.Event()

    def items():
        for n in count():
            made.append(n)
            if n == 4:
                enough.set()
            if n == 5:
                freed.set()
            yield n

    ahead = Prefetch(items(), 3)
    assert next(ahead) == 0
    assert enough.wait(10), "one drawn, three waiting, one in hand"
    assert not freed.wait(0.2)
    assert next(ahead) == 1
    assert freed.wait(10)
    ahead.close()


def test_an_error_comes_where_its_item_would_have_come():
    def items():
        yield 1
        raise ValueError("row 2")

    ahead = Prefetch(items(), 4)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="row 2"):
        next(ahead)
    assert next(ahead, "over") == "over"


def test_closing_ends_the_thread_and_the_source():
    ended = threading.Event()

    def items():
        try:
            yield from count()
        finally:
            ended.set()

    ahead = Prefetch(items(), 2)
    assert list(islice(ahead, 5)) == list(range(5))
    ahead.close()
    assert ended.is_set()
    assert next(ahead, "closed") == "closed"


def test_a_forgotten_prefetch_stops_by_itself():
    ahead = Prefetch(count(), 2)
    next(ahead)
    (thread,) = threads()
    del ahead
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_nothing_runs_before_the_first_item_is_wanted():
    Prefetch(count(), 2)
    assert not threads()


@pytest.mark.timeout(60)
def test_closing_ends_a_wait_in_another_thread(monkeypatch):
    monkeypatch.setattr(prefetch, "_PATIENCE_S", 0.1)
    started, released = threading.Event(), threading.Event()

    def items():
        started.set()
        released.wait()
        yield 1

    ahead = Prefetch(items(), 2)
    found: list[object] = []
    consumer = threading.Thread(target=lambda: found.append(next(ahead, "closed")), daemon=True)
    consumer.start()
    started.wait()
    ahead.close()
    consumer.join(10)
    released.set()
    assert found == ["closed"]
    for thread in threads():
        thread.join()
