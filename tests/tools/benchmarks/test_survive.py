"""The faults of `weft bench survive`, without a run: settings that load, orders that are known."""

from __future__ import annotations

import inspect
import re

import pytest

from weft.conf import load
from weft.tools.benchmarks import survive
from weft.tools.benchmarks.survival import faults, sitecustomize
from weft.tools.benchmarks.survival.run import HOSTS


def test_the_settings_load(tmp_path):
    (tmp_path / "hostfile").write_text("".join(f"{host} slots=2\n" for host in HOSTS))
    hosts = [f"cluster.hostfile={tmp_path / 'hostfile'}", "cluster.manager=local"]
    assert load([*survive.SETTINGS, *hosts]).supervise.enabled


def test_every_order_that_a_fault_gives_is_known_to_the_ranks():
    given = set(re.findall(r"run\.order\([^,]+, \"(\w+)\"", inspect.getsource(faults)))
    assert given
    assert all(callable(getattr(sitecustomize, f"_{name}")) for name in given)


def test_faults_have_names_of_their_own():
    names = [fault.name for session in faults.SESSIONS for fault in session]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("named_s", "next_step_s", "same", "met"), [
    (1.0, 20.0, True, True),
    (11.0, 20.0, True, False),
    (1.0, 31.0, True, False),
    (1.0, 20.0, False, False),
    (None, None, True, True),
])  # fmt: skip
def test_a_fault_is_survived_if_named_in_time_and_the_losses_are_the_same(named_s, next_step_s, same, met):
    outcome = survive.Survival("fault", right=True, named_s=named_s, next_step_s=next_step_s, same=same)
    assert survive._is_met(outcome) is met
