"""Tests of requests for a plan, word by word; of the order of plans; and of reasons for none."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.pipeline.planner.planned import cluster, model, site
from weft.pipeline.planner.refusals import Refusals
from weft.pipeline.planner.request import FREE, PINS, Objective, Request, read_pins


@pytest.mark.parametrize(
    ("word", "pin"),
    [
        ("pipeline.stages=8", {"num_stages": 8}),
        ("pipeline.stages=1", {"num_stages": 1}),
        ("pipeline.stages=1e1", {"num_stages": 10}),
        ("pipeline.microbatches=1000000000", {"microbatches": 10**9}),
        ("pipeline.schedule=1f1b", {"schedule": "1f1b"}),
        ("pipeline.placement=fold", {"arrangement": "fold"}),
        ("zero.stage=0", {"zero_stage": 0}),
        ("zero.stage=3", {"zero_stage": 3}),
        ("pipeline.recompute=layers", {"checkpointing": True}),
        ("pipeline.recompute=none", {"checkpointing": False}),
        ("comm.cell=2", {"cell": 2}),
    ],
)
def test_a_field_is_fixed_to_a_value_of_its_kind(word, pin):
    found = read_pins([word])
    assert found == pin and [type(value) for value in found.values()] == [type(value) for value in pin.values()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pipeline.stage=8"], "did you mean pipeline.stages?"),
        (["pipeline.stages"], "a plan has no such field to fix; did you mean pipeline.stages?"),
        (["xyz=8"], f"one of {', '.join(PINS)}"),
        (["pipeline.stages=0"], "pipeline.stages=0: expected a whole number of at least 1"),
        (["pipeline.stages=1.5"], "pipeline.stages=1.5: expected a whole number"),
        (["pipeline.stages=-1"], "pipeline.stages='-1': expected a number at least 0"),
        (["pipeline.stages=many"], "pipeline.stages='many': expected a number"),
        (["pipeline.stages="], "pipeline.stages='': expected a number"),
        (["pipeline.microbatches=1000000001"], "at most 1000000000"),
        (["pipeline.schedule=gpipe"], "plans compare auto and 1f1b"),
        (["pipeline.placement=w"], "choose one of straight, fold"),
        (["zero.stage=4"], "choose one of 0, 1, 2 and 3"),
        (["zero.stage=0.5"], "choose one of 0, 1, 2 and 3"),
        (["pipeline.recompute=auto"], "plans compare none and layers"),
        (["comm.cell=2", "parallel.tensor=4"], "GPUs of parallel.tensor=4 work at the same time"),
        (
            ["comm.cell=2", "parallel.context=2", "parallel.expert=8"],
            "GPUs of parallel.context=2 and parallel.expert=8 work",
        ),
        (["parallel.expert=6", "parallel.tensor=4"], "choose a multiple of 4, or 1"),
        (["parallel.expert=2", "parallel.tensor=4"], "choose a multiple of 4, or 1"),
    ],
)
def test_what_cannot_be_fixed_is_named(words, said):
    with pytest.raises(ValueError) as caught:
        read_pins(words)
    assert said in str(caught.value)


def test_pins_that_runs_have_together_pass():
    assert read_pins(["comm.cell=1", "parallel.tensor=4", "parallel.expert=8"]) == {"cell": 1, "tensor": 4, "expert": 8}
    assert read_pins(["comm.cell=3", "parallel.tensor=1"]) == {"cell": 3, "tensor": 1}
    assert read_pins(["parallel.expert=1", "parallel.tensor=4"]) == {"expert": 1, "tensor": 4}
    assert read_pins([]) == {}


def test_each_objective_has_least_of_its_own():
    scores = {
        objective: Request(sequences=1, objective=objective).score_of(7200.0, None, 3.0, 0.5, 1000)
        for objective in Objective
    }
    assert scores == {
        Objective.latency: 7200.0,
        Objective.throughput: 7.2,
        Objective.time_to_tokens: 7.2,
        Objective.cost: pytest.approx((2 * (3.0 + FREE) + 0.5) / 1000, rel=1e-12),
    }
    assert FREE <= 1e-5, "what costs something costs no more for it"
    pinned = Request(sequences=1, pins={"tensor": 4})
    assert pinned.choices("tensor", [1, 2]) == [4] and pinned.choices("context", [1, 2]) == [1, 2]


SOME = cluster(site("a"), site("b", gpu="H100"))
REQUEST = Request(sequences=32)


def refusals(**changes):
    return Refusals(SOME, model(), replace(REQUEST, **changes))


def test_what_was_refused_most_often_is_why_there_is_no_plan():
    found = refusals(max_memory=0.5)
    found.gpus()
    assert found.explained() == "GPUs: no set of sites has enough; loosen --pin, or add GPUs"
    found.links()
    found.links()
    assert found.explained().startswith("links: sites with enough GPUs are not neighbours")
    for price in (9.0, 7.5, 8.0):
        found.price(price)
    assert "the cheapest 7.5 an hour" in found.explained()
    for least, where in ((300 * 2**30, "x=1"), (200 * 2**30, "y=2"), (400 * 2**30, "z=3")):
        found.memory(lambda least=least, where=where: (least, where))
    found.memory()
    said = found.explained()
    least, most = (end(one.gpu.memory_bytes for one in SOME.sites) / 2 for end in (min, max))
    filled = f"a plan fills {least / 2**30:.4g} GiB" + f" to {most / 2**30:.4g} GiB" * (most > least)
    assert "at best 200 GiB on a GPU (y=2)" in said and filled in said
    found.memory(lambda: (2**30, "fits every GPU"))
    alone = refusals()
    alone.memory()
    for one in (found, alone):
        assert "no cut of its layers does, and a plan fills" in one.explained()


def test_no_more_routes_are_suggested_than_there_are_sites_with_links_to_each_other():
    chain = cluster(*map(site, "abcd"))
    chain = replace(chain, links={pair: chain.links[pair] for pair in ((0, 1), (1, 2), (2, 3))})
    said = Refusals(chain, model(), replace(REQUEST, sequences=1024, pins={"routes": 3})).explained()
    assert said.endswith("choose one of 1, 2")


def test_a_pin_that_no_layout_has_is_refused_with_possible_values():
    assert "--pin replicas=7: no layout has it with this batch, GPUs and links; choose one of 1, 2, 4" in (
        refusals(pins={"replicas": 7}).explained()
    )
    assert refusals(pins={"cell": 7}).explained().startswith("no layout: the pinned fields")
    assert refusals().explained().startswith("no layout: the pinned fields")
    assert "choose one of 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ..." in (replace_batch(13).explained())
    assert replace_batch(12).explained().endswith("10, 11, 12")


def replace_batch(most):
    """Micro-batches of a batch that all numbers of replicas up to ``most`` divide, on as many GPUs."""
    some = cluster(site("a", hosts=most, gpus_per_host=1))
    pins = {"replicas": 99, "num_stages": 1, "tensor": 1, "microbatch_size": 1}
    return Refusals(some, model(), replace(REQUEST, sequences=360360, pins=pins))


def test_of_equal_scores_the_cheaper_plan_comes_first_and_of_equal_costs_the_faster():
    def predicted(step_s, price_per_hour):
        cost = price_per_hour * step_s / 3600
        layout = SimpleNamespace(price=price_per_hour)
        values = {"step_s": step_s, "price_per_hour": price_per_hour, "egress_per_step": 0.0, "tokens": 1}
        return SimpleNamespace(**values, layout=layout, cost=lambda tokens: cost * tokens)

    rounded, dear, cheap, slow = (predicted(*one) for one in ((1 - 1e-12, 3.0), (1.0, 2.0), (1.0, 1.0), (1.1, 0.1)))
    assert Request(sequences=1).ranked([slow, rounded, dear, cheap]) == [cheap, dear, rounded, slow]
    half, whole = predicted(1.0, 2.0 + FREE), predicted(2.0, 1.0)
    assert Request(sequences=1, objective=Objective.cost).ranked([whole, half]) == [half, whole]
