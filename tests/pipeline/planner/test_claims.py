"""Tests of a plan's claims about its space against all layouts, by brute force."""

import random
from dataclasses import replace
from itertools import permutations, product

import pytest

from tests.pipeline.planner.planned import cluster, model, site
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import LEGS, Shape
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.search import plan
from weft.pipeline.planner.shapes import room


def sums(total, parts):
    """All ways to write a number as so many positive ones."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in sums(total - first, parts - 1))


def case(seed):
    rng = random.Random(seed)
    sites = [
        site(f"s{number}", hosts=rng.randint(1, 2), gpus_per_host=rng.choice([1, 2]), gpu=rng.choice(["A100", "A40"]))
        for number in range(rng.randint(1, 2))
    ]
    some = cluster(*sites, latency_s=rng.choice([0.0, 0.01]), bandwidth_bps=rng.choice([1e9, 2e10]))
    work = replace(model(layers=rng.randint(2, 5), parameters=rng.choice([50, 400]) * 10**6), heads=rng.choice([1, 2]))
    objective = rng.choice([Objective.throughput, Objective.cost])
    return some, work, Request(sequences=rng.choice([2, 4, 6]), objective=objective)


def every_layout(some, work, request):
    """All layouts as candidates, with every cut."""
    sequences, layers = request.sequences, len(work.layers)
    evaluation = Evaluation(some, work, request)
    for tensor, size, replicas, stages in product((1, 2), range(1, 7), range(1, 7), range(1, layers + 1)):
        count, rest = divmod(sequences, size * replicas)
        if rest or work.heads % tensor:
            continue
        for zero, checkpointing, arrangement in product(range(4), (False, True), LEGS):
            shape = Shape(
                num_stages=stages,
                replicas=replicas,
                tensor=tensor,
                microbatches=count,
                microbatch_size=size,
                zero_stage=zero,
                checkpointing=checkpointing,
                arrangement=arrangement,
            )
            if shape.virtual_stages > layers:
                continue
            caps = room(some, tensor, replicas)
            for number in range(1, len(caps) + 1):
                for order in permutations(range(len(caps)), number):
                    for held in sums(stages, number) if stages >= number else ():
                        if all(part <= caps[one] for part, one in zip(held, order, strict=True)):
                            cuts = sums(layers, shape.virtual_stages)
                            yield from evaluation.candidates(shape, Route(order, held), cuts)


@pytest.mark.parametrize("seed", range(6))
def test_no_layout_is_better_than_the_gap_allows(seed):
    some, work, request = case(seed)
    try:
        found = plan(some, work, request)
    except ValueError:
        assert not any(True for _ in every_layout(some, work, request))
        return
    evaluation = Evaluation(some, work, request)
    claimed = request.score(found.best) / (1 + found.gap) * (1 - 1e-9)
    for candidate in every_layout(some, work, request):
        if candidate.score_bound < claimed and (one := evaluation.schedule(candidate)) is not None:
            assert request.score(one) >= claimed, one.layout


def test_a_site_may_hold_fewer_ranks_than_it_has_room_for():
    """Where a slow site is filled up, the fast one behind it holds less."""
    some = cluster(
        site("slow", hosts=8, gpus_per_host=1),
        site("fast", hosts=2, gpus_per_host=1, gpu="H100"),
        latency_s=0.001,
        bandwidth_bps=2e10,
    )
    request = Request(sequences=16)
    work = model(layers=6)
    fewer = plan(some.with_site(0, hosts=2), work, request)
    found = plan(some, work, request)
    assert request.score(found.best) / (1 + found.gap) <= request.score(fewer.best)
    assert found.best.step_s <= fewer.best.step_s * 1.002


def test_any_number_of_stages_may_be_best():
    """Six layers and a head on four ranks: two layers on each of three ranks are one GPU fewer, and slower."""
    some = cluster(site("a", hosts=4, gpus_per_host=1, gpu="H100"))
    found = plan(
        some, model(layers=6, parameters=400_000_000), Request(sequences=24, pins={"replicas": 1, "tensor": 1})
    )
    for stages in range(1, 5):
        pins = {"replicas": 1, "tensor": 1, "num_stages": stages}
        pinned = plan(some, model(layers=6, parameters=400_000_000), Request(sequences=24, pins=pins))
        assert found.best.step_s <= pinned.best.step_s * 1.002


def test_of_equally_fast_plans_the_cheaper_is_best():
    sites = site("dear", price=3.0), site("cheap", price=1.0)
    found = plan(cluster(*sites, bandwidth_bps=1e7, latency_s=0.1), model(), Request(sequences=32))
    assert found.best.layout.sites == (1,)
