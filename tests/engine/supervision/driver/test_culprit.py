"""The culprit: whoever stops in a job, the progress of all ranks name that one."""

import random
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.engine.supervision.driver.stalling_job import StallingJob
from tests.pipeline.cases import FIXED, schedules
from weft.engine.supervision.driver.culprit import JobRows, Replica, find_culprits
from weft.engine.supervision.messages import RowProgress
from weft.pipeline.action import Op, slot_text
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower, open_pairs
from weft.pipeline.placement import Placement

EXAMPLES = 60


@st.composite
def jobs(draw, most_replicas=3):
    """A job of any fixed schedule, its replicas alone or in DP-cells."""
    zero_stage = draw(st.integers(0, 3))
    schedule = draw(schedules(FIXED))
    if draw(st.booleans()):
        schedule = open_pairs(schedule)
    schedule = lower(schedule, zero_stage=zero_stage)
    count = draw(st.integers(1, most_replicas))
    stages = schedule.placement.num_ranks
    replicas = tuple(Replica(schedule, tuple(row * count + n for row in range(stages))) for n in range(count))
    cell = draw(st.integers(1, count))
    cells = [tuple(range(first, min(first + cell, count))) for first in range(0, count, cell)]
    job = JobRows(replicas, tuple(cell for cell in cells if len(cell) > 1))
    return StallingJob(
        job,
        random.Random(draw(st.integers(0, 2**32))),
        zero_stage=zero_stage,
        overlap=draw(st.booleans()),
        clip=draw(st.booleans()),
        log_every=draw(st.integers(1, 3)),
    )


def moves_of(stalling):
    """So many moves that the fault may come in any of the first steps."""
    return stalling.rng.randrange(3 * sum(2 * len(stalling.job.row(rank)) + 8 for rank in stalling.job.seats))


def explain(stalling):
    return "\n".join(f"{rank}: {stalling.job.doing(rank, place)} {place}" for rank, place in stalling.progress.items())


@settings(max_examples=EXAMPLES, deadline=None)
@given(jobs())
def test_a_rank_that_does_nothing_more_is_named(stalling):
    assert stalling.move(moves_of(stalling))
    stalling.hung = stalling.rng.choice(list(stalling.progress))
    assert not stalling.move()
    found = find_culprits(stalling.job, stalling.progress)
    assert [suspect.rank for suspect in found] == [stalling.hung], explain(stalling)


@settings(max_examples=EXAMPLES, deadline=None)
@given(jobs())
def test_a_stopped_process_is_named(stalling):
    assert stalling.move(moves_of(stalling))
    stalling.stopped = stalling.rng.choice(list(stalling.progress))
    assert not stalling.move()
    found = find_culprits(stalling.job, stalling.progress, silent=[stalling.stopped])
    assert [suspect.rank for suspect in found] == [stalling.stopped], explain(stalling)


def hops(job):
    """Pairs of ranks between which tensors move."""
    found = set()
    for replica in job.replicas:
        ranks = [replica.ranks[row] for row in replica.schedule.placement.stage_ranks]
        found |= {frozenset(pair) for pair in pairwise(ranks) if pair[0] != pair[1]}
    return sorted(found, key=sorted)


@settings(max_examples=EXAMPLES, deadline=None)
@given(jobs())
def test_a_dead_link_is_named(stalling):
    pairs = hops(stalling.job)
    assume(pairs)
    assert stalling.move(moves_of(stalling))
    dead = stalling.rng.choice(pairs)
    stalling.cut = {dead}
    assert not stalling.move()
    (suspect,) = find_culprits(stalling.job, stalling.progress)
    assert suspect.rank is None, explain(stalling)
    assert set(suspect.links) == {tuple(sorted(pair)) for pair in stalling.job.carriers(*sorted(dead))}
    (suspect,) = find_culprits(stalling.job, stalling.progress, broken=[tuple(dead)])
    assert suspect.links == (tuple(sorted(dead)),)


