"""Requests with a field pinned, and clusters with more of something: neither may make a plan better, or worse.

`python -m benchmarks planner` counts them.
"""

from dataclasses import replace
from itertools import chain, product

from tests.pipeline.planner.judge import TOLERANCE
from tests.pipeline.planner.own_model import Own
from weft.pipeline.planner.layout import LEGS
from weft.pipeline.planner.search import plan


def score_and_gap(cluster, work, request):
    """Score of the best plan without the planner's preference among equals, and its gap; None without a plan."""
    try:
        found = plan(cluster, work, request)
    except ValueError as error:
        assert any(word in str(error) for word in ("no layout", "memory", "GPUs", "links", "batch", "max-cost")), error
        return None
    return Own(cluster, work, request).score(found.best.layout, found.best.step_s), found.gap


def pinned(cluster, work, request):
    """The request with each value of each pin that layouts of the cluster may have."""
    gpus = sum(site.gpus for site in cluster.sites)
    most = request.sequences or 24
    values = {
        "num_stages": range(1, min(len(work.layers), gpus) + 1),
        "microbatches": [count for count in range(1, most + 1) if request.sequences % count == 0],
        "schedule": ("auto", "1f1b"),
        "arrangement": LEGS,
        "microbatch_size": [size for size in range(1, most + 1) if request.sequences % size == 0],
        "replicas": [count for count in range(1, gpus + 1) if request.sequences % count == 0],
        "routes": range(1, len(cluster.sites) + 1),
        "cell": range(1, min(gpus, 8) + 1),
        "zero_stage": range(4),
        "tensor": [size for size in range(1, 5) if work.heads % size == 0],
        "context": (1, 2, 4),
        "expert": [size for size in range(1, work.experts + 1) if work.experts % size == 0] or [1],
        "checkpointing": (False, True),
    }
    for name, value in chain.from_iterable(product([name], each) for name, each in values.items()):
        if name not in request.pins:
            yield f"{name}={value}", replace(request, pins={**request.pins, name: value})


def richer(cluster):
    """The cluster with more GPUs or memory at a site, with a faster link or network, or with lower prices."""
    for number, site in enumerate(cluster.sites):
        yield f"{site.name} hosts+1", cluster.with_site(number, hosts=site.hosts + 1)
        more = replace(site.gpu, name=f"{site.gpu.name} more", memory_bytes=1.5 * site.gpu.memory_bytes)
        yield f"{site.name} memory", cluster.with_site(number, gpu=more)
        yield f"{site.name} network", cluster.with_site(number, network_bps=2 * site.network_bps)
        yield f"{site.name} price", cluster.with_site(number, price=0.8 * site.price)
    for pair, link in cluster.links.items():
        faster = {"bandwidth_bps": 2 * link.bandwidth_bps, "pair_bps": 2 * link.pair_bps}
        yield f"{pair} bandwidth", cluster.with_link(*pair, **faster)
        yield f"{pair} latency", cluster.with_link(*pair, latency_s=link.latency_s / 2)
        yield f"{pair} egress", cluster.with_link(*pair, egress_price=link.egress_price / 2)


def compared(kind, cluster, work, request):
    """By change, how many times as good the better side is of what has to be no better, and what its gap allows."""
    base = score_and_gap(cluster, work, request)
    if kind == "pins":
        for name, other in pinned(cluster, work, request):
            if (found := score_and_gap(cluster, work, other)) is not None:
                yield name, base[0] / found[0] if base else float("inf"), 1 + (base[1] if base else 0.0)
    elif base is not None:
        for name, other in richer(cluster):
            found = score_and_gap(other, work, request)
            yield name, found[0] / base[0] if found else float("inf"), 1 + (found[1] if found else 0.0)


def is_refuted(ratio, allowed):
    """True if a plan is worse than its gap allows."""
    return ratio > allowed * (1 + TOLERANCE)
