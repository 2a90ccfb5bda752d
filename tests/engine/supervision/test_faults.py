"""The exit status, the error file and the control group show how a rank ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.supervision.faults import POLICIES, OomKills, cause, classify, read_report
from weft.engine.supervision.messages import ErrorReport, FaultKind, RankEnd
from weft.engine.supervision.rank.agent_link import write_report

REPORT = ErrorReport(kind=FaultKind.bad_numbers, message="step 7: nan", step=7, data=(96, 112))


def test_every_class_has_a_policy():
    assert set(POLICIES) == set(FaultKind)
    final = {kind: policy.most for kind, policy in POLICIES.items() if policy.is_final}
    assert final == {FaultKind.input_error: 1, FaultKind.bad_numbers: 1}


@given(
    st.builds(
        ErrorReport,
        kind=st.sampled_from(FaultKind),
        message=st.text(max_size=100),
        step=st.none() | st.integers(),
        data=st.none() | st.tuples(st.integers(), st.integers()),
    )
)
def test_a_report_is_read_as_it_was_written(tmp_path_factory, report):
    path = tmp_path_factory.mktemp("errors") / "0.json"
    write_report(path, report)
    assert read_report(path) == report
    assert path.stat().st_mode & 0o077 == 0


def test_the_first_error_stands(tmp_path):
    write_report(tmp_path / "0.json", REPORT)
    write_report(tmp_path / "0.json", ErrorReport(kind=FaultKind.lost_peer, message="later"))
    assert read_report(tmp_path / "0.json") == REPORT


def test_a_long_message_is_cut(tmp_path):
    write_report(tmp_path / "0.json", ErrorReport(kind=FaultKind.other, message="\0" * 10**6))
    found = read_report(tmp_path / "0.json")
    assert found is not None
    assert len(found.message) == 4000


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 60_000,
        "null",
        '{"kind": "bad_numbers"}',
        '{"kind": "good", "message": "x"}',
        '{"kind": "bad_numbers", "message": "x", "step": "7"}',
        '{"kind": "bad_numbers", "message": "x", "step": true}',
        '{"kind": "bad_numbers", "message": "x", "data": [1]}',
        '{"kind": "bad_numbers", "message": "x", "data": [1, "2"]}',
        '{"kind": "corruption", "message": "x", "ranks": 3}',
        '{"kind": "corruption", "message": "x", "ranks": [true]}',
        '{"kind": "bad_numbers", "message": "' + "x" * 70_000 + '"}',
    ],
)
def test_what_is_no_report_is_none(tmp_path, content):
    (tmp_path / "0.json").write_text(content)
    assert read_report(tmp_path / "0.json") is None


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text(json.dumps({"kind": "other", "message": "x"}))
    (tmp_path / "0.json").symlink_to(tmp_path / "elsewhere")
    assert read_report(tmp_path / "0.json") is None
    assert read_report(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    ("status", "report", "oom_killed", "kind", "part"),
    [
        (1, REPORT, False, FaultKind.bad_numbers, "step 7: nan"),
        (1, None, False, FaultKind.other, "exit code 1"),
        (2, None, False, FaultKind.input_error, "exit code 2"),
        (-9, None, False, FaultKind.signal, "SIGKILL"),
        (-9, None, True, FaultKind.host_memory, "out of memory"),
        (-11, None, True, FaultKind.signal, "SIGSEGV"),
        (-9, REPORT, False, FaultKind.bad_numbers, "step 7: nan"),
        (-9, REPORT, True, FaultKind.host_memory, "out of memory"),
        (-6, REPORT, False, FaultKind.bad_numbers, "step 7: nan"),
        (-99, None, False, FaultKind.signal, "signal 99"),
    ],
)
def test_an_end_has_a_class(status, report, oom_killed, kind, part):
    end = classify(status, report, oom_killed=oom_killed)
    assert end is not None
    assert (end.kind, end.status) == (kind, status)
    assert part in end.message
    assert end.step == (None if report is None else 7)


def test_a_rank_that_ended_well_has_none():
    assert classify(0, None) is None
    assert classify(0, REPORT) is None


def end(kind: FaultKind) -> RankEnd:
    return RankEnd(kind=kind, message="", status=1)


@pytest.mark.parametrize(
    ("kinds", "rank"),
    [
        (["lost_peer", "lost_peer", "signal", "lost_peer"], 2),
        (["lost_peer", "other", "signal"], 2),
        (["lost_peer", "other", "lost_peer"], 1),
        (["signal", "disk_full", "lost_peer"], 1),
        (["bad_numbers"] * 4, 0),
        (["lost_peer"] * 3, 0),
    ],
)
def test_the_cause_is_the_most_telling_end(kinds, rank):
    assert cause({number: end(FaultKind(kind)) for number, kind in enumerate(kinds)}) == rank


def _group(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("line", "file", "before", "after"),
    [
        ("0::/a/job", "a/job/memory.events", "low 0\noom 1\noom_kill 1\n", "low 0\noom 2\noom_kill 2\n"),
        ("0::/", "unified/memory.events", "oom_kill 0\n", "oom_kill 1\n"),
        (
            "4:memory:/a/job",
            "memory/a/job/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
        ),
    ],
)
def test_kills_for_memory_are_counted_in_the_process_own_group(tmp_path, line, file, before, after):
    _group(tmp_path, "proc/12/cgroup", f"9:name=systemd:/\n{line}\n3:cpu,cpuacct:/\n")
    events = _group(tmp_path, f"cgroup/{file}", before)
    kills = OomKills(12, proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")
    assert not kills.seen()
    events.write_text(after)
    assert kills.seen()
    assert not kills.seen()


def test_without_control_groups_nothing_is_counted(tmp_path):
    assert not OomKills(12, proc=tmp_path, cgroups=tmp_path).seen()
    _group(tmp_path, "12/cgroup", "0::/gone\n")
    assert not OomKills(12, proc=tmp_path, cgroups=tmp_path).seen()


def _own_memory_group(most_bytes: int) -> Path | None:
    """A new control group of limited memory below this process's own; None where none can be made."""
    places = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, place = line.split(":", 2)
        if number == "0":
            places[Path("/sys/fs/cgroup") / place.lstrip("/")] = "memory.max"
        elif "memory" in controllers.split(","):
            places[Path("/sys/fs/cgroup/memory") / place.lstrip("/")] = "memory.limit_in_bytes"
    for parent, limit in places.items():
        if not (parent / "cgroup.procs").exists():
            continue
        group = parent / f"weft-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(most_bytes))
            return group
        except OSError:
            group.rmdir()
    return None


@pytest.mark.slow
def test_a_process_that_the_kernel_kills_for_memory_is_known():
    group = _own_memory_group(48 << 20)
    if group is None:
        pytest.skip("no control group with a memory limit can be made here")
    code = "import sys; sys.stdin.readline(); held = bytearray(200 << 20)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        (group / "cgroup.procs").write_text(str(child.pid))
        kills = OomKills(child.pid)
        child.communicate(b"go\n", timeout=100)
        end = classify(child.returncode, None, oom_killed=kills.seen())
        assert end is not None
        assert end.kind is FaultKind.host_memory
    finally:
        child.kill()
        child.wait()
        group.rmdir()
