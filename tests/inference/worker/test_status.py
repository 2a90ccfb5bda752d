"""When a status says that an engine is stuck, to the nanosecond, and what is none."""

import pytest

from weft.inference.worker import status as module
from weft.inference.worker.status import STALE_S, STUCK_S, WorkerStatus, problem_of

BEGIN_NS = 2**40


@pytest.fixture
def path(tmp_path):
    return tmp_path / "boards" / "worker0.status"


@pytest.fixture
def clock(monkeypatch):
    at = [BEGIN_NS]
    monkeypatch.setattr(module, "monotonic_ns", lambda: at[0])
    return at


@pytest.mark.parametrize(
    ("limit_s", "act", "problem"),
    [
        (STALE_S, "serve", "the thread that waits for bubbles has not run"),
        (STUCK_S, "woke", "the engine has not responded"),
        (STALE_S, "stage", "stage 1 has not run"),
    ],
)
def test_a_limit_is_passed_behind_it(path, clock, limit_s, act, problem):
    status = WorkerStatus(path, stages=2)
    status.serve()
    if act == "stage":
        module.record(path, 1)
    if act == "woke":
        status.woke()
    last_ns = BEGIN_NS + round(limit_s * 1e9)
    if act != "serve":
        clock[0] = last_ns
        status.checked()
    assert problem_of(path, last_ns) == ""
    assert problem_of(path, last_ns + 1).startswith(f"{problem} for {limit_s:.0f} s")


def test_what_has_begun_goes_by_its_begin_and_what_was_done_by_its_last_time(path, clock):
    status = WorkerStatus(path)
    status.serve()
    clock[0] += 10 * 10**9
    assert "has not run for 16 s" in problem_of(path, BEGIN_NS + 16 * 10**9)
    status.checked()
    assert problem_of(path, BEGIN_NS + 16 * 10**9) == ""
    status.woke()
    clock[0] += 110 * 10**9
    status.woke()
    status.checked()
    assert "for 121 s since it was woken" in problem_of(path, BEGIN_NS + 131 * 10**9), "since it was woken first"
    status.looped()
    status.woke()
    assert problem_of(path, clock[0] + 10**9) == ""


def test_a_stage_records_nothing_before_its_engine_has_made_the_file(path, clock):
    module.record(path, 0)
    WorkerStatus(path)
    module.record(path, 0)
    status = WorkerStatus(path, stages=2)
    status.serve()
    module.record(path, 0)
    assert status._words.tolist()[-2:] == [BEGIN_NS, 0], "a stage that has not recorded yet loads its weights"


def test_an_engine_is_healthy_when_it_has_warmed_up(path, clock):
    status = WorkerStatus(path)
    assert "computes its first prompts" in problem_of(path, BEGIN_NS)
    status.serve()
    assert problem_of(path, BEGIN_NS) == ""


def test_what_is_not_published_is_kept_all_the_same(clock):
    status = WorkerStatus(None)
    status.woke()
    status.checked()
    assert status._words.tolist() == [BEGIN_NS, 0, 0, BEGIN_NS]


@pytest.mark.parametrize("content", [b"", b"x" * 7, b"x" * 31])
def test_a_file_that_is_too_short_is_no_status(tmp_path, content):
    path = tmp_path / "some.status"
    path.write_bytes(content)
    assert f"{path}: not the status of a prefill worker; remove it" == problem_of(path, 0)


def test_neither_a_folder_nor_a_link_is_a_status(path, clock):
    status = WorkerStatus(path)
    status.serve()
    status.woke()
    late_ns = BEGIN_NS + 10**12
    assert "has not responded" in problem_of(path, late_ns)
    link = path.with_name("link")
    link.symlink_to(path)
    assert problem_of(link, late_ns) == "", "others could lay it"
    assert "not the status" in problem_of(path.parent, late_ns)
