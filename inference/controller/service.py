"""The HTTP service: OpenAI's API for prefill, in front of all workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weft.conf.schema import ControllerConfig
from weft.inference.controller.answering_server import AnsweringServer
from weft.inference.controller.answers import Answers
from weft.inference.controller.clients import Client, Clients
from weft.inference.controller.dispatch import Dispatch, PrefillRequest
from weft.inference.controller.entry import CLIENT, ENDS, Entry
from weft.inference.controller.fleet import Fleet
from weft.inference.controller.metrics import CLIENT_GONE, Metrics
from weft.inference.controller.prompts import BYTES_PER_TOKEN, Count, prompt_tokens
from weft.inference.controller.server_connections import Lost, ServerResponse, Servers, Unreachable
from weft.inference.controller.worker import Ticket
from weft.inference.requests import (
    Refusal,
    as_prefill,
    check_inner_fields,
    check_prefill_only,
    decodes_elsewhere,
    models_of,
    object_of,
    parse,
)

T = TypeVar("T")
DEADLINE_HEADER = "X-Weft-Deadline-S"
_REQUEST_ID = "x-request-id"
_FORWARDED = (
    *("content-type", "x-request-id", "x-session-id", "x-data-parallel-rank", "traceparent", "tracestate"),
    "endpoint-load-metrics-format",
)
"""Client headers that are forwarded to the worker and the decode server."""


class Service:
    """The request handlers."""

    def __init__(
        self,
        fleet: Fleet,
        settings: ControllerConfig,
        *,
        count: Count,
        clients: Clients,
        server_key: str = "",
        model_keys: Mapping[str, str] | None = None,
        allow_decode: bool = False,
        estimated: bool = False,
        decode_url: str = "",
        continues: bool = False,
        servers: Callable[..., Servers] = Servers,
    ) -> None:
        """Create the service.

        Args:
            count: counts the tokens of a text.
            clients: who may use the service.
            server_key: sent to workers and decode server.
            model_keys: API keys of the servers of `inference.controller.models`, by model.
            allow_decode: True if the workers decode.
            estimated: True if ``count`` is an estimate.
            decode_url: URL of a decode server, for whole answers; empty answers prompts only.
            continues: True if the decode server continues answers that have begun. See `Answers`.
            servers: creates what sends requests to servers.
        """
        self._fleet, self._settings = fleet, settings
        self._count, self._allow_decode, self._estimated = count, allow_decode, estimated
        self._clients = clients
        self._metrics = Metrics(fleet)
        own = {"Authorization": f"Bearer {server_key}"} if server_key else {}
        # A new connection costs a prompt a millisecond.
        self.inner = servers(headers=own, keeps=True)
        # None is kept to other servers: if a server closes one as a request arrives, the request is lost. `Dispatch`
        # sends a prompt to another worker, but a decode server may have fetched the prompt's cache already.
        self.outer = servers()
        self.dispatch = Dispatch(fleet, settings, self._metrics, self.inner, server_key=server_key)
        self._answers = None
        if decode_url:
            urls = [url or decode_url for url in fleet.decoders]
            decoders = {url: AnsweringServer(url, self.outer, settings, key=server_key) for url in (decode_url, *urls)}
            near = [decoders[url] for url in urls]
            self._answers = Answers(
                decoders[decode_url],
                self.dispatch,
                self._metrics,
                near=near,
                continues=continues,
                patience_s=settings.answer_timeout_s,
            )
        self._others: dict[str, AnsweringServer] = {}
        for model in settings.models:
            key = (model_keys or {}).get(model.name, "")
            self._others[model.name] = AnsweringServer(model.url, self.outer, settings, key=key)

    def app(self) -> Starlette:
        """Create the ASGI application."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with self.inner, self.outer:
                probes = [] if self._answers is None else [self._answers.refresh]
                await asyncio.gather(self.dispatch.probe_all(), *(probe() for probe in probes))
                watching = asyncio.create_task(self.dispatch.watch(self._clients.count_others, *probes))
                yield
                watching.cancel()
            self._fleet.close()

        routes = [
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/metrics", self.metrics_text, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
        ]
        served = ", ".join(f"{min(route.methods or ())} {route.path}" for route in routes)

        async def unknown(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            why = f"{request.method} {request.url.path}: not served here; available: {served}"
            return await self.refused(request, Refusal(error.status_code, why))

        app = Starlette(routes=routes, lifespan=lifespan)
        app.add_exception_handler(Refusal, self.refused)
        app.add_exception_handler(HTTPException, unknown)
        app.add_exception_handler(Exception, self.failed)
        app.add_middleware(Entry, refused=self.refused, metrics=self._metrics, settings=self._settings)
        return app

    async def generate(self, request: Request) -> Response:
        """Return a whole answer, or have a prompt prefilled and return the worker's response."""
        client = self._authorize(request)
        body = await self._receive(request)
        deadline_s = self._deadline_s(request)
        headers = _forwarded_headers(request)
        value = await asyncio.to_thread(parse, body, max_depth=self._settings.max_json_depth)
        path = request.url.path
        if (other := self._others.get(str(value.get("model")))) is not None:
            self._admit(request, client, len(body) // BYTES_PER_TOKEN)
            answer = other.answer(path, body, headers, added={}, begun=lambda: None)
            return await _unless_disconnected(request, answer)
        if self._answers is not None and not decodes_elsewhere(value):
            tokens, fits = await asyncio.to_thread(self._check_whole, body, value)
            self._admit(request, client, tokens)
            # Worker and decode server log the same name.
            headers.setdefault(_REQUEST_ID, uuid.uuid4().hex)
            tokens = tokens if fits else 0
            whole = PrefillRequest(path=path, body=body, headers=headers, tokens=tokens, deadline_s=deadline_s)
            response = await _unless_disconnected(request, self._answers.answer(whole, value))
            response.headers.setdefault(_REQUEST_ID, headers[_REQUEST_ID].encode().decode("latin-1"))
            return response
        body, tokens = await asyncio.to_thread(self._validate, body, value)
        self._admit(request, client, tokens)
        prefill = PrefillRequest(path=path, body=body, headers=headers, tokens=tokens, deadline_s=deadline_s)
        prefilled, ticket = await _unless_disconnected(request, self.dispatch.prefill(prefill))
        return _answer(prefilled, ticket)

    async def models(self, request: Request) -> Response:
        """Return the models of the decode server, or of the first worker that answers, and the other models."""
        self._authorize(request)
        own = await self._own_models()
        listed = models_of(own.content)
        if not self._others or not own.is_success or not listed:
            return _forwarded(own, {})
        answers = await asyncio.gather(
            *(server.get("/v1/models") for server in self._others.values()), return_exceptions=True
        )
        for name, answer in zip(self._others, answers, strict=True):  # without those whose server does not answer
            if isinstance(answer, ServerResponse) and answer.is_success:
                listed += [model for model in models_of(answer.content) if model.get("id") == name]
        return JSONResponse(object_of(own.content) | {"data": listed})

    async def _own_models(self) -> ServerResponse:
        if self._answers is not None:
            return await self._answers.models()
        for worker in [worker for worker in self._fleet.workers if worker.up]:
            try:
                return await self.inner.ask("GET", f"{worker.url}/v1/models", total_s=self._settings.answer_slack_s)
            except Unreachable:
                self._fleet.set_up(worker, False)
            except Lost:  # slow is not dead
                continue
        raise Refusal(503, "no worker answers", retry_after_s=1)

    async def metrics_text(self, request: Request) -> Response:
        """Return the metrics."""
        self._authorize(request)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def health(self, _: Request) -> Response:
        """Return an empty response: the process answers."""
        return Response()

    async def ready(self, _: Request) -> Response:
        """Return whether requests are served: by the decode server, or without one by a worker with bubbles ahead."""
        workers = self._fleet.workers
        state = {
            "workers": len(workers),
            "up": sum(worker.up for worker in workers),
            "serving": self._fleet.serving,
        }
        is_ready = self._fleet.serving > 0
        if self._answers is not None:
            state["decode"] = int(is_ready := await self._answers.is_up())
        return JSONResponse(state, status_code=200 if is_ready else 503)

    async def refused(self, _: Request, refusal: Exception) -> Response:
        """Return the response of a refusal."""
        assert isinstance(refusal, Refusal)
        headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else {}
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if refusal.status in (408, 413):
            headers["Connection"] = "close"
        return JSONResponse(refusal.answer, status_code=refusal.status, headers=headers)

    async def failed(self, request: Request, _: Exception) -> Response:
        """Return the response after an error of the controller itself."""
        return await self.refused(request, Refusal(500, "an error of the controller, which its log has; report it"))

    def _authorize(self, request: Request) -> Client:
        return self._clients.of(request.headers.get("authorization", ""))

    def _admit(self, request: Request, client: Client, tokens: int) -> None:
        """Count a request as running until its response has been sent, or its client is gone.

        Raises:
            Refusal: it exceeds a limit of the client.
        """
        ends: contextlib.ExitStack = request.scope[ENDS]
        ends.enter_context(client.admitted(tokens))
        self._metrics.admitted(client.name, tokens)
        request.scope[CLIENT] = client.name

    def _check_whole(self, body: bytes, value: dict[str, Any]) -> tuple[int, bool]:
        """Return the prompt's number of tokens, and True if a worker may compute the prompt."""
        check_inner_fields(value)
        if value.get("kv_transfer_params"):
            raise Refusal(
                400,
                "kv_transfer_params: this server hands caches over itself; leave it out, or set do_remote_decode=true "
                "for the prompt alone",
                field="kv_transfer_params",
            )
        try:
            tokens = prompt_tokens(value, self._count)
        except Refusal:  # the decode server may know the format
            return len(body) // BYTES_PER_TOKEN, False
        self._check_tokens(tokens)
        return tokens, tokens < self._fleet.max_tokens

    def _check_tokens(self, tokens: int) -> None:
        if tokens > (most := self._settings.max_prompt_tokens):
            raise Refusal(400, f"the prompt has about {tokens} tokens; the limit is {most}", field="prompt")

    def _validate(self, body: bytes, value: dict[str, Any]) -> tuple[bytes, int]:
        """Return the body to forward, and its number of prompt tokens."""
        if not self._allow_decode:
            check_prefill_only(value)
        prefill = as_prefill(value)
        if prefill != value:
            body = json.dumps(prefill).encode()
        self._check_tokens(tokens := prompt_tokens(value, self._count))
        longest = self._fleet.max_tokens - 1
        if tokens > longest:
            # If it is too long for the model, the worker refuses it at once, without work.
            tokens = longest if self._estimated or value.get("truncate_prompt_tokens") else 1
        return body, tokens

    def _deadline_s(self, request: Request) -> float:
        text = request.headers.get(DEADLINE_HEADER)
        if text is None:
            return self._settings.deadline_s
        try:
            deadline_s = float(text)
        except ValueError:
            deadline_s = 0.0
        if not 0.0 < deadline_s < 86_400:
            raise Refusal(400, f"{DEADLINE_HEADER}={text}: not a number of seconds above 0 and below a day; give one")
        return deadline_s

    async def _receive(self, request: Request) -> bytes:
        most, body = self._settings.max_body_bytes, bytearray()
        is_too_large = int(request.headers.get("content-length", 0)) > most
        try:
            async with asyncio.timeout(self._settings.receive_timeout_s):
                # All of it: a client that still sends when its connection is closed gets a reset, and no answer.
                async for part in request.stream():
                    body += part
                    if is_too_large := is_too_large or len(body) > most:
                        body.clear()
        except ClientDisconnect:
            raise _disconnection() from None
        except TimeoutError:
            if not is_too_large:
                raise Refusal(
                    408, f"the request took longer than {self._settings.receive_timeout_s:g} s to arrive"
                ) from None
        if is_too_large:
            raise Refusal(413, f"the body is larger than {most} bytes")
        return bytes(body)


def _disconnection() -> Refusal:
    return Refusal(CLIENT_GONE, "the client has disconnected")


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, or cancel it when the client disconnects."""
    task, disconnected = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _disconnection()
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _forwarded_headers(request: Request) -> dict[str, str]:
    """Return the client's headers for the servers, without those that are not UTF-8, which aiohttp cannot send."""
    found = {}
    for key, value in request.headers.raw:
        if (name := key.decode("latin-1")) in _FORWARDED:
            with contextlib.suppress(UnicodeDecodeError):
                found[name] = value.decode()
    return found


def _answer(response: ServerResponse, ticket: Ticket) -> Response:
    expected_ms = (ticket.expected_s - ticket.placed_s) * 1e3
    return _forwarded(response, {"X-Weft-Worker": str(ticket.worker), "X-Weft-Predicted-Ms": f"{expected_ms:.0f}"})


def _forwarded(response: ServerResponse, headers: dict[str, Any]) -> Response:
    media_type = response.headers.get("content-type", "application/json")
    return Response(response.content, status_code=response.status, headers=headers, media_type=media_type)
