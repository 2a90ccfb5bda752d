"""Tests of papers' figures: two sites pay in steps, more sites pay, and the W keeps its bubbles."""

import json

from benchmarks.__main__ import main
from benchmarks.claims.atlas import apart_throughput, atlas_throughput
from benchmarks.claims.claim import judged

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
