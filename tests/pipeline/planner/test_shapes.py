"""The shapes that are compared are all that meet the rules, found here by trying every combination."""

from dataclasses import replace
from itertools import product
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.planner.planned import cluster, model, site
from weft.pipeline.planner.layout import LEGS, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.shapes import shapes, site_capacity

REQUEST = Request(sequences=24)


def by_trying(some, work, request):
    """Shapes of a batch on few GPUs; pins of `arrangement` and `microbatches` are none of them."""
    layers, sequences, found = len(work.layers), request.sequences, []
    widest, most = max(one.gpus_per_host for one in some.sites), max(one.gpus for one in some.sites)
    for tensor, context in product(range(1, most + 1), (1, 2, 4, 8, 16)):
        if work.heads % tensor or work.sequence_length % lcm(2 * context if context > 1 else 1, context * tensor):
            continue
        if not work.heads and tensor > widest and tensor & (tensor - 1):
            continue
        units = [one.units(tensor * context) for one in some.sites]
        for size, replicas, expert, stages in product(
            range(1, sequences + 1), range(1, sequences + 1), range(1, (work.experts or 1) + 1), range(1, layers + 1)
        ):
            microbatches, rest = divmod(sequences, size * replicas)
            shared = expert == 1 or (
                work.experts % expert == 0 and expert % tensor == 0 and replicas * context * tensor % expert == 0
            )
            if rest or not shared or replicas * stages > sum(units):
                continue
            zeros = (0,) if replicas * context == 1 else (1, 2, 3) if microbatches == 1 else (1, 3)
            for zero, checkpointing, arrangement in product(zeros, (False, True), LEGS):
                for routes in range(1, min(8, len(units)) + 1):
                    each = replicas // routes
                    is_one = arrangement == "straight" or (stages > 1 and 2 * stages <= layers)
                    if (
                        is_one
                        and replicas % routes == 0
                        and (routes == 1 or zero < 3)
                        and each * tensor * context % expert == 0
                        and sum(unit // each for unit in units) >= routes * stages
                    ):
                        found.append(
                            Shape(
                                num_stages=stages,
                                replicas=replicas,
                                tensor=tensor,
                                context=context,
                                expert=expert,
                                microbatches=microbatches,
                                microbatch_size=size,
                                zero_stage=zero,
                                checkpointing=checkpointing,
                                arrangement=arrangement,
                                routes=routes,
                            )
                        )
    return found


def ordered(found):
    return sorted(found, key=lambda shape: tuple(vars(shape).values()))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 3, 4])), min_size=1, max_size=3),
    st.sampled_from([1, 4, 6]),
    st.integers(1, 4),
    st.sampled_from([0, 8, 12]),
    st.sampled_from([0, 6, 8]),
    st.sampled_from([1024, 32_767, 32_768]),
)
@settings(max_examples=25, deadline=None)
def test_shapes_are_all_that_meet_the_rules(sites, sequences, layers, experts, heads, tokens):
    some = cluster(*(site(str(number), hosts=hosts, gpus_per_host=gpus) for number, (hosts, gpus) in enumerate(sites)))
    work = replace(model(layers=layers, tokens=tokens, experts=experts), experts=experts, heads=heads)
    request = replace(REQUEST, sequences=sequences)
    assert ordered(shapes(some, work, request)) == ordered(by_trying(some, work, request))


@pytest.mark.parametrize(("count", "most"), [(7, 7), (8, 8), (9, 8)])
def test_replicas_have_eight_routes_at_most(count, most):
    some = cluster(*(site(str(number), hosts=1, gpus_per_host=1) for number in range(count)))
    request = Request(sequences=count * 2, pins={"num_stages": 1, "microbatch_size": 1, "zero_stage": 1})
    found = {one.routes for one in shapes(some, model(), request)}
    assert found == {routes for routes in range(1, most + 1) if count * 2 % routes == 0}
    pinned = replace(request, pins=request.pins | {"routes": count})
    assert bool(list(shapes(some, model(), pinned))) == (count <= 8)


