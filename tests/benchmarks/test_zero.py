"""`benchmarks engines sharded`: every engine runs the emulated work whole, and figures are put together rightly."""

import json
from dataclasses import replace

import pytest

from benchmarks.peers import sharded as bench_zero
from benchmarks.peers.case import ZeroCase, ZeroRun
from benchmarks.peers.registry import SHARDED as ENGINES
from benchmarks.peers.sharded import PIPELINE_MICROBATCHES, run_engine
from weft.tools.netbed import NetBed, Topology, missing

SMALL = ZeroCase(
    compute_s=(0.024, 0.048), cache_dir="", num_layers=8, layer_elements=1 << 12, num_warmup=1, num_steps=2
)
NODES = ("n0", "n0", "n1", "n1")


@pytest.fixture(scope="module")
def bed():
    if missing():
        pytest.skip(f"weft netbed: {missing()}")
    with NetBed.up(Topology.even((1, 1), uplink_mbps=500, latency_ms=0.2)) as bed:
        yield bed


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("costs"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_computes_every_layer(name, bed, cache_dir):
    runs = run_engine(name, bed, NODES, replace(SMALL, cache_dir=cache_dir))
    for compute_s, run in zip(SMALL.compute_s, runs, strict=True):
        assert len(run.step_s) == SMALL.num_steps
        letters = [op for op, _, _ in run.spans]
        for op in "FIW":
            # A pipeline's rank has half of the layers, and twice the micro-batches.
            microbatches = PIPELINE_MICROBATCHES if ENGINES[name].across else SMALL.num_microbatches
            assert letters.count(op) == SMALL.num_steps * SMALL.num_layers * microbatches
        spent_s = sum(end - start for _, start, end in run.spans) / SMALL.num_steps
        assert 0.99 * compute_s <= spent_s <= sum(run.step_s) / SMALL.num_steps * 1.01


@pytest.mark.slow
def test_plain_collectives_are_timed(bed):
    found = run_engine("plain", bed, NODES, SMALL)
    assert set(found) == {"all_reduce", "reduce_scatter", "all_gather"}
    assert min(found.values()) > 0


def test_figures_are_written_and_goals_judged(tmp_path, monkeypatch, capsys):
    class Bed:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    def measured(name, bed, nodes, case):
        if name == "plain":
            return {"all_reduce": 0.3, "reduce_scatter": 0.25, "all_gather": 0.15}
        return [ZeroRun((0.0, 1.0, 2.0), ()) for _ in case.compute_s]

    monkeypatch.setattr(bench_zero.NetBed, "up", lambda topology: Bed())
    monkeypatch.setattr(bench_zero, "run_engine", measured)
    path = tmp_path / "zero.json"
    engines = ["--engines", "deepspeed-1", "torch-ddp"]
    assert bench_zero.main([*engines, "--alphas", "0.5", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["figures"]
    assert [row["references"]["no overlap"] for row in rows] == pytest.approx([0.8, 0.7])
    assert "400 ms of compute" in capsys.readouterr().out
    assert bench_zero.main(["--engines", "deepspeed-1", "weft-1", "--alphas", "0.5", "0.8"]) == 1
    assert "Weft ZeRO-1 over DeepSpeed ZeRO-1: 1.00x" in capsys.readouterr().out
