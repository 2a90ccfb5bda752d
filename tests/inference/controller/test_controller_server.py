"""The controller as a server: callers that never finish, callers that leave, and addresses that need a key."""

import asyncio
import contextlib
import json
import socket
from functools import partial

import pytest
import uvicorn

from tests.inference.controller.fake_workers import DECODE, EVENTS, FakeWorkers, Through, fleet_of
from weft.conf.schema import PrefillWorkerConfig, WeftConfig
from weft.inference.controller.clients import Clients
from weft.inference.controller.prompts import counter
from weft.inference.controller.server import app_of, server_config
from weft.inference.controller.server_connections import Servers
from weft.inference.controller.service import Service

PREFILL = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(PREFILL)


@contextlib.asynccontextmanager
async def server(workers, decode_url="", *, over_tcp=False, continues=False, **settings):
    """The port of a controller that listens, and its fleet. Over TCP it reaches the decode server, but no worker."""
    fleet, config = fleet_of(workers, **{"probe_s": 60.0, "receive_timeout_s": 0.3, **settings})
    servers = Servers if over_tcp else partial(Through, workers)
    app = Service(
        fleet, config, count=len, clients=Clients(""), decode_url=decode_url, continues=continues, servers=servers
    ).app()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = uvicorn.Server(server_config(app, config))
        task = asyncio.create_task(running.serve([listener]))
        while not running.started:
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()[1], fleet
        finally:
            running.should_exit = True
            await task


