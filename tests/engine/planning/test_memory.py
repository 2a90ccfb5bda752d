"""Tests of a schedule's live activations: the simulator's count against the engine's, the W against 1F1B."""

from dataclasses import replace

import pytest

from tests.engine.tiny import measured_peaks, tiny_config
from weft.engine.planning.memory import Gathered, RankBytes, message_bytes, rank_memory
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.memory import ZeroMemory
from weft.pipeline.placement import Placement
from weft.pipeline.workload import Working
from weft.tools.ranks import run_ranks

# Two layers per chunk: with fewer, what the loss saves (on the fold's first rank) outweighs them.
CASES = {
    "1f1b": tiny_config("1f1b", stages=4, microbatches=12, layers=16),
    "w": tiny_config("w", "fold", stages=4, microbatches=12, layers=16),
    "zbv": tiny_config("zbv", "fold", stages=4, microbatches=8),
    "auto": tiny_config("auto", "fold", stages=4, microbatches=8),
}


@pytest.mark.timeout(200)
def test_predicted_and_measured_peaks():
    """Live chunks agree on every rank; the W holds at most 3 % more than 1F1B (DHelix section 6.5)."""
    results = run_ranks(4, measured_peaks, list(CASES.values()), timeout_s=180)
    by_case = dict(zip(CASES, results[0], strict=True))
    for name, (predicted, measured, _) in by_case.items():
        assert measured == predicted, name
    assert max(by_case["w"][2]) <= 1.03 * max(by_case["1f1b"][2])


def test_a_hop_has_a_gradient_and_at_its_end_an_output_besides_outputs_on_their_way():
    costs = CostModel.unit(4)
    costs = replace(costs, stages=tuple(replace(stage, output_bytes=10.0**i) for i, stage in enumerate(costs.stages)))
    fold, straight = Placement.fold(2), Placement.straight(4)
    assert [message_bytes(fold, costs, rank) for rank in range(2)] == [1 + 2 * 100, 2 * 1 + 100]
    assert [message_bytes(straight, costs, rank) for rank in range(4)] == [1, 2 * 1 + 10, 2 * 10 + 100, 2 * 100]


@pytest.mark.parametrize("widest", [0, 3])
def test_a_rank_counts_what_its_fullest_action_gathers(widest):
    """Weights count the most that any stage of a rank gathers, here stage 0 of the first rank."""
    config, costs = tiny_config("zbv", "fold", stages=2, microbatches=4), CostModel.unit(4)
    config.zero.stage = 3
    cell = lower(generate("zbv", Placement.fold(2), 4, costs=costs), zero_stage=3)
    ranks = [RankBytes(ZeroMemory(100.0, 0.0, 0.0, 8.0), 0.0, 0.0)] * 2
    working = [Working(1e3 * (stage == widest), 1e3 * (stage == widest), 0.0, 0.0) for stage in range(4)]

    def totals(gathered):
        gathered = [Gathered(num_bytes) for num_bytes in gathered]
        return [each.total for each in rank_memory(config, cell, costs, ranks, [1] * 4, working, gathered)]

    alike, other = totals([50.0] * 4), totals([50.0, 50.0, 50.0, 20.0])
    assert [most - found for most, found in zip(alike, other, strict=True)] == [30.0 * (widest == 3), 0.0]


@pytest.mark.parametrize(
    ("whole", "every", "micro", "beside"),
    [(False, 0, 4, 3), (True, 0, 4, 3), (False, 1, 4, 3 + 5), (False, 0, 1, 3 + 5)],
)
def test_buffers_count_while_weights_are_gathered_or_gradients_reduced(whole, every, micro, beside):
    """Whole weights are gathered before a stage computes. Of the last micro-batch gradients are reduced."""
    config, costs = tiny_config("1f1b", stages=2, microbatches=micro), CostModel.unit(2)
    costs = replace(
        costs, stages=tuple(replace(stage, activation_bytes=100.0, output_bytes=0.0) for stage in costs.stages)
    )
    config.zero.stage, config.zero.reduce_every = 3, every
    cell = lower(generate("1f1b", Placement.straight(2), micro, costs=costs), zero_stage=3)
    ranks = [RankBytes(ZeroMemory(0.0, 0.0, 0.0, 3.0 + 5.0, 3.0), 0.0, 0.0)] * 2
    gathered = [Gathered(0.0, whole)] * 2
    first, _ = rank_memory(config, cell, costs, ranks, [1] * 2, [Working(0.0, 0.0, 0.0, 0.0)] * 2, gathered)
    assert first.activations + first.working == 100.0 * min(2, micro) + beside
