"""A doctor's findings become reasons to leave a host out, and so does a doctor that cannot work."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from weft.engine.supervision import examination
from weft.engine.supervision.examination import SUSPICIOUS, Suspicions, examine

WELL = {"check": "disk", "verdict": "passed", "says": "fine"}
ILL = {"check": "GEMM", "verdict": "failed", "says": "wrong bits"}


@pytest.fixture
def doctor(monkeypatch):
    """Has a program play the doctor."""

    def play(program):
        monkeypatch.setattr(examination, "doctor_command", lambda folder, **_: [sys.executable, "-c", program])

    return play


@pytest.mark.parametrize(
    "program, failed",
    [
        (f"print({json.dumps(json.dumps([WELL]))})", []),
        (f"print({json.dumps(json.dumps([WELL, ILL]))}); raise SystemExit(1)", ["GEMM: wrong bits"]),
        ("raise SystemExit(9)", ["doctor: the doctor ended with 9"]),
    ],
)
def test_what_a_doctor_says(program, failed, doctor, tmp_path):
    doctor(program)
    assert asyncio.run(examine(tmp_path, 1, "driver")) == failed


def test_a_doctor_that_does_not_end_is_given_up(doctor, tmp_path, monkeypatch):
    doctor("import time; time.sleep(600)")
    monkeypatch.setattr(examination, "DOCTOR_S", 0.1)
    assert asyncio.run(examine(tmp_path, 1, ("10.0.0.1", 5))) == ["doctor: the doctor did not end in time"]


def test_who_is_suspected():
    suspicions = Suspicions()
    for _ in range(SUSPICIOUS):
        assert suspicions.take() is None
        suspicions.saw_fault("signal", {"rank": 1, "host": "a"})
        suspicions.saw_fault("lost_peer", {"rank": 2, "host": "b"})
        suspicions.saw_fault("link", {"link": [1, 2]})
    assert suspicions.take() == "a" and suspicions.take() is None
