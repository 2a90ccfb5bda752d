"""What a layout takes, by hand on a machine of round numbers."""

import pytest

from weft.pipeline.planner.cluster import Cluster, Link, Site
from weft.pipeline.planner.estimates import STARTING_S, STEP_BYTES, Estimates, over_gpus_s
from weft.pipeline.planner.hardware import GpuKind
from weft.pipeline.planner.layout import Layout, Shape
from weft.pipeline.planner.workload import LayerWork, ModelWork

UP_S, UP_BYTES_S = 1e-3, 1e6
"""Latency and bandwidth of a GPU inside its host."""
NET_BYTES_S = 1e5
"""Of each of four GPUs between hosts."""
GPU = GpuKind(
    name="round",
    peak={"bf16": 1e9},
    memory_bytes=1e9,
    bytes_per_s=1e8,
    scale_up_bytes_per_s=UP_BYTES_S,
    scale_up_latency_s=UP_S,
    has_nvlink=True,
)
HERE = Site(name="here", hosts=4, gpus_per_host=4, gpu=GPU, network_bps=8 * 4 * NET_BYTES_S)
THERE = Site(name="there", hosts=4, gpus_per_host=8, gpu=GPU, network_bps=8 * 4 * NET_BYTES_S)
LINK = Link(latency_s=0.03, bandwidth_bps=8e6, pair_bps=4e6)
LAYER = LayerWork(
    parameters=1000,
    matmul_flops=2e6,
    attention_flops=5e5,
    activation_bytes=4000.0,
    unrecomputed_bytes=100.0,
    working_bytes=70.0,
    expert_parameters=600,
    routed_bytes=3000.0,
    routed_layers=1.0,
)
WORK = ModelWork(
    name="round",
    sequence_length=16,
    before=LayerWork(parameters=200),
    layers=(LAYER,) * 4,
    after=LayerWork(parameters=300, matmul_flops=1e6),
    tied_parameters=0,
    message_bytes=800.0,
    attended_bytes=1200.0,
    experts=8,
)
MADE = Estimates(Cluster(sites=(HERE, THERE), links={(0, 1): LINK}, efficiency=0.5), WORK)
SPEED = 5e8
"""Of the peak, what is reached."""


def shape(**more):
    return Shape(**{"num_stages": 2, "replicas": 1, "microbatches": 4, "zero_stage": 1} | more)


def test_a_rank_has_the_work_of_its_layers_and_of_the_ends():
    inside = MADE.rank_work(range(1, 3), first=False, last=False)
    assert (inside.parameters, inside.matmul_flops, inside.activation_bytes) == (2000, 4e6, 8000.0)
    assert (inside.expert_parameters, inside.routed_bytes, inside.routed_layers) == (1200, 6000.0, 2.0)
    assert MADE.rank_work(range(0, 1), first=True, last=False).parameters == 1200
    assert MADE.rank_work(range(3, 4), first=False, last=True).parameters == 1300
    assert MADE.rank_work(range(0, 4), first=True, last=True).matmul_flops == 9e6


@pytest.mark.parametrize(
    ("more", "forward_s", "input_s", "weight_s", "kept"),
    [
        ({}, 2.5e6, 3e6, 2e6, 4000.0),
        ({"microbatch_size": 3}, 7.5e6, 9e6, 6e6, 12000.0),
        # A backward computes its forward again, and what is kept is the layer's input and what cannot be.
        ({"checkpointing": True}, 2.5e6, 5.5e6, 2e6, 900.0),
    ],
)
def test_seconds_and_bytes_of_a_micro_batch(more, forward_s, input_s, weight_s, kept):
    found = MADE.stage_cost(LAYER, 1, shape(**more), HERE)
    assert (found.forward_s, found.input_s, found.weight_s) == pytest.approx(
        (forward_s / SPEED, input_s / SPEED, weight_s / SPEED)
    )
    assert found.activation_bytes == found.weight_saved_bytes == kept
    assert found.output_bytes == 800.0 * more.get("microbatch_size", 1)


