"""The solver's model against known optima, the simulator, and `auto` against the solver."""

import pytest

from tests.pipeline.generators.optimum import solve
from tests.pipeline.generators.random_cases import closed_cases
from tests.pipeline.pair_costs import scaled
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate

pytest.importorskip("ortools")


@pytest.mark.parametrize(
    ("placement", "num_microbatches", "cap_bytes", "expected_s"),
    [
        (Placement.straight(1), 3, 1.0, 9),
        (Placement.straight(2), 1, 1.0, 5),  # F F I I W, the other W at the same time
        (Placement.fold(2), 4, 4.0, 25),  # all work, behind the one forward that the lower rank waits for
        (Placement.straight(2), 3, 1.0, 13),  # F F I I, three times, and the last W
    ],
)
def test_known_optima(placement, num_microbatches, cap_bytes, expected_s):
    found = solve(placement, num_microbatches, CostModel.unit(placement.num_stages), cap_bytes, limit_s=30)
    assert found.proven
    assert found.best_s == found.bound_s == expected_s


def test_a_shared_uplink_serves_one_transfer_at_a_time():
    """Two micro-batches over two sites: 2 s per transfer, each way on the sender's own uplink."""
    placement = Placement.straight(2, (1, 1))
    costs = CostModel.unit(2, wan=LinkCost(bandwidth_bps=4.0))
    found = solve(placement, 2, costs, limit_s=30)
    assert found.proven
    assert found.best_s == simulate(generate("auto", placement, 2, costs=costs), costs).step_s == 11


def test_a_full_backward_saves_what_the_weight_gradient_would_keep():
    stage = StageCost(forward_s=1, input_s=1, weight_s=1, activation_bytes=2, weight_saved_bytes=1)
    costs = CostModel(stages=(stage,) * 2)
    tight = solve(Placement.straight(2), 1, costs, 2.0, limit_s=30)
    roomy = solve(Placement.straight(2), 1, costs, 3.0, limit_s=30)
    assert (tight.best_s, roomy.best_s) == (6, 5)


def test_rounding_keeps_the_bound_a_bound():
    stage = StageCost(forward_s=1.26, input_s=1.04, weight_s=0.77, activation_bytes=1)
    placement, costs = Placement.straight(2), CostModel(stages=(stage,) * 2)
    exact = solve(placement, 3, costs, quantum_s=0.01, limit_s=30)
    coarse = solve(placement, 3, costs, quantum_s=0.5, limit_s=30)
    assert exact.proven
    assert coarse.bound_s <= exact.best_s


def test_no_schedule_under_the_cap():
    with pytest.raises(ValueError, match=r"memory_cap_bytes=1: no schedule exists"):
        solve(Placement.fold(2), 1, CostModel.unit(4), 1.0)


def test_pairs_that_gain_are_beyond_the_model():
    with pytest.raises(ValueError, match=r"costs.strands: the optimum is modelled without pairs"):
        solve(Placement.fold(2), 1, CostModel(stages=CostModel.unit(4).stages, pairs=scaled(0.5)))


@pytest.mark.slow
def test_auto_is_close_to_the_optimum():
    gaps = [result.gap for result in closed_cases(10, limit_s=60, search_s=1.0)]
    assert sum(gaps) / len(gaps) <= 0.02
    assert max(gaps) <= 0.05
