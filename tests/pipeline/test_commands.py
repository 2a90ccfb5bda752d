"""`weft schedule` and `weft simulate`, as scripts call them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from weft.pipeline import text
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.serialization import load_schedule
from weft.pipeline.text import jitter_text
from weft.tools import cli
from weft.tools.schedule import place

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "schedule-kinds.json"


def run(capsys, *words):
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert cli.main([str(word) for word in words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "step_s"), [("1f1b", 33), ("gpipe", 33), ("interleaved", 57), ("zbv", 51), ("w", 60), ("dualpipev", 51)]
)
def test_a_schedule_goes_through_json_into_the_simulator(capsys, tmp_path, kind, step_s):
    path = tmp_path / "schedule.json"
    run(capsys, "schedule", kind, "--ranks", 4, "--microbatches", 8, "--format", "json", "--out", path)
    summary = json.loads(run(capsys, "simulate", path, "--format", "json"))
    assert summary["step_s"] == step_s
    assert summary.keys() == {"name", "step_s", "bubble_share", "busy_s", "peak_bytes", "live_microbatches"}
    assert len(summary["busy_s"]) == 4


def test_pairs_stay_where_they_gain(capsys, tmp_path):
    """The engine opens pairs that gain nothing, and so do the command and what it exports."""
    costs = tmp_path / "costs.yaml"
    layer = "{forward: [{link: inside_host, comm_ms: 4}, {compute_ms: 6}], backward: [{compute_ms: 20}]}"
    stages = "stages: {forward_ms: 10, input_ms: 10, weight_ms: 10}"
    costs.write_text(f"{stages}\nstrands: {{layers: {{one: {layer}}}, stages: {{one: 1}}}}\n")
    words = ("schedule", "w", "--ranks", 2, "--microbatches", 4, "--format", "torch-csv")
    assert "OVERLAP_F_B" not in run(capsys, *words)
    assert "OVERLAP_F_B" in run(capsys, *words, "--costs", costs)


def test_every_answer_says_how_far_it_is_from_the_bound_and_what_it_holds(capsys):
    text = run(capsys, "schedule", "1f1b", "--ranks", 4, "--microbatches", 8)
    assert "step 33 s, 22.2 % above the lower bound of 27 s for this placement in any memory" in text
    assert "activations at the fullest rank: 4 B, 1.00 times the 4 B that 1F1B would hold (no cap given)" in text
    text = run(capsys, "schedule", "auto", "--ranks", 4, "--microbatches", 8, "--memory-cap", 9)
    assert "step 51 s, which is the lower bound of 51 s" in text
    assert "(cap 9 B)" in text


PLACEMENTS = {  # as the table says them, and how many chunks one of their stages is
    "straight (a stage is two chunks)": (Placement.straight(4), 2),
    "two chunks": (Placement.interleaved(4, 2), 1),
    "fold": (Placement.fold(4), 1),
}


def test_the_table_of_the_docs_is_what_the_command_says(capsys):
    """Its steps, placements and live chunks: those of `weft schedule KIND`, as the engine runs it."""
    result = json.loads(RESULT.read_text())
    words = result["command"].removeprefix("weft ")
    (table,) = result["tables"]
    assert table["columns"] == ["", "placement", "step", "live chunks at the peak rank"]
    rows = table["rows"]
    assert [row[0] for row in rows] == ["1f1b", "interleaved", "w", "dualpipev", "zbv", "auto"]
    for kind, placement, step, live in rows:
        placed, chunks = PLACEMENTS[placement]
        assert place(kind, 4, None, (), None) == placed
        text = run(capsys, *words.replace("KIND", kind).split())
        predicted = re.search(rf"^{kind} predicted: step (\S+) s", text, re.MULTILINE).group(1)
        assert float(predicted) * chunks == float(step), kind
        held = [int(found) for found in re.findall(r"^\d .* B +(\d+)$", text, re.MULTILINE)]
        assert len(held) == 4 and max(held) * chunks == int(live), kind


@pytest.mark.parametrize("kind", ["auto", "1f1b"])
def test_a_cell_is_drawn_exported_and_simulated(capsys, tmp_path, kind):
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        "layers: {count: 8, forward_ms: 5, input_ms: 5, weight_ms: 5, activation_bytes: 1, output_bytes: 1.25e5}\n"
        "links: {wan: {latency_ms: 20, bandwidth_mbps: 25}}\n"
    )
    words = ("schedule", kind, "--ranks", 4, "--sites", "2,2", "--microbatches", 2, "--cell", 2, "--costs", costs)
    words = (*words, "--search-seconds", 0, "--placement", "straight")
    text = run(capsys, *words)
    assert "rank 7" in text
    path = tmp_path / "cell.json"
    run(capsys, *words, "--format", "json", "--out", path)
    assert load_schedule(path).placement.pipelines == 2
    summary = json.loads(run(capsys, "simulate", path, "--costs", costs, "--format", "json"))
    assert f"step {summary['step_s']:.6g} s" in text
    run(capsys, *words, "--format", "png", "--out", tmp_path / "cell.png")
    assert (tmp_path / "cell.png").stat().st_size > 10_000


def test_placements_are_compared_by_cost(capsys, tmp_path):
    """Three sites whose uplinks are slow: a fold inside the middle one sends both ways by one rank."""
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        "layers: {count: 12, forward_ms: 500, input_ms: 500, weight_ms: 500, activation_bytes: 1, output_bytes: 1e6}\n"
        "links: {wan: {latency_ms: 1000, bandwidth_mbps: 2}}\n"
    )
    words = ("schedule", "auto", "--ranks", 6, "--sites", "2,2,2", "--microbatches", 12, "--costs", costs)
    assert "auto predicted: step 108.5 s" in run(capsys, *words, "--placement", "site_fold")
    assert "auto predicted: step 77 s" in run(capsys, *words, "--placement", "straight")
    text = run(capsys, *words)
    assert "auto predicted: step 76.5 s" in text
    assert "placement site_interleaved, by cost:" in text
    assert "site_fold         takes at least 108.5 s" in text


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
        ("auto", "site_interleaved", (2, 2), None, Placement((2, 2), "dd", (2, 2))),
        ("auto", "fold", (4,), 4, Placement.fold(4, 4)),
    ],
)
def test_default_placements(kind, layout, sites, chunks, placement):
    assert place(kind, 4, layout, sites, chunks) == placement


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--placement", "fold"), "weft schedule: pipeline.schedule=1f1b: it needs placement=straight"),
        (("--placement", "site_fold"), "--placement=site_fold: it goes through one site after the other; give them"),
        (("--sites", "1,2"), "--sites=1,2: they must be positive and sum to --ranks=4"),
        (("--chunks", "0"), "--chunks=0: expected a whole number of at least 1"),
        (("--cell", "0"), "--cell=0: expected a whole number of at least 1 and at most 64"),
        (("--cell", "2", "--format", "torch-csv"), "--cell=2: torch's CSV knows one pipeline"),
        (("--together", "-1"), "--together=-1: expected a whole number of at least 0"),
        (("--memory-cap", "nan"), "--memory-cap=nan: expected a number above 0, and finite"),
        (("--memory-cap", "inf"), "--memory-cap=inf: expected a number above 0, and finite"),
        (("--search-seconds", "-1"), "--search-seconds=-1.0: expected a number at least 0, and finite"),
        (("--search-seconds", "1e400"), "--search-seconds=inf: expected a number at least 0, and finite"),
        (("--jitter-samples", "2000"), "--jitter-samples=2000: expected a whole number of at least 0 and at most 1024"),
        (("--jitter-samples", "4"), "--jitter-samples=4: 1f1b depends on no costs; choose auto, or 0"),
        (("--microbatches", "1000000000"), "pipeline.microbatches=1000000000: 1.2e+10 actions on 4 virtual stages"),
        (("--ranks", "1000000000"), "--ranks=1000000000: expected a whole number of at least 1 and at most 100000"),
        (("--out", 230 * "n"), "nnn: cannot be written; name a file"),
        (("--out", ""), "--out .: cannot be written; name a file in a folder that is there"),
        (("--format", "png", "--out", "/proc/nowhere/s.png"), "--out /proc/nowhere/s.png: cannot be written"),
        (("--memory-cap", "3"), "rank 0 would hold 4 bytes of activations"),
        (("--costs", "none.yaml"), "costs file none.yaml: cannot be read"),
    ],
)
def test_bad_options_are_refused_with_a_remedy(capsys, words, message):
    said = refused(capsys, "schedule", "1f1b", "--ranks", 4, "--microbatches", 8, *words)
    assert message in said
    assert len(said.splitlines()) == 1 or "<-- ERROR HERE" in said


def test_no_folder_is_created_for_a_misspelt_path(capsys, tmp_path):
    schedule, file = tmp_path / "s.json", tmp_path / "none/file"
    words = ("schedule", "1f1b", "--ranks", 2, "--microbatches", 2)
    run(capsys, *words, "--format", "json", "--out", schedule)
    for command in (words, ("simulate", schedule)):
        assert f"--out {file}: cannot be written; name a file" in refused(capsys, *command, "--out", file)
    assert not file.parent.exists()


@pytest.mark.parametrize("option", ["--loads", "--stages=1", "--hop=2.3"])
def test_options_of_prefills_need_a_trace(capsys, option):
    assert f"{option.partition('=')[0]}: only --prefill TRACE.csv uses it" in refused(
        capsys, "simulate", "s.json", option
    )


def test_simulate_refuses_what_cannot_run(capsys, tmp_path):
    (tmp_path / "s.csv").write_text("0B0,0F0\n1F0,1B0\n")
    message = refused(capsys, "simulate", tmp_path / "s.csv")
    assert "waits for" in message
    assert "<-- ERROR HERE" in message


def test_the_simulator_prints_the_step_over_sampled_durations(capsys, tmp_path):
    costs, schedule = tmp_path / "costs.yaml", tmp_path / "schedule.json"
    costs.write_text("stages: {forward_ms: 10, input_ms: 10, weight_ms: 10, jitter: [0, 0.5]}")
    words = "1f1b", "--ranks", 2, "--microbatches", 4, "--costs", costs
    run(capsys, "schedule", *words, "--format", "json", "--out", schedule)
    text = run(capsys, "simulate", schedule, "--costs", costs)
    step_s, mean_s, late_s = (
        float(re.search(f"{name} ([0-9.]+) s", text)[1]) for name in ("predicted: step", "jitter: step", "percentile")
    )
    assert step_s < mean_s < late_s
    assert "jitter" not in run(capsys, "simulate", schedule)


def test_few_steps_of_a_large_schedule_are_sampled(monkeypatch):
    costs = CostModel.unit(2)
    costs = replace(costs, stages=tuple(replace(stage, jitter=0.2) for stage in costs.stages))
    schedule = lower(generate("1f1b", Placement.straight(2), 8))
    assert jitter_text(schedule, costs).endswith("(100 samples)")
    monkeypatch.setattr(text, "_SAMPLED_SLOTS", 3 * sum(map(len, schedule.rows)))
    assert jitter_text(schedule, costs).endswith("(3 samples)")
    monkeypatch.setattr(text, "_SAMPLED_SLOTS", 1)
    assert jitter_text(schedule, costs).endswith("(1 samples)")
