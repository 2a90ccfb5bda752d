"""Tests of stored measurements, and of their lifetime."""

import pytest

from weft.comm.collectives.cache import CostCache
from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.costs import AlphaBeta, CollectiveCosts
from weft.comm.collectives.group import LinkClass
from weft.conf import measurements
from weft.conf.files import JsonCache
from weft.conf.measurements import MOST_DAYS, keep, measured, notes_of
from weft.tools.cli import main

COSTS = CollectiveCosts({(LinkClass.intra, Primitive.all_gather): AlphaBeta(1e-5, 1e-9)})


def test_each_measurement_has_a_date_a_load_and_a_spread(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements.os, "getloadavg", lambda: (6.0, 0.0, 0.0))
    monkeypatch.setattr(measurements.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(measurements, "time", lambda: 1000.0)
    cache = JsonCache(tmp_path / "devices.json")
    keep(cache, {"cpu": 1e9}, spread=0.2)
    assert notes_of(cache) == {"cpu": measurements.Note(1000.0, 3.0, 0.2)}
    assert cache.read() == {"cpu": 1e9}, "the note lies alongside it"


def test_an_old_measurement_is_not_planned_with(tmp_path, monkeypatch):
    cache = CostCache.in_folder(str(tmp_path))
    cache.write("a", COSTS)
    assert cache.read("a") == COSTS
    later = measurements.time() + (MOST_DAYS + 1) * 86_400
    monkeypatch.setattr(measurements, "time", lambda: later)
    assert cache.read("a") is None
    cache.write("a", COSTS)
    assert cache.read("a") == COSTS


def test_a_run_that_finds_a_device_faster_replaces_what_was_measured_before(tmp_path):
    import torch

    from weft.engine.planning.devices import _name, correct

    cache, device = JsonCache(tmp_path / "devices.json"), torch.device("cpu")
    name = _name("", device, torch.get_num_threads())
    correct(device, 9e9, cache)
    assert not cache.read(), "nothing was planned with"
    keep(cache, {name: 1e9})
    correct(device, 1.1e9, cache)
    assert measured(cache) == {name: 1e9}
    correct(device, 4e9, cache)
    assert measured(cache) == {name: 4e9} and notes_of(cache)[name].spread == pytest.approx(0.75)
    correct(device, 1e9, cache)
    assert measured(cache) == {name: 4e9}, "other work has slowed this one down"


def test_the_doctor_shows_and_clears_what_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    CostCache.in_folder(str(tmp_path)).write("cpu on 2 ranks", COSTS)
    keep(JsonCache(tmp_path / "devices.json"), {"cpu, threads=1": 1e9, "memory of cpu": 2e9})
    (tmp_path / "prefill").mkdir()
    (tmp_path / "prefill" / "model.json").write_text('{"format": 1}')
    folder = ["--folder", str(tmp_path)]
    assert main(["doctor", "cache", *folder]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("cpu on 2 ranks", "cpu, threads=1", "prefill/model.json", "load"))
    assert main(["doctor", "cache", *folder, "--clear", "memory", "collectives"]) == 0
    assert set(JsonCache(tmp_path / "devices.json").read()) == {"cpu, threads=1"}
    assert not (tmp_path / "collectives.json").exists()
    assert main(["doctor", "cache", *folder, "--clear", "nothing"]) == 2
    assert main(["doctor", "cache", *folder, "--clear"]) == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
