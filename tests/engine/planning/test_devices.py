"""Tests that a device is measured once."""

import logging

import pytest
import torch

from tests.engine.stages.tiny import tiny
from weft.conf.host.measurements import Measurements
from weft.conf.schema import Float8
from weft.engine.models.tracing import trace_model
from weft.engine.planning import axis_facts, devices
from weft.engine.planning.axis_facts import with_float8
from weft.engine.planning.devices import usable_flops
from weft.engine.stages.files.loading import load_hf_config
from weft.pipeline.hardware import EFFICIENCY, GPU_KINDS

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


def test_fp8_products_are_planned_at_the_speed_of_the_data_sheet(monkeypatch):
    dense, experts = (trace_model(load_hf_config(tiny(arch)), 16) for arch in ("llama", "mixtral"))
    assert with_float8(dense, Float8.tensorwise, CPU) == dense, "no data sheet"
    monkeypatch.setattr(axis_facts, "data_sheet", lambda _: GPU_KINDS["A100"])
    assert with_float8(dense, Float8.tensorwise, CPU) == dense, "no fp8"
    monkeypatch.setattr(axis_facts, "data_sheet", lambda _: GPU_KINDS["B200"])
    assert with_float8(dense, Float8.none, CPU) == dense
    assert with_float8(experts, Float8.rowwise, CPU) == experts
    for recipe, of_weights in ((Float8.rowwise, 0.5), (Float8.rowwise_with_gw_hp, 1.0)):
        found = with_float8(dense, recipe, CPU)
        assert (found.before, found.after) == (dense.before, dense.after)
        for new, old in zip(found.layers, dense.layers, strict=True):
            assert new.matmul_flops == 0.5 * old.matmul_flops and new.attention_flops == old.attention_flops
            assert new.trained_flops == of_weights * old.trained_flops
            assert new.activation_bytes == old.activation_bytes
