"""Prefill workers without vLLM: boards with given contents, servers that can be broken."""

import asyncio
import contextlib
import json
import time
from functools import partial

import httpx

from weft.conf.schema import ControllerConfig, PrefillConfig, PrefillWorkerConfig
from weft.inference.controller.clients import Clients
from weft.inference.controller.fleet import Fleet
from weft.inference.controller.server_connections import Lost, ServerResponse, Servers, Unreachable
from weft.inference.controller.service import Service

PATH = "/v1/completions"
PREFILL = {"model": "tiny", "prompt": "one two three", "max_tokens": 1}
REMOTE = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
DECODE = "http://decode"
MODELS = {"data": [{"id": "tiny", "max_model_len": 4096}]}
EVENTS = (
    b'data: {"choices": [{"text": "a"}]}\n\n'
    b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\n'
    b"data: [DONE]\n\n"
)
LONG_EVENT = b'data: {"choices": [{"text": "%s"}]}\n\n' % (b"x" * 30_000)
TOKEN_S = 1.5 * 5e-4
"""Seconds per token of the cost model's cautious prior."""


class FakeBoard:
    """Always in a bubble, or what `bubbles` says: (start, end) in seconds from now."""

    def __init__(self, bubbles=((0.0, 10.0),)):
        self.bubbles = bubbles

    def upcoming(self, horizon_s):
        now_s = time.monotonic()
        return [(now_s + start_s, now_s + end_s) for start_s, end_s in self.bubbles if start_s < horizon_s]


