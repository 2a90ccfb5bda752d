"""DHelix's W against its figure 8 and its claims about pairs and memory."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.generators.one_f_one_b import generate_1f1b
from weft.pipeline.generators.w import generate_w
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate

PLACEMENTS = st.one_of(
    st.integers(1, 6).map(Placement.fold),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda sites: Placement.site_fold(tuple(sites))),
)


@settings(deadline=None)
@given(PLACEMENTS, st.integers(1, 24))
def test_every_action_once_on_its_rank(placement, num_microbatches):
    schedule = generate_w(placement, num_microbatches)
    for rank, stages in enumerate(placement.rank_stages):
        actions = list(schedule.actions(rank))
        assert sorted(map(str, actions)) == sorted(
            str(Action(op, stage, m)) for stage in stages for op in (Op.F, Op.B) for m in range(num_microbatches)
        )


@settings(deadline=None)
@given(PLACEMENTS, st.integers(1, 24))
def test_forwards_of_one_group_meet_backwards_of_the_group_before(placement, num_microbatches):
    group = placement.num_ranks
    for row in generate_w(placement, num_microbatches).rows:
        pairs = [slot for slot in row if len(slot) == 2]
        assert all(forward.op is Op.F and backward.op is Op.B for forward, backward in pairs)
        strands = {(forward.microbatch - backward.microbatch) for forward, backward in pairs}
        if placement.groups == (group,):
            assert strands <= {group}
            assert len(pairs) == 2 * max(0, num_microbatches - group)


def test_figure_8():
    """Four ranks, twelve micro-batches: warm-up alpha 1-4, then [beta 5 / alpha 1] enters on rank 0."""
    top, bottom = (generate_w(Placement.fold(4), 12).rows[rank] for rank in (0, 3))
    assert top[:4] == tuple((Action(Op.F, 0, m),) for m in range(4))
    assert next(slot for slot in top if len(slot) == 2) == (Action(Op.F, 0, 4), Action(Op.B, 7, 0))
    assert all(len(slot) == 1 for slot in bottom[:8])
    assert all(len(slot) == 2 for slot in bottom[8:24])
    assert [slot[0].op for slot in bottom[24:]] == [Op.B] * 8


@pytest.mark.parametrize("placement", [Placement.straight(4), Placement.interleaved(4, 2), Placement.fold(4, 4)])
def test_other_placements_name_the_remedy(placement):
    with pytest.raises(ValueError, match=r"schedule=w: .* choose placement=fold, or"):
        generate_w(placement, 8)


def chunk_peaks(schedule, num_layers):
    """Most chunk activations that each rank holds, its pairs alternating layer by layer, forward first."""
    peaks = []
    for row in schedule.rows:
        layers = peak = 0
        for slot in row:
            for _ in range(num_layers):
                for op in (action.op for action in slot):
                    layers += 1 if op is Op.F else -1
                    peak = max(peak, layers)
        peaks.append(peak / num_layers)
    return peaks


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_memory_beside_1f1b(num_ranks):
    """DHelix section 6.5: at most 3 % more, if a pair alternates its layers; one chunk more, if it does not."""
    num_microbatches = 3 * num_ranks
    schedule = generate_w(Placement.fold(num_ranks), num_microbatches)
    straight = generate_1f1b(Placement.straight(num_ranks), num_microbatches)
    half = StageCost(forward_s=0.5, input_s=0.5, weight_s=0.5, activation_bytes=0.5)
    whole = StageCost(forward_s=1, input_s=1, weight_s=1, activation_bytes=1)
    peer_bytes = max(simulate(straight, CostModel(stages=(whole,) * num_ranks)).peak_bytes)
    our_bytes = simulate(schedule, CostModel(stages=(half,) * 2 * num_ranks)).peak_bytes
    assert peer_bytes == num_ranks
    assert max(our_bytes) == num_ranks + 0.5
    num_layers = 64 // num_ranks
    assert max(chunk_peaks(schedule, num_layers)) / 2 == num_ranks + 0.5 / num_layers <= 1.03 * peer_bytes


@pytest.mark.parametrize(("sites", "chunks"), [((2, 2), (12, 4)), ((3, 3), (18, 6)), ((1, 1, 1), (10, 6, 2))])
def test_memory_on_a_site_fold(sites, chunks):
    """The first site holds its chunks longest: 4P - 2p between slots."""
    schedule = generate_w(Placement.site_fold(sites), 40)
    first_ranks = accumulate(sites[:-1], initial=0)
    for rank, expected in zip(first_ranks, chunks, strict=True):
        level = peak = 0
        for slot in schedule.rows[rank]:
            level += sum(1 if action.op is Op.F else -1 for action in slot)
            peak = max(peak, level)
        assert peak == expected
