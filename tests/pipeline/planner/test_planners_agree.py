"""`weft plan` and the dry run predict the same for each rank: seconds, and bytes of each kind."""

from dataclasses import replace
from itertools import product

import pytest
from pytest import approx

from tests.shapes import sizes
from weft.conf.schema import (
    ClusterConfig,
    ContextExchange,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    Precision,
    Recompute,
    TrainConfig,
    WeftConfig,
    ZeroConfig,
)
from weft.engine.planning.gathering import facts_before_start
from weft.engine.planning.run_plan import plan_run
from weft.engine.stages.files.loading import load_hf_config
from weft.pipeline.hardware import GpuKind
from weft.pipeline.planner.cluster import Cluster, Site
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Layout

SHAPE = sizes(hidden=64, inner=256, layers=8, heads=4, groups=4, words=512)
GPU = GpuKind(
    name="quick to exchange",
    peak={"bf16": 1e12},
    memory_bytes=1e12,
    bytes_per_s=1e12,
    scale_up_bytes_per_s=1e18,
    scale_up_latency_s=0.0,
)
CLUSTER = Cluster(
    sites=(Site(name="here", hosts=64, gpus_per_host=8, gpu=GPU, network_bps=1e18),), links={}, efficiency=1.0
)
PRECISE = {"rel": 0.01, "abs": 1e-12}


def run_of(folder, stages, replicas, tensor, context, zero, checkpointing, lora):
    config = WeftConfig(
        model=ModelConfig(overrides=SHAPE, lora=LoraConfig(enabled=lora)),
        pipeline=PipelineConfig(
            stages=stages,
            microbatches=4,
            layers=[1, 2, 2, 3] if stages == 4 else [],
            recompute=Recompute.layers if checkpointing else Recompute.none,
        ),
        cluster=ClusterConfig(ranks=stages * replicas * tensor * context),
        parallel=ParallelConfig(tensor=tensor, context=context, context_exchange=ContextExchange.gather),
        zero=ZeroConfig(stage=zero),
        train=TrainConfig(precision=Precision.bf16, microbatch_size=2),
    )
    config.data.sequence_length, config.data.cache_dir = 64, str(folder)
    facts = facts_before_start(config, load_hf_config(config.model))
    return plan_run(config, replace(facts, device="cuda", flops_per_s=1e12, keeps_frozen=False, strands=None))


@pytest.mark.parametrize(("checkpointing", "lora"), product((False, True), (False, True)))
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(
    ("stages", "replicas", "tensor", "context"), [(1, 1, 1, 1), (4, 2, 1, 1), (4, 1, 2, 1), (2, 2, 1, 2), (4, 2, 2, 2)]
)
def test_the_planner_and_the_dry_run_agree_on_each_rank(
    tmp_path_factory, stages, replicas, tensor, context, zero, checkpointing, lora
):
    folder = tmp_path_factory.getbasetemp() / "agree"
    plan = run_of(folder, stages, replicas, tensor, context, zero, checkpointing, lora)
    layers = [len(held) for held in plan.split.layers]
    estimates = Estimates(CLUSTER, plan.facts.work)
    layout = Layout(
        num_stages=stages,
        replicas=replicas,
        tensor=tensor,
        context=context,
        microbatches=4,
        microbatch_size=2,
        zero_stage=zero,
        checkpointing=checkpointing,
        sites=(0,),
        stages=(stages,),
        layers=tuple(layers),
    )
    for rank, (ours, memory) in enumerate(zip(plan.costs.stages, plan.memory, strict=True)):
        work = estimates.rank_work(plan.split.layers[rank], first=rank == 0, last=rank == stages - 1)
        theirs = estimates.stage_cost(work, layers[rank], layout, CLUSTER.sites[0])
        assert (theirs.forward_s, theirs.input_s) == (
            approx(ours.forward_s, **PRECISE),
            approx(ours.input_s, **PRECISE),
        )
        assert theirs.weight_s == approx(ours.weight_s, **PRECISE)
        # `weft plan` assumes that all outputs of micro-batches in flight are on their way.
        sent = 0 if rank == stages - 1 else ours.output_bytes
        assert theirs.activation_bytes == approx(ours.activation_bytes + sent, **PRECISE)
        found = estimates.memory(work, layers[rank], layout, min(stages - rank, 4) * theirs.activation_bytes)
        assert found.zero.weights == approx(memory.zero.weights, **PRECISE)
        assert found.zero.gradients == approx(memory.zero.gradients, **PRECISE)
        assert found.zero.optimizer == approx(memory.zero.optimizer, **PRECISE)
        assert found.zero.buffers == approx(memory.zero.buffers, **PRECISE)
        assert found.stepping == approx(memory.stepping, **PRECISE)
        assert found.total == approx(memory.total - memory.small, rel=0.05)
