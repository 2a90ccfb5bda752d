"""An error in the middle of a step leaves nothing to later steps, or they are refused."""

import itertools

import pytest
import torch

from tests.engine.tiny import batches, tiny_config
from weft.engine.initialize import initialize
from weft.engine.interruption import Interruption
from weft.engine.zero import NonFiniteError
from weft.pipeline.action import Op

pytestmark = pytest.mark.usefixtures("one_rank")
MICROBATCHES = 3
CASES = {
    "before the last backward": ({}, Op.F, 2),
    "between the last backward and its reduction": ({}, Op.B, 2),
    "after the reduction": ({}, Op.REDUCE_GRAD, None),
    "a new buffer for each reduction": ({"zero": 2, "reduce_every": 1}, Op.B, 1),
}


class OutOfMemory:
    """An observer that raises an error once, at the end of a slot."""

    def __init__(self, op, microbatch):
        self._slot, self.armed = (op, microbatch), False

    def step_begins(self, num_microbatches):
        pass

    slot_begins = step_begins

    def slot_ends(self, slot):
        if self.armed and (slot[0].op, slot[0].microbatch) == self._slot:
            self.armed = False
            raise torch.OutOfMemoryError("no memory is left")


def make_engine(**keywords):
    engine, *_ = initialize(config=tiny_config(stages=1, layers=2, microbatches=MICROBATCHES, **keywords))
    return engine


def steps_of(count):
    data = batches(0, 1)
    return [list(itertools.islice(data, MICROBATCHES)) for _ in range(count)]


def losses(keywords, op=None, microbatch=None):
    """Losses of three steps. With ``op``, the second one is also tried before, and interrupted there."""
    engine, failing, found = make_engine(**keywords), OutOfMemory(op, microbatch), []
    engine.slot_observers.append(failing)
    for number, step in enumerate(steps_of(3)):
        failing.armed = op is not None and number == 1
        if failing.armed:
            with pytest.raises(torch.OutOfMemoryError):
                engine.train_batch(iter(step))
        found.append(float(engine.train_batch(iter(step))))
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def expected():
    return losses({})


@pytest.mark.parametrize("case", CASES)
def test_the_step_after_an_interrupted_one_is_right(expected, case):
    keywords, op, microbatch = CASES[case]
    assert losses(keywords, op, microbatch) == expected


def test_an_interrupted_update_is_refused_until_a_checkpoint_is_loaded(tmp_path, monkeypatch):
    engine, steps = make_engine(), steps_of(3)
    expected = [float(engine.train_batch(iter(step))) for step in steps[:2]]
    engine.save_checkpoint(str(tmp_path))
    expected.append(float(engine.train_batch(iter(steps[2]))))
    engine.load_checkpoint(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(engine.basic_optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.train_batch(iter(steps[2]))
    refusal = "the update of step 3: some weights are those before it and some those after it. Load a checkpoint"
    with pytest.raises(RuntimeError, match=refusal):
        engine.train_batch(iter(steps[2]))
    with pytest.raises(RuntimeError, match=refusal):
        engine.save_checkpoint(str(tmp_path / "another"))
    engine.load_checkpoint(str(tmp_path))
    assert float(engine.train_batch(iter(steps[2]))) == expected[2]
    engine.destroy()


def test_a_rank_with_peers_does_not_go_on_after_an_interrupted_step(monkeypatch):
    class Dropped:
        drop_step = staticmethod(lambda: None)

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    interruption = Interruption(Dropped)
    for error, goes_on in ((NonFiniteError("on every rank"), True), (KeyboardInterrupt(), False)):
        with pytest.raises(type(error)), interruption.caught("step 7"):
            raise error
        if goes_on:
            with interruption.caught("step 8"):
                continue
        with (
            pytest.raises(RuntimeError, match="step 8: an error has interrupted step 7 on this rank"),
            interruption.caught("step 8"),
        ):
            pass
