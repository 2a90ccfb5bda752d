"""Our schedules run in torch's own pipeline runtime, and torch's load in ours."""

import csv
import io

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from tests.pipeline.torch_training import train
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower, open_pairs
from weft.pipeline.placement import Placement
from weft.pipeline.serialization import schedule_from_csv, schedule_to_csv
from weft.pipeline.simulation import simulate
from weft.pipeline.validation import validate
from weft.tools.ranks import run_ranks


def torch_csv(cls, num_ranks, num_microbatches):
    """The compute-only CSV of a torch schedule, without its stages."""
    peer = object.__new__(cls)
    peer.pp_group_size = num_ranks
    peer.n_local_stages = 2
    peer.num_stages = peer._num_stages = 2 * num_ranks
    peer._n_microbatches = num_microbatches
    peer.number_of_rounds = max(1, num_microbatches // num_ranks)
    peer.microbatches_per_round = num_microbatches // peer.number_of_rounds
    peer.pipeline_order = {rank: peer._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    text = io.StringIO()
    csv.writer(text).writerows(peer.pipeline_order[rank] for rank in range(num_ranks))
    return text.getvalue()


@pytest.mark.parametrize(
    ("cls", "placement", "step_s", "live"),
    [
        (ScheduleZBVZeroBubble, Placement.fold(4), 51, [8, 8, 8, 8]),
        # A pair is atomic: its forward's output leaves when its backward has ended too.
        (ScheduleDualPipeV, Placement.fold(4), 54, [9, 9, 9, 9]),
        (ScheduleInterleaved1F1B, Placement.interleaved(4, 2), 57, [11, 9, 7, 5]),
    ],
)
def test_torch_schedules_load_and_simulate(cls, placement, step_s, live):
    schedule = schedule_from_csv(torch_csv(cls, 4, 8), name=cls.__name__)
    assert schedule.placement == placement
    validate(schedule)
    validate(lower(schedule))
    timeline = simulate(schedule, CostModel.unit(8))
    assert timeline.step_s == step_s
    assert list(timeline.live_microbatches) == live


def test_dualpipev_with_opened_pairs():
    schedule = open_pairs(schedule_from_csv(torch_csv(ScheduleDualPipeV, 4, 8), name="DualPipeV"))
    validate(schedule)
    assert simulate(schedule, CostModel.unit(8)).step_s == 51


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"),
    [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 3, 4, 8, 10, 12, 15, 33) if m % max(1, m // p) == 0],
)
def test_interleaved_is_torchs_where_torch_has_one(num_ranks, num_microbatches):
    peer = schedule_from_csv(torch_csv(ScheduleInterleaved1F1B, num_ranks, num_microbatches), name="peer")
    ours = generate("interleaved", Placement.interleaved(num_ranks, 2), num_microbatches)
    assert peer.rows == ours.rows


PLACEMENTS = {
    "gpipe": Placement.straight(4),
    "1f1b": Placement.straight(4),
    "interleaved": Placement.interleaved(4, 2),
    "zbv": Placement.fold(4),
    "w": Placement.fold(4),
    "w in sites": Placement.site_fold((2, 2)),
    "dualpipev": Placement.fold(4),
}


@pytest.mark.slow
def test_our_schedules_train_in_torchs_runtime():
    texts = [
        (name, (schedule_to_csv(generate(name.split()[0], placement, 8)), 8, placement.num_stages))
        for name, placement in PLACEMENTS.items()
    ]
    for errors in run_ranks(4, train, texts, timeout_s=100):
        assert set(errors) == set(PLACEMENTS)
        assert max(errors.values()) < 1e-6, errors
