"""Lanes of the timeline and of its trace: transfers, uplinks between sites, and prefills, each shown once."""

import json
from itertools import pairwise

import pytest

from tests.tools.watch.recorded import Recording
from weft.pipeline.action import SENDS, Action, Op
from weft.pipeline.costs import LinkCost
from weft.tools.watch import FOLDER
from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import Views

WAN_S = 0.015
HOW = {
    "microbatches": 6,
    "sites": {"east": 2, "west": 2},
    "local": LinkCost(latency_s=0.001),
    "wan": LinkCost(latency_s=WAN_S),
}
STEP = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    recording = Recording(tmp_path_factory.mktemp("run"), **HOW)
    recording.run(4, jitter=0.0)
    prefills = recording.prefill(STEP, tokens=96)
    return RunRecord(recording.write()), prefills, recording.events[STEP - 1]["start"].min()


@pytest.fixture(scope="module")
def record(made):
    return made[0]


@pytest.fixture(scope="module")
def shown(record):
    return Views(record).show("timeline", step=STEP)


def sends(record):
    """Every send of the schedule by global rank."""
    rows = enumerate(record.schedules[0].rows)
    found = [(stage, slot[0]) for stage, row in rows for slot in row if slot[0].op in SENDS]
    return sorted((ranks[stage], str(action)) for ranks in record.plan["ranks"] for stage, action in found)


@pytest.mark.parametrize("part", ["transfers", "predicted_transfers"])
def test_every_send_of_the_schedule_is_a_transfer_to_its_receiver(record, shown, part):
    assert sorted((rank, send) for rank, _, _, send, *_ in shown[part]) == sends(record)
    sites = {rank: record.site_name(rank) for rank in record.places}
    for rank, peer, uplink, text, start_s, end_s, is_exact in shown[part]:
        send = Action.parse(text)
        assert record.places[peer].line == record.places[rank].line
        assert record.places[peer].stage - record.places[rank].stage == (1 if send.op is Op.SEND_F else -1)
        assert uplink == ("" if sites[rank] == sites[peer] else f"{sites[rank]} → {sites[peer]}")
        assert 0.0 <= start_s <= end_s <= shown["step_s"] + 1e-9
        if uplink:
            assert end_s - start_s >= WAN_S - 1e-6
            assert not is_exact or end_s - start_s == pytest.approx(WAN_S, abs=1e-5)
    crossing = {uplink for _, _, uplink, *_ in shown[part] if uplink}
    assert crossing == {"east → west", "west → east"}
    assert any(each[-1] for each in shown[part] if each[2])


def test_prefills_are_shown_in_the_bubbles_of_their_ranks(made, shown):
    _, prefills, origin_s = made
    expected = sorted((rank, start - origin_s, end - origin_s) for rank, start, end in prefills)
    got = sorted((rank, start, end) for rank, _, _, start, end in shown["prefills"])
    assert len(got) > 8 and [each[0] for each in got] == [each[0] for each in expected]
    for one, two in zip(got, expected, strict=True):
        assert one[1:] == pytest.approx(two[1:], abs=1e-5)
    assert {text for _, _, text, *_ in shown["prefills"]} == {"prefill 96"}
    assert all(kind != "prefill" for _, kind, *_ in shown["spans"])
    work = [each for each in shown["spans"] if each[1] in ("F", "B", "I", "W")]
    for rank, start_s, end_s in got:
        assert not [w for w in work if w[0] == rank and w[3] < end_s - 1e-6 and w[4] > start_s + 1e-6]


def test_prefills_change_nothing_else_that_is_shown(made, tmp_path):
    record, *_ = made
    plain = Recording(tmp_path, **HOW)
    plain.run(4, jitter=0.0)
    other = Views(RunRecord(plain.write()))
    for view in ("time", "links", "heat"):
        assert Views(record).show(view, step=STEP) == other.show(view, step=STEP), view


def test_a_trace_holds_every_rank_lane_and_uplink_and_no_thread_overlaps(record, shown):
    events = Views(record).show("perfetto", step=STEP)["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [each for each in events if each["ph"] == "X"]
    schedule = record.schedules[0].name
    expected = {f"rank {rank}: {schedule} {how}" for rank in record.places for how in ("measured", "predicted")}
    expected |= {f"WAN {one}: {how}" for one in ("east → west", "west → east") for how in ("measured", "predicted")}
    assert len(names) == len(set(names.values())) and set(names.values()) == expected

    def of(process, lane):
        return sorted(
            (e["name"], round(e["ts"] / 1e6, 6)) for e in slices
            if names[e["pid"]] == process and threads[e["pid"], e["tid"]].partition(" (")[0] == lane
        )  # fmt: skip

    for rank in record.places:
        process = f"rank {rank}: {schedule} measured"
        assert of(process, "prefill") == sorted((t, round(s, 6)) for r, _, t, s, _ in shown["prefills"] if r == rank)
    texts = {"F": "SEND_F", "B": "SEND_B"}
    for how, part in (("measured", "transfers"), ("predicted", "predicted_transfers")):
        for rank, peer, uplink, text, start_s, *_ in shown[part]:
            send = Action.parse(text)
            entry = (f"{send.op.value}{send.microbatch} s{send.stage}", round(start_s, 6))
            kind = next(kind for kind, name in texts.items() if name == send.op.value)
            lane = f"{kind}>{record.places[peer].stage}"
            assert of(f"rank {rank}: {schedule} {how}", lane).count(entry) == 1
            assert not uplink or of(f"WAN {uplink}: {how}", f"{rank} → {peer}").count(entry) == 1
    by_thread = {}
    for each in slices:
        by_thread.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
    for intervals in by_thread.values():
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(sorted(intervals)))
    begins = {(each["pid"], each["tid"], each["ts"]) for each in slices}
    arrows = [each for each in events if each["ph"] in "sf"]
    assert arrows and all((e["pid"], e["tid"], e["ts"]) in begins for e in arrows), "arrows join slices"


def test_sites_without_names_are_numbered(tmp_path):
    recording = Recording(tmp_path, sites={"east": 1, "": 3}, lines=1)
    recording.run(2)
    shown = Views(RunRecord(recording.write())).show("timeline", step=1)
    assert {each[2] for each in shown["transfers"]} == {"", "east → 1", "1 → east"}


def test_the_share_of_timing_is_that_of_the_rank_with_the_most(tmp_path):
    recording = Recording(tmp_path, **HOW)
    recording.run(3, jitter=0.0)
    record = RunRecord(recording.write())
    assert Views(record).show("timeline", step=2)["timer_share"] is None, "no rank has stated the cost"
    ranks = [{"rank": rank, "slot": "", "step": 3, "alive": False, "event_s": 7e-6 * (rank == 7)} for rank in range(8)]
    now = {"at": 0.0, "host": "host", "ranks": ranks}
    (tmp_path / FOLDER / "now-host.json").write_text(json.dumps(now))
    spans = record.spans(2)
    own = spans[spans["rank"] == 7]
    whole = own[own.section == "step"]
    expected = 7e-6 * len(own) / float(whole.end_s.iloc[0] - whole.start_s.iloc[0])
    assert Views(record).show("timeline", step=2)["timer_share"] == pytest.approx(expected)
