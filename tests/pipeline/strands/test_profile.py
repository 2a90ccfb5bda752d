"""Strands in a cost model's YAML: what is left out, what comes back, and what is refused with its place."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.pipeline.costs import CostModel
from weft.pipeline.profile import costs_to_yaml, load_costs
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.profile import strands_from_tables, strands_to_tables
from weft.pipeline.strands.segments import Kind, LinkScope, Segment, StageStrands, Strand, StrandPair, WeightGradient


def least():
    """As little as can be said."""
    return {
        "layers": {"block": {"forward": [{"link": "inside_host"}, {}], "backward": [{}]}},
        "stages": {"block": 3},
    }


def test_what_is_left_out_takes_no_time_and_overlaps_in_full():
    pairs = strands_from_tables(least(), 2)
    ends = Segment(compute_s=0.0, link=None, comm_s=0.0, kind=Kind.gemm)
    starts = Segment(compute_s=0.0, link=LinkScope.inside_host, comm_s=0.0, kind=Kind.gemm)
    block = StrandPair(Strand((starts, ends)), Strand((ends,)), ())
    assert pairs.stages == (StageStrands(((block, 3),)),) * 2
    assert pairs.handover_s == 0.0
    assert (pairs.overlap.default, pairs.overlap.links, dict(pairs.overlap.compute)) == (1.0, 1.0, {})


def test_a_weight_gradient_needs_no_seconds_but_a_place():
    tables = least()
    tables["layers"]["block"]["weights"] = [{"after": 0}]
    (stage,) = strands_from_tables(tables, 1).stages
    assert stage.runs[0][0].weights == (WeightGradient(after=0, compute_s=0.0, kind=Kind.gemm),)
    tables["layers"]["block"]["weights"] = [{"compute_ms": 1}]
    with pytest.raises(ValueError, match=r"strands\.layers\.block\.weights\[0\]\.after"):
        strands_from_tables(tables, 1)


MILLISECONDS = st.floats(0, 1e3)


@given(st.lists(MILLISECONDS, min_size=4, max_size=4), st.sampled_from(Kind), st.sampled_from(LinkScope))
def test_milliseconds_are_seconds_and_come_back(times, kind, link):
    compute, comm, weight, handover = times
    segment = {"compute_ms": compute, "comm_ms": comm}
    tables = least() | {"handover_ms": handover}
    block = tables["layers"]["block"]
    block["forward"] = [segment | {"kind": kind.value, "link": link.value}]
    block["weights"] = [{"after": 0, "compute_ms": weight, "kind": kind.value}]
    pairs = strands_from_tables(tables, 1)
    layer = pairs.stages[0].runs[0][0]
    (read,) = layer.forward.segments
    approx = pytest.approx
    assert (read.kind, read.link) == (kind, link)
    assert [read.compute_s, read.comm_s] == approx([t / 1e3 for t in times[:2]])
    assert layer.weights[0].compute_s == approx(weight / 1e3) and pairs.handover_s == approx(handover / 1e3)
    again = strands_to_tables(strands_from_tables(strands_to_tables(pairs), 1))
    assert _flat(again) == approx(_flat(strands_to_tables(pairs)))


def _flat(tables):
    """Every number of nested tables."""
    if isinstance(tables, dict):
        tables = list(tables.values())
    if isinstance(tables, list):
        return [number for value in tables for number in _flat(value)]
    return [tables] if isinstance(tables, int | float) else []


def change(*path, to):
    tables = least()
    holder = tables
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = to
    return tables


BLOCK = ("layers", "block")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (change("layers", to={}), r"strands\.layers={}"),
        (change("layers", to=[]), r"strands\.layers=\[\]"),
        (change("stages", to=[{"block": 1}]), r"strands\.stages: 1 tables where there are 2"),
        (change("stages", to={}), r"strands\.stages\[0\]: no layers; .*block: 4"),
        (change("stages", to={"brick": 1}), "brick"),
        (change("stages", to={"block": 0}), r"strands\.stages\[0\]\.block"),
        (change("stages", to={"block": 1001}), r"strands\.stages\[0\]\.block"),
        (change("handover_ms", to=-1), r"strands\.handover_ms"),
        (change(*BLOCK, "forward", to=None), r"strands\.layers\.block\.forward=None"),
        (change(*BLOCK, "forward", to=[{}] * 201), r"at most 200"),
        (change(*BLOCK, "forward", to=[{"kind": "x"}]), r"forward\[0\]\.kind='x': expected one of"),
        (change(*BLOCK, "forward", to=[{"link": "x"}]), r"forward\[0\]\.link='x': expected one of"),
        (change(*BLOCK, "backward", to=[{}, {"comm_ms": float("nan")}]), r"backward\[1\]\.comm_ms"),
        (change(*BLOCK, "sideways", to=[]), "sideways"),
        (change("overlap", to={"default": "x"}), r"strands\.overlap\.default"),
        (change("overlap", to={"compute": [{"kind": "gemm", "factor": 1}]}), r"overlap\.compute\[0\]\.link"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(tables, said):
    with pytest.raises(ValueError, match=said):
        strands_from_tables(tables, 2)


@pytest.mark.parametrize("tables", [change("stages", to={"block": 1000}), change(*BLOCK, "forward", to=[{}] * 200)])
def test_the_largest_are_taken(tables):
    assert isinstance(strands_from_tables(tables, 2), StrandCosts)


COSTS = """
stages: {forward_ms: 10, input_ms: 10, weight_ms: 5}
strands:
  layers:
    norm: {forward: [{compute_ms: 2, kind: memory}], backward: [{compute_ms: 1}]}
    block:
      forward: [{compute_ms: 3, link: inside_host, comm_ms: 4}]
      backward: [{link: between_hosts, comm_ms: 5}, {compute_ms: 6}]
      weights: [{after: 1, compute_ms: 7, kind: attention}]
  stages: [{norm: 1, block: 2}, {block: 3}]
  overlap: {default: 0.9, links: 0.8, compute: [{kind: gemm, link: inside_host, factor: 0.7}]}
  handover_ms: 0.05
