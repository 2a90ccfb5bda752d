"""The three tiers against the paper's formulas, searched by brute force, and its own examples."""

from itertools import product
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.pipeline.tiers import (
    MAX_CHUNKS,
    First,
    LayerCosts,
    ModelCosts,
    OperationCosts,
    layer_tier,
    model_tier,
    operation_tier,
)

SECONDS = st.floats(0, 100)
SIZES = st.integers(1, 16)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SIZES, SIZES)
def test_granularity_is_a_partition_of_the_workload(comm, independent, dependent, inter_cost, inter, intra):
    costs = OperationCosts(
        comm_cost=comm,
        in_cost=independent,
        comp_cost=dependent,
        cost_inter=inter_cost,
        inter_size=inter,
        intra_size=intra,
    )
    shares = operation_tier(costs).granularity
    assert isclose(sum(shares), 1.0)
    assert min(shares) > 0
    assert len(shares) <= MAX_CHUNKS
    if independent >= comm:
        assert shares == (1.0,)


@pytest.mark.parametrize(
    ("costs", "granularity"),
    [
        ({"comm_cost": 4, "in_cost": 4}, [1]),  # lines 24-25
        ({"comm_cost": 4, "in_cost": 2}, [1 / 2, 1 / 2]),  # lines 4-7
        ({"comm_cost": 4, "in_cost": 1.5}, [1 / 3] * 3),
        ({"comm_cost": 4, "in_cost": 0}, [1 / 8] * 8),  # line 1
        ({"comm_cost": 400, "in_cost": 1}, [1 / 8] * 8),
        ({"comm_cost": 4, "in_cost": 3, "cost_inter": 2, "inter_size": 2, "intra_size": 8}, [1 / 8, 7 / 8]),  # 10-12
        (
            {"comm_cost": 4, "in_cost": 1, "cost_inter": 2, "comp_cost": 40, "inter_size": 2, "intra_size": 8},
            [1 / 2, 1 / 2],  # 15-16
        ),
        (
            {"comm_cost": 4, "in_cost": 1, "cost_inter": 2, "comp_cost": 8, "inter_size": 3, "intra_size": 8},
            [8 / 24, 2 / 24, 14 / 24],  # 17-20
        ),
        (
            {"comm_cost": 4, "in_cost": 1, "cost_inter": 2, "comp_cost": 24, "inter_size": 2, "intra_size": 8},
            [8 / 16, 1 / 16, 7 / 16],  # 13: compute of 12 is less than 16 of the intra-node part
        ),
        ({"comm_cost": 4, "in_cost": 1.5, "cost_inter": 1, "inter_size": 2, "intra_size": 2}, [1 / 2, 1 / 2]),  # 7, 9
        (
            {"comm_cost": 4, "in_cost": 2, "cost_inter": 2, "inter_size": 2, "intra_size": 8},
            [8 / 16, 1 / 16, 7 / 16],  # 10: no more than the inter-node part
        ),
    ],
)
def test_algorithm_1_line_by_line(costs, granularity):
    assert operation_tier(OperationCosts(**costs)).granularity == pytest.approx(granularity)


@given(
    st.builds(LayerCosts, **dict.fromkeys(("g_act", "g_w", "g_w_rs", "w_ag", "act_ag", "act_rs", "others"), SECONDS))
)
def test_the_layer_tier_takes_the_smaller_side_of_equation_1(costs):
    plan = layer_tier(costs)
    assert (plan.first is First.weight_gradients) == (plan.t2 < plan.t1)
    compute = costs.g_act + costs.g_w + costs.others
    assert plan.t1 >= compute or isclose(plan.t1, compute)
    assert plan.t2 >= compute or isclose(plan.t2, compute)


def test_tensor_parallelism_alone_takes_input_gradients_first():
    assert layer_tier(LayerCosts(g_act=2, g_w=2, g_w_rs=0, act_ag=1, act_rs=1)).first is First.input_gradients


def test_sharded_weights_take_weight_gradients_first():
    plan = layer_tier(LayerCosts(g_act=2, g_w=2, g_w_rs=2, w_ag=2))
    assert plan.first is First.weight_gradients
    assert (plan.t1, plan.t2) == (8, 4)


COSTS = st.builds(
    ModelCosts,
    c_ag=SECONDS,
    c_rs=SECONDS,
    c_fw=st.floats(0.1, 10),
    c_bw=st.floats(0.1, 10),
    m=st.floats(0, 5),
    memory=st.floats(5, 60),
    mb=st.integers(1, 24),
)


@given(COSTS)
def test_the_model_tier_solves_equation_2(c):
    def uncovered(l1, l2):
        return max(c.c_ag - l1 * c.c_fw, 0) + max(c.c_rs - l2 * c.c_bw, 0)

    allowed = [
        (l1, l2)
        for l1, l2 in product(range(c.mb + 1), repeat=2)
        if l1 + l2 <= c.mb and l1 * c.m <= c.memory and l2 * c.m <= c.memory
    ]
    plan = model_tier(c)
    assert (plan.l1, plan.l2) in allowed
    assert plan.uncovered == uncovered(plan.l1, plan.l2)
    assert isclose(plan.uncovered, min(uncovered(*pair) for pair in allowed), abs_tol=1e-9)


@given(
    st.builds(
        ModelCosts,
        **dict.fromkeys(("c_ag", "c_rs"), st.integers(0, 20)),
        **dict.fromkeys(("c_fw", "c_bw"), st.integers(1, 5)),
        m=st.integers(0, 5),
        memory=st.integers(5, 60),
        mb=st.integers(1, 12),
    )
)
def test_of_plans_that_cover_as_much_the_one_of_fewest_micro_batches_is_taken(c):
    found = [
        (max(c.c_ag - l1 * c.c_fw, 0) + max(c.c_rs - l2 * c.c_bw, 0), l1 + l2, l1)
        for l1, l2 in product(range(c.mb + 1), repeat=2)
        if l1 + l2 <= c.mb and max(l1, l2) * c.m <= c.memory
    ]
    plan = model_tier(c)
    assert (plan.uncovered, plan.l1 + plan.l2, plan.l1) == min(found)


def test_the_model_tier_says_what_limits_it():
    base = {"c_ag": 10, "c_rs": 10, "c_fw": 1, "c_bw": 2, "m": 1}
    assert "all is covered" in model_tier(ModelCosts(**base, memory=100, mb=16)).reason
    assert "memory allows no more" in model_tier(ModelCosts(**base, memory=4, mb=16)).reason
    assert "number of micro-batches allows no more" in model_tier(ModelCosts(**base, memory=100, mb=4)).reason
    with pytest.raises(ValueError, match="not even one fits"):
        model_tier(ModelCosts(**base, memory=0.5, mb=4))


def test_a_group_that_is_not_partitioned_has_one_node_of_one_rank():
    assert OperationCosts(comm_cost=1.0, in_cost=1.0).world_size == 1
