"""How often memory checkpoints are taken, by a clock of each rank that only steps and copies move on."""

import threading
from collections import Counter
from math import ceil
from time import sleep

import pytest
import torch

from tests.engine.small_engine import assert_equal, joined
from tests.engine.supervision.memory.test_memory_in_threads import opened
from tests.thread_ranks import run_in_threads
from weft.engine.supervision.memory import checkpoints
from weft.engine.supervision.memory.checkpoints import MemoryCheckpoints
from weft.engine.supervision.memory.slots import Slot

STEPS = 30
STEP_S = (0.5, 0.25)
"""Seconds of each rank's step: the slower one counts."""


class Clocks:
    """One for each rank's training, and one for each rank's copies; and whether the training waits for a copy."""

    def __init__(self):
        self._now_s = Counter()
        self._waits = {}

    @staticmethod
    def _rank():
        return id(threading.current_thread().__dict__["weft_world"])

    def _mine(self):
        return self._rank(), threading.current_thread().name.startswith("weft-memory")

    def now_s(self):
        return self._now_s[self._mine()]

    def go_on(self, duration_s):
        self._now_s[self._mine()] += duration_s

    def training_waits(self):
        return self._waits.setdefault(self._rank(), threading.Event())


def paced(root, clocks, share):
    told = []
    made, memory = opened(root, "one host", share=share, whole=told.append)
    for step in range(1, STEPS + 1):
        made.step()
        clocks.go_on(STEP_S[made.global_rank])
        memory.take({"step": step})
    memory.finish()
    memory.close()
    assert memory.num_whole == len(told)
    return told


@pytest.mark.parametrize(
    ("copy_s", "share", "apart"),
    [(1.0, 0.01, 1), (1.25, 1.0, 3), (3.0, 1.0, 6), (3.0, 0.5, 12), (3.1, 0.5, 13), (100.0, 1.0, 200)],
)
def test_copies_that_take_long_are_under_way_for_their_share_of_the_time(tmp_path, monkeypatch, copy_s, share, apart):
    """Those of a second or less are taken at every step; a step is timed by when the first is waited for."""
    clocks, commit, finish = Clocks(), Slot.commit, MemoryCheckpoints.finish

    def slow(slot, text):
        assert clocks.training_waits().wait(60)
        clocks.go_on(copy_s if slot.path.name == "rank-000.safetensors" else copy_s / 2)
        commit(slot, text)

    def waited_for(memory):
        clocks.training_waits().set()
        finish(memory)
        clocks.training_waits().clear()

    monkeypatch.setattr(checkpoints, "perf_counter", clocks.now_s)
    monkeypatch.setattr(Slot, "commit", slow)
    monkeypatch.setattr(MemoryCheckpoints, "finish", waited_for)
    assert apart in (1, ceil(copy_s / share / max(STEP_S)))
    assert run_in_threads(2, paced, tmp_path, clocks, share) == [[*range(1, STEPS + 1, apart)]] * 2


def beside_a_slow_copy(root):
    made, memory = opened(root, "one host")
    made.part.register_buffer("running", torch.zeros(2))
    made.step()
    before = made.held()
    memory.take({})
    made.part.running.fill_(1.0)  # as the next forwards do
    made.step()
    memory.finish()
    found, restored = memory.recover(), made.held()
    memory.close()
    return found, before, restored, made.part.running.tolist()


def test_what_was_true_when_it_was_taken_is_stored_however_slow_the_copy_is(tmp_path, monkeypatch):
    places = Slot.places

    def slow(slot, pieces):
        sleep(0.2)
        return places(slot, pieces)

    monkeypatch.setattr(Slot, "places", slow)
    found, before, restored, running = zip(*run_in_threads(2, beside_a_slow_copy, tmp_path), strict=True)
    assert found == ((1, {}),) * 2 and running == ([0.0, 0.0],) * 2
    assert_equal(joined(restored), joined(before))
