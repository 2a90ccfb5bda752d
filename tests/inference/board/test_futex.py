"""A futex wakes who waits for another value, and is refused where the system has none."""

import platform
import threading

import pytest

from weft.inference.board.futex import Futex


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Darwin", "x86_64"), ("Linux", "riscv64")])
def test_it_is_refused_where_there_is_none(monkeypatch, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(OSError, match=f"not supported on {system} {machine}"):
        Futex(memoryview(bytearray(8)), 4)


def test_it_counts_in_its_own_word():
    buffer = bytearray(12)
    futex = Futex(memoryview(buffer), 4)
    assert futex.read() == 0
    for _ in range(3):
        futex.ring()
    assert futex.read() == 3
    assert list(memoryview(buffer).cast("I")) == [0, 3, 0]


def test_waiting_tells_whether_the_value_is_another():
    futex = Futex(memoryview(bytearray(4)), 0)
    assert not futex.wait(0, 0.001)
    assert not futex.wait(0, 0.0)
    futex.ring()
    assert futex.wait(0, 60.0)
    assert not futex.wait(1, 0.001)


@pytest.mark.parametrize("waiting", [1, 5])
def test_a_ring_wakes_all_who_wait(waiting):
    futex = Futex(memoryview(bytearray(4)), 0)
    woken = []
    threads = [threading.Thread(target=lambda: woken.append(futex.wait(0, 60.0))) for _ in range(waiting)]
    for thread in threads:
        thread.start()
    futex.ring()
    for thread in threads:
        thread.join(30)
    assert woken == [True] * waiting
