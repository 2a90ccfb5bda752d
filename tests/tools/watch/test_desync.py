"""The collective at which ranks differ is named as torch's analyser does, and damaged dumps do no harm."""

import json
import logging
import os
import pickle
import time
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed.flight_recorder.components.builder import build_db

from weft.tools.cli import main
from weft.tools.watch.calls import parse, read_dumps
from weft.tools.watch.desync import differences, idle, stored_difference

NOW_S = 1000.0
KINDS = {
    "all_reduce": ([[8]], [[8]]),
    "broadcast": ([[8]], [[8]]),
    "all_gather": ([[8]], [[3, 8]]),
    "barrier": ([[1]], [[1]]),
}
FAULTS = ("skips", "another", "size", "type", "hangs", "nothing")


def call(number, name="all_reduce", *, group="3", age_s=12.0, done=True, sizes=None, kind="Float", record=None):
    inputs, outputs = sizes or KINDS[name]
    return {
        "record_id": number if record is None else record,
        "process_group": [group, "replicas"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "is_p2p": False,
        "profiling_name": f"gloo:{name}",
        "time_created_ns": int((NOW_S - age_s) * 1e9),
        "input_sizes": inputs,
        "input_dtypes": [kind] * len(inputs),
        "output_sizes": outputs,
        "output_dtypes": [kind] * len(outputs),
        "state": "scheduled",
        "retired": done,
        "frames": [
            {"name": "all_reduce", "filename": "/env/torch/distributed/c10d.py", "line": 1},
            {"name": "finish", "filename": "/home/me/weft/engine/zero/bucket.py", "line": 88},
        ],
    }


def transfer(operation, ends, *, done=False):
    return {**call(0, done=done), "is_p2p": True, "p2p_seq_id": 4, "profiling_name": f"nccl:{operation} {ends}"}


def dump(calls, ranks, group="3"):
    return {"version": "2.10", "entries": calls, "pg_config": {group: {"desc": "replicas", "ranks": str(ranks)}}}


def compared(dumps, now_s=NOW_S):
    found = differences({rank: parse(each) for rank, each in dumps.items()}, dict.fromkeys(dumps, now_s))
    return found, [each.text for each in found]


def test_a_skipped_collective_is_named_with_its_callers():
    three = [call(number, done=number < 3) for number in (1, 2, 3)]
    found, texts = compared({0: dump(three, [0, 2]), 2: dump(three[:2], [0, 2])})
    assert texts == [
        "gloo group 3 (ranks 0, 2): all_reduce 3: rank 2 has not called it, "
        "rank 0 did in finish (engine/zero/bucket.py:88) 12.0 s ago"
    ]
    assert found[0].waiting == (0,) and found[0].absent == (2,) and idle(found) == [2]


def test_calls_that_were_stored_in_this_stall_are_compared(tmp_path):
    """The driver quotes the difference. Calls of an earlier stall, and damaged files, give none."""
    three = [call(number, done=number < 3) for number in (1, 2, 3)]
    dumps = {0: dump(three, [0, 2]), 2: dump(three[:2], [0, 2])}
    stalled_s = time.time() - NOW_S + 2.0  # since before the dumps
    assert stored_difference(tmp_path, stalled_s) == ""
    (tmp_path / "watch").mkdir()
    file = tmp_path / "watch" / "calls-host.json"
    file.write_text(json.dumps({"at": NOW_S, "still": NOW_S - 1.0, "ranks": dumps}))
    assert stored_difference(tmp_path, stalled_s) == compared(dumps)[1][0]
    assert stored_difference(tmp_path, stalled_s - 4.0) == ""
    for text in ("{", "[]", json.dumps({"at": NOW_S, "still": "x", "ranks": {}})):
        file.write_text(text)
        assert stored_difference(tmp_path, stalled_s) == ""


def test_the_rank_with_another_call_is_named_even_if_it_is_the_first():
    usual = [call(1), call(2, done=False)]
    odd = [call(1), call(2, "broadcast", done=False)]
    found, texts = compared({0: dump(odd, [0, 1, 2]), 1: dump(usual, [0, 1, 2]), 2: dump(usual, [0, 1, 2])})
    by = "in finish (engine/zero/bucket.py:88)"
    assert texts == [
        f"gloo group 3 (ranks 0, 1, 2): collective 2 differs: rank 0 called broadcast of 8 Float {by}; "
        f"ranks 1, 2 called all_reduce of 8 Float {by}"
    ]
    assert found[0].absent == (0,)


def test_the_first_of_a_chain_is_the_rank_that_waits_nowhere():
    """Rank 1 waits for rank 0 in one group, and rank 2 for rank 1 in another."""
    first, second = "[0, 1]", "[1, 2]"
    groups = {"a": {"ranks": first}, "b": {"ranks": second}}
    calls = {0: [], 1: [call(5, group="a", done=False)], 2: [call(9, group="b", done=False, age_s=30.0)]}
    found, texts = compared({rank: {"entries": each, "pg_config": groups} for rank, each in calls.items()})
    assert [each.absent for each in found] == [(0,), (1,)] and idle(found) == [0]
    assert "rank 0 has not called it" in texts[0]


def test_calls_that_others_are_about_to_make_and_forgotten_ones_are_no_difference():
    newest = [call(number) for number in range(5, 9)]
    late = [call(9, age_s=0.2, done=False)]
    assert compared({0: dump(newest + late, [0, 1]), 1: dump(newest[2:], [0, 1])})[0] == []


def test_a_collective_that_all_have_called_and_a_rank_without_record_are_named():
    waits = [call(1), call(2, done=False)]
    _, texts = compared({0: dump(waits, [0, 1, 2]), 1: dump(waits, [0, 1, 2])})
    assert len(texts) == 1 and "all recorded ranks have called it" in texts[0]
    assert texts[0].endswith("nothing is recorded of rank 2")


def test_transfers_over_nccl_without_a_partner_are_named():
    both = {0: dump([transfer("send", "0->1")], [4, 6]), 1: dump([], [4, 6])}
    assert compared(both)[0] == []  # not the ranks of the group
    _, texts = compared({4: both[0], 6: both[1]})
    assert texts[0].startswith(
        "nccl group 3 (ranks 4, 6): rank 4 to rank 6: the receiver has posted 0 of 1 receives for 12"
    )
    _, texts = compared({4: both[0], 6: dump([transfer("recv", "1<-0")], [4, 6])})
    assert "posted on both ranks, and does not arrive" in texts[0]
    done = {4: dump([transfer("send", "0->1", done=True)], [4, 6]), 6: both[1]}
    assert compared(done)[0] == []


@pytest.mark.parametrize("seed", range(40))
def test_torchs_analyser_finds_the_same_difference(seed, caplog):
    """It has to be given the ranks of gloo's groups, and records that begin with the first call."""
    rng = np.random.default_rng(seed)
    fault, culprit, at = FAULTS[seed % len(FAULTS)], int(rng.integers(1, 3)), int(rng.integers(1, 6))
    names = rng.choice(list(KINDS), 6)
    names[-2:] = "all_reduce", "barrier"
    rows = {rank: list(names) for rank in range(3)}
    if fault == "skips":
        del rows[culprit][at]
    dumps = {}
    for rank, row in rows.items():
        calls = [call(number, name, record=number - 1) for number, name in enumerate(row, start=1)]
        odd = calls[min(at, len(calls) - 1)]
        if rank == culprit and fault == "another":
            name = "broadcast" if odd["profiling_name"] == "gloo:all_reduce" else "all_reduce"
            odd |= call(odd["collective_seq_id"], name, record=odd["record_id"])
        elif rank == culprit and fault == "size":
            odd["input_sizes"] = odd["output_sizes"] = [[4]]
        elif rank == culprit and fault == "type":
            odd["input_dtypes"] = odd["output_dtypes"] = ["Half"]
        if fault in ("skips", "hangs"):
            calls[-1]["retired"] = len(calls) < len(names)
        dumps[rank] = dump(calls, [0, 1, 2])
    found, texts = compared(dumps)
    options = {"verbose": False, "just_print_entries": False, "allow_incomplete_ranks": False, "mismatch_cap": 10}
    logging.getLogger("Flight Recorder").handlers.clear()
    details = {str(rank): {"rank": rank, **json.loads(json.dumps(each))} for rank, each in dumps.items()}
    found_by_torch = build_db(details, SimpleNamespace(**options), "2.10").collectives
    theirs = [each for each in found_by_torch if not each.pass_check or each.missing_ranks]
    if fault in ("nothing", "hangs"):
        assert not theirs and len(texts) == (fault == "hangs")
        return
    number = theirs[0].collective_seq_id
    assert f" {number} differs" in texts[0] or f" {number}: rank" in texts[0]
    assert set(theirs[0].mismatch_collectives or theirs[0].missing_ranks) == {culprit} == set(found[0].absent)


def test_batches_of_transfers_and_a_groups_other_backend_have_numbers_of_their_own():
    batch = {**call(2, done=False), "is_p2p": True, "profiling_name": "nccl:coalesced"}
    on_host = [{**call(number), "profiling_name": "gloo:barrier"} for number in (1, 2)]
    on_device = [{**call(1), "profiling_name": "nccl:all_reduce"}]
    both = on_host + on_device
    assert compared({0: dump([*both, batch], [0, 1]), 1: dump(both, [0, 1])})[0] == []


def test_the_dumps_of_nccls_watchdog_are_read_without_running_what_they_contain(tmp_path, capsys):
    waits = [{**call(1, done=False), "process_group": ("3", "x"), "state": "started"}]
    for rank, calls in enumerate((waits, [])):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(calls, [0, 1])))
        os.utime(tmp_path / f"nccl_trace_rank_{rank}", (NOW_S, NOW_S))
    assert main(["stacks", "runs/any", "--dumps", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "all_reduce 1: rank 1 has not called it" in shown and "examine rank 1 first" in shown

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps({"entries": [Evil()]}))
    assert main(["stacks", "runs/any", "--dumps", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no dump of torch's Flight Recorder" in error and error.count("\n") == 1
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x05.", b"[1]", pickle.dumps([1]), b"{" * 10**6, b"i" * 999])
def test_a_file_that_is_no_dump_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "rank0").write_bytes(content)
    with pytest.raises(ValueError, match="no dump of torch's Flight Recorder"):
        read_dumps(tmp_path)
    with pytest.raises(ValueError, match="no dumps there"):
        read_dumps(tmp_path / "rank0")


def test_entries_of_a_strangers_dump_neither_steer_the_terminal_nor_end_the_report():
    damaged = [
        None,
        7,
        {},
        {**call(2), "collective_seq_id": -1},
        {**call(2), "collective_seq_id": 10**400},
        {**call(2), "time_created_ns": float("nan")},
        {**call(2), "input_sizes": [["x"]]},
        {**call(2), "frames": [{}]},
        transfer("send", "0->99999999999999999999999"),
        transfer("send", "0->7"),
        transfer("send", "nonsense"),
    ]
    escape = {**call(1, done=False), "profiling_name": "gloo:\x1b]0;owned\x07"}
    hostile = {"entries": [*damaged, escape], "pg_config": {"3": {"ranks": "__import__('os').abort()"}, "4": 5}}
    _, texts = compared({0: hostile, 1: {"entries": 3, "pg_config": []}})
    assert len(texts) == 1 and texts[0].isprintable()
