"""Tests of a layout's costs, by hand on a machine of round numbers."""

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.planner.planned import cluster, model, site
from weft.pipeline.hardware import GpuKind
from weft.pipeline.planner.cluster import Cluster, Link, Site
from weft.pipeline.planner.estimates import STARTING_S, STEP_BYTES, Estimates, over_gpus_s
from weft.pipeline.planner.layout import Layout, Shape
from weft.pipeline.workload import LayerWork, ModelWork

UP_S, UP_BYTES_S = 1e-3, 1e6
"""Latency and bandwidth of a GPU inside its host."""
NET_BYTES_S = 1e5
"""Bytes per second of each of four GPUs between hosts."""
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
"""The reached share of the peak."""


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
    ("more", "forward_s", "input_s", "weight_s", "saved", "waiting"),
    [
        ({}, 2.5e6, 3e6, 2e6, 4000.0, 4000.0),
        ({"microbatch_size": 3}, 7.5e6, 9e6, 6e6, 12000.0, 12000.0),
        # A backward computes its forward again, and what is saved is the layer's input and what cannot be. What waits
        # for weight gradients is the same.
        ({"checkpointing": True}, 2.5e6, 5.5e6, 2e6, 900.0, 4000.0),
    ],
)
def test_seconds_and_bytes_of_a_micro_batch(more, forward_s, input_s, weight_s, saved, waiting):
    found = MADE.stage_cost(LAYER, 1, shape(**more), HERE)
    assert (found.forward_s, found.input_s, found.weight_s) == pytest.approx(
        (forward_s / SPEED, input_s / SPEED, weight_s / SPEED)
    )
    assert (found.activation_bytes, found.weight_saved_bytes) == (saved, waiting)
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
    assert shared.weight_s == pytest.approx(2e6 / SPEED / 4)
    assert shared.activation_bytes == (4000 + 2 * 3 * 800) / 4, "two inputs were gathered from three others"
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


def test_what_estimates_go_by():
    """A stepped weight: fp32 weight and two moments are read and written, an fp32 gradient read, a bf16 one written."""
    assert STEP_BYTES == 2 * (4 + 4 + 4) + 4 + 2
    assert 1e-6 < STARTING_S < 1e-4, "a collective between hosts starts in some microseconds"


def test_memory_is_of_states_activations_and_what_a_backward_needs_besides():
    messages = 2 * MADE.work.message_bytes  # one in each direction of the hop between two ranks
    found = MADE.memory(LAYER, 1, shape(replicas=4, zero_stage=0, microbatch_size=2), 77.0)
    assert (found.zero.weights, found.zero.gradients, found.zero.optimizer) == (2000, 4000, 12000)
    assert (found.activations, found.working, found.concurrent_buffers) == (77.0, 140.0, 2 * messages)
    again = MADE.memory(LAYER, 3, shape(checkpointing=True), 0.0)
    assert again.working == 1300.0, "a layer's forward, of three"
    assert MADE.memory(LAYER, 0, shape(checkpointing=True), 0.0).working == 3900.0
    shared = MADE.memory(LAYER, 1, shape(tensor=2, replicas=2), 0.0)
    assert shared.working == 35.0 * 6 / 8 and shared.zero.weights == 1000.0, "a loss over a part of the vocabulary"
    assert shared.zero.optimizer == 12 * 250
    gathered = MADE.memory(LAYER, 1, shape(replicas=2, zero_stage=3), 0.0)
    assert gathered.concurrent_buffers - messages == gathered.zero.buffers > 0.0
    assert MADE.memory(LAYER, 1, shape(replicas=2), 0.0).concurrent_buffers == messages
    for stages, hops in ((1, 0), (3, 2), (9, 2)):
        assert MADE.memory(LAYER, 1, shape(num_stages=stages), 0.0).concurrent_buffers == hops * messages


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


