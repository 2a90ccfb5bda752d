"""Whole answers: prompts in bubbles where possible, by the decode server otherwise."""

import asyncio
import contextlib
import json
import re
from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inference.controller.fake_workers import (
    DECODE,
    MODELS,
    PATH,
    REMOTE,
    FakeBoard,
    FakeWorkers,
    controller,
    fleet_of,
)
from weft.conf.schema import OtherModelConfig
from weft.inference.controller.clients import Clients
from weft.inference.controller.service import Service

WHOLE = {"model": "tiny", "prompt": "one two three", "max_tokens": 9}
HANDED = {"kv_transfer_params": {"do_remote_prefill": True}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 9}


def counted(text, prefill, reason=""):
    return f'weft_answers_total{{prefill="{prefill}",reason="{reason}"}} 1.0' in text


@pytest.mark.parametrize(("path", "body"), [(PATH, WHOLE), ("/v1/chat/completions", CHAT)])
async def test_a_worker_computes_the_prompt_and_the_decode_server_the_answer(path, body):
    workers = FakeWorkers(1)
    async with controller(workers, decode_url=DECODE) as client:
        sent = {"X-Request-Id": "abc", "traceparent": "00-1-2-03"}
        answer = await client.post(path, json=body | {"seed": 4, "stop": ["x"], "logprobs": None}, headers=sent)
        assert answer.status_code == 200
        assert answer.json() == {"choices": [{"text": "hi", "finish_reason": "stop"}]}
        assert (answer.headers["x-server"], answer.headers["x-weft-worker"]) == ("stock", "0")
        assert answer.headers["x-request-id"] == "abc"
        ((_, first, part),) = workers.seen
        ((second, whole),) = workers.decoded
        assert whole == body | {"seed": 4, "stop": ["x"], "logprobs": None} | HANDED
        assert part["kv_transfer_params"]["do_remote_decode"] and part["max_tokens"] == 1
        assert part.keys() == (body.keys() - {"max_completion_tokens"}) | {"max_tokens", "kv_transfer_params"}
        for request in (first, second):
            assert (request.url.path, request.headers["x-request-id"]) == (path, "abc")
            assert request.headers["traceparent"] == "00-1-2-03"
        metrics = (await client.get("/metrics")).text
        assert counted(metrics, "bubble")
        assert 'weft_answer_begin_seconds_count{prefill="bubble"} 1.0' in metrics


@pytest.mark.parametrize("fault", ["", "dead", "hung", "full", "leaving"])
async def test_the_decode_server_near_the_worker_answers_unless_it_fails(fault):
    workers = FakeWorkers(2)
    workers.fault = {"decode1": fault}
    async with controller(workers, decode_url=DECODE, decoders=["", f"{DECODE}1"], deadline_s=2.0) as client:
        asked = []
        for _ in range(2):
            before = asked.count("decode1")
            answers = await asyncio.gather(*(client.post(PATH, json=WHOLE) for _ in range(8)))
            assert {answer.status_code for answer in answers} == {200}
            assert {answer.json()["choices"][0]["text"] for answer in answers} == {"hi"}
            asked = [request.url.host for request, _ in workers.decoded]
        by_worker = Counter(name for name, _, _ in workers.seen)
        assert {*by_worker} == {"w0", "w1"}, "both workers compute prompts"
        if fault:
            assert asked.count("decode") == 16 and asked.count("decode1") == before
        else:
            assert asked.count("decode") == by_worker["w0"] and asked.count("decode1") == by_worker["w1"]


async def test_a_prompt_that_no_worker_computes_is_answered_by_the_server_of_all():
    workers = FakeWorkers(1)
    async with controller(workers, decode_url=DECODE, decoders=[f"{DECODE}1"]) as client:
        assert (await client.post(PATH, json=WHOLE | {"n": 2})).status_code == 200
        assert [request.url.host for request, _ in workers.decoded] == ["decode"]


@pytest.mark.parametrize(
    "field",
    [
        {"prompt": ["one", "two"]},
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 1},
        {"max_tokens": 0},
        {"max_tokens": "9"},
        {"prompt": None, "prompt_embeds": "AA=="},
        {"prompt": {"a": 1}},
        {"prompt": "word " * 5000},
        {"prompt": None, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ],
)
async def test_what_one_cache_cannot_serve_goes_to_the_decode_server_unchanged(field):
    workers = FakeWorkers(1)
    async with controller(workers, decode_url=DECODE) as client:
        answer = await client.post(PATH, json=WHOLE | field)
        assert (answer.status_code, answer.headers["x-weft-fallback"]) == (200, "request")
        assert not workers.seen and workers.decoded[0][1] == WHOLE | field
        assert counted((await client.get("/metrics")).text, "decode", "request")