async def ask(port, *parts):
    """Send the parts of a request; what comes back until the connection is closed or 5 s have passed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    answer = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(5):
            while part := await reader.read(65536):
                answer += part
                head, end, body = answer.lower().partition(b"\r\n\r\n")
                length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                if end and len(body) >= int(length or 0):
                    break
    writer.close()
    return answer


async def test_callers_that_never_finish_are_sent_away_and_others_are_served():
    async with server(FakeWorkers(1)) as (port, _):
        half_head, half_body, whole, second = await asyncio.gather(
            ask(port, HEAD[:20]),
            ask(port, HEAD, PREFILL[:5]),
            ask(port, HEAD, PREFILL),
            ask(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", HEAD[:20]),
        )
        assert half_head == b""
        assert half_body.startswith(b"HTTP/1.1 408")
        assert whole.startswith(b"HTTP/1.1 200")
        assert second.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_client_that_sends_too_much_reads_why(is_declared):
    """Over TCP, where closing a connection that still receives resets it."""
    body = b"x" * 30_000_000
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    encoding = b"Transfer-Encoding: chunked\r\n\r\n" + chunk
    length = b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with server(FakeWorkers(1), max_body_bytes=1000, receive_timeout_s=10.0) as (port, _):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        answer = await ask(port, head, length if is_declared else encoding)
        assert answer.startswith(b"HTTP/1.1 413")


async def test_clients_without_a_key_write_nothing_to_the_log(capfd):
    """Logs are in the host's shared memory."""
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with server(FakeWorkers(1)) as (port, _):
        assert (await ask(port, b"not HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert (await ask(port, upgrade)).startswith(b"HTTP/1.1 200")
    assert "".join(capfd.readouterr()) == ""


def error_of(answer):
    """The message of an answer in OpenAI's error format."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    status = int(head.split(b" ", 2)[1])
    error = json.loads(body)["error"]
    assert error["code"] == status and error.keys() == {"message", "type", "param", "code"}
    return error["message"]


async def test_more_requests_than_allowed_get_an_error_and_probes_an_answer():
    workers = FakeWorkers(1)
    workers.fault = {"w0": "slow"}
    async with server(workers, max_connections=2, receive_timeout_s=10.0) as (port, _):
        running = [asyncio.create_task(ask(port, HEAD, PREFILL)) for _ in range(2)]
        while len(workers.seen) < 2:
            await asyncio.sleep(0.01)
        refused = await ask(port, HEAD, PREFILL)
        assert "2 requests are in progress (inference.controller.max_connections)" in error_of(refused)
        assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in refused.lower()
        for path in (b"/health", b"/ready"):
            assert (await ask(port, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)).startswith(b"HTTP/1.1 200")
        assert [answer[:12] for answer in await asyncio.gather(*running)] == [b"HTTP/1.1 200"] * 2
        workers.fault = {}
        assert (await ask(port, HEAD, PREFILL)).startswith(b"HTTP/1.1 200")


REFUSED = b"POST /v1/none HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD[:20], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", REFUSED])
async def test_connections_without_a_request_lock_no_client_out(monkeypatch, sent):
    """Silent ones, half a header, those whose answer is sent, and those that were refused and go on sending."""
    monkeypatch.setattr("weft.inference.controller.server.IDLE_S", 0.0)
    async with server(FakeWorkers(1), max_connections=20, receive_timeout_s=60.0) as (port, _):
        idle = []
        for _ in range(100):
            idle.append(await asyncio.open_connection("127.0.0.1", port))
            idle[-1][1].write(sent)
            await asyncio.sleep(0)
        assert (await ask(port, HEAD, PREFILL)).startswith(b"HTTP/1.1 200")
        ends = [asyncio.create_task(reader.read()) for reader, _ in idle]
        async with asyncio.timeout(5):
            while sum(end.done() for end in ends) < 80:
                await asyncio.sleep(0.01)
        assert not ends[-1].done(), "the youngest stays"
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_a_refused_request_has_limited_time_to_end():
    async with server(FakeWorkers(1)) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REFUSED)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(5):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 40_000, 431),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
async def test_what_is_not_http_is_refused_in_openais_format(request_, status):
    async with server(FakeWorkers(1), receive_timeout_s=10.0) as (port, _):
        answer = await ask(port, request_)
        assert answer.startswith(b"HTTP/1.1 %d" % status) and b"connection: close" in answer.lower()
        assert error_of(answer).startswith("invalid HTTP request: ")


async def test_an_error_of_the_controller_is_answered_in_openais_format(monkeypatch):
    async with server(FakeWorkers(1)) as (port, fleet):
        monkeypatch.setattr(fleet, "place", None)
        answer = await ask(port, HEAD, PREFILL)
        assert answer.startswith(b"HTTP/1.1 500") and "its log" in error_of(answer)


async def test_a_client_that_leaves_in_its_body_is_no_error(caplog):
    async with server(FakeWorkers(1), receive_timeout_s=10.0) as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + PREFILL[:5])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        async with asyncio.timeout(5):
            while b'refusals_total{status="499"} 1.0' not in await ask(port, METRICS):
                await asyncio.sleep(0.02)
    assert "Exception" not in caplog.text


async def test_the_work_of_a_caller_that_has_left_is_given_up():
    workers = FakeWorkers(1)
    workers.fault = {"w0": "slow"}
    async with server(workers) as (port, fleet):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + PREFILL)
        while not fleet.workers[0].tickets:
            await asyncio.sleep(0.01)
        writer.close()
        async with asyncio.timeout(0.9):
            while fleet.workers[0].tickets:
                await asyncio.sleep(0.01)


STREAMED = json.dumps({"prompt": "hello", "stream": True}).encode()
UNREAD = 20
STREAM_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(STREAMED)


async def test_a_stream_begins_before_it_ends_and_keeps_its_headers():
    workers = FakeWorkers(1)
    workers.gate.clear()
    async with server(workers, DECODE, receive_timeout_s=10.0) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM_HEAD + STREAMED)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b"x-server: stock" in head and b"x-weft-worker: 0" in head
        assert b"content-type: text/event-stream; charset=utf-8" in head
        assert head.count(b"date:") == 1
        workers.gate.set()
        body = await reader.readuntil(b"[DONE]\n\n")
        assert body.count(b"data: ") == 3
        writer.close()


@pytest.mark.parametrize("fault", ["dying", "leaving"])
async def test_a_stream_that_breaks_off_ends_with_an_error(fault):
    workers = FakeWorkers(1)
    workers.fault = {"decode": fault}
    async with server(workers, DECODE, receive_timeout_s=10.0) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM_HEAD + STREAMED)
        body = await reader.readuntil(b"[DONE]\n\n")
        assert b'data: {"error": {"message": "the decode server ends, starts' in body
        writer.close()


@pytest.mark.parametrize("where", ["worker", "decode", "stream"])
async def test_a_caller_that_leaves_ends_its_work_on_worker_and_decode_server(where):
    workers = FakeWorkers(1)
    workers.fault = {"w0": "slow"} if where == "worker" else {}
    workers.gate.clear()
    async with server(workers, DECODE, receive_timeout_s=10.0, probe_s=60.0) as (port, fleet):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM_HEAD + STREAMED if where == "stream" else HEAD + PREFILL)
        while not (fleet.workers[0].tickets if where == "worker" else workers.decoded):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not workers.cancelled
        writer.close()
        async with asyncio.timeout(0.9):
            while not workers.cancelled:
                await asyncio.sleep(0.01)
        assert workers.cancelled[0] == {"worker": "w0"}.get(where, where)
        assert bool(workers.decoded) == (where != "worker")


async def test_a_caller_that_leaves_a_stream_that_flows_ends_it_at_the_decode_server():
    has_ended = asyncio.Event()

    async def stream(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(EVENTS[:36])
                await writer.drain()
                await asyncio.sleep(0.001)
        has_ended.set()

    async with await asyncio.start_server(stream, "127.0.0.1", 0) as decoder, asyncio.timeout(20):
        url = f"http://127.0.0.1:{decoder.sockets[0].getsockname()[1]}"
        async with server(FakeWorkers(1), url, over_tcp=True, receive_timeout_s=10.0) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(STREAM_HEAD + STREAMED)
            await reader.readuntil(b"data: ")
            writer.close()
            await has_ended.wait()


@pytest.mark.parametrize("case", ["slow", "server stopped", "engine stopped"])
async def test_a_stream_of_a_decode_server_that_is_stopped_ends_with_an_error(case):
    """A stopped process accepts connections, and sends nothing more."""
    checks = []

    async def answer(reader, writer):
        if b"/health" in await reader.readuntil(b"\r\n\r\n"):
            checks.append(writer)
            if case != "server stopped":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + EVENTS[:36])
        while len(checks) < 3:
            await asyncio.sleep(0.01)
        if case == "slow":
            writer.write(EVENTS[36:])
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as decoder, asyncio.timeout(20):
        url = f"http://127.0.0.1:{decoder.sockets[0].getsockname()[1]}"
        settings = {"receive_timeout_s": 10.0, "silence_s": 0.1}
        if case == "engine stopped":
            settings["answer_timeout_s"] = 1.0
        async with server(FakeWorkers(1), url, over_tcp=True, **settings) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(STREAM_HEAD + STREAMED)
            body = await reader.readuntil(b"[DONE]\n\n")
            assert b'"a"' in body and (b'"b"' in body) == (case == "slow")
            assert (b'data: {"error": {"message": "the decode server ends' in body) == (case != "slow")
            writer.close()


@contextlib.asynccontextmanager
async def unread(port, sent):
    """A client with a small buffer that has sent a request."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, sent)
        yield client


async def test_clients_that_never_read_hold_little_memory_for_a_limited_time_and_delay_no_other():
    workers, got = FakeWorkers(1), [0, 0]
    workers.fault = {"decode": "endless"}

    async def read(client, number, most, pause_s):
        while part := await asyncio.get_running_loop().sock_recv(client, most):
            got[number] += len(part)
            await asyncio.sleep(pause_s)

    async with server(workers, DECODE, receive_timeout_s=10.0, send_timeout_s=1.0) as (port, _):
        async with contextlib.AsyncExitStack() as clients, asyncio.timeout(20):
            slow, fast, *_ = [
                await clients.enter_async_context(unread(port, STREAM_HEAD + STREAMED)) for _ in range(UNREAD + 2)
            ]
            reading = [asyncio.create_task(read(slow, 0, 4096, 0.1)), asyncio.create_task(read(fast, 1, 2**20, 0.0))]
            while workers.cancelled.count("stream") < UNREAD or got[1] < 3_000_000:
                await asyncio.sleep(0.05)
            await asyncio.sleep(2.0)
            assert not any(task.done() for task in reading) and got[0]
            for task in reading:
                task.cancel()
        assert sorted(workers.streamed)[-3] < 1_000_000


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
async def test_an_answer_that_is_never_read_is_dropped(connection):
    workers, loop = FakeWorkers(1), asyncio.get_running_loop()
    workers.fault = {"decode": "endless"}
    head = HEAD.replace(b"Host: x", b"Host: x\r\nConnection: " + connection)
    async with (
        server(workers, DECODE, receive_timeout_s=10.0, send_timeout_s=0.3) as (port, _),
        unread(port, head + PREFILL) as client,
        asyncio.timeout(10),
    ):
        await asyncio.sleep(1.0)
        with pytest.raises(ConnectionError):
            while await loop.sock_recv(client, 2**20):
                pass


async def test_accepted_requests_are_answered_after_sigterm():
    workers = FakeWorkers(1)
    workers.gate.clear()
    async with server(workers, DECODE, receive_timeout_s=10.0) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM_HEAD + STREAMED)
        await reader.readuntil(b"\r\n\r\n")
        asyncio.get_running_loop().call_later(0.3, workers.gate.set)
    assert (await reader.read()).count(b"data: ") == 3
    writer.close()


async def test_clients_are_sent_an_error_when_the_server_ends_before_their_answers():
    workers = FakeWorkers(1)
    workers.gate.clear()
    async with server(workers, DECODE, receive_timeout_s=10.0, drain_s=0.2) as (port, _):
        whole = asyncio.create_task(ask(port, HEAD, PREFILL))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM_HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + STREAMED)  # whose end is that of the connection
        while len(workers.decoded) < 2:
            await asyncio.sleep(0.01)
    stream, whole = await reader.read(), await whole
    writer.close()
    assert stream.startswith(b"HTTP/1.1 200") and stream.endswith(b"data: [DONE]\n\n")
    assert whole.startswith(b"HTTP/1.1 503") and b"retry-after: 5" in whole
    for answer in (stream, whole):
        assert b'{"error":' in answer and b"inference.controller.drain_s=0.2; send the request again" in answer


