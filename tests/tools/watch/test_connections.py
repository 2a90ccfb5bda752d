"""Links between sites: what their ends counted is shown, next to the probed rate."""

import json
import shutil
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from tests.tools.watch.recorded import Recording
from weft.comm.channel import ChannelError
from weft.comm.links import LinkCounters
from weft.engine.observability.event_ring import RingWriter, rings_folder
from weft.engine.observability.link_gauge import LinkGauge
from weft.pipeline.costs import LinkCost
from weft.tools.watch.collector import Collector
from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import Views

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


@pytest.mark.parametrize(
    "links", [None, 5, [5], [{}], [{"peer": 99, **asdict(COUNTERS)}], [{"peer": 4, **asdict(COUNTERS), "ready": 1e999}]]
)
def test_links_of_a_damaged_file_are_left_out(recording, links):
    ranks = [{"rank": 2, "slot": "", "step": 1, "since": 0.0, "alive": True, "links": links}]
    text = json.dumps({"at": time.time(), "host": "h", "ranks": ranks})
    (recording / "watch" / "now-h.json").write_text(text)
    assert Views(RunRecord(recording)).show("links")["connections"] == []
