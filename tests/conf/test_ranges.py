"""Both ends of every range: what lies at an end, just inside and just outside of it."""

from math import inf, nan, nextafter

import pytest

from weft.conf import load
from weft.conf.fields import field_types
from weft.conf.schema import WeftConfig
from weft.conf.schema.ranges import Range, out_of_range, ranges

WHOLE = {name for name, kind in field_types().items() if kind in (int, int | None)}


def with_value(name, value):
    config = WeftConfig()
    *groups, leaf = name.split(".")
    part = config
    for group in groups:
        part = getattr(part, group)
    setattr(part, leaf, value)
    return config


def ends():
    """(field, value, whether it is allowed), at both ends of each range."""
    for name, allowed in ranges(WeftConfig).items():
        for end, is_open, inwards in ((allowed.low, allowed.low_open, 1), (allowed.high, allowed.high_open, -1)):
            if end == inf:
                continue
            whole = name in WHOLE
            yield name, (int(end) if whole else end), not is_open
            yield name, (int(end) - inwards if whole else nextafter(end, -inf * inwards)), False
            yield name, (int(end) + inwards if whole else nextafter(end, inf * inwards)), True
        for value in (inf, -inf, nan):
            yield name, value, False


@pytest.mark.parametrize(("name", "value", "allowed"), ends())
def test_ends(name, value, allowed):
    lines = [line for line in out_of_range(with_value(name, value)) if line.startswith(f"{name}=")]
    assert len(lines) == (not allowed)
    assert all("; choose a value " in line for line in lines)


def test_every_number_of_the_schema_has_a_range():
    numbers = {name for name, kind in field_types().items() if kind in (int, float, int | None, float | None)}
    assert numbers == set(ranges(WeftConfig))


def test_a_number_may_be_left_open_where_its_field_says_so():
    assert not list(out_of_range(with_value("supervise.max_skips", None)))


def test_every_default_is_allowed():
    assert not list(out_of_range(WeftConfig()))


TEXTS = [
    (Range(0), "at least 0"),
    (Range(0, low_open=True), "above 0"),
    (Range(0, 1, high_open=True), "at least 0 and below 1"),
    (Range(1, 64), "at least 1 and at most 64"),
]


@pytest.mark.parametrize(("allowed", "text"), TEXTS)
def test_what_is_said_of_a_range(allowed, text):
    assert str(allowed) == text


@pytest.mark.parametrize("setting", [f"train.steps={10**400}", f"train.batch_size=-{10**400}", "optimizer.lr=1e400"])
def test_numbers_beyond_all_bounds_end_in_one_line(setting):
    with pytest.raises(ValueError) as error:
        load([setting])
    assert str(error.value).startswith(setting.partition("=")[0]) and len(str(error.value).splitlines()) == 1


EDGES = [
    # settings at the edge of a rule, and the same one step beyond it
    (["model=tiny_llama", "pipeline.stages=8"], ["model=tiny_llama", "pipeline.stages=9"]),
    (["model=tiny_llama", "pipeline.layers=[8]"], ["model=tiny_llama", "pipeline.layers=[9]"]),
    (["pipeline.layers=[0]"], ["pipeline.layers=[-1]"]),
    (
        ["pipeline=dualpipev", "pipeline.stages=4", "pipeline.microbatches=8"],
        ["pipeline=dualpipev", "pipeline.stages=4", "pipeline.microbatches=7"],
    ),
    (["pipeline=w", "pipeline.stages=2"], ["pipeline=w", "pipeline.stages=1"]),
    (
        ["pipeline=interleaved", "pipeline.chunks_per_rank=2"],
        ["pipeline=interleaved", "pipeline.chunks_per_rank=1"],
    ),
    (["comm.deadline_s=5", "comm.timeout_s=5"], ["comm.deadline_s=5", "comm.timeout_s=4.9"]),
    (["optimizer.betas=[0,0.99]"], ["optimizer.betas=[0,1]"]),
    (["train.batch_size=8", "pipeline.microbatches=4"], ["train.batch_size=7", "pipeline.microbatches=4"]),
    (
        ["inference.prefill.ranks=[0,1]", "cluster.ranks=2"],
        ["inference.prefill.ranks=[0,2]", "cluster.ranks=2"],
    ),
]


@pytest.mark.parametrize(("inside", "outside"), EDGES)
def test_edges_of_rules(inside, outside):
    load(inside)
    with pytest.raises(ValueError):
        load(outside)
