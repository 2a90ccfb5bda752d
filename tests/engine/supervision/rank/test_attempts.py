"""A process that takes part in many attempts trains as one would, and collects nothing on the way."""

import json

import pytest

from tests.engine.supervision.rank.repeated_attempts import attempts
from tests.recipes.runs import prepare
from weft.conf.host.processes import free_port
from weft.tools.ranks import run_ranks

ATTEMPTS = 5

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_attempts_leave_nothing_behind(tmp_path):
    """Two stages of two replicas lose each other five times; the memory checkpoint is found, threads and files go."""
    memory = str(tmp_path / "memory")
    settings = [
        *prepare(tmp_path),
        "pipeline.stages=2",
        "zero.stage=1",
        "checkpoint.memory_every=1",
        "checkpoint.every=3",
        "train.steps=100",
    ]
    for rank in run_ranks(4, attempts, settings, ATTEMPTS, free_port(), 4, memory, timeout_s=500):
        assert [seen["reason"] for seen in rank] == ["link rank 0 -> rank 9: the peer has exited"] * ATTEMPTS
        assert [seen["engines"] for seen in rank] == [0] * ATTEMPTS
        early, late = rank[1], rank[-1]  # libraries keep some of what they open once
        for what in ("threads", "tasks", "files"):
            for name, count in late[what].items():
                # What leaks does so each time; a library's thread may take its time to end.
                assert count - early[what][name] < ATTEMPTS - 2, (what, name, early[what], late[what])
    lines = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)), "each step is there once"
    assert len(steps) >= ATTEMPTS * 3, "at most the step in flight was lost"
    folders = {path.name.rpartition("-")[0] for path in (tmp_path / "memory").iterdir()}
    assert len(folders) <= 2, "of the last attempt, and of the one before while its own is not whole"
