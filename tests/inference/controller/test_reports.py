"""Reports of workers on other hosts: both ends prove that they have the key, and what is no report is refused."""

import json
from math import inf, nan
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from tests.inference.controller.fake_workers import Through
from weft.inference.board.writer import BoardWriter
from weft.inference.controller.reports import ReportedBubbles, read_report
from weft.inference.placement.prefill_cost import PrefillCost
from weft.inference.worker.bubble_report import ROUTE
from weft.inference.worker.proofs import HEADER, answer_proof
from weft.inference.worker.settings import SETTINGS_VARIABLE, WorkerSettings
from weft.inference.worker.vllm_middleware import KEY_VARIABLE, PrefillOnlyMiddleware

URL = "http://worker"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """The transport to a worker of two stages, whose first rank trains by plan."""
    board = BoardWriter(tmp_path / "rank0.board", rank=0, plan=[(0.2, 0.5), (0.7, 1.0)], max_edges=16)
    board.begin(1)
    boards = tuple(str(tmp_path / f"rank{rank}.board") for rank in range(2))
    settings = WorkerSettings(boards=boards, guard_s=0.0, quantile=0.9, cost_file=str(tmp_path / "cost.json"), stages=2)
    monkeypatch.setenv(SETTINGS_VARIABLE, json.dumps(settings.to_additional_config()))
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    app = FastAPI()
    app.state.server = SimpleNamespace(should_exit=False)
    app.add_middleware(PrefillOnlyMiddleware)
    yield httpx.ASGITransport(app)
    board.close()


async def report_of(transport, key="secret", *, stages=2, horizon_s=10.0):
    async with Through(transport, headers={"Authorization": "Bearer secret"}) as servers:
        return await read_report(servers, URL, key, stages=stages, quantile=0.9, horizon_s=horizon_s, timeout_s=5.0)


async def test_a_report_has_the_bubbles_and_costs_of_each_stage(worker):
    report = await report_of(worker)
    assert len(report.stages) == len(report.costs) == 2
    assert report.stages[0] and report.stages[1] == [], "no training at the second"
    assert all(cost.steps == 0 for cost in report.costs)
    bubbles = ReportedBubbles()
    assert bubbles.upcoming(10.0) == []
    bubbles.update(report.stages[0])
    assert len(bubbles.upcoming(10.0)) == len(report.stages[0]) > len(bubbles.upcoming(0.1))
    bubbles.update(None)
    assert bubbles.upcoming(10.0) is None, "training has ended"


async def test_a_report_that_is_old_predicts_nothing(worker, monkeypatch):
    bubbles, report = ReportedBubbles(), await report_of(worker)
    bubbles.update(report.stages[0])
    monkeypatch.setattr("weft.inference.controller.reports.FRESH_S", 0.0)
    assert bubbles.upcoming(10.0) == []


async def test_a_report_needs_the_key_and_a_nonce(worker):
    with pytest.raises(ValueError, match=r"401 .*API key"):
        await report_of(worker, "other")
    async with httpx.AsyncClient(transport=worker) as client:
        answer = await client.get(f"{URL}{ROUTE}", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 401 and "needs a nonce" in answer.json()["error"]["message"]
    with pytest.raises(ValueError, match=r"400 .*horizon_s=-1\.0: give seconds above 0"):
        await report_of(worker, horizon_s=-1.0)
    with pytest.raises(ValueError, match=r"2 stages; set inference\.controller\.workers\.stages"):
        await report_of(worker, stages=1)


COST = PrefillCost().to_dict()


@pytest.mark.parametrize(
    ("value", "key", "part"),
    [
        ({"stages": [[[0.0, 1.0]]], "costs": [COST]}, "other", "without a proof"),
        ({"stages": [[[0.0, nan]]], "costs": [COST]}, "secret", "not finite"),
        ({"stages": [[[0.0, inf]]], "costs": [COST]}, "secret", "not finite"),
        ({"stages": [[0.0, 1.0]], "costs": [COST]}, "secret", "not a report"),
        ({"stages": [[["a", 1.0]]], "costs": [COST]}, "secret", "not a report"),
        ({"stages": [[[0.0, 1.0]]], "costs": [{}]}, "secret", "this version of Weft reads"),
        ({"stages": [[[0.0, 1.0]]], "costs": [{"format": COST["format"]}]}, "secret", "not a report"),
        ({}, "secret", "not a report"),
        ([], "secret", "not a report"),
    ],
)
async def test_what_is_no_report_is_refused(value, key, part):
    def forge(request):
        nonce = request.headers["authorization"].split(" ")[1].partition(":")[0]
        body = json.dumps(value).encode()
        return httpx.Response(200, content=body, headers={HEADER: answer_proof(key.encode(), nonce, b"", body)})

    with pytest.raises(ValueError, match=part):
        await report_of(httpx.MockTransport(forge), stages=1)
