"""Links between sites: what their ends counted is shown, next to the probed rate."""

import json
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from tests.tools.watch.recorded import Recording
from tests.waiting import until
from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.key import WanKey
from weft.comm.links import LinkCounters
from weft.engine.observability.event_ring import RingWriter, rings_folder
from weft.engine.observability.link_gauge import LinkGauge
from weft.pipeline.costs import LinkCost
from weft.tools.watch.collector import Collector
from weft.tools.watch.connections import COUNTED
from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import Views

KEY = WanKey(b"a key for tests, long enough")
COUNTERS = LinkCounters(8_000_000, 5, 3, 0, 2, 8, 0.03, 2.0, 4096, 7)


@pytest.fixture
def recording(tmp_path):
    made = Recording(tmp_path / "run", sites={"east": 2, "west": 2}, wan=LinkCost(latency_s=0.004, bandwidth_bps=50e6))
    made.run(3)
    yield made.write()
    shutil.rmtree(rings_folder(tmp_path / "run"), ignore_errors=True)


def test_counters_of_a_rank_are_published_by_the_collector_and_shown_with_the_probed_rate(recording):
    states = [COUNTERS]

    def counters(_):
        if not states:
            raise ChannelError("closed")
        return states[0]

    ring = RingWriter(rings_folder(recording), 2, 64)
    gauge = LinkGauge(rings_folder(recording), 2, SimpleNamespace(peers={4: "a link"}, counters=counters))
    collector = Collector(recording, "host")
    gauge.close()
    states.clear()  # links that are closed leave the last counters
    LinkGauge(rings_folder(recording), 2, SimpleNamespace(peers={4: "a link"}, counters=counters)).close()
    collector.poll()
    collector.publish_current()
    (found,) = Views(RunRecord(recording)).show("links")["connections"]
    assert found.items() >= {"from": 2, "to": 4, "sites": "east → west", "mbps": 32.0, "probed_mbps": 50.0}.items()
    assert (found["queued_bytes"], found["retransmissions"], found["broken"], found["resent_chunks"]) == (4096, 7, 2, 3)
    ring.close(finished=True)


def test_what_an_endpoint_has_counted_is_shown(recording):
    wan = pytest.importorskip("weft.comm.wan.endpoint", reason="needs the feature wan")
    folder, tensor = rings_folder(recording), torch.zeros(1 << 18)
    RingWriter(folder, 2, 64)
    with ExitStack() as stack:
        ends = [wan.WanEndpoint(rank=rank, bind="127.0.0.1", key=KEY, connections=2) for rank in (2, 4)]
        for end in ends:
            stack.callback(end.close, linger_s=0.0)
        ends[1].link(2)
        ends[0].link(4, address=ends[1].address)
        sender, receiver = ends[0].channel(4), ends[1].channel(2)
        for tag in "abc":
            received = receiver.recv(tag, TensorSpec(tuple(tensor.shape), tensor.dtype))
            sender.send(tag, tensor).wait()
            received.wait()
        until(lambda: ends[0].counters(4).sent_bytes >= 3 * tensor.nbytes)
        before = ends[0].counters(4)
        LinkGauge(folder, 2, ends[0]).close()
        after = ends[0].counters(4)
    collector = Collector(recording, "host")
    collector.poll()
    collector.publish_current()
    (found,) = Views(RunRecord(recording)).show("links")["connections"]
    for name in COUNTED:
        assert getattr(before, name) <= found[name] <= getattr(after, name)
    assert (found["from"], found["to"], found["ready"], found["broken"]) == (2, 4, 2, 0)
    assert found["sent_bytes"] >= 3 * tensor.nbytes
    rates = [each.sent_bytes * 8e-6 / each.busy_s for each in (before, after)]
    assert min(rates) * 0.99 <= found["mbps"] <= max(rates) * 1.01


@pytest.mark.parametrize(
    "links", [None, 5, [5], [{}], [{"peer": 99, **asdict(COUNTERS)}], [{"peer": 4, **asdict(COUNTERS), "ready": 1e999}]]
)
def test_links_of_a_damaged_file_are_left_out(recording, links):
    ranks = [{"rank": 2, "slot": "", "step": 1, "since": 0.0, "alive": True, "links": links}]
    text = json.dumps({"at": time.time(), "host": "h", "ranks": ranks})
    (recording / "watch" / "now-h.json").write_text(text)
    assert Views(RunRecord(recording)).show("links")["connections"] == []
