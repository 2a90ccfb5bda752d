"""`weft schedule` and `weft simulate`, as scripts call them."""

import json
import subprocess
import sys

import pytest

from weft.pipeline.placement import Placement
from weft.pipeline.serialization import load_schedule
from weft.tools import cli
from weft.tools.schedule import place


def run(capsys, *words):
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert cli.main([str(word) for word in words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "step_s"), [("1f1b", 33), ("gpipe", 33), ("interleaved", 57), ("zbv", 51), ("w", 66), ("dualpipev", 54)]
)
def test_a_schedule_goes_through_json_into_the_simulator(capsys, tmp_path, kind, step_s):
    path = tmp_path / "schedule.json"
    run(capsys, "schedule", kind, "--ranks", 4, "--microbatches", 8, "--format", "json", "--out", path)
    summary = json.loads(run(capsys, "simulate", path, "--format", "json"))
    assert summary["step_s"] == step_s
    assert summary.keys() == {"name", "step_s", "bubble_share", "busy_s", "peak_bytes", "live_microbatches"}
    assert len(summary["busy_s"]) == 4


def test_csv_is_simulated_too(capsys, tmp_path):
    path = tmp_path / "schedule.csv"
    run(capsys, "schedule", "zbv", "--ranks", 4, "--microbatches", 8, "--format", "torch-csv", "--out", path)
    assert "step 51 s, bubbles 5.9 %" in run(capsys, "simulate", path)


def test_json_and_csv_are_compute_only(capsys, tmp_path):
    words = ("schedule", "1f1b", "--ranks", 2, "--microbatches", 2, "--format")
    (tmp_path / "s.json").write_text(run(capsys, *words, "json"))
    (tmp_path / "s.csv").write_text(run(capsys, *words, "torch-csv"))
    one, other = load_schedule(tmp_path / "s.json"), load_schedule(tmp_path / "s.csv")
    assert one.rows == other.rows
    assert {op.value for op in one.ops} == {"F", "B"}


def test_text_holds_grid_and_summary(capsys):
    text = run(capsys, "schedule", "1f1b", "--ranks", 2, "--microbatches", 2)
    assert "rank 0   0F0 0F1" in text
    assert "1f1b predicted: step 9 s" in text


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("perfetto", b"{")])
def test_pictures_and_traces_need_a_file(capsys, tmp_path, form, start):
    words = ("schedule", "zbv", "--ranks", 2, "--microbatches", 4, "--format", form)
    assert f"--format={form}: it writes a file; name it with --out" in refused(capsys, *words)
    run(capsys, *words, "--out", tmp_path / "picture")
    assert (tmp_path / "picture").read_bytes().startswith(start)


def test_costs_and_sites(capsys, tmp_path):
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        "stages: {forward_ms: 10, input_ms: 10, weight_ms: 10, output_bytes: 1e6}\n"
        "links: {wan: {latency_ms: 20, bandwidth_mbps: 800}}\n"
    )
    words = ("schedule", "1f1b", "--ranks", 2, "--microbatches", 1, "--sites", "1,1", "--format", "json")
    schedule = tmp_path / "schedule.json"
    run(capsys, *words, "--out", schedule)
    summary = json.loads(run(capsys, "simulate", schedule, "--costs", costs, "--format", "json"))
    assert summary["step_s"] == pytest.approx(0.06 + 2 * (0.01 + 0.02))


@pytest.mark.parametrize(
    ("kind", "layout", "sites", "chunks", "placement"),
    [
        ("1f1b", None, (), None, Placement.straight(4)),
        ("gpipe", None, (2, 2), None, Placement.straight(4, (2, 2))),
        ("interleaved", None, (), None, Placement.interleaved(4, 2)),
        ("interleaved", "straight", (), 3, Placement.interleaved(4, 3)),
        ("auto", "straight", (), 2, Placement.interleaved(4, 2)),
        ("zbv", None, (), None, Placement.fold(4)),
        ("w", "site_fold", (2, 2), None, Placement.site_fold((2, 2))),
        ("auto", None, (), None, Placement.fold(4)),
        ("auto", None, (2, 2), None, Placement.site_fold((2, 2))),
        ("auto", "fold", (4,), 4, Placement.fold(4, 4)),
    ],
)
def test_default_placements(kind, layout, sites, chunks, placement):
    assert place(kind, 4, layout, sites, chunks) == placement


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--placement", "fold"), "weft schedule: pipeline.schedule=1f1b: it needs placement=straight"),
        (("--placement", "site_fold"), "--placement=site_fold: it folds inside each site; give them"),
        (("--sites", "1,2"), "--sites=1,2: they must be positive and sum to --ranks=4"),
        (("--chunks", "0"), "--chunks=0: a rank holds at least 1 virtual stage"),
        (("--memory-cap", "3"), "rank 0 would hold 4 bytes of activations"),
        (("--costs", "none.yaml"), "costs file none.yaml: cannot be read"),
    ],
)
def test_bad_options_are_refused_with_a_remedy(capsys, words, message):
    assert message in refused(capsys, "schedule", "1f1b", "--ranks", 4, "--microbatches", 8, *words)


def test_simulate_refuses_what_cannot_run(capsys, tmp_path):
    (tmp_path / "s.csv").write_text("0B0,0F0\n1F0,1B0\n")
    message = refused(capsys, "simulate", tmp_path / "s.csv")
    assert "waits for" in message
    assert "<-- ERROR HERE" in message


def test_commands_and_pipeline_load_neither_torch_nor_matplotlib():
    code = (
        "import importlib, pkgutil, sys, weft.pipeline\n"
        "for module in pkgutil.walk_packages(weft.pipeline.__path__, 'weft.pipeline.'):\n"
        "    importlib.import_module(module.name)\n"
        "from weft.tools import cli\n"
        "assert cli.main(['schedule', 'zbv', '--ranks', '2', '--microbatches', '4']) == 0\n"
        "import weft.tools.simulate\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'deepspeed', 'transformers', 'hydra'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
