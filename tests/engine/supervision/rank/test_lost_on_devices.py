"""Ranks that die under NCCL's rules: the others learn of it, and train on in the same processes."""

import pytest

from tests.device.build import obstacle
from tests.device.ranks import run_on_devices
from tests.engine.supervision.rank.lost_on_devices import train_through
from tests.engine.tiny import reference_losses, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(obstacle()), reason=obstacle())]


def test_a_rank_dies_and_those_that_stay_take_part_in_the_next_attempt(tmp_path):
    """All others learn of a death by one error that names the rank; none waits for its device, and training goes on.

    Attempts of one process: what an engine holds is given back, groups are made anew, and host memory has its state.
    """
    config = tiny_config(stages=2, zero=1, tied=True)
    dying = [("behind its step", 3, 2), ("between its note and its send", 1, 3), ("in a reduction", 2, 4)]
    dying.append(("before its note", 0, 5))  # with the store
    ranks = run_on_devices(4, train_through, config, str(tmp_path), dying, 6, timeout_s=400)
    expected = reference_losses(config, 2, 6)
    for rank, heard in enumerate(ranks):
        deaths = [dead for _, dead, _ in dying[heard["begun"] :]]
        assert heard["errors"] == [f"rank {dead} has ended or cannot be reached" for dead in deaths], rank
        assert heard["recovered"] == [None, 1, 2, 3, 4][heard["begun"] :], rank
        assert list(heard["losses"].values()) == pytest.approx(expected[6 - len(heard["losses"]) :], rel=1e-5)
        assert heard["code"] == 0
