"""Odd clusters from a seed: sites of one GPU, 3, 5 or 6 GPUs a host, chains and stars of sites, prices of 0."""

import random
from dataclasses import replace
from itertools import combinations

from tests.pipeline.planner.random_cases import MODELS, random_work, scaled
from weft.pipeline.hardware import GPU_KINDS
from weft.pipeline.planner.cluster import Cluster, Link, Site
from weft.pipeline.planner.request import Objective, Request

HOSTS = {
    "ones": [(1, 1)],
    "chain": [(1, 1), (1, 1), (1, 1), (2, 1)],
    "star": [(1, 1), (1, 1), (1, 1), (2, 1)],
    "odd host": [(1, 3), (1, 2), (3, 1), (1, 1)],
    "one odd site": [(1, 3), (1, 5), (1, 6), (2, 3), (3, 1), (5, 1)],
    "no price": [(1, 1), (2, 1), (1, 2), (1, 3)],
}
"""By kind of cluster, the numbers of hosts and of a host's GPUs."""
SITES = {
    "ones": (2, 4),
    "chain": (4, 4),
    "star": (4, 4),
    "odd host": (2, 2),
    "one odd site": (1, 1),
    "no price": (1, 3),
}


def case(seed):
    """A cluster, a model and a request. Links may be faster than a site's network."""
    rng = random.Random(f"odd {seed}")
    kind = rng.choice(list(HOSTS))
    sites = [_site(rng, kind, number) for number in range(rng.randint(*SITES[kind]))]
    links = {}
    for here, there in combinations(range(len(sites)), 2):
        are_near = {"chain": there - here == 1, "star": here == 0}.get(kind, rng.random() < 0.85 or len(sites) == 2)
        if are_near:
            links[here, there] = Link(
                latency_s=rng.choice([0.0, 0.0005, 0.01, 0.15, 0.4]),
                bandwidth_bps=rng.choice([5e7, 1e9, 3e9, 2e10, 4e11]),
                pair_bps=rng.choice([float("inf"), 1e8, 2e9]),
                egress_price=rng.choice([0.0, 0.02, 1.0]),
            )
    work = random_work(rng, rng.choice(MODELS))
    work = replace(work, heads=rng.choice([1, 3, 5, 6]), experts=rng.choice([2, 3, 6]) if work.experts else 0)
    share = rng.choice([0.8, 0.5, 0.2, 0.05])
    memory = share * sum(site.gpus * site.gpu.memory_bytes for site in sites)
    weights = memory * rng.choice([0.05, 0.3, 0.6, 0.8]) / (18 * work.parameters)
    request = Request(
        sequences=rng.choice([1, 2, 3, 5, 6, 7, 9, 10, 12]),
        objective=rng.choice([*[Objective.throughput, Objective.cost] * 3, Objective.latency]),
        max_memory=share,
        max_sites=rng.choice([0] * 5 + [1, 2]),
        max_cost_per_hour=rng.choice([0.0] * 5 + [1.5, 3.0]),
        home=frozenset(rng.choice([()] * 5 + [(0,)])),
    )
    cluster = Cluster(sites=tuple(sites), links=links, efficiency=rng.choice([0.2, 0.4, 0.6]))
    return cluster, scaled(work, weights, rng.choice([0.1, 1.0, 4.0]) * share), request


def _site(rng, kind, number):
    hosts, gpus_per_host = rng.choice(HOSTS[kind])
    return Site(
        name=f"s{number}",
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        gpu=GPU_KINDS[rng.choice(["A100", "A100-40GB", "H100", "A40", "L40S", "B200"])],
        price=0.0
        if kind == "no price" and rng.random() < 0.6
        else rng.choice([0.0, 1.0, round(rng.uniform(0.3, 5), 2)]),
        network_bps=rng.choice([1e9, 10e9, 25e9, 400e9]),
    )