"""


def test_a_costs_file_has_strands_of_each_stage(tmp_path):
    path = tmp_path / "costs.yaml"
    path.write_text(COSTS)
    norm = StrandPair(Strand((Segment(0.002, kind=Kind.memory),)), Strand((Segment(0.001),)))
    block = StrandPair(
        Strand((Segment(0.003, LinkScope.inside_host, 0.004),)),
        Strand((Segment(0.0, LinkScope.between_hosts, 0.005), Segment(0.006))),
        (WeightGradient(1, 0.007, Kind.attention),),
    )
    stages = StageStrands(((norm, 1), (block, 2))), StageStrands(((block, 3),))
    table = OverlapTable({(Kind.gemm, LinkScope.inside_host): 0.7}, 0.8, 0.9)
    pairs = load_costs(path, 2).pairs
    assert pairs == StrandCosts(stages, table, 0.00005)
    path.write_text(costs_to_yaml(replace(CostModel.unit(2), pairs=pairs)))
    assert load_costs(path, 2).pairs == pairs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{norm: 1, block: 2}", "{}"), r"strands.stages\[0\]: no layers; name those"),
        (("{norm: 1, block: 2}", "{other: 2}"), r"strands.stages\[0\]: field 'other' is not known; one of norm, block"),
        (("{norm: 1, block: 2}, ", ""), r"strands.stages: 1 tables where there are 2; give one each"),
        (("norm: 1, block: 2", "norm: 1, block: 2000"), r"strands.stages\[0\].block=2000: expected a whole number"),
        (("after: 1", "after: 2"), r"strands.layers.block: weights: after segments \[2\] of a backward with 2"),
        (("kind: attention", "kind: art"), r"weights\[0\].kind='art': expected one of gemm, attention, memory"),
        (("default: 0.9", "default: 1.5"), r"overlap.default=1.5: an overlap effectiveness factor lies"),
        (("compute_ms: 3", "compute_ms: -3"), r"strands.layers.block.forward\[0\].compute_ms=-3: expected a number"),
        (("link: inside_host, comm", "comm"), r"segment.comm_s=0.004: a segment without a link has no collective"),
    ],
)
def test_errors_of_a_costs_file_name_the_field_and_remedy(tmp_path, change, message):
    assert change[0] in COSTS
    path = tmp_path / "costs.yaml"
    path.write_text(COSTS.replace(*change))
    with pytest.raises(ValueError, match=message):
        load_costs(path, 2)