FAR = Site(name="far", hosts=2, gpus_per_host=2, gpu=GPU, network_bps=8 * 4 * NET_BYTES_S)
EMPTY = Site(name="empty", hosts=0, gpus_per_host=2, gpu=GPU, network_bps=8 * 4 * NET_BYTES_S)
LINKS = {
    (0, 1): LINK,
    (0, 2): Link(latency_s=0.01, bandwidth_bps=2e6),
    (1, 2): Link(latency_s=0.02, bandwidth_bps=16e6),
    (0, 3): Link(latency_s=0.0, bandwidth_bps=1e12),
}
APART = replace(MADE, cluster=Cluster(sites=(HERE, THERE, FAR, EMPTY), links=LINKS))


@pytest.mark.parametrize(
    ("some", "expected"),
    [
        (shape(replicas=4), 0.0),
        # Gradients and weights, of what the GPUs of a route share, to each of the others.
        (shape(replicas=4, routes=2), 6 * 1000 / 2 / 2),
        (shape(replicas=4, routes=2, zero_stage=0), 8 * 1000 / 2 / 2),
        (shape(replicas=6, routes=3), 6 * 1000 / 2 / 3),
        (shape(replicas=4, routes=2, tensor=2), 6 * 500 / 2 / 2),
        (shape(replicas=4, routes=2, context=2), 6 * 1000 / 4 / 2),
        (shape(replicas=8, routes=2, expert=4), 6 * (400 / 4 + 150) / 2),
        (shape(replicas=8, routes=2, expert=2), 6 * (400 / 4 + 300 / 2) / 2),
    ],
)
def test_each_gpu_sends_its_share_to_the_other_sites(some, expected):
    assert APART.across_bytes(LAYER, some) == pytest.approx(expected)


def test_replicas_at_several_sites_reduce_over_the_slowest_uplink():
    two = shape(replicas=4, routes=2)
    bits = 8 * 1500
    # Eight GPUs of a host send at once, to one host of the other site each.
    assert APART.across_s(LAYER, two, (0, 1)) == pytest.approx(2 * 0.03 + 8 * bits / 4e6)
    assert APART.across_s(LAYER, two, (1, 0)) == APART.across_s(LAYER, two, (0, 1))
    assert APART.across_s(LAYER, two, (0, 2)) == pytest.approx(2 * 0.01 + 4 * bits / 2e6), "of no limit between hosts"
    three = shape(replicas=6, routes=3)
    bits = 8 * 1000
    by_site = [
        2 * 0.03 + 4 * bits / 8e6 + 4 * bits / 2e6,
        2 * 0.03 + max(8 * bits / 8e6 + 8 * bits / 16e6, 8 * bits / 4e6),
        2 * 0.02 + 2 * bits / 2e6 + 2 * bits / 16e6,
    ]
    assert APART.across_s(LAYER, three, (0, 1, 2)) == pytest.approx(max(by_site))
    assert APART.across_s(LAYER, two, (1, 3)) == inf, "without a link"
    assert APART.across_s(LAYER, two, (1,)) == 0.0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8)), min_size=2, max_size=5),
    st.lists(
        st.none() | st.tuples(st.sampled_from([0.0, 0.01, 0.3]), st.sampled_from([1e6, 3e6, 1e8])),
        min_size=10,
        max_size=10,
    ),
    st.integers(2, 4),
    st.sampled_from([0.0, 1e3, 1e6]),
    st.sets(st.integers(0, 4), max_size=3),
)
def test_no_sites_of_routes_reduce_faster_than_the_least(sites, links, routes, sent, known):
    """Against all sets of sites: the cheapest bytes, and the shortest delay besides those that are known."""
    known = sorted(site for site in known if site < len(sites))
    made = Cluster(
        sites=tuple(
            replace(HERE, name=str(number), hosts=hosts, gpus_per_host=gpus)
            for number, (hosts, gpus) in enumerate(sites)
        ),
        links={
            pair: Link(latency_s=link[0], bandwidth_bps=link[1])
            for pair, link in zip(combinations(range(len(sites)), 2), links, strict=False)
            if link is not None
        },
    )
    estimates = replace(MADE, cluster=made)

    def least_s(here, settled):
        """By trying all."""
        near = {
            there: link
            for there, site in enumerate(made.sites)
            if there != here and site.gpus and (link := made.link(here, there)) is not None
        }
        settled = set(settled) - {here}
        best = inf
        for others in combinations(near, routes - 1):
            if settled <= set(others):
                byte_s = sum(8 * made.sites[here].gpus_per_host / near[there].bandwidth_bps for there in others)
                delay_s = max(
                    [near[there].latency_s for there in settled] + [min(one.latency_s for one in near.values())]
                )
                best = min(best, 2 * delay_s + sent * byte_s)
        return best

    with_gpus = [number for number, site in enumerate(made.sites) if site.gpus]
    for here in with_gpus:
        if len(set(known) - {here}) < routes:
            found_s = estimates.least_across_from_s(here, known, routes, sent)
            assert found_s == pytest.approx(least_s(here, known), rel=1e-9)
    some = shape(replicas=routes, routes=routes)
    sent = estimates.across_bytes(LAYER, some)
    expected_s = min((least_s(here, ()) for here in with_gpus), default=inf)
    assert estimates.least_across_s(LAYER, some) == pytest.approx(expected_s, rel=1e-6)
    assert estimates.least_across_s(LAYER, shape(replicas=routes)) == 0.0