@pytest.mark.parametrize("decode_url", [DECODE, ""])
async def test_each_request_within_its_limits_is_counted_as_begun_or_by_its_error(decode_url):
    workers = FakeWorkers(2)
    faults = [
        dict.fromkeys(["w0", "w1", "decode"], fault) for fault in ("", "broken", "strict", "full", "dead", "hung")
    ]
    async with controller(workers, decode_url=decode_url, deadline_s=0.3) as client:
        bodies = [WHOLE | REMOTE] if not decode_url else [WHOLE, WHOLE | {"temperature": -1}]
        answered = Counter()
        for workers.fault, body in product(faults, bodies):
            answered[(await client.post(PATH, json=body)).status_code] += 1
        metrics = (await client.get("/metrics")).text
        errors = dict(re.findall(r'weft_prefill_refusals_total{status="(\d+)"} (\d+)', metrics))
        assert {int(status): int(number) for status, number in errors.items()} | {200: answered[200]} == answered
        begun = r"weft_answer_begin_seconds_count{.*} (\d+)" if decode_url else r"weft_prefill_ttft_seconds_count (\d+)"
        assert sum(map(int, re.findall(begun, metrics))) == answered[200]
        assert len(answered) >= 3 and answered.total() == len(faults) * len(bodies)


RENDERED = [
    *(CHAT | {"response_format": {"type": kind}} for kind in ("json_object", "json_schema")),
    CHAT | {"tool_choice": "required"},
    CHAT | {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    WHOLE | {"truncate_prompt_tokens": -1},
    WHOLE | {"truncate_prompt_tokens": "-1"},
]
"""Requests of which a worker might make another prompt than the decode server."""


@pytest.mark.parametrize("body", RENDERED)
async def test_a_worker_gets_the_tokens_of_the_decode_server_where_it_might_render_another_prompt(body):
    workers, path = FakeWorkers(1), "/v1/chat/completions" if "messages" in body else PATH
    workers.rendered = {"token_ids": [7, 8, 9]} if "messages" in body else [{"token_ids": [7, 8, 9]}]
    body |= {"model": "tiny", "cache_salt": "s"}
    async with controller(workers, decode_url=DECODE) as client:
        answer = await client.post(path, json=body, headers={"X-Request-Id": "abc"})
        assert (answer.status_code, answer.headers["x-weft-worker"]) == (200, "0")
        ((_, request, part),), ((_, asked), (second, whole)) = workers.seen, workers.decoded
        assert asked == body
        assert (request.url.path, request.headers["x-request-id"]) == (PATH, "abc")
        assert part == {"model": "tiny", "cache_salt": "s", "prompt": [7, 8, 9], "max_tokens": 1} | REMOTE
        handed = HANDED["kv_transfer_params"] | {"prompt_token_ids": [7, 8, 9]}
        assert (second.url.path, whole) == (path, body | {"kv_transfer_params": handed})


@pytest.mark.parametrize("body", RENDERED[:1] + RENDERED[-1:])
@pytest.mark.parametrize(
    "rendered", [None, 3, [], [{}, {}], {}, {"token_ids": None}, {"token_ids": []}, {"token_ids": [1] * 5000}]
)
async def test_a_prompt_that_the_decode_server_does_not_render_is_computed_there(body, rendered):
    workers = FakeWorkers(1)
    workers.rendered = rendered
    async with controller(workers, decode_url=DECODE) as client:
        answer = await client.post("/v1/chat/completions" if "messages" in body else PATH, json=body)
        assert (answer.status_code, answer.headers["x-weft-fallback"]) == (200, "request")
        assert not workers.seen and workers.decoded[-1][1] == body


async def test_a_decode_server_that_renders_slowly_is_not_awaited_beyond_the_deadline():
    workers = FakeWorkers(1)
    workers.fault = {"decode": "slow"}
    async with controller(workers, decode_url=DECODE, deadline_s=0.2) as client:
        answer = await client.post("/v1/chat/completions", json=RENDERED[0])
        assert (answer.status_code, answer.headers["x-weft-fallback"]) == (200, "late")
        assert not workers.seen and workers.cancelled == ["decode"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("no trainer", "no bubble"),
        ("far", "no bubble"),
        ("dead", "no bubble"),
        ("dying", "no bubble"),
        ("broken", "worker"),
        ("strict", "worker"),
        ("slow", "late"),
    ],
)
async def test_users_never_wait_for_training(case, reason):
    workers = FakeWorkers(1)
    bubbles = {"no trainer": (), "far": ((5.0, 9.0),)}.get(case, ((0.0, 10.0),))
    async with controller(workers, [FakeBoard(bubbles)], decode_url=DECODE, deadline_s=0.5) as client:
        workers.fault = {"w0": case}
        async with asyncio.timeout(0.9):
            answer = await client.post(PATH, json=WHOLE)
        assert (answer.status_code, answer.headers["x-weft-fallback"]) == (200, reason)
        assert workers.decoded[0][1] == WHOLE
        assert not client.fleet.workers[0].tickets
        metrics = (await client.get("/metrics")).text
        assert counted(metrics, "decode", reason) and "weft_prefill_refusals_total{" not in metrics
        assert (workers.cancelled == ["w0"]) == (case == "slow")


