"""Tests of papers' figures: two sites pay in steps, more sites pay, and the W keeps its bubbles."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.atlas import algorithm1, apart_throughput, atlas_throughput, judged

STAGES = 12


def test_a_few_more_gpus_elsewhere_are_left_alone_and_many_are_not():
    found = {more: atlas_throughput({"here": 120, "there": more}, 2, STAGES) for more in (0, 12, 24, 36, 120)}
    rates = {more: rate for more, (rate, _) in found.items()}
    assert found[0][1] == found[12][1] == 5  # DP-cells
    assert rates[12] == rates[0]
    assert rates[0] < rates[24] == rates[36] < rates[120]


def test_cells_beat_pipelines_that_have_an_uplink_each():
    gpus = {"one": 48, "two": 48, "three": 48}
    assert atlas_throughput(gpus, 4, STAGES)[0] > apart_throughput(gpus, 4, STAGES, "1f1b")


def test_results_depend_on_the_distance_from_the_paper():
    assert [judged(ours, 10.0, 0.1) for ours in (10.9, 12.5, 20.0)] == ["reproduced", "partly", "not"]


def test_the_bench_writes_its_claims(tmp_path, capsys):
    file = tmp_path / "claims.json"
    assert main(["papers", "--only", "dhelix-8", "--json", str(file)]) == 0
    assert "reproduced" in capsys.readouterr().out
    assert json.loads(file.read_text())["figures"][0]["verdict"] == "reproduced"


def test_algorithm_1_fills_one_data_centre_after_the_other():
    asked = []

    def latency(partitions, cells):
        asked.append((cells, dict(partitions)))
        return 1.0 + 0.1 * len(partitions)

    found = algorithm1(
        6, ["big", "small"], {"big": 600, "small": 120}, 2, 60, get_latency_pp=latency, get_latency_dp=lambda _: 0.0
    )
    assert asked[4] == (5, {"big": 60}) and asked[5] == (6, {"big": 50, "small": 10})
    assert [one.throughput for one in found] == [
        pytest.approx(2 * d / (1.0 + 0.1 * n)) for d, n in zip(range(1, 7), [1] * 5 + [2], strict=True)
    ]
    none = algorithm1(7, ["big"], {"big": 600}, 2, 60, get_latency_pp=latency, get_latency_dp=lambda _: 0.0)
    assert none[-1].total_time == float("inf") and none[-1].throughput == 0


def test_algorithm_1_goes_on_until_the_last_partition_has_its_place():
    asked = []

    def latency(partitions, cells):
        return float(sum(partitions.values()))

    def reduced(pipelines):
        asked.append(pipelines)
        return 10.0

    found = algorithm1(
        2,
        ["big", "none", "small"],
        {"big": 120, "none": 1, "small": 9},
        2,
        61,
        get_latency_pp=latency,
        get_latency_dp=reduced,
    )
    assert found[0].partitions == {"big": 60, "small": 1} and found[0].total_time == 71.0
    assert found[0].throughput == pytest.approx(2 / 71.0) and asked == [2]
    assert (found[1].total_time, found[1].throughput) == (float("inf"), 0.0)