class FakeWorkers(httpx.AsyncBaseTransport):
    """Servers named w0, w1, ...; `fault[name]` is one of:

    dead, hung, dying (in a request), crashing (likewise, with an error), broken, strict, slow, busy (one prompt after
    the other), mute (no word on its health, but answers), crossing (closes connections when asked for its health, but
    answers), late (its health comes while the controller does not run, every other time after the controller's
    timeout), leaving (aborts prompts, as vLLM does when it shuts down), full (answers 503), endless (streams without
    end), stopped (its engine does not run, but its health answers), unwell (likewise, and its health says so).
    """

    def __init__(self, count):
        self.fault = {}
        self.seen = []
        self.asked = 0
        self.device = asyncio.Lock()
        self.names = [f"w{number}" for number in range(count)]
        self.cancelled = []
        self.stuck = []
        """Names of servers for each request that waits for a stopped engine."""
        self.decoded = []
        """Requests of the decode server, `DECODE`: (request, body)."""
        self.prefilled = {}
        """Further fields of a worker's response, and of its transfer parameters under `kv_transfer_params`."""
        self.answer = None
        """A worker's whole response in bytes, if not None."""
        self.events = EVENTS
        """Events of the decode server."""
        self.rendered = None
        """Response of the decode server that renders a prompt; None refuses."""
        self.models, self.listed = MODELS, {"data": [{"id": "other"}]}
        """Models of all servers, and of the server named other."""
        self.streamed = []
        """Bytes that each endless stream has produced."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def handle_async_request(self, request):
        try:
            return await self._handle(request)
        except asyncio.CancelledError:
            self.cancelled.append(request.url.host)
            raise

    async def _handle(self, request):
        name, fault = request.url.host, self.fault.get(request.url.host)
        if fault == "dead":
            raise httpx.ConnectError("refused", request=request)
        if fault == "hung" or (fault == "mute" and request.url.path == "/health"):
            await asyncio.sleep(request.extensions["timeout"]["read"] or 3600.0)
            raise httpx.ReadTimeout("no answer", request=request)
        if fault == "late" and request.url.path == "/health":
            self.asked += 1
            time.sleep(0.5)
            if self.asked % 2:
                raise httpx.ReadTimeout("no answer", request=request)
        if fault in ("stopped", "unwell") and request.method == "POST":
            self.stuck.append(name)
            await asyncio.sleep(3600.0)
        if request.url.path == "/health":
            if fault == "unwell":
                return httpx.Response(503)
            if fault in ("slow", "crossing"):
                self.asked += 1
            if fault == "crossing":
                raise httpx.RemoteProtocolError("closed an idle connection", request=request)
            return httpx.Response(200)
        if request.url.path == "/v1/models":
            if fault == "slow":
                raise httpx.ReadTimeout("no answer", request=request)
            return httpx.Response(200, json=self.listed if name == "other" else self.models)
        body = await request.aread()
        if name == "other":
            if fault:
                return httpx.Response(500)
            self.decoded.append((request, json.loads(body)))
            return httpx.Response(200, json={"model": "other"})
        if name.startswith("decode"):
            return await self._decode(request, json.loads(body), fault)
        self.seen.append((name, request, json.loads(body)))
        if fault == "dying":
            self.fault[name] = "dead"
            raise httpx.RemoteProtocolError("closed", request=request)
        if fault == "crashing":
            self.fault[name] = "dead"
        if fault in ("broken", "crashing"):
            return httpx.Response(500, json={"error": "engine dead"})
        if fault == "leaving":
            return httpx.Response(200, json={"choices": [{"text": "", "finish_reason": "abort"}]})
        if fault == "full":
            return httpx.Response(503, json={"error": "full"})
        if fault == "strict":
            return httpx.Response(404, json={"error": "no such model"})
        if fault == "busy":
            async with self.device:
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.0 if fault in ("slow", "mute", "crossing") else 0.0)
        if self.answer is not None:
            return httpx.Response(200, content=self.answer)
        transfer = {"do_remote_prefill": True} | self.prefilled.get("kv_transfer_params", {})
        return httpx.Response(200, json={"worker": name} | self.prefilled | {"kv_transfer_params": transfer})

    async def _decode(self, request, body, fault):
        self.decoded.append((request, body))
        if request.url.path.endswith("/render"):
            await asyncio.sleep(1.0 if fault == "slow" else 0.0)
            return httpx.Response(404 if self.rendered is None else 200, json=self.rendered)
        headers = {"X-Server": "stock", "Date": "then"}
        if fault == "full":
            return httpx.Response(503, json={"error": {"message": "busy"}}, headers=headers)
        if body.get("temperature") == -1:
            return httpx.Response(400, json={"error": {"message": "temperature"}}, headers=headers)
        if not body.get("stream"):
            await self.gate.wait()
            reason, text = "abort" if fault == "leaving" else "stop", "x" * 5_000_000 if fault == "endless" else "hi"
            return httpx.Response(200, json={"choices": [{"text": text, "finish_reason": reason}]}, headers=headers)
        headers["content-type"] = "text/event-stream; charset=utf-8"
        return httpx.Response(200, headers=headers, stream=_Events(self, fault))


class _Events(httpx.AsyncByteStream):
    """Events of the decode server, in parts that end anywhere."""

    def __init__(self, servers, fault):
        self.servers, self.fault = servers, fault

    async def __aiter__(self):
        if self.fault == "endless":
            number = len(self.servers.streamed)
            self.servers.streamed.append(0)
            while True:
                self.servers.streamed[number] += len(LONG_EVENT)
                await asyncio.sleep(0.001)
                yield LONG_EVENT
        events = self.servers.events
        yield events[:30]
        await self.servers.gate.wait()
        if self.fault == "dying":
            raise httpx.RemoteProtocolError("closed")
        if self.fault != "leaving":
            yield events[30:70]
            yield events[70:]
        else:
            yield b'"a"}]}\n\ndata: [DONE]\n\n'

    def close(self):
        self.servers.cancelled.append("stream")


class Through(Servers):
    """Sends requests through a transport of httpx instead of over connections."""

    def __init__(self, transport, *, headers=None, keeps=False):
        super().__init__(headers=headers, keeps=keeps)
        self.transport = transport

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def open(self, method, url, content=b"", headers=None, *, connect_s=None, total_s=None):
        sent = {name: value.encode() for name, value in {**(self._headers or {}), **(headers or {})}.items()}
        request = httpx.Request(method, url, content=content or None, headers=sent)
        request.extensions = {"timeout": {"read": total_s}}
        try:
            return _Response(await self.transport.handle_async_request(request))
        except httpx.ConnectError as error:
            raise Unreachable from error
        except httpx.TransportError as error:
            raise Lost from error


class _Response(ServerResponse):
    def __init__(self, response):
        super().__init__(response.status_code, dict(response.headers))
        self.response = response

    async def parts(self):
        try:
            async for part in self.response.stream:
                yield part
        except httpx.TransportError as error:
            raise Lost from error

    def close(self):
        if isinstance(self.response.stream, _Events):
            self.response.stream.close()


def fleet_of(workers, boards=None, prefill=None, cost="", decoders=None, **settings):
    controller = ControllerConfig(**settings)
    boards = boards or [FakeBoard() for _ in workers.names]
    decoders = decoders or [""] * len(workers.names)
    addresses = [
        PrefillWorkerConfig(url=f"http://{name}", boards=["x"], cost=cost, decode_url=decoder)
        for name, decoder in zip(workers.names, decoders, strict=True)
    ]
    fleet = Fleet(
        [(address, [board]) for address, board in zip(addresses, boards, strict=True)],
        controller,
        prefill or PrefillConfig(),
    )
    return fleet, controller


@contextlib.asynccontextmanager
async def controller(
    workers,
    boards=None,
    *,
    api_key="",
    allow_decode=False,
    decode_url="",
    continues=False,
    clients="",
    keys=None,
    over_tcp=False,
    **settings,
):
    """A client of a running controller. Over TCP the names of workers are addresses of servers."""
    fleet, config = fleet_of(workers, boards, **{"probe_s": 60.0, "answer_slack_s": 0.2, "silence_s": 0.3, **settings})
    app = Service(
        fleet,
        config,
        count=lambda text: len(text.split()),
        clients=Clients(api_key, str(clients)),
        server_key="inner",
        model_keys=keys,
        allow_decode=allow_decode,
        decode_url=decode_url,
        continues=continues,
        servers=Servers if over_tcp else partial(Through, workers),
    ).app()
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://controller") as client,
    ):
        client.fleet = fleet
        yield client
