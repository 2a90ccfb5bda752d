"""The service: OpenAI's API on the prefill side, in front of all workers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from weft.conf.schema import ControllerConfig
from weft.inference.controller.dispatch import Asked, Dispatch
from weft.inference.controller.fleet import Fleet, Ticket
from weft.inference.controller.metrics import Metrics
from weft.inference.controller.prompts import Count, prompt_tokens
from weft.inference.requests import Refusal, check_prefill_only, parse

KEEP_ALIVE_S = 2.0
"""How long connections to workers are kept for another request; vLLM's server closes them after 5 s, and a
request that crosses that on its way fails."""
DEADLINE_HEADER = "X-Weft-Deadline-S"
CLIENT_GONE = 499
"""Status in the metrics of requests whose caller went away, as nginx has it."""
_OPEN = ("/health", "/ready")
_PASSED_ON = ("content-type", "x-request-id", "x-data-parallel-rank")
"""Headers of the caller that the worker gets."""


def make_app(
    fleet: Fleet,
    settings: ControllerConfig,
    *,
    count: Count,
    api_key: str = "",
    allow_decode: bool = False,
    transport: httpx.AsyncBaseTransport | None = None,
) -> FastAPI:
    """The ASGI application.

    Args:
        count: tokens of a text.
        api_key: what callers have to send; empty asks for none.
        allow_decode: whether the workers decode.
        transport: how the workers are reached; by default over TCP.
    """
    service = _Service(fleet, settings, count, api_key, allow_decode, transport)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.client:
            await service.dispatch.look()
            watching = asyncio.create_task(service.dispatch.watch())
            yield
            watching.cancel()

    app = FastAPI(title="Weft prefill", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/v1/completions", service.generate, methods=["POST"])
    app.add_api_route("/v1/chat/completions", service.generate, methods=["POST"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/metrics", service.metrics_text, methods=["GET"])
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/ready", service.ready, methods=["GET"])
    app.add_exception_handler(Refusal, service.refused)
    return app


class _Service:
    """Requests on their way from a caller to a worker and back."""

    def __init__(
        self,
        fleet: Fleet,
        settings: ControllerConfig,
        count: Count,
        api_key: str,
        allow_decode: bool,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self._fleet, self._settings = fleet, settings
        self._count, self._allow_decode = count, allow_decode
        self._key = f"Bearer {api_key}" if api_key else ""
        self._metrics = Metrics(fleet)
        headers = {"Authorization": self._key} if self._key else {}
        # Workers are near: no proxy of the environment's stands between.
        self.client = httpx.AsyncClient(
            transport=transport,
            headers=headers,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        )
        self.dispatch = Dispatch(fleet, settings, self._metrics, self.client)

    async def generate(self, request: Request) -> Response:
        """Place a prompt, have it prefilled, and hand on the worker's answer."""
        self._authorize(request)
        body = await self._receive(request)
        deadline_s = self._deadline_s(request)
        tokens = await asyncio.to_thread(self._judge, body)
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        asked = Asked(path=request.url.path, body=body, headers=headers, tokens=tokens, deadline_s=deadline_s)
        answer = asyncio.create_task(self.dispatch.prefill(asked))
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise Refusal(CLIENT_GONE, "the caller has gone")
            return _answer(*answer.result())
        finally:
            answer.cancel()
            gone.cancel()

    async def models(self, request: Request) -> Response:
        """What the workers serve, as the first that answers says."""
        self._authorize(request)
        for worker in [worker for worker in self._fleet.workers if worker.up]:
            try:
                found = await self.client.get(f"{worker.url}/v1/models", timeout=self._settings.answer_slack_s)
            except httpx.TransportError:
                self._fleet.set_up(worker, False)
                continue
            return _handed_on(found, {})
        raise Refusal(503, "no worker answers", retry_after_s=1)

    async def metrics_text(self, request: Request) -> Response:
        """For Prometheus."""
        self._authorize(request)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def health(self) -> Response:
        """That the controller runs."""
        return Response()

    async def ready(self) -> Response:
        """Whether a prompt could be placed now."""
        workers = self._fleet.workers
        state = {
            "workers": len(workers),
            "up": sum(worker.up for worker in workers),
            "serving": self._fleet.serving,
        }
        return JSONResponse(state, status_code=200 if self._fleet.serving else 503)

    async def refused(self, _: Request, refusal: Exception) -> Response:
        """An error of ours, in the form of OpenAI's."""
        assert isinstance(refusal, Refusal)
        self._metrics.refused(refusal.status)
        headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else {}
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if refusal.status in (408, 413):
            headers["Connection"] = "close"
        return JSONResponse(refusal.answer, status_code=refusal.status, headers=headers)

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self._key and not hmac.compare_digest(given.encode(), self._key.encode()):
            raise Refusal(401, "no API key, or a wrong one; send it as `Authorization: Bearer KEY`")

    def _judge(self, body: bytes) -> int:
        """Tokens of a request that may be served."""
        value = parse(body, max_depth=self._settings.max_json_depth)
        if not self._allow_decode:
            check_prefill_only(value)
        tokens, most = prompt_tokens(value, self._count), self._settings.max_prompt_tokens
        if tokens > most:
            raise Refusal(400, f"the prompt has about {tokens} tokens; at most {most} are taken")
        return tokens

    def _deadline_s(self, request: Request) -> float:
        text = request.headers.get(DEADLINE_HEADER)
        if text is None:
            return self._settings.deadline_s
        try:
            deadline_s = float(text)
        except ValueError:
            deadline_s = 0.0
        if not 0.0 < deadline_s < 86_400:
            raise Refusal(400, f"{DEADLINE_HEADER}={text}: not a number of seconds above 0 and below a day; correct it")
        return deadline_s

    async def _receive(self, request: Request) -> bytes:
        most, body = self._settings.max_body_bytes, bytearray()
        too_large = Refusal(413, f"the body is larger than {most} bytes")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large
        try:
            async with asyncio.timeout(self._settings.receive_timeout_s):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise Refusal(408, f"the request took longer than {self._settings.receive_timeout_s:g} s to come") from None
        return bytes(body)


async def _gone(request: Request) -> None:
    """Ends when the caller closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(found: httpx.Response, ticket: Ticket) -> Response:
    expected_ms = (ticket.expected_s - ticket.placed_s) * 1e3
    return _handed_on(found, {"X-Weft-Worker": str(ticket.worker), "X-Weft-Predicted-Ms": f"{expected_ms:.0f}"})


def _handed_on(found: httpx.Response, headers: dict[str, Any]) -> Response:
    media_type = found.headers.get("content-type", "application/json")
    return Response(found.content, status_code=found.status_code, headers=headers, media_type=media_type)
