"""Clocks of several hosts: never further off than the bound that is shown, whatever they were ahead."""

from math import inf

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.watch.recorded import Recording
from weft.pipeline.costs import LinkCost
from weft.tools.watch.analysis import where_time_goes
from weft.tools.watch.clocks import Clock, line_up
from weft.tools.watch.record import RunRecord
from weft.tools.watch.step_files import host_of
from weft.tools.watch.views import Views

WAN_S = 0.004


@given(
    st.lists(st.floats(-10.0, 10.0), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0.0, 1.0)), max_size=40),
)
def test_no_clock_is_further_off_than_its_bound(ahead_s, passed):
    hosts = [f"host{number}" for number in range(len(ahead_s))]
    seen = [(a, b, latency_s) for a, b, latency_s in passed if max(a, b) < len(hosts)]
    found = line_up(hosts, [(hosts[a], hosts[b], s + ahead_s[b] - ahead_s[a]) for a, b, s in seen])
    assert list(found) == hosts and found[hosts[0]] == Clock(0.0, 0.0)
    pairs = {(a, b) for a, b, _ in seen if a != b}
    reached, grown = {0}, True
    while grown:
        more = {b for a, b in pairs if a in reached and (b, a) in pairs} - reached
        reached, grown = reached | more, bool(more)
    for number, (host, true_s) in enumerate(zip(hosts, ahead_s, strict=True)):
        assert abs(found[host].ahead_s - (true_s - ahead_s[0])) <= found[host].bound_s + 1e-9
        assert (found[host].bound_s < inf) == (number in reached)


def recorded(folder, hosts=None, **how):
    recording = Recording(folder, sites={"east": 2, "west": 2}, wan=LinkCost(latency_s=WAN_S), **how)
    recording.run(4, jitter=0.0)
    recording.prefill(2)
    return RunRecord(recording.write(hosts))


@pytest.mark.parametrize("ahead_s", [0.0, 0.3, -7.0])
def test_a_step_of_two_hosts_is_shown_as_if_they_had_one_clock(tmp_path, ahead_s):
    record = recorded(tmp_path / "two", {"a-1": (range(4), 0.0), "b": (range(4, 8), ahead_s)})
    one, two = (Views(each).show("timeline", step=2) for each in (recorded(tmp_path / "one"), record))
    assert two["clocks"] == {"hosts": 2, "bound_s": pytest.approx(WAN_S, abs=1e-5), "unknown": []}
    assert one["clocks"] == {"hosts": 1, "bound_s": 0.0, "unknown": []}
    for part in ("spans", "prefills", "transfers"):
        expected, got = sorted(one[part]), sorted(two[part])
        texts = [[value for value in row if not isinstance(value, float)] for row in expected]
        assert [[value for value in row if not isinstance(value, float)] for row in got] == texts
        times = [[value for value in row if isinstance(value, float)] for row in expected]
        for row, near in zip(got, times, strict=True):
            assert [value for value in row if isinstance(value, float)] == pytest.approx(near, abs=1e-5)
    assert min(end_s - start_s for *_, start_s, end_s, _ in two["transfers"]) >= 0.0
    shares = [where_time_goes(each, each.spans(2))["measured"] for each in (recorded(tmp_path / "again"), record)]
    assert shares[1] == pytest.approx(shares[0], abs=1e-5)


@pytest.mark.parametrize("ahead_s", [0.0, 5.0, -7.0])
def test_hosts_with_a_pipeline_each_are_lined_up_by_their_sums_of_gradients(tmp_path, ahead_s):
    record = recorded(tmp_path, {"a": (range(0, 8, 2), 0.0), "b": (range(1, 8, 2), ahead_s)})
    table = pd.read_parquet(tmp_path / "watch" / "spans-b-00001.parquet", filters=[("step", "==", 2)])
    found = record.clocks(pd.concat([record.spans(2).query("host == 'a'"), table.assign(host="b")]))["b"]
    assert 0.0 < found.bound_s < 0.01 and abs(found.ahead_s - ahead_s) <= found.bound_s
    shown = Views(record).show("timeline", step=2)["clocks"]
    assert shown == {"hosts": 2, "bound_s": pytest.approx(found.bound_s), "unknown": []}


def test_hosts_that_exchange_nothing_keep_their_clocks_and_are_named(tmp_path):
    record = recorded(tmp_path, {"a": (range(2), 0.0), "b": (range(2, 4), 5.0)}, lines=1)
    path = tmp_path / "watch" / "spans-b-00001.parquet"
    table = pd.read_parquet(path)
    table[~table.section.isin(["SEND_F", "SEND_B", "RECV_F", "RECV_B"])].to_parquet(path)
    assert Views(record).show("timeline", step=2)["clocks"] == {"hosts": 2, "bound_s": 0.0, "unknown": ["b"]}
    spans = record.spans(2)
    assert spans[spans.host == "b"].start_s.min() == pytest.approx(spans[spans.host == "a"].start_s.min() + 5.0)


def test_names_of_hosts_may_have_dashes(tmp_path):
    assert host_of(tmp_path / "spans-a-b-00012.parquet") == "a-b"
