"""Costs from YAML: what is read, and how what is wrong is named."""

import pytest
from hypothesis import given, settings

from tests.pipeline.cases import costs_for
from weft.pipeline.costs import LinkCost
from weft.pipeline.profile import costs_to_yaml, load_costs

WHOLE = """
stages:
  forward_ms: 10
  input_ms: [10, 20]
  weight_ms: 5
  activation_bytes: 33.5e6
  weight_saved_bytes: 1e6
  output_bytes: 8e6
  reduce_ms: 40
  step_ms: 2
links:
  local: {latency_ms: 0.01, bandwidth_mbps: 100000}
  wan: {latency_ms: 20, bandwidth_mbps: 500, streams: 16, sharing: 2}
  pairs:
    - {sites: [0, 1], latency_ms: 40, bandwidth_mbps: 300}
pair_scale: 0.9
"""


def write(tmp_path, text):
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    return path


def test_every_field_is_read(tmp_path):
    costs = load_costs(write(tmp_path, WHOLE), 2)
    first, second = costs.stages
    assert (first.forward_s, first.input_s, second.input_s, first.weight_s) == (0.01, 0.01, 0.02, 0.005)
    assert (first.activation_bytes, first.weight_saved_bytes, first.output_bytes) == (33.5e6, 1e6, 8e6)
    assert (first.reduce_s, first.unshard_s, first.step_s) == (0.04, 0.0, 0.002)
    assert costs.local == LinkCost(latency_s=1e-5, bandwidth_bps=1e11)
    assert costs.wan == LinkCost(latency_s=0.02, bandwidth_bps=5e8, streams=16, sharing=2)
    assert costs.link(1, 0) == costs.link(0, 1) == LinkCost(latency_s=0.04, bandwidth_bps=3e8)
    assert costs.link(1, 2) == costs.wan
    assert costs.pair_scale == 0.9


def test_links_are_free_unless_given(tmp_path):
    costs = load_costs(write(tmp_path, "stages: {forward_ms: 1, input_ms: 1, weight_ms: 1}"), 3)
    assert costs.local == costs.wan == LinkCost()
    assert len(costs.stages) == 3


@settings(max_examples=50)
@given(costs_for(3))
def test_written_costs_read_back(tmp_path_factory, costs):
    path = write(tmp_path_factory.mktemp("costs"), costs_to_yaml(costs))
    read = load_costs(path, 3)
    assert read.pair_scale == costs.pair_scale
    for one, other in zip(read.stages, costs.stages, strict=True):
        assert vars(one) == pytest.approx(vars(other))
    for sites in ((0, 0), (0, 1), (1, 0), (1, 2), (2, 1)):
        assert vars(read.link(*sites)) == pytest.approx(vars(costs.link(*sites)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("forward_ms: 10", "forward: 10"), r"costs.yaml: stages: field 'forward' is not known; one of forward_ms, "),
        (("  weight_ms: 5\n", ""), r"costs.yaml: stages.weight_ms: missing; give a number, or a list of 2"),
        (("[10, 20]", "[10, 20, 30]"), r"costs.yaml: stages.input_ms: 3 values for 2 virtual stages"),
        (("[10, 20]", "[10, x]"), r"costs.yaml: stages.input_ms\[1\]='x': expected a number at least 0"),
        (("reduce_ms: 40", "reduce_ms: -1"), r"costs.yaml: stages.reduce_ms=-1: expected a number at least 0"),
        (("bandwidth_mbps: 500", "bandwidth_mbps: 0"), r"links.wan.bandwidth_mbps=0: expected a number above 0"),
        (("sharing: 2", "sharing: 1.5"), r"links.wan.sharing=1.5: expected a whole number"),
        (("sites: [0, 1]", "sites: [0]"), r"links.pairs\[0\].sites=\[0\]: expected the numbers of two sites"),
        (("pair_scale: 0.9", "pair_scale: 0"), r"pair_scale=0: expected a number above 0"),
        (("stages:", "stages: ["), r"costs.yaml: cannot be read"),
        (("  local: {latency_ms: 0.01, bandwidth_mbps: 100000}", "  local: 3"), r"links.local: expected a table"),
    ],
)
def test_errors_name_file_field_and_remedy(tmp_path, change, message):
    assert change[0] in WHOLE
    with pytest.raises(ValueError, match=message):
        load_costs(write(tmp_path, WHOLE.replace(*change)), 2)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml: cannot be read"):
        load_costs(tmp_path / "none.yaml", 2)