async def test_requests_are_in_progress_until_their_answers_are_read():
    workers = FakeWorkers(1)
    workers.fault = {"decode": "endless"}
    async with (
        server(workers, DECODE, receive_timeout_s=10.0, max_connections=2, drain_s=1.0) as (port, _),
        unread(port, HEAD + PREFILL),
        unread(port, HEAD + PREFILL),
        asyncio.timeout(10),
    ):
        while len(workers.decoded) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert "2 requests are in progress" in error_of(await ask(port, HEAD, PREFILL))


def test_who_listens_to_others_needs_a_key(tmp_path):
    config = WeftConfig()
    controller = config.inference.controller
    controller.workers = [PrefillWorkerConfig(url="http://127.0.0.1:1", boards=[str(tmp_path / "board")])]
    controller.host = "0.0.0.0"
    with pytest.raises(ValueError, match=r"reachable by others, and there is no API key; set the .* WEFT_API_KEY"):
        app_of(config, {})
    assert app_of(config, {"WEFT_API_KEY": "x"})
    controller.host = "127.0.0.1"
    assert app_of(config, {})
    controller.tokenizer = str(tmp_path)
    with pytest.raises(ValueError, match="no such file; give a tokenizer"):
        app_of(config, {})


@pytest.mark.parametrize("key", ["schl\u00fcssel", "key\n", " key", "k\x00y"])
def test_keys_that_no_header_carries_are_refused(tmp_path, key):
    config = WeftConfig()
    with pytest.raises(ValueError, match="WEFT_API_KEY: the key has characters that an HTTP header cannot carry"):
        app_of(config, {"WEFT_API_KEY": key})


def test_prompts_are_counted_by_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert counter(str(tmp_path))("a b c a") == 4
    assert counter("")("12345678") == 3
