"""`benchmarks data`: it fails where waits for data are long, or where one loader per host takes no less time."""

import pytest

from benchmarks import data
from benchmarks.data import HOST, RANK
from benchmarks.loading.rank import Work


@pytest.mark.parametrize(("wait", "cpu_s", "code"), [(0.001, 1.0, 0), (0.02, 1.0, 1), (0.001, 9.0, 1)])
def test_long_waits_and_redundant_work_fail_the_bench(monkeypatch, wait, cpu_s, code):
    found = {RANK: [Work(3, 2.0, 10, "")] * 4, HOST: [Work(3, cpu_s, 10, "")] * 4}
    monkeypatch.setattr(data, "measure", lambda ranks, steps: found)
    monkeypatch.setattr(data, "wait_for_data", lambda: wait)
    assert data.main([]) == code
