"""The worker's middleware: what it does not serve is refused with what to do, and never reaches vLLM."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.inference.requests import Refusal
from weft.inference.worker import status as worker_status
from weft.inference.worker import vllm_middleware
from weft.inference.worker.status import WorkerStatus, problem_of
from weft.inference.worker.vllm_middleware import (
    KEY_VARIABLE,
    MOST_BYTES,
    MOST_DEPTH,
    STATUS_VARIABLE,
    ApiMiddleware,
    KeyMiddleware,
    PrefillOnlyMiddleware,
)
from weft.inference.worker.vllm_weights import FOLDER_VARIABLE, ROUTE

PREFILL = {"prompt": "hello", "max_tokens": 1}
REMOTE = {"kv_transfer_params": {"do_remote_decode": True}}
ELSEWHERE = [
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/invocations",
    "/v1/chat/completions/batch",
    "/tokenize",
    "/detokenize",
    "/generative_scoring",
    "/scale_elastic_ep",
    "/v1/embeddings",
    "/pause",
    "/collective_rpc",
    "/v1/load_lora_adapter",
    "/abort_requests",
    "/weft/weights",
    "/v1/completions/",
    "//v1/completions",
    "/V1/completions",
    "/v1/./completions",
    "/v1/completions\x00",
    "",
    "/docs",
    "/openapi.json",
]
"""Paths on which vLLM 0.32.0 generates, or lets its engine be changed, and spellings of ours."""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv(STATUS_VARIABLE, raising=False)


def judge(body):
    PrefillOnlyMiddleware(None).validate(body)


@pytest.mark.parametrize(
    "body",
    [
        PREFILL,
        {"messages": [], "max_completion_tokens": 1},
        PREFILL | REMOTE,
        {"prompt": "hello", "max_tokens": 9} | REMOTE,
    ],
)
def test_prefills_pass(body):
    judge(json.dumps(body).encode())


@pytest.mark.parametrize(
    "body",
    [{"prompt": "hello"}, PREFILL | {"max_tokens": 2}, PREFILL | {"n": 3}, {"prompt": "x", "kv_transfer_params": {}}],
)
def test_decoding_is_refused_with_what_to_do(body):
    with pytest.raises(Refusal, match="set max_tokens=1, or kv_transfer_params") as refusal:
        judge(json.dumps(body).encode())
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5, b"[" * 10**5 + b"]" * 10**5]
)
def test_what_is_no_request_is_refused(body):
    with pytest.raises(Refusal):
        judge(body)


@given(
    st.recursive(
        st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_text_in_a_flat_body_passes(value):
    judge(json.dumps(PREFILL | {"user": json.dumps(value)}).encode())


def app_of(**state):
    """Return vLLM's application, of which the middleware reads the state: its server, whether that ends, its engine."""
    state.setdefault("engine_client", SimpleNamespace(is_paused=lambda: asyncio.sleep(0)))
    return SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(should_exit=False), **state))


def call(body_parts, path="/v1/completions", method="POST", headers=(), middleware=PrefillOnlyMiddleware, kind="http"):
    """Return the request that the app received, and the answer."""
    seen, sent = [], []

    async def app(scope, receive, send):
        seen.append((await receive())["body"])

    async def send(message):
        sent.append(message)

    parts = iter(body_parts)

    async def receive():
        part = next(parts, None)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": True} if part else {"type": "http.request"}

    scope = {"type": kind, "method": method, "path": path, "headers": list(headers), "app": app_of()}
    asyncio.run(middleware(app)(scope, receive, send))
    return seen, sent


WHOLE = json.dumps(PREFILL).encode()


@pytest.mark.parametrize("middleware", [ApiMiddleware, PrefillOnlyMiddleware])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_what_is_not_listed_is_not_there(middleware, method):
    for path in ELSEWHERE:
        seen, sent = call([WHOLE, b""], path=path, method=method, middleware=middleware)
        assert not seen and sent[0]["status"] == 404, path
        assert b"not served by a prefill worker; available: GET /health" in sent[1]["body"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        if method != "POST":
            assert not call([WHOLE, b""], path=path, method=method, middleware=middleware)[0]


def test_what_is_listed_is():
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("GET", "/metrics")):
        assert call([b"x", b""], path=path, method=method) == ([b"x"], [])
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert call([WHOLE, b""], path=path) == ([WHOLE], [])


@given(path=st.sampled_from([*ELSEWHERE, "/v1/completions", "/metrics"]), method=st.sampled_from(["GET", "POST"]))
def test_every_route_of_the_decode_server_but_health_needs_the_key(path, method):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, "secret")
        for key, is_served in ((b"Bearer secret", True), (b"Bearer other", False)):
            headers = [(b"authorization", key)]
            assert bool(call([b"{}"], path, method, headers, KeyMiddleware)[0]) is is_served
        assert call([b"{}"], "/health", "GET", (), KeyMiddleware)[0]