@pytest.mark.parametrize("content", [b"", b"word", b"3", b"[" * 100_000])
async def test_a_worker_that_answers_something_else_leaves_the_prompt_to_the_decode_server(content):
    workers = FakeWorkers(1)
    workers.answer = content
    async with controller(workers, decode_url=DECODE) as client:
        answer = await client.post(PATH, json=WHOLE)
    assert (answer.status_code, answer.headers["x-weft-fallback"]) == (200, "worker")


@pytest.mark.parametrize("decode_url", ["", DECODE])
@pytest.mark.parametrize("key", ["", "outer"])
async def test_other_models_are_answered_by_their_servers_which_get_no_key_of_ours(decode_url, key):
    workers, others = FakeWorkers(1), [OtherModelConfig(name="other", url="http://other/")]
    async with controller(workers, decode_url=decode_url, models=others, keys={"other": key}) as client:
        answer = await client.post(PATH, json=WHOLE | {"model": "other"}, headers={"Authorization": "Bearer mine"})
        assert answer.json() == {"model": "other"} and not workers.seen
        ((request, body),) = workers.decoded
        assert body == WHOLE | {"model": "other"}
        assert request.headers.get("authorization") == (f"Bearer {key}" if key else None)
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["tiny", "other"]
        for workers.listed in (3, {}, {"data": 3}, {"data": [3, {}]}):
            assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["tiny"]
        workers.fault = {"other": "dead"}
        assert (await client.post(PATH, json=WHOLE | {"model": "other"})).status_code == 503
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["tiny"]


