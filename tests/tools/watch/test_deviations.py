"""Ranks of a class are compared within each step, and the error is that of the comparison."""

import numpy as np
import pytest

from weft.tools.watch.deviations import against_peers, deviation, is_steady, lower_median

MEDIAN = 0.5


def noisy(rng, steps, ranks, common, own):
    """Seconds with a noise that all ranks share, which lasts for several steps, and one of each rank."""
    shared = np.repeat(rng.exponential(common, (steps // 5 + 1, 1)), 5, axis=0)[:steps]
    return np.exp(shared + own * rng.standard_normal((steps, ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_noise_that_all_ranks_share_cancels(ranks):
    rng = np.random.default_rng(ranks)
    seconds = noisy(rng, 20, ranks, common=0.5, own=0.0)
    seconds[:, 1] *= 1.1
    seconds[3, 0] = np.nan
    share, error = deviation(against_peers(seconds), np.full(ranks, MEDIAN))
    assert share == pytest.approx([0.1 * (rank == 1) for rank in range(ranks)], abs=1e-9)
    assert error == pytest.approx(np.zeros(ranks), abs=1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_the_error_is_that_of_the_comparison(ranks):
    rng, deviations = np.random.default_rng(ranks), []
    for _ in range(400):
        share, error = deviation(against_peers(noisy(rng, 20, ranks, 0.3, 0.05)), np.full(ranks, MEDIAN))
        deviations.append(np.log1p(share) / error)
    assert np.std(deviations) < 1.1 and abs(np.median(deviations)) < 0.8
    assert np.mean(np.array(deviations) > 5.0) < 1e-3


def test_shared_noise_makes_no_rank_slower_than_its_only_slower_peer():
    rng = np.random.default_rng(1)
    for _ in range(100):
        seconds = noisy(rng, 20, 2, common=1.0, own=0.05)
        seconds[:, 1] *= 1.07
        share, _ = deviation(against_peers(seconds), np.full(2, MEDIAN))
        assert share[0] == pytest.approx(0.0, abs=1e-6) and share[1] == pytest.approx(0.07, abs=0.08)


def test_a_rank_without_peers_in_a_step_and_sections_of_no_seconds_have_no_ratio():
    seconds = np.array([[1.0, np.nan], [0.0, 1.0], [1.0, 2.0]])
    found = against_peers(seconds)
    assert np.isnan(found[:2]).all() and np.isfinite(found[2]).all()
    assert np.isnan(against_peers(np.zeros((4, 3)))).all()


def test_a_deviation_in_half_of_the_steps_or_one_that_has_ended_is_not_steady():
    rng = np.random.default_rng(0)
    noise, slow = 0.03 * rng.standard_normal(80), np.log1p(0.1)
    assert is_steady(noise[:20] + slow, 0.1, 0.01) and is_steady(noise + slow, 0.1, 0.004)
    assert not is_steady(noise[:20] + slow * (np.arange(20) % 2), 0.1, 0.01)
    assert not is_steady(noise + slow * (np.arange(80) < 60), 0.1, 0.004)


def test_of_two_ranks_the_faster_is_the_reference():
    assert lower_median(np.array([3.0, 1.0])) == 1.0 and lower_median(np.array([[1.0, 2.0, 9.0]])) == [2.0]
