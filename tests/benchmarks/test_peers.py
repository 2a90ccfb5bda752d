"""Benchmarks: engines run the emulated work whole, results are put together rightly, nothing is left behind."""

import json
import os
import time
from dataclasses import replace

import psutil
import pytest

from benchmarks import engines as bench_engines
from benchmarks.peers import on_host
from benchmarks.peers.case import EngineCase, RankRun
from benchmarks.peers.comparison import Measured
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.on_host import measure
from benchmarks.peers.registry import HOST
from weft.pipeline.action import slot_text
from weft.pipeline.costs import LinkCost
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement
from weft.tools.links import Way, measure_link
from weft.tools.ranks import run_ranks

SMALL = EngineCase(
    num_ranks=2,
    num_layers=4,
    num_microbatches=4,
    work=EmulatedWork(forward_s=0.002, input_s=0.002, weight_s=0.002, hidden_bytes=4096),
    link=LinkCost(latency_s=0.001),
    num_warmup=1,
    num_steps=2,
)

IDEAL_LAYER_TIMES = {  # of SMALL: 2 ranks, one or two virtual stages each, in units of 2 ms
    "deepspeed-1f1b": 30,
    "torch-1f1b": 30,
    "weft-1f1b": 30,
    "torch-zbv": 25,
    "weft-zbv": 25,
}

LIVE_LAYERS = {  # of SMALL: most that a rank holds, two stages of two layers or four of one
    "deepspeed-1f1b": (4, 2),
    "torch-1f1b": (4, 2),
    "weft-1f1b": (4, 2),
    "torch-zbv": (4, 4),
    "weft-zbv": (4, 4),
}


def live_layers_of(run):
    return tuple(map(int, run.notes["live layers"].split()))


@pytest.mark.slow
@pytest.mark.parametrize("peer", HOST)
def test_every_peer_runs(peer):
    run = measure(peer, SMALL)
    assert len(run.step_s) == 2
    live, (ideal_s, simulated_s, profiled_s) = live_layers_of(run), run.references.values()
    assert len(live) == 2
    assert min(run.step_s) >= 0.9 * ideal_s  # nothing was skipped
    assert simulated_s > ideal_s
    assert (profiled_s or 0.0) >= ideal_s * peer.startswith("weft")
    if peer in IDEAL_LAYER_TIMES:
        assert ideal_s == pytest.approx(IDEAL_LAYER_TIMES[peer] * 0.002)
    if peer in LIVE_LAYERS:
        assert live == LIVE_LAYERS[peer]
    if peer == "weft-auto-zbv":  # the one to compare with ZBV: no more than it at any rank
        assert max(live) <= min(LIVE_LAYERS["torch-zbv"])


@pytest.mark.parametrize(
    ("kind", "placement", "num_layers", "live_layers"),
    [
        ("1f1b", Placement.straight(2), 4, (4, 2)),
        ("gpipe", Placement.straight(2), 4, (8, 8)),
        ("zbv", Placement.fold(2), 4, (4, 4)),
        ("zbv", Placement.fold(2), 12, (12, 12)),
    ],
)
def test_what_an_engine_holds_is_counted_in_the_rows_that_it_ran(monkeypatch, kind, placement, num_layers, live_layers):
    """In layers, so that engines whose stages differ can be compared."""
    ran = generate(kind, placement, 4)
    cells = [tuple(slot_text(slot) for slot in row) for row in ran.rows]
    monkeypatch.setattr(on_host, "run_ranks", lambda *_, **__: [RankRun((1.0, 1.0), row) for row in cells])
    assert live_layers_of(measure("torch-zbv", replace(SMALL, num_layers=num_layers))) == live_layers


@pytest.mark.parametrize("way", Way)
def test_the_link_is_measured(way):
    link = measure_link(2**20, way)
    assert 0 < link.latency_s < 1
    assert 1e6 < link.bandwidth_bps < 1e13


def _work_for_ever(rank_file):
    with open(f"{rank_file}{os.environ['RANK']}", "w") as out:
        out.write(str(os.getpid()))
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
        raise ValueError("no luck today")
    time.sleep(600)


def _gone(path):
    return not psutil.pid_exists(int(path.read_text()))


def test_a_failed_rank_ends_the_others(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*no luck today"):
        run_ranks(2, _work_for_ever, str(tmp_path / "rank"), timeout_s=60)
    assert _gone(tmp_path / "rank0")
    assert _gone(tmp_path / "rank1")


def _sleep():
    print("about to sleep", flush=True)
    time.sleep(600)


def test_a_run_has_a_hard_time_limit():
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] had not ended after 1 s"):
        run_ranks(2, _sleep, timeout_s=1.0)


@pytest.fixture
def no_processes(monkeypatch):
    """Return runs whose duration depends on the engine's name."""
    order = []

    def measured(peer, case):
        order.append((case.name, peer))
        return Measured(
            engine=peer,
            title=HOST[peer].title,
            case=case.name,
            step_s=(1.0, 1.1, 1.2),
            references={"ideal": 2.0 if peer.startswith("deepspeed") else 1.0, "simulated": 2.2, "profiled": 4.4},
            ratios=("simulated", "profiled"),
            notes={"live layers": "2 1"},
        )

    monkeypatch.setattr(on_host, "measure", measured)
    monkeypatch.setattr(on_host, "measure_link", lambda num_bytes, way: LinkCost())
    return order


def test_bench_engine(no_processes, capsys, tmp_path):
    chosen = ["weft-1f1b", "weft-auto", "deepspeed-1f1b", "torch-1f1b"]
    words = ["host", "--rounds", "1", "--cases", "2", "--engines", *chosen, "--json", str(tmp_path / "out.json")]
    assert bench_engines.main(words) == 0
    assert "goal of 1.10 is met" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["bench"] == "engines" and written["met"] and written["arguments"]["rounds"] == 1
    found = written["figures"]
    assert [r["engine"] for r in found] == chosen
    assert found[2]["references"]["ideal"] == 2.0
    assert found[0]["case"].endswith(", 8 MiB")