def test_tensor_and_context_parallelism_share_work_and_exchange():
    """Four exchanges a layer of what the others have of the stream; keys and values once."""
    one = MADE.layer_collectives_s(LAYER, 2, shape(tensor=4), HERE)
    assert one == pytest.approx(2 * 4 * (3 * UP_S + 800 * 3 / 4 / UP_BYTES_S))
    two = MADE.layer_collectives_s(LAYER, 2, shape(context=4, microbatch_size=3), HERE)
    assert two == pytest.approx(2 * (3 * UP_S + 3 * 1200 * 3 / 4 / UP_BYTES_S))
    both = MADE.layer_collectives_s(LAYER, 1, shape(tensor=2, context=4), HERE)
    streams = 4 * (UP_S + 800 / 4 / 2 / UP_BYTES_S)
    assert both == pytest.approx(streams + 3 * STARTING_S + 1200 / 2 * 3 / 4 / NET_BYTES_S), "over two hosts"
    assert MADE.layer_collectives_s(LAYER, 9, shape(), HERE) == 0.0
    shared = MADE.stage_cost(LAYER, 1, shape(tensor=4), HERE)
    assert shared.weight_s == pytest.approx(2e6 / SPEED / 4) and shared.activation_bytes == 1000.0
    exchanged_s = MADE.layer_collectives_s(LAYER, 1, shape(tensor=4), HERE)
    assert shared.forward_s == pytest.approx(2.5e6 / SPEED / 4 + exchanged_s)
    assert shared.input_s == pytest.approx(3e6 / SPEED / 4 + exchanged_s)


def test_tokens_go_to_their_experts_and_come_back():
    found = MADE.layer_collectives_s(LAYER, 1, shape(replicas=4, expert=4, microbatch_size=2), HERE)
    assert found == pytest.approx(2 * (3 * UP_S + 2 * 3000 * 3 / 4 / UP_BYTES_S))
    far = MADE.layer_collectives_s(LAYER, 1, shape(replicas=8, expert=8), HERE)
    assert far == pytest.approx(2 * (7 * STARTING_S + 3000 * 7 / 8 / NET_BYTES_S))


@pytest.mark.parametrize(
    ("count", "apart", "seconds"),
    [
        (1, 1, 0.0),
        (4, 1, 2 * UP_S * 3 + 1000 * 3 / 4 / UP_BYTES_S),
        (8, 1, 2 * UP_S * 3 + 2 * STARTING_S + 1000 * 3 / 4 / UP_BYTES_S + 1000 / 4 / 2 / NET_BYTES_S),
        (2, 2, 2 * UP_S + 1000 / 2 / UP_BYTES_S),
        (4, 2, 2 * UP_S + 2 * STARTING_S + 1000 / 2 / UP_BYTES_S + 1000 / 2 / 2 / NET_BYTES_S),
        (3, 4, 2 * STARTING_S * 2 + 1000 * 2 / 3 / NET_BYTES_S),
        (3, 8, 2 * STARTING_S * 2 + 1000 * 2 / 3 / NET_BYTES_S),
    ],
)
def test_those_of_a_host_reduce_first_and_hosts_what_is_left_to_each(count, apart, seconds):
    assert over_gpus_s(1000.0, count, apart, HERE) == pytest.approx(seconds)


@pytest.mark.parametrize(("zero_stage", "moved"), [(0, 8), (1, 6), (2, 6), (3, 4)])
def test_replicas_reduce_gradients_and_gather_weights(zero_stage, moved):
    some = shape(replicas=4, zero_stage=zero_stage)
    assert MADE.collective_s(LAYER, some, HERE) == pytest.approx(over_gpus_s(moved * 1000, 4, 1, HERE))
    gathered_s = over_gpus_s(2 * 1000, 4, 1, HERE) if zero_stage == 3 else 0.0
    assert MADE.weights_s(LAYER, some, HERE) == pytest.approx(gathered_s)
    cost = MADE.stage_cost(LAYER, 1, some, HERE)
    assert cost.forward_s == pytest.approx(max(2.5e6 / SPEED, gathered_s))
    assert cost.input_s == pytest.approx(max(3e6 / SPEED, gathered_s))