class Engine:
    """An engine that loads any weights but those named `bad`."""

    def __init__(self):
        self.loaded = []

    async def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        if kwargs["weights_path"].endswith("bad"):
            raise RuntimeError("shapes differ")
        self.loaded.append(kwargs["weights_path"])

    async def reset_prefix_cache(self, reset_running_requests=False):
        assert reset_running_requests, "otherwise vLLM keeps the cache while it computes a prompt"
        self.loaded.append("reset")


def test_weights_are_replaced_by_those_beside_them_and_by_no_others(tmp_path, monkeypatch):
    for name in ("1", "2", "bad"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    (tmp_path / "other").mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "weights" / "1"))
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    engine, middleware, sent = Engine(), PrefillOnlyMiddleware(None), []
    app = app_of(engine_client=engine)

    def ask(method, name=None, key=b"Bearer secret"):
        async def receive():
            return {"type": "http.request", "body": json.dumps({"name": name}).encode()}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": method, "path": ROUTE, "headers": [(b"authorization", key)], "app": app}
        asyncio.run(middleware(scope, receive, send))
        return sent[-2]["status"], json.loads(sent[-1]["body"])

    assert ask("POST", "2", key=b"Bearer other")[0] == 401
    assert ask("GET") == (200, {"name": "1"})
    for name in ("3", "../other", "", ".", "..", None, 7, str(tmp_path / "other")):
        assert ask("POST", name)[0] == 400, name
    assert ask("POST", "2") == (200, {"name": "2"}) and ask("GET") == (200, {"name": "2"})
    assert engine.loaded == [str(tmp_path / "weights" / "2"), "reset"]
    status, answer = ask("POST", "bad")
    assert status == 500 and "bad: not loaded (shapes differ)" in answer["error"]["message"]
    assert ask("GET") == (200, {"name": ""}), "parts of both may be there"


def test_websockets_are_closed():
    seen, sent = call([], kind="websocket")
    assert not seen and [message["type"] for message in sent] == ["websocket.close"]


def test_one_that_decodes_takes_longer_answers_and_no_other_paths():
    body = json.dumps(PREFILL | {"max_tokens": 100}).encode()
    assert call([body, b""], middleware=ApiMiddleware) == ([body], [])
    assert call([body, b""])[1][0]["status"] == 400
    assert call([b"[", b""], middleware=ApiMiddleware)[1][0]["status"] == 400


