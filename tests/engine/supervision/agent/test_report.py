"""Reports of hosts: what is in them, and their way through JSON."""

import json

import pytest

from weft.conf.host.processes import ProcessState
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.agent.reports import rank_report
from weft.engine.supervision.messages import (
    AgentMessage,
    FaultKind,
    HostReport,
    LinkReading,
    RankEnd,
    RankReport,
    RowProgress,
    decode,
    encode,
    from_fields,
)
from weft.engine.supervision.progress_page import Reading

LINK = LinkReading(3, 1, 2, 3, 4, 5, 0.5, 6)
READING = Reading(
    2, 9, 77, 5, Phase.steady, RowProgress(4, 3, True, 1), 1_000_000_000, 8, 66, 2_500_000_000, 3, 7, 3, (LINK,)
)
PROCESS = ProcessState("R", 1.5, 5, 4096)
END = {"kind": "other", "message": "", "step": None, "data": None, "ranks": [], "status": 1}


def message_of(report, **fields):
    blank = {"ready": True, "ends": {}, "standby": {}, "lines": {}, "examined": 0, "failed": []}
    return AgentMessage(attempt=2, report=report, **blank | fields)


def test_a_report_joins_place_and_process():
    found = rank_report(9, 2, READING, PROCESS, now_ns=3_000_000_000)
    assert found == RankReport(
        9, 2, Phase.steady, RowProgress(4, 3, True, 1), 8, 2.0, 66, 2.5, 3, "R", 1.5, None, 4096, 7, 3, (LINK,)
    )


@pytest.mark.parametrize("attempt, rank", [(3, 9), (2, 8)])
def test_what_an_earlier_attempt_left_is_ignored(attempt, rank):
    found = rank_report(rank, attempt, READING, PROCESS, now_ns=3_000_000_000)
    assert (found.phase, found.progress, found.state) == (Phase.imports, RowProgress(0), "R")


def test_an_ended_rank_keeps_its_last_place():
    found = rank_report(9, 2, READING, None, now_ns=3_000_000_000, exit_code=-9)
    assert (found.state, found.exit_code, found.progress) == ("", -9, RowProgress(4, 3, True, 1))


def test_reports_go_through_json():
    ranks = (rank_report(9, 2, READING, PROCESS, now_ns=2_000_000_000), RankReport(1, 2, exit_code=1))
    end = RankEnd(kind=FaultKind.corruption, message="é", step=4, data=(8, 16), ranks=(3,), status=1)
    message = message_of(
        HostReport("alpha", ranks, {"disk_free_bytes": 5}), ends={9: end}, standby={1: "lost"}, lines={9: ["last"]}
    )
    assert decode(encode(message), AgentMessage) == message


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": [[1, 2]]},
        {"ranks": [["x", *RankReport(1, 2)[1:]]]},
        {"ranks": [[1, 2, 99, *RankReport(1, 2)[3:]]]},
        {"ranks": [[1, 2, 0, [1], *RankReport(1, 2)[4:]]]},
        {"ranks": 3},
        {"host": 5},
        {"vitals": []},
        *(
            {"ranks": [[*RankReport(1, 2)[:-1], [link]]]}
            for link in (
                5,
                "12345678",
                [],
                [*LINK[:-1]],
                [*LINK[:-1], "fast"],
                [*LINK[:-1], float("nan")],
                [None, *LINK[1:]],
            )
        ),
    ],
)
def test_another_form_is_refused(change):
    wire = json.loads(encode(message_of(HostReport("alpha", (RankReport(1, 2),)))))
    assert from_fields(wire, AgentMessage)
    with pytest.raises(ValueError, match="the same Weft"):
        from_fields(wire | {"report": wire["report"] | change}, AgentMessage)


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": "2"},
        {"report": None},
        {"report": []},
        {"ends": {"x": END}},
        {"ends": {"1": END | {"kind": "no such"}}},
        {"ends": {"1": END | {"step": 1.5}}},
        {"ends": {"1": END | {"data": [1]}}},
        {"ends": [END]},
        {"standby": {"1": 5}},
        {"lines": {"1": "a line"}},
        {"failed": [None]},
        {"ready": 1},
    ],
)
def test_another_message_is_refused(change):
    wire = json.loads(encode(message_of(HostReport("alpha", ()))))
    assert from_fields(wire | {"ends": {"1": END}}, AgentMessage).ends[1].kind is FaultKind.other
    with pytest.raises(ValueError, match="the same Weft"):
        from_fields(wire | change, AgentMessage)


@pytest.mark.parametrize("name", ["attempt", "ready", "report", "ends", "standby", "lines", "examined", "failed"])
def test_a_message_that_lacks_a_field_is_refused(name):
    """A message of an older Weft."""
    wire = json.loads(encode(message_of(HostReport("alpha", ()))))
    del wire[name]
    with pytest.raises(ValueError, match="the same Weft"):
        from_fields(wire, AgentMessage)
