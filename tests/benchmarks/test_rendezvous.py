"""Engines on gloo, simulated: what their own order of posts and waits makes of a line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.rendezvous import PROGRAMS, Compute, Post, Transfer, Wait, step_s
from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate

KINDS = {"torch GPipe": "gpipe", "torch 1F1B": "1f1b", "DeepSpeed 1F1B": "1f1b"}


@pytest.mark.parametrize("name", PROGRAMS)
@given(ranks=st.integers(2, 6), microbatches=st.integers(1, 9))
@settings(deadline=None)  # the first imports DeepSpeed
def test_free_links_leave_the_schedules_own_time(name, ranks, microbatches):
    placement = Placement.straight(ranks)
    costs = CostModel.unit(ranks)
    alone = simulate(generate(KINDS[name], placement, microbatches), costs).step_s
    assert step_s(PROGRAMS[name], placement, microbatches, costs) == pytest.approx(alone)


@pytest.mark.parametrize("name", PROGRAMS)
@given(
    ranks=st.integers(2, 6),
    microbatches=st.integers(1, 9),
    latency=st.floats(0.0, 3.0),
    seconds=st.floats(0.0, 9.0),
)
@settings(deadline=None)
def test_a_rendezvous_never_gains(name, ranks, microbatches, latency, seconds):
    placement = Placement.straight(ranks, (1, ranks - 1))
    wan = LinkCost(latency_s=latency, bandwidth_bps=8 / seconds if seconds else float("inf"))
    costs = CostModel.unit(ranks, wan=wan)
    freely = simulate(lower(generate(KINDS[name], placement, microbatches)), costs).step_s
    assert step_s(PROGRAMS[name], placement, microbatches, costs) >= freely - 1e-9


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("rank", range(4))
def test_a_program_has_every_computation_and_waits_for_all_that_it_posts(name, rank):
    steps = list(PROGRAMS[name](rank, 4, 6))
    assert [step.letter for step in steps if isinstance(step, Compute)].count("F") == 6
    assert [step.letter for step in steps if isinstance(step, Compute)].count("B") == 6
    posted = [transfer for step in steps if isinstance(step, Post) for transfer in step.transfers]
    waited = {transfer for step in steps if isinstance(step, Wait) for transfer in step.transfers}
    assert len(set(posted)) == len(posted) == 6 * (2 if rank in (0, 3) else 4)
    assert set(posted) == waited


def test_a_send_and_a_receive_posted_together_come_one_after_the_other():
    # Of two ranks with slow links, 1F1B has a gradient and an activation to exchange for each micro-batch.
    placement, link = Placement.straight(2, (1, 1)), LinkCost(latency_s=1.0, bandwidth_bps=0.08)
    costs = CostModel.unit(2, wan=link)
    transfers = 2 * 8 * 100.0
    assert transfers < step_s(PROGRAMS["torch 1F1B"], placement, 8, costs) < 1.1 * transfers
    assert simulate(lower(generate("1f1b", placement, 8)), costs).step_s < 0.8 * transfers


def test_ranks_that_wait_for_each_other_are_found():
    def never_sends(rank, ranks, microbatches):
        yield Wait((Transfer("F", 0, 1 - rank, rank),))

    with pytest.raises(ValueError, match="without end"):
        step_s(never_sends, Placement.straight(2), 1, CostModel.unit(2))
