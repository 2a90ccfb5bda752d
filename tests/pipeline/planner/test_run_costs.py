"""The planner and a run's plan compute the same costs of stages and the same memory of ranks."""

from dataclasses import astuple, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.planning.given import MODEL
from tests.pipeline.planner.test_estimates import HERE
from weft.conf.schema import Precision, WeftConfig
from weft.engine.layout import RankLayout
from weft.engine.models.sizes import model_sizes
from weft.engine.models.tracing import trace_model
from weft.engine.planning.estimates import planning_costs, rank_size, working_bytes
from weft.engine.planning.facts import Facts, Links
from weft.engine.planning.memory import rank_states
from weft.engine.planning.run_plan import _stepped
from weft.engine.stages.cutting.split import StageSplit
from weft.pipeline.memory import stepping_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Layout

TOKENS = 32
SITE = replace(HERE, gpus_per_host=64)


@cache
def model(tensor):
    """Return the model's work, and its sizes on each of the ranks that share a layer."""
    return trace_model(MODEL, TOKENS), model_sizes(MODEL, tensor=tensor)


@given(
    layers=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    size=st.integers(1, 3),
    replicas=st.integers(1, 4),
    tensor=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    microbatches=st.integers(4, 8),
    recomputes=st.booleans(),
)
def test_both_compute_the_same(layers, size, replicas, tensor, context, zero, microbatches, recomputes):
    layers = (*layers, 12 - sum(layers)) if sum(layers) < 12 else (3, 9)
    work, sizes = model(tensor)
    stages = len(layers)
    config = WeftConfig()
    config.data.sequence_length, config.train.microbatch_size, config.train.precision = TOKENS, size, Precision.bf16
    config.pipeline.microbatches, config.zero.stage = microbatches, zero
    layout = RankLayout(sites=(stages,), replicas=replicas, context=context, tensor=tensor)
    estimates = Estimates(Cluster(sites=(SITE,)), work)
    speed = SITE.gpu.flops_per_s * estimates.cluster.efficiency
    facts = Facts(
        layout=layout,
        model=sizes,
        work=work,
        flops_per_s=speed,
        device="cuda",
        device_bytes=1e12,
        stage_costs={},
        links=Links(),
        replica_nodes=(0,) * replicas * context,
        recomputes=recomputes,
        sources={"links": "given"},
    )
    planned = Layout(
        num_stages=stages, replicas=replicas, tensor=tensor, context=context, microbatches=microbatches,
        microbatch_size=size, zero_stage=zero, checkpointing=recomputes, sites=(0,), stages=(stages,), layers=layers,
    )  # fmt: skip
    split, placement = StageSplit(layers), Placement.straight(stages)
    run = planning_costs(config, facts, split)
    working, states = working_bytes(config, facts, split, run), rank_states(config, facts, placement, split)
    found = estimates.of_ranks(planned, lambda work, held, site: (work, held, site))
    for stage, (part, held, site) in enumerate(found):
        cost = estimates.stage_cost(part, held, planned, site)
        exchanged_s = estimates.layer_collectives_s(part, held, planned, site)
        assert cost.activation_bytes == pytest.approx(run.stages[stage].activation_bytes)
        assert cost.output_bytes == pytest.approx(run.stages[stage].output_bytes * tensor * context)
        if zero < 3:
            assert cost.forward_s == pytest.approx(run.stages[stage].forward_s + exchanged_s)
            assert cost.weight_s == pytest.approx(run.stages[stage].weight_s)
        memory = estimates.memory(part, held, planned)
        assert astuple(memory.zero) == pytest.approx(astuple(states[stage]), rel=0.02)
        stepped = _stepped(config, facts, rank := rank_size(sizes, split, [stage]))
        assert memory.stepping == pytest.approx(
            stepping_bytes(config.optimizer, stepped, rank.largest, together=True), rel=0.02
        )
        if stage:
            assert memory.working == pytest.approx(max(working[stage]))