@settings(max_examples=EXAMPLES, deadline=None)
@given(jobs())
def test_over_links_that_work_the_receiver_is_named_and_over_others_the_link(stalling):
    pairs = hops(stalling.job)
    assume(pairs)
    assert stalling.move(moves_of(stalling))
    stalling.deaf = stalling.rng.choice([rank for pair in pairs for rank in pair])
    assert not stalling.move()
    sound = [tuple(pair) for pair in pairs]
    (suspect,) = find_culprits(stalling.job, stalling.progress, sound=sound)
    assert suspect.rank == stalling.deaf, explain(stalling)
    (suspect,) = find_culprits(stalling.job, stalling.progress)
    assert suspect.rank is None and any(stalling.deaf in link for link in suspect.links), explain(stalling)
    broken = [pair for pair in sound if stalling.deaf in pair]
    (suspect,) = find_culprits(stalling.job, stalling.progress, sound=[p for p in sound if p not in broken])
    assert suspect.rank is None, "one of the links that carry it may be at fault"


@settings(max_examples=EXAMPLES, deadline=None)
@given(jobs())
def test_among_the_suspects_one_can_go_on_unless_a_fault_keeps_it(stalling):
    assert stalling.move(moves_of(stalling))
    suspects = find_culprits(stalling.job, stalling.progress)
    named = {suspect.rank for suspect in suspects if suspect.rank is not None}
    named |= {rank for suspect in suspects for link in suspect.links for rank in link}
    assert any(map(stalling.can_move, named)), explain(stalling)


def test_a_ranks_current_action_is_described():
    schedule = lower(generate("1f1b", Placement.straight(2), 2))
    job = JobRows((Replica(schedule, (4, 7)),))
    row = job.row(7)
    assert row == schedule.rows[1]
    assert job.doing(7, RowProgress(0)) == "before its first step"
    assert job.doing(7, RowProgress(3)) == f"before {slot_text(row[0])} (slot 1 of {len(row)}) of step 3"
    within = RowProgress(3, done=1, begun=True)
    assert job.doing(7, within) == f"in {slot_text(row[1])} (slot 2 of {len(row)}) of step 3"
    assert job.doing(7, RowProgress(3, done=len(row))) == "done with step 3"
    assert job.predicted_s(7) == 0.0
    assert JobRows((Replica(schedule, (4, 7), busy_s=(1.5, 2.5)),)).predicted_s(7) == 2.5


def test_a_schedule_without_sends_is_no_job():
    lowered = lower(generate("1f1b", Placement.straight(2), 1))
    rows = [[slot for slot in row if slot[0].op is not Op.SEND_F] for row in lowered.rows]
    job = JobRows((Replica(lowered.with_rows(rows), (0, 1)),))
    receiving = next(number for number, slot in enumerate(rows[1]) if slot[0].op is Op.RECV_F)
    with pytest.raises(ValueError, match="1RECV_F0: no rank sends it"):
        find_culprits(job, {0: RowProgress(1, 0, True), 1: RowProgress(1, receiving, True)})


def test_what_crosses_between_sites_goes_over_all_uplinks_of_its_cell():
    schedule = lower(generate("1f1b", Placement.straight(3, (1, 2)), 1))
    replicas = tuple(Replica(schedule, (first, first + 1, first + 2)) for first in (0, 10, 20))
    job = JobRows(replicas, ((0, 2),))
    assert job.crosses(0, 1) and job.crosses(1, 0) and not job.crosses(1, 2)
    assert job.carriers(0, 1) == ((0, 1), (20, 21)) and job.carriers(21, 20) == ((1, 0), (21, 20))
    assert job.carriers(1, 2) == ((1, 2),), "inside of a site"
    assert job.carriers(10, 11) == ((10, 11),), "not of the cell"
    assert job.seats[21] == (2, 1)