def test_who_has_no_key_learns_nothing_but_health(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    right = (b"authorization", b"Bearer secret")
    wrong = [(), [(b"authorization", b"Bearer wrong")], [(b"authorization", b"secret")], [right, right]]
    for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/v1/models")):
        for headers in wrong:
            assert call([WHOLE, b""], path=path, method=method, headers=headers)[1][0]["status"] == 401
        assert call([WHOLE, b""], path=path, method=method, headers=[right])[0]
    assert call([b"x", b""], path="/health", method="GET")[0]
    for path in ELSEWHERE:
        assert not call([WHOLE, b""], path=path, headers=[right])[0]


def test_health_knows_of_the_engines_threads(monkeypatch, tmp_path):
    path = tmp_path / "boards" / "worker0.status"
    monkeypatch.setenv(STATUS_VARIABLE, str(path))
    assert call([b"x", b""], path="/health", method="GET")[0]
    status = WorkerStatus(path)
    assert call([b"x", b""], path="/health", method="GET")[1][0]["status"] == 503, "it warms up"
    status.serve()
    assert call([b"x", b""], path="/health", method="GET")[0]
    monkeypatch.setattr(worker_status, "STALE_S", -1.0)
    seen, sent = call([b"x", b""], path="/health", method="GET")
    assert not seen and sent[0]["status"] == 503 and b"waits for bubbles" in sent[1]["body"]


def test_a_status_says_what_is_wrong_with_an_engine(tmp_path):
    path, hour = tmp_path / "boards" / "worker0.status", 3600 * 10**9
    status, now = WorkerStatus(path), time.monotonic_ns()
    status.serve()
    assert problem_of(path, now) == ""
    assert "has not run for 3600 s" in problem_of(path, now + hour)
    status.woke()
    status.woke()
    assert "has not responded for 3600 s" in problem_of(path, now + hour)
    status.looped()
    assert problem_of(path, now) == ""
    assert problem_of(tmp_path / "none", now) == ""
    path.write_bytes(b"x" * 9)
    assert "remove it" in problem_of(path, now)


def test_a_body_that_comes_in_parts_is_handed_on_whole():
    body = json.dumps(PREFILL).encode()
    assert call([body[:5], body[5:], b""]) == ([body], [])


def test_a_body_without_end_is_cut_off():
    for end in ([], [b""]):
        parts = iter([b" " * 2**20] * (MOST_BYTES // 2**20 + 2) + end)
        seen, sent = call(parts)
        assert not seen and sent[0]["status"] == 413
        assert not list(parts), "read to its end: a client that still sends when it is closed gets a reset"


def test_a_caller_that_leaves_is_no_error():
    seen, sent = call([b"{"])
    assert not seen and sent[0]["status"] == 400


def test_a_prefill_for_another_decoder_is_bounded_before_vllm_sees_it():
    decoding = {"prompt": "hello", "n": 3, "max_tokens": 99, "min_tokens": 5} | REMOTE
    for middleware in (ApiMiddleware, PrefillOnlyMiddleware):
        ((seen,), _) = call([json.dumps(decoding).encode(), b""], middleware=middleware)
        assert json.loads(seen) == decoding | {"n": 1, "max_tokens": 1, "min_tokens": 1}
        several = json.dumps(decoding | {"prompt": ["one", "two"]}).encode()
        seen, sent = call([several, b""], middleware=middleware)
        assert not seen and sent[0]["status"] == 400


def answer(*bodies, status=200):
    """Return the client's answer when vLLM answers with these bodies."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": WHOLE}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": app_of()}
    asyncio.run(PrefillOnlyMiddleware(app)(scope, receive, send))
    return sent


@pytest.mark.parametrize("aborted", [b'{"choices":[{"finish_reason":"abort"}]}', b'data: {"finish_reason":"abort"}'])
def test_a_prompt_that_vllm_aborts_is_not_answered_with_success(aborted):
    start, body = answer(aborted)
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == 503
    completed = b'{"choices":[{"finish_reason":"length"}]}'
    assert [message.get("body") for message in answer(completed)] == [None, completed, None]
    assert answer(completed)[0]["status"] == 200


def test_an_engine_that_shuts_down_is_no_internal_error(monkeypatch, tmp_path):
    """But one that crashed is: the prompt may be the cause."""
    path = tmp_path / "boards" / "worker0.status"
    monkeypatch.setenv(STATUS_VARIABLE, str(path))
    status = WorkerStatus(path)
    assert answer(b'{"error": "engine dead"}', status=500)[0]["status"] == 500
    status.leave()
    assert answer(b'{"error": "engine dead"}', status=500)[0]["status"] == 503
    assert answer(b"{}")[0]["status"] == 200
    WorkerStatus(path)
    assert answer(b'{"error": "engine dead"}', status=500)[0]["status"] == 500, "it was started again"


def test_a_stream_that_vllm_aborts_ends_with_an_error():
    start, first, last = answer(b"data: {}\n\n", b'data: {"finish_reason":"abort"}\n\n', b"data: [DONE]\n\n")
    assert (start["status"], first["body"]) == (200, b"data: {}\n\n")
    assert b'"code": 503' in last["body"] and not last.get("more_body")


@pytest.mark.parametrize("middleware", [PrefillOnlyMiddleware, KeyMiddleware])
@pytest.mark.parametrize("begun", [False, True])
def test_a_prompt_that_waits_for_an_engine_that_is_gone_is_answered(monkeypatch, middleware, begun):
    """An engine that ended may have had no time for its last outputs. vLLM then waits for ever."""
    monkeypatch.setattr(vllm_middleware, "ENDED_S", 0.05)
    sent, left, application = [], [], app_of()

    async def app(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: {}", "more_body": True})
        try:
            await asyncio.sleep(3600)
        finally:
            left.append(True)

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": WHOLE}

    async def serve():
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": application}
        serving = asyncio.create_task(middleware(app)(scope, receive, send))
        await asyncio.sleep(0.3)
        assert not serving.done() and not left, "prompts wait for as long as the engine lives"
        application.state.server.should_exit = True
        await asyncio.wait_for(serving, 10)

    asyncio.run(serve())
    assert left
    if begun:
        assert sent[0]["status"] == 200 and b'"code": 503' in sent[-1]["body"] and b"[DONE]" in sent[-1]["body"]
    else:
        assert sent[0]["status"] == 503 and (b"retry-after", b"1") in sent[0]["headers"]


def test_depth_is_measured_outside_of_strings():
    judge(json.dumps(PREFILL | {"user": "[" * 2 * MOST_DEPTH + '\\"'}).encode())
