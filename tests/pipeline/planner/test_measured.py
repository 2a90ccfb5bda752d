"""Tests of `weft profile`'s output: a share of the peak, or one line with the reason."""

from dataclasses import replace

import pytest

from tests.pipeline.planner.planned import cluster, model, site
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.hardware import GPU_KINDS
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.measured import load_measured
from weft.pipeline.profile import costs_to_yaml, load_costs

ON = {
    "gpu": "A100",
    "device": "NVIDIA A100",
    "sequence_length": 0,
    "microbatch_size": 2,
    "gradient_checkpointing": False,
}


def written(path, work, efficiency, **changes):
    seconds = 2 * work.whole.forward_flops / len(work.layers) / GPU_KINDS["A100"].flops_per_s / efficiency
    layer = StageCost(forward_s=seconds, input_s=seconds, weight_s=seconds, activation_bytes=1.0)
    costs = CostModel(stages=(layer,) * len(work.layers))
    on = {**ON, "sequence_length": work.sequence_length, **changes}
    path.write_text(costs_to_yaml(costs, per="layers", measured=on))
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "profile.yaml"


@pytest.mark.parametrize("efficiency", [0.1, 0.5])
def test_the_efficiency_is_what_the_layers_reached(file, efficiency):
    work, some = model(), cluster(site("a"), site("b"))
    found = load_measured(written(file, work, efficiency))
    assert found.efficiency(work, some) == pytest.approx(efficiency)
    again = replace(found, checkpointing=True)
    assert again.efficiency(work, some) == pytest.approx(efficiency * 4 / 3)
    assert len(load_costs(file, 2).stages) == 2  # as pipeline.costs_file takes it


def test_measured_collectives_are_those_of_hosts_with_this_gpu(file):
    work, some = model(), cluster(site("a"), site("b", gpu="H100"))
    inside = {"ranks": 4, "latency_us": 20, "gb_per_s": 100}
    slow = load_measured(written(file, work, 0.5, collectives=inside)).applied(work, some)
    assert slow.sites[1] == some.sites[1] and slow.efficiency == pytest.approx(0.5)
    shape = Shape(num_stages=1, replicas=1, tensor=4, microbatches=1)

    def exchanged_s(on):
        return Estimates(on, work).layer_collectives_s(work.layers[0], 1, shape, on.sites[0])

    assert exchanged_s(slow) == pytest.approx(4 * (3 * 20e-6 + work.message_bytes * 3 / 4 / 100e9))
    assert exchanged_s(some) < exchanged_s(slow)
    without = load_measured(written(file, work, 0.5)).applied(work, some)
    assert without.sites == some.sites


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "H100"}, "measured on H100, and the cluster has A100"),
        ({"gpu": "", "device": "cpu"}, "measured on cpu"),
        ({"sequence_length": 7}, "7 tokens"),
        ({"microbatch_size": 1000}, "no share of it"),
    ],
)
def test_what_does_not_go_with_the_plan_is_said(file, changes, said):
    work = model()
    with pytest.raises(ValueError, match=said):
        load_measured(written(file, work, 0.5, **changes)).efficiency(work, cluster(site("a")))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "A1000"}, "measured.gpu=A1000"),
        ({"microbatch_size": 0}, "measured.microbatch_size"),
        ({"sequence_length": "long"}, "measured.sequence_length"),
        ({"gradient_checkpointing": 3}, "measured.gradient_checkpointing"),
        ({"colour": 1}, "colour"),
        ({"collectives": 3}, "measured.collectives: expected a table"),
        ({"collectives": {"ranks": 1}}, "measured.collectives.ranks=1: .* at least 2"),
        ({"collectives": {"ranks": 2, "latency_us": 1, "gb_per_s": 0}}, "gb_per_s=0: .* above 0"),
        ({"collectives": {"ranks": 2, "latency_us": float("inf"), "gb_per_s": 1}}, "latency_us=inf"),
    ],
)
def test_a_damaged_file_is_named(file, changes, said):
    with pytest.raises(ValueError, match=said) as caught:
        load_measured(written(file, model(), 0.5, **changes))
    assert str(file) in str(caught.value)


def test_costs_without_a_source_are_no_profile(file):
    file.write_text("layers: {count: 2, forward_ms: 1, input_ms: 1, weight_ms: 1, output_bytes: [1, 1]}")
    with pytest.raises(ValueError, match="measured: missing"):
        load_measured(file)
