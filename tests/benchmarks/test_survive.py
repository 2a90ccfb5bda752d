"""The faults of `benchmarks survive`, without a run: settings that load, orders that are known, judgements."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import survive
from benchmarks.survival import faults, network, reference, session, sitecustomize
from benchmarks.survival.hosts import HOSTS, LocalHosts, OneMachine
from benchmarks.survival.outcome import NEXT_STEP_WITHIN_S, Survival, is_right
from benchmarks.survival.reference import difference
from benchmarks.survival.run import Metrics
from weft.conf import load
from weft.pipeline.action import Action

HOST_OF = {rank: HOSTS[rank // 2] for rank in range(8)}


@pytest.mark.parametrize("number", range(len(session.SESSIONS)))
def test_the_settings_load(tmp_path, number):
    chosen = session.SESSIONS[number]
    settings = [*survive.SETTINGS, *chosen.settings]
    assert load([*settings, *LocalHosts(tmp_path).settings]).supervise.enabled
    plain = load([*settings, *reference.PLAIN, *OneMachine(stages=chosen.stages).settings])
    assert not plain.cluster.hostfile
    assert sum(site.ranks for site in plain.cluster.sites) == plain.pipeline.stages


def test_every_order_that_is_given_is_known_to_the_ranks():
    given = set(re.findall(r"run\.order\([^,]+, \"(\w+)\"", inspect.getsource(faults) + inspect.getsource(reference)))
    assert len(given) > 1
    assert all(callable(getattr(sitecustomize, f"_{name}")) for name in given)


def test_a_bit_flips_once_and_while_weights_are_whole():
    class Engine:
        def __init__(self):
            self.module, self.slot_observers = torch.nn.Linear(3, 2), []

    engine = Engine()
    before = torch.nn.utils.parameters_to_vector(engine.module.parameters())
    sitecustomize._flip(SimpleNamespace(WeftEngine=Engine))
    changed = []
    for row in ("0F0", "0SEND_F0", "0F1", "0I0", "0W0", "0B1", "0STEP"):
        slot = (Action.parse(row),)
        for observer in engine.slot_observers:
            observer.slot_begins(slot)
        after = torch.nn.utils.parameters_to_vector(engine.module.parameters())
        changed.append(int((before != after).sum()))
    assert changed == [0, 0, 0, 1, 1, 1, 1]


def test_once_replicas_become_fewer_only_what_rounds_follows():
    for each in session.SESSIONS:
        rounds = [fault.rounds for fault in each.faults]
        assert rounds == sorted(rounds)
    assert [fault for fault in network.AWAY if fault.grows]


@pytest.mark.parametrize(("named_s", "next_step_s", "difference", "rounds", "met"), [
    (1.0, 20.0, 0.0, False, True),
    (11.0, 20.0, 0.0, False, False),
    (1.0, NEXT_STEP_WITHIN_S + 1, 0.0, False, False),
    (1.0, 20.0, 1e-7, False, False),
    (1.0, 20.0, 1e-7, True, True),
    (1.0, 20.0, 1e-1, True, False),
    (1.0, 20.0, None, False, False),
    (None, None, 0.0, False, True),
])  # fmt: skip
def test_a_fault_is_survived_if_named_in_time_and_the_losses_are_the_same(
    named_s, next_step_s, difference, rounds, met
):
    outcome = Survival(
        "fault", right=True, named_s=named_s, next_step_s=next_step_s, difference=difference, rounds=rounds
    )
    assert outcome.met is met


@pytest.mark.parametrize(("said", "blamed", "right"), [
    ({"rank": 3, "host": "east1", "kind": "signal"}, {"rank": 3, "host": "east1"}, True),
    ({"rank": 3, "host": "east1", "kind": "signal"}, {"rank": 2, "host": "east1"}, False),
    ({"kind": "link"}, {"rank": 3}, False),
    ({"host": "west1", "kind": "host"}, {"site": "west"}, True),
    ({"host": "east1", "kind": "host"}, {"site": "west"}, False),
    ({"kind": "hung"}, {"site": "west"}, False),
    ({"link": [2, 4], "kind": "link"}, {"between": ("east", "west")}, True),
    ({"link": [4, 2], "kind": "link"}, {"between": ("east", "west")}, True),
    ({"link": [0, 2], "kind": "link"}, {"between": ("east", "west")}, False),
    ({"host": "west0", "kind": "host"}, {"between": ("east", "west")}, True),
    ({"host": "east0", "kind": "host"}, {"between": ("east", "west")}, False),
    ({"kind": "hung"}, {"between": ("east", "west")}, False),
    ({"rank": 1, "kind": "disk_full"}, {"kind": "disk_full"}, True),
    ({"rank": 1, "kind": "other"}, {"kind": "disk_full"}, False),
])  # fmt: skip
def test_who_is_rightly_blamed(said, blamed, right):
    assert is_right(said, blamed, HOST_OF) is right


def test_losses_differ_by_the_largest_and_a_missing_one_is_an_error():
    assert difference({}, {1: 2.0}) is None
    assert difference({1: 2.0, 2: 3.0}, {1: 2.0, 2: 3.0, 3: 4.0}) == 0.0
    assert difference({1: 2.0, 2: 3.3}, {1: 2.0, 2: 3.0}) == pytest.approx(0.1)
    assert difference({1: None}, {1: None}) == 0.0
    assert difference({1: None}, {1: 1.0}) == float("inf")
    with pytest.raises(KeyError):
        difference({4: 2.0}, {1: 2.0})


def test_what_is_trained_again_replaces_what_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    assert metrics.by_step() == {}
    path.write_text('{"step": 1, "kind": "train", "loss": 2}\n{"step": 1, "kind": "eval", "loss": 9}\n{"step": 2, "ki')
    assert {step: record["loss"] for step, record in metrics.by_step().items()} == {1: 2}
    path.unlink()
    path.write_text('{"step": 1, "kind": "train", "loss": 3}\n')
    assert {step: record["loss"] for step, record in metrics.by_step().items()} == {1: 3}
