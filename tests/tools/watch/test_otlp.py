"""The OpenTelemetry trace of a recorded step: every event once, below its rank, with the schedule's dependencies."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.tools.watch.recorded import Recording
from weft.tools.cli import main
from weft.tools.watch import command, otlp
from weft.tools.watch.record import RunRecord


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    recording = Recording(tmp_path_factory.mktemp("run"), stages=3, microbatches=4)
    recording.run(3)
    return RunRecord(recording.write())


def test_every_event_is_a_span_below_its_rank_at_its_recorded_time(record):
    exporter = InMemorySpanExporter()
    step, count = otlp.send(record, exporter, 2)
    found, table = exporter.get_finished_spans(), record.spans(2)
    assert (step, count) == (2, len(table) + 1) and len(found) == count
    by_id = {each.context.span_id: each for each in found}
    assert len({each.context.trace_id for each in found}) == 1
    events = {(e.attributes["weft.rank"], e.name): e for e in found if "weft.section" in e.attributes}
    for row in table[table.section != "step"].itertuples():
        span = events[row.rank, row.slot]
        assert by_id[span.parent.span_id].name == f"rank {row.rank}"
        assert span.start_time == pytest.approx(row.start_s * 1e9, abs=1e3)
        assert span.end_time == pytest.approx(row.end_s * 1e9, abs=1e3)


def test_links_lead_from_the_last_backward_of_a_micro_batch_to_its_first_forward(record):
    found = {each.context.span_id: each for each in otlp.spans(record, 2)}
    ranks = record.plan["ranks"][1]
    waiting = [next(e for e in found.values() if (e.name, e.attributes.get("weft.rank")) == ("0B3", ranks[0]))]
    names = set()
    while waiting:
        span = waiting.pop()
        names.add((span.attributes["weft.rank"], span.name))
        waiting += [found[link.context.span_id] for link in span.links]
    for stage, rank in enumerate(ranks):
        assert {(rank, f"{stage}F3"), (rank, f"{stage}B3")} <= names
    assert {rank for rank, _ in names} == set(ranks)


def test_a_collector_gets_the_spans_over_http_and_faults_are_named(record, capsys, monkeypatch, tmp_path):
    bodies, status = [], [200]

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1/traces"
        assert main(["watch", str(record.folder), "--otlp", address, "--step", "1"]) == 0
        sent = [ExportTraceServiceRequest.FromString(body).resource_spans for body in bodies]
        names = [s.name for each in sent for r in each for scope in r.scope_spans for s in scope.spans]
        assert len(names) == len(otlp.spans(record, 1)) and f"{len(names)} spans of step 1" in capsys.readouterr().out
        status[0] = 400
        assert main(["watch", str(record.folder), "--otlp", address]) == 2
        assert f"--otlp {address}: the collector did not take" in capsys.readouterr().err
        server.shutdown()
    empty = Recording(tmp_path / "run")
    empty.run(1)
    for path in empty.write().glob("watch/*.parquet"):
        path.unlink()
    assert main(["watch", str(empty.folder), "--otlp", address]) == 2
    assert "no step is recorded" in capsys.readouterr().err
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["watch", str(record.folder), "--otlp", address]) == 2
    assert "pip install 'weft[otlp]'" in capsys.readouterr().err
    assert main(["watch", str(record.folder), "--otlp", "localhost"]) == 2
    assert "--otlp localhost: " in capsys.readouterr().err
