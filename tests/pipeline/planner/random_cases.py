"""Random small clusters, models and requests, from a seed."""

import random
from dataclasses import replace
from itertools import combinations

from weft.pipeline.hardware import GPU_KINDS
from weft.pipeline.planner.cluster import Cluster, Link, Site
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.workload import LayerWork, ModelWork, received_work

MODELS = ("even", "head", "embedding", "one huge layer", "few layers", "experts")


def case(seed):
    """A cluster, a model and a request; half of the models barely fit."""
    rng = random.Random(seed)
    cluster = random_cluster(rng)
    work = random_work(rng, rng.choice(MODELS))
    max_memory = rng.choice([0.8, 0.8, 0.8, 0.4, 0.1])
    memory = max_memory * sum(site.gpus * site.gpu.memory_bytes for site in cluster.sites)
    fill = rng.choice([0.05, 0.3, 0.5, 0.7])
    work = scaled(work, memory * fill / (18 * work.parameters), rng.choice([0.3, 1.0, 3.0]) * max_memory)
    sequences = rng.choice([1, 2, 3, 4, 6, 8, 8, 12, 12])
    pins = {}
    if rng.random() < 0.2:
        sequences, pins = 0, {"microbatches": rng.choice([1, 2, 4, 6])}
    objective = rng.choice([Objective.throughput] * 5 + [Objective.cost, Objective.cost, Objective.latency])
    return (
        cluster,
        work,
        Request(
            sequences=sequences,
            objective=objective,
            pins=pins,
            max_memory=max_memory,
            max_sites=rng.choice([0] * 9 + [1]),
            max_cost_per_hour=rng.choice([0.0] * 9 + [4.0]),
            home=frozenset(rng.choice([()] * 9 + [(0,)])),
        ),
    )


def random_cluster(rng):
    sites = []
    for number in range(number_of_sites := rng.choice([1, 1, 2, 2, 2, 3])):
        most = 4 if number_of_sites < 3 else 2
        gpus_per_host = min(most, rng.choice([1, 1, 2, 4]))
        sites.append(
            Site(
                name=f"s{number}",
                hosts=rng.randint(1, most // gpus_per_host),
                gpus_per_host=gpus_per_host,
                gpu=GPU_KINDS[rng.choice(["A100", "A100-40GB", "H100", "A40", "L40S", "B200"])],
                price=rng.choice([0.0, 1.0, 2.0, round(rng.uniform(0.5, 4.0), 2)]),
                network_bps=rng.choice([10e9, 25e9, 400e9]),
            )
        )
    if rng.random() < 0.3:  # all of one kind
        sites = [replace(sites[0], name=site.name, price=site.price) for site in sites]
    links = {}
    for pair in combinations(range(len(sites)), 2):
        if len(sites) < 3 or rng.random() < 0.8:
            links[pair] = Link(
                latency_s=rng.choice([0.0, 0.001, 0.02, 0.08]),
                bandwidth_bps=rng.choice([1e8, 1e9, 5e9, 2e10, 4e11]),
                pair_bps=rng.choice([float("inf"), float("inf"), 3e8]),
                egress_price=rng.choice([0.0, 0.02]),
            )
    return Cluster(sites=tuple(sites), links=links, efficiency=rng.choice([0.3, 0.4, 0.5]))


def random_work(rng, kind):
    """A model of one kind, whose sizes `scaled` sets."""
    width, tokens = rng.choice([1024, 4096, 8192]), rng.choice([1024, 2048, 4096])
    count = rng.randint(1, 3) if kind == "few layers" else rng.randint(3, 6)
    layers = [_layer(width, tokens, 12 * width * width, kind == "experts") for _ in range(count)]
    rows = rng.choice([32_000, 128_000])
    outside = rows * width
    if kind == "one huge layer":
        place = rng.randrange(count)
        layers[place] = _layer(width, tokens, rng.choice([2, 4]) * 12 * width * width, False)
    heavy = {"head": 6, "embedding": 1}.get(kind, 1)
    before = LayerWork(
        parameters=outside * (6 if kind == "embedding" else 1),
        activation_bytes=8.0 * tokens,
        shared_bytes=256.0 * tokens,
    )
    received = received_work(2.0 * width * tokens, shared_bytes=256.0 * tokens)
    after = LayerWork(
        parameters=outside * heavy,
        matmul_flops=2.0 * outside * heavy * tokens,
        activation_bytes=4.0 * rows * tokens,
        unrecomputed_bytes=4.0 * rows * tokens,
        working_bytes=8.0 * rows * tokens,
    )
    return ModelWork(
        name=kind,
        sequence_length=tokens,
        before=before,
        layers=tuple(layers),
        after=after,
        tied_parameters=0,
        message_bytes=2.0 * width * tokens,
        attended_bytes=0.5 * width * tokens,
        heads=rng.choice([1, 2, 4, 6]),
        experts=4 if kind == "experts" else 0,
        received=received,
    )


def _layer(width, tokens, parameters, has_experts):
    share = 4 if has_experts else 1  # of the experts a token goes to one in four
    return LayerWork(
        parameters=parameters,
        matmul_flops=2.0 * parameters * tokens / share,
        attention_flops=2.0 * width * tokens * tokens,
        activation_bytes=34.0 * width * tokens,
        gradient_bytes=20.0 * width * tokens,
        forward_bytes=8.0 * width * tokens,
        expert_parameters=parameters * 2 // 3 if has_experts else 0,
        routed_bytes=2.0 * width * tokens if has_experts else 0.0,
        routed_layers=float(has_experts),
    )


def scaled(work, weights, activations):
    """The model with so many times as many weights, and products with them, and so much larger activations.

    Operations and bytes are whole numbers, whose sums do not depend on the order.
    """

    def part(one):
        return replace(
            one,
            parameters=max(1, int(one.parameters * weights)) if one.parameters else 0,
            expert_parameters=int(one.expert_parameters * weights),
            matmul_flops=float(round(one.matmul_flops * weights)),
            trained_parameters=None,
            trained_expert_parameters=None,
            trained_flops=None,
            activation_bytes=float(round(one.activation_bytes * activations)),
            unrecomputed_bytes=float(round(one.unrecomputed_bytes * activations)),
            deferred_bytes=None,
        )

    return replace(work, before=part(work.before), layers=tuple(map(part, work.layers)), after=part(work.after))
