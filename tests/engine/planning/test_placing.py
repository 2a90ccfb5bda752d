"""Which placement a run takes: what is named, what the schedule needs, or what `auto` finds the shortest."""

from dataclasses import replace
from itertools import pairwise

import pytest
from transformers import LlamaConfig

from tests.engine.planning.given import MODEL, facts_of
from weft.conf.checks import check
from weft.conf.schema import (
    ClusterConfig,
    LinkConfig,
    PipelineConfig,
    PlacementKind,
    ScheduleKind,
    SiteConfig,
    WeftConfig,
)
from weft.engine.planning.run_plan import settle_placement
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement
from weft.pipeline.serialization import schedule_to_json


def config(schedule="auto", *, sites=(), mbps=0.0, **pipeline):
    names = [f"site{number}" for number in range(len(sites))]
    cluster = ClusterConfig(
        sites=[SiteConfig(name=name, ranks=ranks) for name, ranks in zip(names, sites, strict=True)],
        links=[LinkConfig(sites=[a, b], latency_ms=10, bandwidth_mbps=mbps) for a, b in pairwise(names)],
    )
    stages = sum(sites) or 4
    return WeftConfig(
        pipeline=PipelineConfig(stages=stages, schedule=ScheduleKind[schedule], search_seconds=0.0, **pipeline),
        cluster=cluster,
    )


def settled(made, model=MODEL, flops=1e12):
    facts = facts_of(made, model)
    return settle_placement(made, facts if made.pipeline.costs_file else replace(facts, flops_per_s=flops))


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        ("1f1b", Placement.straight(4)),
        ("gpipe", Placement.straight(4)),
        ("interleaved", Placement.interleaved(4, 2)),
        ("w", Placement.fold(4)),
        ("zbv", Placement.fold(4)),
    ],
)
def test_a_fixed_schedule_takes_what_it_needs(schedule, placement):
    made = config(schedule)
    check(made)
    assert settled(made) == placement


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("straight", Placement.straight(4, (2, 2))),
        ("site_fold", Placement.site_fold((2, 2))),
        ("site_interleaved", Placement((2, 2), "dd", (2, 2))),
        ("interleaved", Placement.interleaved(4, 2, (2, 2))),
    ],
)
def test_a_placement_that_is_named_is_taken(kind, placement):
    assert settled(config(sites=(2, 2), mbps=1, placement=PlacementKind[kind])) == placement


def test_auto_cuts_finer_at_one_site_and_crosses_slow_links_once():
    """Three sites: a fold in the middle one would send both ways over one uplink."""
    assert settled(config(microbatches=8)).num_stages == 8
    slow = settled(config(sites=(2, 2, 2), mbps=5, microbatches=12), flops=2e10)
    crossings = sum(slow.crosses_wan(stage) for stage in range(slow.num_stages - 1))
    assert crossings == 2
    assert slow.legs != "du"


def test_placements_that_the_model_has_no_layers_for_are_left_out():
    few = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    assert settled(config(microbatches=8), few) == Placement.straight(4)
    with pytest.raises(ValueError, match="virtual stages, but the model has 4 layers"):
        settled(config(sites=(3, 3), mbps=10), few)


def test_given_costs_are_cut_for_every_placement(tmp_path):
    path = tmp_path / "costs.yaml"
    path.write_text("layers: {count: 12, forward_ms: 10, input_ms: 10, weight_ms: 10, output_bytes: 1e6}\n")
    made = config(sites=(2, 2, 2), mbps=5, microbatches=12, costs_file=str(path))
    assert settled(made).legs != "du"
    path.write_text("stages: {forward_ms: 10, input_ms: 10, weight_ms: 10}\n")
    with pytest.raises(ValueError, match=r"pipeline.costs_file: .* one number for every virtual stage"):
        settled(made)


def test_links_that_are_to_be_compared_have_to_be_known():
    check(config(sites=(2, 2), mbps=100))
    with pytest.raises(
        ValueError, match=r"bandwidth_mbps: not given between site0 and site1, .* or pipeline.placement"
    ):
        check(config(sites=(2, 2)))
    check(config(sites=(2, 2), placement=PlacementKind.straight))
    check(config("1f1b", sites=(2, 2)))


def test_a_schedule_of_other_ranks_is_refused(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(schedule_to_json(generate("1f1b", Placement.straight(2), 4)))
    with pytest.raises(ValueError, match=r"it is of 2 pipeline ranks, and pipeline\.stages=4"):
        settled(config("file", schedule_file=str(path)))
