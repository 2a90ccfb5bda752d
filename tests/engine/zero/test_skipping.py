"""Steps with bad numbers leave weights and the optimiser's state as they were, and are counted."""

from itertools import pairwise

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.zero.test_norm import NAN, Trained
from weft.engine.zero import NonFiniteError, SkippedTooOften, Skips
from weft.engine.zero.skipping import WINDOW

INF = float("inf")


def test_nothing_is_judged_bad_that_is_finite_without_a_bound():
    skips = Skips(3)
    assert all(skips.judge(step, 10.0**step) for step in range(100))
    skips.check()


@given(st.lists(st.sampled_from([1.0, NAN, INF]), max_size=40), st.integers(1, 4))
def test_only_bad_steps_in_a_row_are_too_many(norms, most):
    skips = Skips(most)
    for step, norm in enumerate(norms, start=1):
        assert skips.judge(step, norm) is (norm == 1.0)
        last = norms[:step][-most:]
        if len(last) == most and 1.0 not in last:
            with pytest.raises(SkippedTooOften, match=f"step {step}: the last") as raised:
                skips.check()
            assert len(raised.value.steps) >= most
            assert all(later.step == earlier.step + 1 for earlier, later in pairwise(raised.value.steps))
            return
        skips.check()


def test_a_spike_is_relative_to_the_median_of_the_last_norms():
    skips = Skips(2, spike=10.0)
    for step in range(WINDOW - 1):
        assert skips.judge(step, 1.0 + step % 3)
    assert skips.judge(WINDOW - 1, 1e6), "too few to tell by"
    assert skips.judge(WINDOW, 20.0) and not skips.judge(WINDOW + 1, 20.1), "the median is 2"
    skips.check()
    assert skips.norms[-1] == 20.0 and len(skips.norms) == WINDOW, "what was skipped sets no standard"
    again = Skips(2, spike=10.0)
    again.restore(skips.norms)
    assert not again.judge(WINDOW + 2, 20.1)
    again.check()
    skips.restore([])
    assert skips.judge(1, 20.1)


def state(trained):
    found = [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in trained.optimizer.state.values()]
    return trained.weights(), found


def unchanged(trained, before):
    weights, states = state(trained)
    same = all(torch.equal(a, b) for a, b in zip(before[0], weights, strict=True))
    return same and all(torch.equal(a[k], b[k]) for a, b in zip(before[1], states, strict=True) for k in a)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_step_changes_nothing(clip, value):
    trained = Trained(clip=clip, skips=Skips(3))
    trained.step()
    before = state(trained)
    for count in (1, 2, 3):
        trained.optimizer.skips.check()
        trained.step(spoilt=value)
        assert trained.optimizer.overflow and unchanged(trained, before), count
    with pytest.raises(SkippedTooOften, match=r"step 4: the last 3 steps were skipped.*(nan|inf)"):
        trained.optimizer.skips.check()
    trained.optimizer.check_finite()
    trained.optimizer.restored([2.0, 3.0])
    assert trained.optimizer.skips.norms == [2.0, 3.0]
    trained.optimizer.skips.check()  # what came before the checkpoint does not count
    trained.step()
    trained.optimizer.skips.check()
    assert not trained.optimizer.overflow and not unchanged(trained, before)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_good_steps_are_the_same_with_and_without(clip):
    plain, watched = Trained(clip=clip), Trained(clip=clip, skips=Skips(3, spike=20.0))
    for _ in range(5):
        plain.step()
        watched.step(loss=torch.tensor(2.5))
    assert unchanged(watched, state(plain))


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_is_enough(loss):
    trained = Trained(clip=1.0, skips=Skips(3))
    before = trained.weights()
    trained.step(loss=torch.tensor(loss))
    assert trained.optimizer.overflow
    assert all(torch.equal(a, b) for a, b in zip(before, trained.weights(), strict=True))
    trained.step()
    assert not trained.optimizer.overflow, "it is forgotten"


class Halving(LossScaler):  # DeepSpeed's dynamic one needs ranks
    def __init__(self, scale):
        super().__init__(scale)
        self.dynamic, self.min_scale = True, 1.0

    def update_scale(self, overflow):
        self.cur_scale = max(self.cur_scale / 2, self.min_scale) if overflow else self.cur_scale


def test_overflows_are_the_loss_scales_until_it_cannot_be_lowered():
    trained = Trained(check_overflow=True, skips=Skips(2), scaler=Halving(8.0))
    for scale in (4.0, 2.0, 1.0):
        trained.step(spoilt=NAN)
        assert trained.optimizer.overflow and trained.optimizer.cur_scale == scale
        trained.optimizer.skips.check()
    trained.step(spoilt=NAN)
    trained.optimizer.skips.check()
    trained.step(spoilt=NAN)
    with pytest.raises(SkippedTooOften):
        trained.optimizer.skips.check()


def test_a_spike_does_not_lower_the_loss_scale():
    trained = Trained(check_overflow=True, skips=Skips(2, spike=10.0), scaler=Halving(8.0))
    trained.optimizer.skips.restore([1.0] * WINDOW)
    trained.step(spoilt=1e4)
    assert trained.optimizer.overflow and trained.optimizer.cur_scale == 8.0


def test_without_skips_it_ends_as_before():
    trained = Trained(clip=1.0, skips=Skips(0))
    with pytest.raises(NonFiniteError, match="training has diverged"):
        trained.step(spoilt=NAN)
