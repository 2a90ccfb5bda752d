"""Tests that a device is measured once."""

import logging

import pytest
import torch

from weft.conf.host.measurements import Measurements
from weft.engine.planning import devices
from weft.engine.planning.devices import usable_flops
from weft.pipeline.hardware import EFFICIENCY

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch):
    """Speeds that measurements find, and how many threads they had."""
    threads = []

    def measure(_, threads_now):
        threads.append(torch.get_num_threads())
        return 1e9 * len(threads), 0.0

    monkeypatch.setattr(devices, "_measured_flops", measure)
    return threads


def test_every_start_plans_with_one_figure(tmp_path, measured):
    cache, before = Measurements(tmp_path / "devices.json"), torch.get_num_threads()
    first, second, other = (usable_flops(CPU, threads, cache) for threads in (1, 1, 2))
    assert first[0] == second[0] == EFFICIENCY * 1e9 and other[0] == EFFICIENCY * 2e9
    assert "was measured to do" in first[1] and f"cache {cache.path}" in second[1]
    assert measured == [1, 2] and torch.get_num_threads() == before


def test_failed_write_of_measurements_logs_a_warning(tmp_path, measured, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        found, _ = usable_flops(CPU, 1, Measurements(tmp_path / "file" / "devices.json"))
    assert found == EFFICIENCY * 1e9
    assert "measured anew at every start" in caplog.text