@pytest.mark.parametrize(("tensor", "most"), [(1, 128), (2, 128), (4, 128)])
def test_experts_are_shared_by_as_many_gpus_as_divide_them(tensor, most):
    some, work = cluster(site("a", hosts=64, gpus_per_host=4)), replace(model(experts=128), experts=128)
    pins = {"num_stages": 1, "tensor": tensor, "microbatch_size": 1, "replicas": 128 // tensor, "context": 1}
    found = {one.expert for one in shapes(some, work, Request(sequences=128, pins=pins))}
    assert found == {1, *(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size >= tensor)} and max(found) == most


def test_an_expert_count_that_is_pinned_has_to_divide():
    some, work = cluster(site("a", hosts=4, gpus_per_host=4)), replace(model(experts=12), experts=12)

    def fits(expert, tensor=1, replicas=4, work=work):
        pins = {"num_stages": 1, "expert": expert, "tensor": tensor, "context": 1, "replicas": replicas}
        return bool(list(shapes(some, work, Request(sequences=8, pins=pins))))

    assert fits(4) and fits(2) and fits(4, tensor=2, replicas=2)
    assert not fits(8), "12 experts"
    assert not fits(2, tensor=4, replicas=1), "less than share weights"
    assert not fits(4, replicas=2), "fewer lines"
    assert not fits(2, work=model()), "a model without"


@pytest.mark.parametrize("microbatches", [1, 6])
def test_with_micro_batches_given_replicas_are_all_that_gpus_allow(microbatches):
    some = cluster(site("a", hosts=5, gpus_per_host=1), site("b", hosts=3, gpus_per_host=1))
    pins = {"tensor": 1, "context": 1, "microbatch_size": 2, "microbatches": microbatches, "zero_stage": 1}
    found = list(shapes(some, model(layers=3), Request(sequences=0, pins=pins)))
    assert {one.microbatches for one in found} == {microbatches}
    assert {one.replicas for one in found} == set(range(1, 7))
    for one in found:
        assert sum(units // (one.replicas // one.routes) for units in (5, 3)) >= one.routes * one.num_stages
    pinned = Request(sequences=0, pins=pins | {"replicas": 4})
    assert {one.replicas for one in shapes(some, model(layers=3), pinned)} == {4}


def test_pinned_micro_batches_beside_a_batch_leave_the_replicas_that_make_it():
    some = cluster(site("a", hosts=8))
    for count in (1, 3, 4, 5, 24):
        found = shapes(some, model(), replace(REQUEST, pins={"microbatches": count, "microbatch_size": 1}))
        assert {one.replicas for one in found} == ({24 // count} if 24 % count == 0 else set())
    odd = replace(REQUEST, sequences=9, pins={"microbatch_size": 2})
    assert not list(shapes(some, model(), odd)), "nine sequences are no micro-batches of two"


def test_arrangements_that_are_asked_for_need_a_layer_for_each_virtual_stage():
    some = cluster(site("a", hosts=8))
    for name, legs in (("straight", 1), ("fold", 2), ("site_fold", 2), ("site_interleaved", 2)):
        pins = {"arrangement": name, "replicas": 1, "tensor": 1, "microbatch_size": 1, "num_stages": 4}
        for layers in (4, 7, 8):
            found = list(shapes(some, model(layers=layers), replace(REQUEST, pins=pins)))
            assert bool(found) == (layers >= 4 * legs), (name, layers)


def test_a_site_holds_whole_ranks_of_all_replicas():
    some = cluster(site("a", hosts=3, gpus_per_host=4), site("b", hosts=2, gpus_per_host=2))
    assert site_capacity(some, 1, 1) == [12, 4] and site_capacity(some, 1, 5) == [2, 0]
    assert (
        site_capacity(some, 2, 2) == [3, 1]
        and site_capacity(some, 4, 1) == [3, 1]
        and site_capacity(some, 8, 1) == [1, 0]
    )


def test_an_open_batch_has_micro_batches_of_every_size():
    """Sizes that are no powers of two fill the memory better."""
    pins = {"microbatches": 6, "num_stages": 1, "replicas": 1, "tensor": 1, "context": 1}
    found = shapes(cluster(site("a")), model(), replace(REQUEST, sequences=0, pins=pins))
    assert {one.microbatch_size for one in found} == set(range(1, 65))


def test_only_shapes_with_enough_replicas_to_pool_have_a_pinned_cell():
    """Without a plan, every shape would be looked at until none is left."""
    some = cluster(site("a"), site("b"))
    for cell in (1, 2, 3):
        every = [one for one in shapes(some, model(), REQUEST) if cell == 1 or (one.may_pool and one.replicas >= cell)]
        assert list(shapes(some, model(), replace(REQUEST, pins={"cell": cell}))) == every
