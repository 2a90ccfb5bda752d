"""ZB-V and DualPipeV against torch's own schedules, row for row."""

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

from weft.pipeline.action import slot_text
from weft.pipeline.generators.folded import generate_dualpipev, generate_zbv
from weft.pipeline.placement import Placement


def torch_rows(cls, num_ranks, num_microbatches):
    """The compute rows that torch's schedule builds in its constructor, without its stages."""
    peer = object.__new__(cls)
    peer.pp_group_size = num_ranks
    peer.num_stages = peer._num_stages = 2 * num_ranks
    peer._n_microbatches = num_microbatches
    rows = (peer._calculate_single_rank_operations(rank) for rank in range(num_ranks))
    return [[str(action) for action in row if action is not None] for row in rows]


def text_rows(schedule):
    return [[slot_text(slot) for slot in row] for row in schedule.rows]


@pytest.mark.parametrize("num_microbatches", [1, 3, 8, 15, 16, 33])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_zbv_is_torchs(num_ranks, num_microbatches):
    ours = generate_zbv(Placement.fold(num_ranks), num_microbatches)
    assert text_rows(ours) == torch_rows(ScheduleZBVZeroBubble, num_ranks, num_microbatches)


@pytest.mark.parametrize("extra_microbatches", [0, 1, 7, 20])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_dualpipev_is_torchs(num_ranks, extra_microbatches):
    num_microbatches = 2 * num_ranks + extra_microbatches
    ours = generate_dualpipev(Placement.fold(num_ranks), num_microbatches)
    assert text_rows(ours) == torch_rows(ScheduleDualPipeV, num_ranks, num_microbatches)


@pytest.mark.parametrize("generate", [generate_zbv, generate_dualpipev])
@pytest.mark.parametrize(
    "placement", [Placement.straight(4), Placement.interleaved(4, 2), Placement.site_fold((2, 2)), Placement.fold(4, 4)]
)
def test_other_placements_name_the_remedy(generate, placement):
    with pytest.raises(ValueError, match=r"choose placement=fold or schedule=auto"):
        generate(placement, 16)
