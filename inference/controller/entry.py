"""The entry of all requests: how many are in progress, what ends with each, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.conf.schema import ControllerConfig
from weft.inference.controller.answering_server import RETRY_S, STREAM_ERROR, last_event
from weft.inference.controller.metrics import CLIENT_GONE, Metrics
from weft.inference.requests import Refusal

_PROBES = ("/health", "/ready")
"""Routes that answer however many requests are in progress."""
ENDS, CLIENT = "weft.ends", "weft.client"
"""Names in a request's scope of the contexts that end with it, and of its client once it is admitted."""
Refused = Callable[[Request, Exception], Awaitable[Response]]


class Entry:
    """Limits how many requests are in progress, and ends what each has entered, after its response.

    It counts responses with an error. When the server ends before a response, its client is sent an error.
    """

    def __init__(self, app: ASGIApp, refused: Refused, metrics: Metrics, settings: ControllerConfig) -> None:
        self._app, self._refused, self._metrics, self._most = app, refused, metrics, settings.max_connections
        self._running = 0
        why = f"the controller ends, and the answer took longer than inference.controller.drain_s={settings.drain_s:g}"
        self._ending = Refusal(503, f"{why}; send the request again", retry_after_s=RETRY_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it if too many are in progress."""
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        if self._running >= self._most:
            why = f"{self._most} requests are in progress (inference.controller.max_connections); retry in 1 s"
            response = await self._refused(Request(scope), Refusal(503, why, retry_after_s=1))
            self._metrics.refused(503)
            await response(scope, receive, send)
            return
        self._running += 1
        sent, error = list[Message](), 0

        def fail(status: int) -> None:
            nonlocal error
            error = status
            self._metrics.refused(status)

        async def send_noted(message: Message) -> None:
            if message.get("status", 0) >= HTTPStatus.BAD_REQUEST:
                fail(message["status"])
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                # This one waits until the client has read most of the body.
                message = {"type": "http.response.body", "more_body": False}
            await send(message)
            sent[1:] = [message]  # the first and the last

        try:
            with contextlib.ExitStack() as scope[ENDS]:  # `Client.admitted`
                await self._app(scope, receive, send_noted)
            is_sent = bool(sent) and not sent[-1].get("more_body", True)
            if not error and (status := scope.get(STREAM_ERROR) or (0 if is_sent else CLIENT_GONE)):
                fail(status)
        except asyncio.CancelledError:  # the server ends
            if not sent:
                response = await self._refused(Request(scope), self._ending)
                await response(scope, receive, send_noted)
            elif not error and sent[-1].get("more_body", True):
                fail(self._ending.status)
                if b"content-length" not in dict(sent[0]["headers"]):  # a stream
                    await send({"type": "http.response.body", "body": last_event(self._ending.answer)})
        except Exception:
            fail(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise
        finally:
            self._running -= 1
            if CLIENT in scope:
                self._metrics.ended(scope[CLIENT], error)
