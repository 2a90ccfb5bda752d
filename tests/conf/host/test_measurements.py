"""Measurements: how long they are used, and which of two replaces the other."""

import pytest

from weft.comm.collectives.cache import CostCache
from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.costs import AlphaBeta, CollectiveCosts, Sample
from weft.comm.collectives.group import LinkClass
from weft.conf.host import measurements
from weft.conf.host.files import JsonCache
from weft.conf.host.measurements import MOST_DAYS, Measurement, Measurements
from weft.tools.cli import main
from weft.tools.diagnostics.judging import Judge

GATHER, SCATTER = ((LinkClass.intra, primitive) for primitive in (Primitive.all_gather, Primitive.reduce_scatter))
COSTS = CollectiveCosts({GATHER: AlphaBeta(1e-5, 1e-9), SCATTER: AlphaBeta(1e-5, 1e-9)})
DAY = 86_400


@pytest.fixture
def machine(monkeypatch):
    """A machine with a time and a load that a test sets."""

    class Machine:
        now, load = 1e9, 0.0

    monkeypatch.setattr(measurements, "time", lambda: Machine.now)
    monkeypatch.setattr(measurements, "_load", lambda: Machine.load)
    return Machine


def test_each_measurement_has_a_date_a_load_and_a_spread(tmp_path, machine):
    cache, machine.load = Measurements(tmp_path / "devices.json"), 3.0
    cache.store({"cpu": 1e9}, spread=0.2)
    assert cache.read() == {"cpu": Measurement(1e9, 1e9, 3.0, 0.2)}


@pytest.mark.parametrize(
    "write",
    [
        lambda path: Judge(Measurements(path)).by_own_best("x", "cpu", lambda: 1.0, share=0.5, unit="GB/s"),
        lambda path: CostCache(path).write("x", COSTS),
    ],
    ids=["diagnostics", "collectives"],
)
def test_all_that_is_measured_is_kept_as_measurements(tmp_path, machine, write):
    machine.load = 2.5
    write(tmp_path / "file.json")
    (found,) = Measurements(tmp_path / "file.json").read().values()
    assert (found.at, found.load) == (1e9, 2.5)


def test_an_old_measurement_is_not_planned_with(tmp_path, machine):
    cache = CostCache.in_folder(str(tmp_path))
    cache.write("a", COSTS)
    assert cache.read("a") == COSTS
    machine.now += (MOST_DAYS + 1) * DAY
    assert cache.read("a") is None and cache.is_due("a")
    cache.write("a", COSTS)
    assert cache.read("a") == COSTS and not cache.is_due("a")


@pytest.mark.parametrize(("load", "spread"), [(4.0, 0.0), (0.0, 0.9)], ids=["load", "spread"])
def test_a_doubtful_measurement_never_replaces_a_better_one(tmp_path, machine, load, spread):
    cache = Measurements(tmp_path / "devices.json")

    def kept(value, load, spread):
        machine.load = load
        cache.store({"cpu": value}, spread)
        return cache.read()["cpu"].value

    assert kept(1, load, spread) == 1, "better than none"
    assert kept(2, load / 2, spread / 2) == 2, "less doubtful"
    assert kept(3, load, spread) == 2
    assert kept(4, 0.5, 0.1) == 4
    assert kept(5, load, spread) == 4
    assert kept(6, 0.9, 0.2) == 6, "neither is doubtful"
    machine.now += (MOST_DAYS + 1) * DAY
    assert kept(7, load, spread) == 7, "better than an old one"


@pytest.mark.parametrize(
    ("load", "spread", "later", "days", "due"),
    [
        (4.0, 0.0, 3.0, 0.1, False),
        (4.0, 0.0, 2.0, 0.1, True),
        (4.0, 0.0, 4.0, 2.0, True),
        (0.5, 0.9, 0.4, 0.1, False),
        (0.5, 0.9, 0.2, 0.1, True),
        (0.5, 0.9, 0.5, 2.0, True),
        (0.9, 0.2, 0.0, 20.0, False),
        (0.9, 0.2, 0.0, 31.0, True),
    ],
)
def test_a_doubtful_measurement_is_repeated_when_the_machine_is_quieter(
    tmp_path, machine, load, spread, later, days, due
):
    cache, machine.load = Measurements(tmp_path / "devices.json"), load
    cache.store({"cpu": 1}, spread)
    machine.load, machine.now = later, machine.now + days * DAY
    assert cache.is_due("cpu") is due
    assert cache.is_due("other")