NAMES = ["prompt", "messages", "max_tokens", "n", "stream", "echo", "logprobs", "tools", "kv_transfer_params", "model"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "do_remote_decode", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    path=st.sampled_from([PATH, "/v1/chat/completions"]),
    body=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5).map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=30),
)
def test_whatever_a_client_sends_is_answered_or_refused_and_never_an_internal_error(path, body):
    async def scenario():
        workers = FakeWorkers(1)
        async with controller(workers, decode_url=DECODE) as client:
            answer = await client.post(path, content=body)
            assert answer.status_code in (200, 400, 503)
            assert (answer.status_code == 200) == (bool(workers.decoded) or "worker" in answer.json())
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_server_with_a_full_queue_names_the_seconds_until_a_retry(stream):
    workers = FakeWorkers(1)
    workers.fault = {"decode": "full"}
    async with controller(workers, decode_url=DECODE) as client:
        answer = await client.post(PATH, json=WHOLE | {"stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["message"] == "busy"


@pytest.mark.parametrize("fault", ["dead", "hung", "leaving"])
async def test_without_a_decode_server_one_is_asked_to_come_again(fault):
    workers = FakeWorkers(1)
    workers.fault = {"decode": fault}
    async with controller(workers, decode_url=DECODE) as client:
        answer = await client.post(PATH, json=WHOLE)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "the decode server" in answer.json()["error"]["message"]
        ready = await client.get("/ready")
        assert ready.status_code == (200 if fault == "leaving" else 503)
        assert ready.json() == {"workers": 1, "up": 1, "serving": 1, "decode": int(fault == "leaving")}
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_decode_server_may_be_slow_unless_its_health_does_not_answer_either(is_stopped):
    workers = FakeWorkers(1)
    workers.gate.clear()
    async with controller(workers, decode_url=DECODE, silence_s=0.1) as client:
        pending = asyncio.create_task(client.post(PATH, json=WHOLE))
        while not workers.decoded:
            await asyncio.sleep(0.001)
        if is_stopped:
            workers.fault = {"decode": "hung"}
        else:
            await asyncio.sleep(0.5)
            workers.gate.set()
        answer = await pending
        assert answer.status_code == (503 if is_stopped else 200)
        assert ("the decode server" in answer.text) == is_stopped


@pytest.mark.parametrize("fault", ["stopped", "unwell"])
@pytest.mark.parametrize(
    "field",
    [{}, {"stream": True}, {"n": 2}, {"prompt": ["one", "two"]}, {"prompt": None, **CHAT}, {"model": "other"}, REMOTE],
)
async def test_a_server_whose_engine_is_stopped_leaves_no_request_unanswered(field, fault):
    """Its process for HTTP still accepts connections."""
    workers, others = FakeWorkers(1), [OtherModelConfig(name="other", url="http://other/")]
    if fault == "stopped":  # nothing but the time says so
        limits = {"answer_timeout_s": 0.3}
    else:
        limits = {"silence_s": 0.1, "probe_s": 0.05, "answer_slack_s": 0.05}
    stopped = ["w0"] if field == REMOTE else ["decode", "other"]
    async with controller(workers, decode_url=DECODE, models=others, **limits) as client, asyncio.timeout(20):
        workers.fault = dict.fromkeys(stopped, fault)
        answer = await client.post("/v1/chat/completions" if "messages" in field else PATH, json=WHOLE | field)
        assert answer.status_code == (504 if (field, fault) == (REMOTE, "stopped") else 503)
        assert answer.headers.get("retry-after") or answer.status_code == 504
        assert len(workers.stuck) == 1 and workers.cancelled == workers.stuck, "sent once, and withdrawn"


@pytest.mark.parametrize("fault", ["stopped", "unwell"])
async def test_a_near_decode_server_whose_engine_is_stopped_is_replaced(fault):
    workers, limits = FakeWorkers(1), {"answer_timeout_s": 0.3} if fault == "stopped" else {"silence_s": 0.1}
    async with controller(workers, decode_url=DECODE, decoders=[f"{DECODE}1"], **limits) as client:
        workers.fault = {"decode1": fault}
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*(client.post(PATH, json=WHOLE) for _ in range(4)))
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {"hi"}
        assert Counter(workers.stuck) == Counter(workers.cancelled) == {"decode1": 4}
        assert len(workers.decoded) == 4, "each is answered once"


async def test_no_decode_server_gets_a_request_on_a_connection_that_another_has_used():
    """The client may close such a connection under the request, after the server has fetched the prompt's cache."""
    peers = []

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                peers.append(writer.get_extra_info("peername"))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    service = Service(*fleet_of(FakeWorkers(1), None), count=len, clients=Clients("", ""))
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, service.outer as servers:
        for _ in range(3):
            await servers.ask("GET", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health")
    assert len(set(peers)) == 3


async def test_without_training_it_is_ready():
    async with controller(FakeWorkers(1), [FakeBoard(())], decode_url=DECODE) as client:
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["serving"]) == (200, 0)
        assert (await client.get("/v1/models")).json() == MODELS


async def test_an_error_of_the_decode_server_is_the_callers():
    async with controller(FakeWorkers(1), decode_url=DECODE) as client:
        answer = await client.post(PATH, json=WHOLE | {"temperature": -1})
        assert (answer.status_code, answer.json()) == (400, {"error": {"message": "temperature"}})


@pytest.mark.parametrize(
    ("field", "name"),
    [(HANDED, "kv_transfer_params"), ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs")],
)
async def test_caches_of_others_are_refused_with_field_and_remedy(field, name):
    workers = FakeWorkers(1)
    async with controller(workers, decode_url=DECODE) as client:
        answer = await client.post(PATH, json=WHOLE | field)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert "leave it out" in error["message"] or "give it as a field" in error["message"]
        assert not workers.seen and not workers.decoded


async def test_a_proxy_gets_prompts_from_the_same_address():
    workers = FakeWorkers(1)
    async with controller(workers, decode_url=DECODE) as client:
        answer = await client.post(PATH, json=WHOLE | REMOTE)
        assert answer.json() == {"worker": "w0"} | HANDED
        assert not workers.decoded


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [*(("POST", path, 404) for path in ("/v1/responses", "/v1/embeddings", "/tokenize")), ("GET", PATH, 405)],
)
async def test_other_routes_are_refused_with_those_that_exist(method, path, status):
    async with controller(FakeWorkers(1), decode_url=DECODE) as client:
        answer = await client.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, status)
        assert f"{method} {path}: not served here" in error["message"]
        assert "POST /v1/chat/completions" in error["message"]