def test_experts_are_reduced_over_those_that_hold_the_same():
    some = shape(replicas=8, expert=4)
    expected_s = over_gpus_s(6 * 400, 8, 1, HERE) + over_gpus_s(6 * 600 / 4, 2, 4, HERE)
    assert MADE.collective_s(LAYER, some, HERE) == pytest.approx(expected_s)
    assert MADE.parameters(LAYER, some) == 400 + 150
    assert MADE.parameters(LAYER, shape(tensor=4)) == 250
    assert MADE.parameters(LAYER, shape(tensor=2, expert=2, replicas=2)) == 200 + 300


def test_the_optimiser_reads_and_writes_what_a_gpu_steps():
    assert MADE.optimizer_s(LAYER, shape(replicas=4), HERE) == pytest.approx(250 * STEP_BYTES / 1e8)
    assert MADE.optimizer_s(LAYER, shape(replicas=4, zero_stage=0), HERE) == pytest.approx(1000 * STEP_BYTES / 1e8)
    assert MADE.optimizer_s(LAYER, shape(replicas=2, tensor=2), HERE) == pytest.approx(250 * STEP_BYTES / 1e8)
    assert MADE.optimizer_s(LAYER, shape(tensor=2, zero_stage=0), HERE) == pytest.approx(500 * STEP_BYTES / 1e8)


def test_memory_is_of_states_activations_and_what_a_backward_needs_besides():
    found = MADE.memory(LAYER, 1, shape(replicas=4, zero_stage=0, microbatch_size=2), 77.0)
    assert (found.zero.weights, found.zero.gradients, found.zero.optimizer) == (2000, 4000, 12000)
    assert (found.activations, found.working, found.beside) == (77.0, 140.0, 0.0)
    again = MADE.memory(LAYER, 3, shape(checkpointing=True), 0.0)
    assert again.working == 1300.0, "a layer's forward, of three"
    assert MADE.memory(LAYER, 0, shape(checkpointing=True), 0.0).working == 3900.0
    shared = MADE.memory(LAYER, 1, shape(tensor=2, replicas=2), 0.0)
    assert shared.working == 35.0 and shared.zero.weights == 1000.0
    assert shared.zero.optimizer == 12 * 250
    gathered = MADE.memory(LAYER, 1, shape(replicas=2, zero_stage=3), 0.0)
    assert gathered.beside == gathered.zero.buffers > 0.0
    assert MADE.memory(LAYER, 1, shape(replicas=2), 0.0).beside == 0.0


def test_a_pipeline_has_as_much_of_a_link_as_of_a_hosts_gpus():
    """The least of both sites'."""
    found = MADE.link_cost(0, 1, shape(tensor=4))
    assert (found.latency_s, found.bandwidth_bps, found.pair_bps) == (0.03, 8e6 / 2, 4e6 / 2)
    assert found.streams == LINK.connections
    assert MADE.link_cost(1, 0, shape()).bandwidth_bps == 8e6 / 8
    assert MADE.link_cost(0, 1, shape(tensor=4, context=4)).bandwidth_bps == 8e6 * 2


def test_costs_of_a_layout_are_those_of_its_stages_and_links():
    layout = Layout(
        **vars(shape(num_stages=3, tensor=2)), sites=(0, 1), stages=(1, 2), layers=(2, 1, 1), schedule="auto"
    )
    costs = MADE.costs(layout)
    expected = [
        MADE.stage_cost(MADE.rank_work(range(0, 2), first=True, last=False), 2, layout, HERE),
        MADE.stage_cost(MADE.rank_work(range(2, 3), first=False, last=False), 1, layout, THERE),
        MADE.stage_cost(MADE.rank_work(range(3, 4), first=False, last=True), 1, layout, THERE),
    ]
    assert list(costs.stages) == expected
    assert costs.local.latency_s == STARTING_S
    assert costs.local.bandwidth_bps == 8 * 4 * NET_BYTES_S / 8 * 2, "of the slower network a GPU's share, twice"
    assert dict(costs.wan_links) == dict.fromkeys([(0, 1), (1, 0)], MADE.link_cost(0, 1, layout))