def test_a_device_that_was_measured_under_load_is_measured_again(tmp_path, machine, monkeypatch):
    import torch

    from weft.engine.planning import devices

    speeds = iter([1e9, 3e9])
    monkeypatch.setattr(devices, "_measured_flops", lambda *_: (next(speeds), 0.0))
    cache, machine.load = Measurements(tmp_path / "devices.json"), 4.0

    def usable():
        return devices.usable_flops(torch.device("cpu"), 1, cache)[0] / devices.EFFICIENCY

    assert usable() == usable() == 1e9
    machine.load = 0.5
    assert usable() == usable() == 3e9


@pytest.mark.parametrize(
    ("faster", "load", "refuted"),
    [(1.2, 0.0, False), (1.3, 0.0, True), (1.3, 9.0, True), (0.9, 0.0, False), (0.7, 0.9, True), (0.7, 2.0, False)],
)
def test_a_run_replaces_a_speed_that_it_contradicts(tmp_path, machine, faster, load, refuted):
    """Other work can only slow a measurement down: a slower one counts on a quiet machine."""
    import torch

    from weft.engine.planning.devices import _name, correct

    cache, device = Measurements(tmp_path / "devices.json"), torch.device("cpu")
    name = _name("", device, torch.get_num_threads())
    correct(device, 9e9, cache, load=load)
    assert not cache.read(), "nothing was planned with"
    cache.store({name: 1e9}, spread=0.1)
    correct(device, faster * 1e9, cache, load=load)
    assert cache.values() == {name: faster * 1e9 if refuted else 1e9}


def test_differences_within_the_spread_are_no_contradiction(tmp_path, machine):
    known = Measurement.now(1.0, spread=0.6)
    assert not Measurement.now(1.5).refutes(known, 1.5)
    assert Measurement.now(1.7).refutes(known, 1.7)
    assert not Measurement.now(1.7, spread=0.8).refutes(known, 1.7)


def test_a_run_replaces_costs_of_collectives_that_it_contradicts(tmp_path, machine):
    cache = CostCache.in_folder(str(tmp_path))
    samples = [
        Sample(*GATHER, 2, size, 3 * COSTS.step_s(GATHER[1], GATHER[0], 2, size)) for size in (1000, 10**6, 10**8)
    ] + [Sample(*SCATTER, 2, 10**6, 1.1 * COSTS.step_s(SCATTER[1], SCATTER[0], 2, 10**6))]
    cache.correct("a", samples, load=0.0)
    assert cache.read("a") is None, "nothing was planned with"
    cache.write("a", COSTS)
    cache.correct("a", samples, load=2.0)
    assert cache.read("a") == COSTS, "the run was slower on a busier machine"
    cache.correct("a", samples, load=1.0)
    found = cache.read("a").table
    assert found[GATHER].alpha_s == pytest.approx(3e-5) and found[GATHER].beta_s == pytest.approx(3e-9)
    assert found[SCATTER] == COSTS.table[SCATTER], "within what measurements differ by"


def test_the_doctor_shows_and_clears_what_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    CostCache.in_folder(str(tmp_path)).write("cpu on 2 ranks", COSTS)
    Measurements(tmp_path / "devices.json").store({"cpu, threads=1": 1e9, "memory of cpu": 2e9})
    Measurements(tmp_path / "prefill" / "model.json").store({"prefill": 1.0})
    JsonCache(tmp_path / "work.json").add({"3 abc": {}})
    folder = ["--folder", str(tmp_path)]
    assert main(["doctor", "cache", *folder]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("cpu on 2 ranks", "cpu, threads=1", "prefill/model.json", "load", "traced"))
    assert main(["doctor", "cache", *folder, "--clear", "memory", "collectives"]) == 0
    assert set(Measurements(tmp_path / "devices.json").read()) == {"cpu, threads=1"}
    assert not (tmp_path / "collectives.json").exists()
    assert main(["doctor", "cache", *folder, "--clear", "nothing"]) == 2
    assert main(["doctor", "cache", *folder, "--clear"]) == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
