"""Tests of the criteria for an emulated step compared with the real one."""

import json
import threading
from types import SimpleNamespace

import pytest

from benchmarks import emulation
from benchmarks.emulation import CHANGES, LAYOUTS, TIMEOUT_S, Beside
from benchmarks.peers.layout import LATENCY_MS, UPLINK_MBPS


@pytest.mark.parametrize(
    ("real", "emulated", "to_goal", "to_most"),
    [
        ([1.0, 1.0], 1.004, "yes", "yes"),
        ([1.0, 1.0], 0.99, "no", "yes"),
        ([1.0, 1.0], 1.02, "no", "no"),
        ([0.995, 1.005], 1.009, "yes", "yes"),
        ([0.995, 1.005], 1.03, "no", "no"),
        ([0.755, 1.0, 1.0], 1.0, "not shown: real runs differ by 24.5%", "not shown: real runs differ by 24.5%"),
        ([0.755, 1.0, 1.0], 1.2, "not shown: real runs differ by 24.5%", "not shown: real runs differ by 24.5%"),
    ],
)
def test_the_jobs_own_difference_excuses_an_error_as_long_as_it_is_small(real, emulated, to_goal, to_most):
    row = emulation._row(Beside("job", 4, list(real), [emulated]))
    assert (row["within 0.5%"], row["within 1.5%"]) == (to_goal, to_most)


def bench(monkeypatch, seconds):
    """The bench's `main`, where a job is asked of ``seconds`` for what it takes: real runs, and one emulated."""
    monkeypatch.setattr(emulation, "_links", lambda layouts, work: None)

    def compare(layout, *_):
        real, emulated = seconds(layout)
        return Beside(layout.name, layout.ranks, real, [emulated])

    monkeypatch.setattr(emulation, "compare", compare)
    return emulation.main


@pytest.mark.parametrize(
    ("emulated", "real", "code"),
    [(1.0, [1.0], 0), (1.012, [1.0], 1), (1.02, [1.0], 1), (1.0, [0.9, 1.1], 1)],
)
def test_what_is_not_shown_is_not_met(monkeypatch, emulated, real, code):
    main = bench(monkeypatch, lambda layout: (real, emulated))
    assert main(["--parts", "jobs", "--jobs", "straight", "two stages"]) == code


def test_all_parts_are_in_the_file_and_the_exit_code_covers_all(monkeypatch, tmp_path, capsys):
    file = tmp_path / "found.json"
    main = bench(monkeypatch, lambda layout: ([1.0], 1.1 if layout.name == "straight" else 1.0))
    options = ["--what-ifs", "jitter", "--json", str(file), "--jobs", "site fold", "two stages"]
    assert main([*options, "straight"]) == 1
    assert main(options) == 0
    found = json.loads(file.read_text())
    assert found["met"]
    assert [row["name"] for row in found["figures"]][:2] == ["site fold", "two stages"] and len(found["figures"]) == 4
    shown = capsys.readouterr().out
    assert "10 ms of jitter" in shown
    assert "within 0.5%: 2 of 2" in shown


def test_unknown_parts_and_durations_are_refused_before_anything_is_measured(monkeypatch):
    main = bench(monkeypatch, lambda layout: pytest.fail("nothing is measured"))
    with pytest.raises(ValueError, match="--parts steps: not known"):
        main(["--parts", "steps"])
    for milliseconds in ("0", "-3", "nan", "1e400"):
        with pytest.raises(ValueError, match=r"--layer-ms .*: give milliseconds above 0"):
            main([f"--layer-ms={milliseconds}"])


@pytest.mark.parametrize("layout", [*LAYOUTS, *(after for _, after in CHANGES.values())], ids=lambda each: each.name)
def test_a_changed_real_job_has_the_settings_of_its_emulation(layout, tmp_path):
    what_if, config = layout.what_if, layout.config(str(tmp_path), timeout_s=TIMEOUT_S)
    assert config.pipeline.stages == layout.stages == sum(layout.sites or (layout.stages,))
    what_if.check(layout.ranks, layout.stages)
    if layout.sites:
        bed = layout.topology()
        (link,) = bed.links
        assert len(bed.nodes) == layout.ranks
        assert {node.uplink_mbps for node in bed.nodes} == {UPLINK_MBPS * what_if.bandwidth}
        assert link.latency_ms - link.jitter_ms == LATENCY_MS  # a message is late by 0 to the emulation's jitter
        assert 2 * link.jitter_ms == what_if.jitter_ms


def test_real_ranks_and_the_emulation_take_turns(monkeypatch, tmp_path):
    monkeypatch.setattr(emulation.dist, "barrier", lambda: None)
    monkeypatch.setattr(emulation.dist, "get_rank", lambda: 0)
    done = []
    turns = emulation.Turns(tmp_path, 2, lambda: done.append("emulated") or SimpleNamespace(step_s=1.0))
    turns()
    assert not done  # ranks are not ready yet

    def real():
        theirs = emulation.Turns(tmp_path, 2, emulation._nothing)
        for number in range(2):
            theirs.wait(number)
            done.append("real")

    thread = threading.Thread(target=real, daemon=True)
    thread.start()
    while thread.is_alive():
        turns()
    thread.join()
    turns()
    assert done == ["emulated", "real"] * 2
    assert turns.emulated_s == [1.0, 1.0]
