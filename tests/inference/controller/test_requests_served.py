"""Requests that the controller takes and refuses, and its answers: keys, limits and metrics."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.inference.controller.fake_workers import MODELS, PATH, PREFILL, REMOTE, FakeBoard, FakeWorkers, controller

TOO_LARGE = 5_000_000
ROOT = Path(__file__).parents[3]


async def test_a_request_and_its_answer_pass_unchanged():
    workers = FakeWorkers(1)
    async with controller(workers) as client:
        body = PREFILL | REMOTE | {"stream": False}
        answer = await client.post(PATH, json=body, headers={"X-Request-Id": "abc"})
        assert answer.status_code == 200
        assert answer.json() == {"worker": "w0", "kv_transfer_params": {"do_remote_prefill": True}}
        assert answer.headers["x-weft-worker"] == "0"
        ((_, request, seen),) = workers.seen
        assert seen == body
        assert request.headers["x-request-id"] == "abc"
        assert request.url.path == PATH
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 1}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert (await client.get("/v1/models")).json() == MODELS


async def test_a_body_that_is_said_to_be_too_large_is_not_waited_for():
    async def drip():
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async with controller(FakeWorkers(1), receive_timeout_s=0.2) as client:
        answer = await client.post(PATH, content=drip(), headers={"Content-Length": str(TOO_LARGE)})
        assert answer.status_code == 413


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"", 400, "not valid JSON"),
        (b"[]", 400, "not a JSON object"),
        (b'{"prompt": ' + b"[" * 10**5, 400, "nested deeper than 32"),
        (json.dumps(PREFILL | {"max_tokens": 7}), 400, "set max_tokens=1, or kv_transfer_params"),
        (json.dumps(PREFILL | {"prompt": [1] * 10**6}), 400, "the prompt has about 1000000 tokens"),
        (json.dumps(PREFILL | {"prompt": {"a": 1}}), 400, "give a string, a list of tokens"),
        (json.dumps({"messages": "hi", "max_tokens": 1}), 400, "give a list of {role, content}"),
        (b" " * TOO_LARGE, 413, "larger than 4194304"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(body, status, part):
    workers = FakeWorkers(1)
    async with controller(workers) as client:
        answer = await client.post(PATH, content=body)
        assert answer.status_code == status
        assert part in answer.json()["error"]["message"]
        assert not workers.seen
        metrics = (await client.get("/metrics")).text
        assert f'weft_prefill_refusals_total{{status="{status}"}} 1.0' in metrics


async def test_a_worker_that_decodes_gets_any_request():
    async with controller(FakeWorkers(1), allow_decode=True) as client:
        assert (await client.post(PATH, json=PREFILL | {"max_tokens": 7})).status_code == 200


async def test_who_has_no_key_gets_nothing_but_health():
    workers = FakeWorkers(1)
    async with controller(workers, api_key="secret") as client:
        for path in ("/v1/models", "/metrics"):
            assert (await client.get(path)).status_code == 401
        for value in ("Bearer wrong", "secret", "Bearer sécret"):
            headers = {"Authorization": value.encode()}
            assert (await client.post(PATH, json=PREFILL, headers=headers)).status_code == 401
        assert not workers.seen
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200
        for scheme in ("Bearer", "bearer", "BEARER"):
            headers = {"Authorization": f"{scheme} secret"}
            assert (await client.post(PATH, json=PREFILL, headers=headers)).status_code == 200
        assert workers.seen[0][1].headers["authorization"] == "Bearer inner", "workers have a key of their own"


async def test_prefills_for_another_decoder_are_bounded_and_several_at_once_refused():
    workers = FakeWorkers(1)
    async with controller(workers) as client:
        decoding = PREFILL | REMOTE | {"n": 3, "max_tokens": 99, "min_tokens": 4}
        assert (await client.post(PATH, json=decoding)).status_code == 200
        assert workers.seen[0][2] == decoding | {"n": 1, "max_tokens": 1, "min_tokens": 1}
        answer = await client.post(PATH, json=decoding | {"prompt": ["one", "two"]})
        assert answer.status_code == 400 and "one request for each prompt" in answer.json()["error"]["message"]
        answer = await client.post(PATH, content=rb'{"prompt": "\ud800", "max_tokens": 1}')
        assert answer.status_code == 400 and "surrogate" in answer.json()["error"]["message"]
        assert len(workers.seen) == 1


async def test_a_header_is_forwarded_unless_it_is_not_utf_8():
    workers = FakeWorkers(1)
    async with controller(workers) as client:
        for value, sent in (("é日".encode(), "é日".encode()), (b"\xe9", None)):
            answer = await client.post(PATH, json=PREFILL, headers={"X-Request-Id": value})
            assert answer.status_code == 200
            assert dict(workers.seen[-1][1].headers.raw).get(b"x-request-id") == sent


async def test_a_caller_that_sends_slowly_is_not_waited_for():
    async def drip():
        for _ in range(100):
            yield b" "
            await asyncio.sleep(0.05)

    async with controller(FakeWorkers(1), receive_timeout_s=0.2) as client:
        answer = await client.post(PATH, content=drip())
        assert answer.status_code == 408


async def test_metrics_count_what_happened():
    async with controller(FakeWorkers(2), probe_s=0.05) as client:
        for _ in range(3):
            await client.post(PATH, json=PREFILL)
        values = {}
        while float(values.get('weft_prefill_bubble_seconds_total{worker="0"}', 0)) <= 0.1:
            await asyncio.sleep(0.02)
            metrics = (await client.get("/metrics")).text
            values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        assert sum(float(values.get(f'weft_prefill_grants_total{{worker="{n}"}}', 0)) for n in (0, 1)) == 3
        for name in ("ttft_predicted", "ttft", "lateness"):
            assert values[f"weft_prefill_{name}_seconds_count"] == "3.0"
        assert values['weft_prefill_queue{worker="0"}'] == "0.0"


async def test_models_are_those_of_the_first_worker_that_answers():
    workers = FakeWorkers(3)
    async with controller(workers) as client:
        workers.fault = {"w0": "dead"}
        assert (await client.get("/v1/models")).json() == MODELS
        metrics = (await client.get("/metrics")).text
        up = [f'weft_prefill_worker_up{{worker="{number}"}} {number and 1}.0' in metrics for number in range(3)]
        assert up == [True] * 3
        workers.fault = dict.fromkeys(workers.names, "dead")
        for _ in range(2):
            answer = await client.get("/v1/models")
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert "no worker answers" in answer.json()["error"]["message"]


@pytest.mark.parametrize("deadline", ["0.9", "1", "86399.9"])
async def test_a_deadline_may_be_short_or_almost_a_day(deadline):
    async with controller(FakeWorkers(1), [FakeBoard([(0.0, 4.0)])]) as client:
        answer = await client.post(PATH, json=PREFILL, headers={"X-Weft-Deadline-S": deadline})
        assert answer.status_code == 200


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("more", [0, 1])
async def test_a_body_may_be_as_large_as_the_limit(more, told):
    """With and without a Content-Length."""
    body = json.dumps(PREFILL).encode()

    async def parts():
        yield body[:5]
        yield body[5:]

    async with controller(FakeWorkers(1), max_body_bytes=len(body) - more) as client:
        answer = await client.post(PATH, content=body if told else parts())
        assert answer.status_code == (413 if more else 200)


async def test_the_dashboard_shows_every_metric_and_no_other():
    names = set(re.findall(r"weft_\w+", (ROOT / "docs" / "grafana" / "serving.json").read_text()))
    async with controller(FakeWorkers(1)) as client:
        lines = (await client.get("/metrics")).text.splitlines()
        types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
        series = {f"{name}_bucket" if kind == "histogram" else name for name, kind in types.items()}
        assert names == {name for name in series if not name.endswith("_created")}
