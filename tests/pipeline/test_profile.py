"""Costs from YAML: what is read, and how what is wrong is named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.pipeline.cases import costs_for
from weft.pipeline.costs import LinkCost
from weft.pipeline.profile import costs_to_yaml, load_costs, load_pieces

WHOLE = """
stages:
  forward_ms: 10
  input_ms: [10, 20]
  weight_ms: 5
  activation_bytes: 33.5e6
  weight_saved_bytes: 1e6
  output_bytes: 8e6
  reduce_ms: 40
  unshard_ms: 30
  step_ms: 2
  send_ms: 0.5
  jitter: [0.1, 0.2]
links:
  local: {latency_ms: 0.01, bandwidth_mbps: 100000}
  wan: {latency_ms: 20, bandwidth_mbps: 500, streams: 16, sharing: 2, jitter: 0.2}
  pairs:
    - {sites: [0, 1], latency_ms: 40, bandwidth_mbps: 300}
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
    assert (first.reduce_s, first.unshard_s, first.step_s, first.send_s) == (0.04, 0.03, 0.002, 0.0005)
    assert (first.jitter, second.jitter) == (0.1, 0.2)
    assert costs.local == LinkCost(latency_s=1e-5, bandwidth_bps=1e11)
    assert costs.wan == LinkCost(latency_s=0.02, bandwidth_bps=5e8, streams=16, sharing=2, jitter=0.2)
    assert costs.link(1, 0) == costs.link(0, 1) == LinkCost(latency_s=0.04, bandwidth_bps=3e8)
    assert costs.link(1, 2) == costs.wan


def test_links_are_free_unless_given(tmp_path):
    costs = load_costs(write(tmp_path, "stages: {forward_ms: 1, input_ms: 1, weight_ms: 1}"), 3)
    assert costs.local == costs.wan == LinkCost()
    assert len(costs.stages) == 3


@settings(max_examples=50)
@given(costs_for(3))
def test_written_costs_read_back(tmp_path_factory, costs):
    path = write(tmp_path_factory.mktemp("costs"), costs_to_yaml(replace(costs, pairs=None)))
    read = load_costs(path, 3)
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
        (("jitter: 0.2", "jitter: 4"), r"links.wan.jitter=4: above 3"),
        (("jitter: 0.2", "jitter: .nan"), r"links.wan.jitter=nan: expected"),
        (("sharing: 2", "sharing: 1.5"), r"links.wan.sharing=1.5: expected a whole number"),
        (("sites: [0, 1]", "sites: [0]"), r"links.pairs\[0\].sites=\[0\]: expected the numbers of two sites"),
        (("stages:", "stages: ["), r"costs.yaml: cannot be read"),
        (("stages:", "stages: " + "[" * 5000), r"costs.yaml: cannot be read"),
        (("forward_ms: 10", "forward_ms: .inf"), r"stages.forward_ms=inf: expected a number at least 0, and finite"),
        (
            ("forward_ms: 10", "forward_ms: 1e400"),
            r"stages.forward_ms='1e400': expected a number at least 0, and finite",
        ),
        (("forward_ms: 10", "forward_ms: .nan"), r"stages.forward_ms=nan: expected a number"),
        (("forward_ms: 10", "forward_ms: true"), r"stages.forward_ms=True: expected a number"),
        (("forward_ms: 10", "forward_ms: 1" + "0" * 400), r"stages.forward_ms=1000.*: expected a number"),
        (("sharing: 2", "sharing: true"), r"links.wan.sharing=True: expected a whole number"),
        (("bandwidth_mbps: 100000}", "pair_mbps: 10}"), r"links.local: field 'pair_mbps' is not known"),
        (("stages:", "layers: {count: 2}\nstages:"), r"layers: given together with stages"),
        (("  local: {latency_ms: 0.01, bandwidth_mbps: 100000}", "  local: 3"), r"links.local: expected a table"),
    ],
)
def test_errors_name_file_field_and_remedy(tmp_path, change, message):
    assert change[0] in WHOLE
    with pytest.raises(ValueError, match=message):
        load_costs(write(tmp_path, WHOLE.replace(*change)), 2)


def test_costs_per_layer_fit_any_cut(tmp_path):
    path = write(
        tmp_path,
        "layers: {forward_ms: [1, 2, 3, 4, 5], input_ms: 1, weight_ms: 1, activation_bytes: 2, output_bytes: 7}\n"
        "links: {wan: {latency_ms: 20, bandwidth_mbps: 500, pair_mbps: 100}}",
    )
    straight, fold = load_costs(path, 2), load_pieces(path).cut(4)
    assert [round(1e3 * stage.forward_s) for stage in straight.stages] == [6, 9]
    assert [round(1e3 * stage.forward_s) for stage in fold.stages] == [1, 5, 4, 5]
    assert [stage.activation_bytes for stage in straight.stages] == [6, 4]
    assert {stage.output_bytes for stage in straight.stages} == {7}
    assert straight.wan.transit_s(1e6) == pytest.approx(0.08)
    assert straight.wan.occupancy_s(1e6) == pytest.approx(0.016)


def test_a_run_s_stages_can_be_cut_otherwise(tmp_path):
    path = write(tmp_path, "stages: {forward_ms: [10, 20], input_ms: 1, weight_ms: 1, output_bytes: 7}")
    assert [stage.forward_s for stage in load_pieces(path).cut(4).stages] == pytest.approx([0.005, 0.005, 0.01, 0.01])
    assert load_pieces(path).cut(4).stages[0].output_bytes == 7
    with pytest.raises(ValueError, match="costs of 2 pieces of the model cannot be cut into 3 virtual stages"):
        load_pieces(path).cut(3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: {forward_ms: 1, input_ms: 1, weight_ms: 1}", r"stages: one number for every virtual stage"),
        ("layers: {forward_ms: 1, input_ms: 1, weight_ms: 1}", r"layers.count: missing; say how many layers"),
        ("layers: {count: 3, forward_ms: [1, 2], input_ms: 1, weight_ms: 1}", r"forward_ms: 2 values for 3 layers"),
        ("layers: {count: 1e9, forward_ms: 1, input_ms: 1, weight_ms: 1}", r"layers.count='1e9': expected a whole"),
        ("layers: {count: 2, forward_ms: 1, input_ms: 1}", r"layers.weight_ms: missing"),
        ("layers: {count: 2, forward_ms: 1, input_ms: 1, weight_ms: 1, jitter: 4}", r"layers.jitter=4: above 3"),
        ("layers: {count: 2, forward_ms: 1, input_ms: 1, weight_ms: 1, jitter: .nan}", r"layers.jitter=nan: expected"),
    ],
)
def test_costs_that_fit_no_cut_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_pieces(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml: cannot be read"):
        load_costs(tmp_path / "none.yaml", 2)