def test_parts_of_one_kind_have_one_answer_and_others_their_own():
    """Among equal layers those in the middle of the pipeline count, as many at one site."""
    layout = Layout(**vars(shape(num_stages=4)), sites=(0, 1), stages=(3, 1), layers=(1, 1, 1, 1), schedule="auto")
    asked = []

    def what(work, held, site):
        asked.append((work.parameters, held, site.name))
        return len(asked)

    assert MADE.of_ranks(layout, what) == [1, 2, 2, 3]
    assert asked == [(1200, 1, "here"), (1000, 1, "here"), (1300, 1, "there")]
    uneven = replace(
        MADE, work=replace(WORK, layers=(LAYER, LAYER, replace(LAYER, parameters=5, trained_parameters=None), LAYER))
    )
    asked.clear()
    assert uneven.of_ranks(layout, what) == [1, 2, 3, 4]
    assert [parameters for parameters, _, _ in asked] == [1200, 1000, 5, 1300]
    asked.clear()
    folded = Layout(**vars(shape(num_stages=2, arrangement="site_fold")), sites=(0,), stages=(2,), layers=(1, 1, 1, 1))
    MADE.of_ranks(folded, what)
    assert asked == [(2500, 2, "here"), (2000, 2, "here")], "the first rank holds both ends"


def test_shared_experts_leave_the_optimizer_as_large_as_it_is():
    layer = LayerWork(parameters=100, expert_parameters=80, matmul_flops=1.0)
    work = replace(model(), layers=(layer,) * 8)
    estimates = Estimates(cluster(site("a")), work)
    shape = Shape(num_stages=1, replicas=4, microbatches=1)
    held = estimates.rank_work(range(8), first=False, last=False)
    alone, shared = (estimates.memory(held, 8, replace(shape, expert=expert)).zero for expert in (1, 4))
    assert shared.weights == pytest.approx(alone.weights * 0.4)
    assert shared.optimizer == pytest.approx(alone.optimizer)


def test_experts_are_whole_beside_tensor_and_of_each_gpu_as_many_weights_are_stepped():
    work = replace(model(experts=8), layers=(LayerWork(parameters=100, expert_parameters=80, matmul_flops=1.0),) * 8)
    estimates, where = Estimates(cluster(site("a")), work), site("a")
    held = estimates.rank_work(range(8), first=False, last=False)
    cut = Shape(num_stages=1, replicas=2, tensor=4, microbatches=1)
    for expert, weights in ((1, 200), (4, 40 + 160), (8, 40 + 80)):
        shape = replace(cut, expert=expert)
        assert estimates.parameters(held, shape) == weights
        assert estimates.optimizer_s(held, shape, where) == estimates.optimizer_s(held, cut, where)
    none_to_reduce = replace(cut, expert=8, replicas=2)
    all_reduced = replace(cut, expert=4, replicas=2)
    assert estimates.collective_s(held, none_to_reduce, where) < estimates.collective_s(held, all_reduced, where)
