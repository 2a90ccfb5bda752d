"""Clusters and models that are made up."""

from itertools import combinations

from weft.pipeline.hardware import GPU_KINDS
from weft.pipeline.planner.cluster import Cluster, Link, Site
from weft.pipeline.workload import LayerWork, ModelWork


def site(name, hosts=2, gpus_per_host=4, gpu="A100", price=1.5, region=""):
    return Site(name=name, hosts=hosts, gpus_per_host=gpus_per_host, gpu=GPU_KINDS[gpu], price=price, region=region)


def cluster(*sites, latency_s=0.01, bandwidth_bps=5e9):
    """Sites with equal links between all of them."""
    link = Link(latency_s=latency_s, bandwidth_bps=bandwidth_bps, egress_price=0.02)
    return Cluster(sites=sites, links=dict.fromkeys(combinations(range(len(sites)), 2), link))


def model(layers=8, parameters=200_000_000, tokens=1024, width=4096, experts=0):
    """Equal layers with a head of half a layer; of a model with experts, half of the weights are theirs."""
    part = LayerWork(
        parameters=parameters,
        matmul_flops=2.0 * parameters * tokens,
        attention_flops=2.0 * width * tokens * tokens,
        activation_bytes=34.0 * width * tokens,
        expert_parameters=parameters // 2 if experts else 0,
        routed_bytes=4.0 * width * tokens if experts else 0.0,
        routed_layers=float(experts > 0),
    )
    outside = LayerWork(parameters=parameters // 2, activation_bytes=8.0 * tokens * 1000)
    return ModelWork(
        name="made up",
        sequence_length=tokens,
        before=LayerWork(parameters=parameters // 2),
        layers=(part,) * layers,
        after=outside,
        tied_parameters=0,
        message_bytes=2.0 * width * tokens,
        attended_bytes=0.5 * width * tokens,
        experts=experts,
    )


def sums(total, parts):
    """All ways to write a number as so many positive ones."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in sums(total - first, parts - 1))
