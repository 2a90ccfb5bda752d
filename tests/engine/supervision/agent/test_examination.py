"""Failed checks of a host become reasons to leave it out, and so does a check that cannot run."""

import asyncio

import pytest

from tests.engine.supervision.agent.agent_bed import gone
from tests.waiting import until
from weft.conf.host.diagnosis import DOCTOR, doctor_arguments, read_results
from weft.engine.supervision.agent import processes
from weft.engine.supervision.agent.forkserver import PRELOAD
from weft.engine.supervision.agent.processes import Ranks, examine
from weft.engine.supervision.driver.limits import SUSPICIOUS, Suspicions


@pytest.fixture
def examined(monkeypatch, tmp_path):
    """Return the result of an examination by one of `fake_doctors`, forked from a forkserver as for an agent."""

    def by(doctor, driver="driver"):
        async def ask():
            ranks = Ranks((), lambda: None)
            try:
                return await examine(ranks, tmp_path, 1, driver)
            finally:
                ranks.close()

        monkeypatch.setattr(processes, "DOCTOR", f"tests.engine.supervision.agent.fake_doctors:{doctor}")
        return asyncio.run(ask())

    return by


@pytest.mark.parametrize(
    "doctor, failed",
    [
        ("finds_nothing", []),
        ("finds_something", ["GEMM: wrong bits"]),
        ("dies", ["doctor: the doctor ended with 9"]),
    ],
)
def test_what_a_doctor_says(doctor, failed, examined):
    assert examined(doctor) == failed


def test_a_doctor_that_does_not_end_is_given_up_with_what_it_has_started(examined, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "DOCTOR_S", 1.0)
    assert examined("hangs", ("10.0.0.1", 5)) == ["doctor: the doctor did not end in time"]
    child = int((tmp_path / "child").read_text())
    until(lambda: gone(child))


def test_a_doctor_that_talks_too_much_has_failed(examined):
    (said,) = examined("talks")
    assert said.startswith("doctor: the doctor ended with ")


def test_who_is_suspected():
    suspicions = Suspicions()
    for _ in range(SUSPICIOUS):
        assert suspicions.take() is None
        suspicions.saw_fault("signal", {"rank": 1, "host": "a"})
        suspicions.saw_fault("lost_peer", {"rank": 2, "host": "b"})
        suspicions.saw_fault("link", {"link": [1, 2]})
    assert suspicions.take() == "a" and suspicions.take() is None


@pytest.mark.slow
def test_as_the_supervisor_runs_it(tmp_path):
    async def ask():
        ranks = Ranks(PRELOAD, lambda: None)
        try:
            return await ranks.ask("doctor", DOCTOR, arguments, 240.0)
        finally:
            ranks.close()

    arguments = doctor_arguments(tmp_path, ranks=2, cache=tmp_path / "figures.json")
    printed, code = asyncio.run(ask())
    findings = read_results(printed, code)
    assert code == 0, findings
    assert {finding.check for finding in findings} >= {"collectives", "memory", "GEMM", "GEMM bits", "disk", "loopback"}
