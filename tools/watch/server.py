"""The page's web server: static files, views of a run as JSON, and server-sent events when there is something new.

Only this user reaches it on loopback, because a run's folder is private. On another address every request needs the
token. Names of hosts are checked, so that no other web site reaches it through the user's browser.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.conf.host.processes import connection_users
from weft.conf.hosts import is_loopback
from weft.tools.watch.limits import Limits
from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import Views

PAGE = Path(__file__).parent / "page"
COOKIE = "weft_watch"
LOOK_S = 1.0
NAMES = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class OwnUserProtocol(H11Protocol):
    """HTTP on loopback for processes of this user and of root. Connections of others are closed at once."""

    def connection_made(self, transport: Any) -> None:
        """Close the connection if it is another user's."""
        super().connection_made(transport)
        users = connection_users(*map(transport.get_extra_info, ("sockname", "peername")))
        if not users or users - {os.geteuid(), 0}:
            transport.abort()


def new_token() -> str:
    """Return a token for a server that other machines reach."""
    return secrets.token_urlsafe(24)


def make_app(record: RunRecord, *, host: str, token: str = "", other: RunRecord | None = None) -> FastAPI:
    """Return the application that shows a run.

    Args:
        host: the address on which it listens.
        token: expected in ``?token=`` or in the cookie that this sets. Empty needs none.
        other: a run with which this one is compared.

    Raises:
        ValueError: others can reach the address, and there is no token.
    """
    if not token and not is_loopback(host):
        raise ValueError(f"--host {host}: others can reach it, and there is no token; give one, or use 127.0.0.1")

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        yield
        explaining.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=running)
    views, reading, explaining = Views(record, other), Lock(), Limits(record.folder)

    @app.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if (answer := _refusal(request, token)) is not None:
            return answer
        answer = await go_on(request)
        answer.headers.update(HEADERS)
        return answer

    @app.get("/")
    def index() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/page/{name}")
    def page(name: str) -> FileResponse:
        path = PAGE / name
        if path.parent != PAGE or not path.is_file():
            raise HTTPException(404)
        return FileResponse(path)

    @app.get("/api/explain")
    def explain() -> Response:
        return Response(explaining.newest(), media_type="application/json")

    @app.get("/api/{view}")
    def view(view: str, step: int | None = None, window: int = 20, against: int | None = None) -> Response:
        try:
            with reading:
                shown = views.show(view, step=step, window=max(1, min(window, 1000)), against=against)
        except KeyError:
            raise HTTPException(404) from None
        return Response(_json(shown), media_type="application/json")

    @app.get("/events")
    async def events(request: Request) -> StreamingResponse:
        def changed() -> dict[str, Any]:
            with reading:
                return views.changed()

        return StreamingResponse(_news(request, changed), media_type="text/event-stream")

    return app


async def _news(request: Request, changed: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
    """Yield what ``changed`` returns whenever it differs, until the caller is gone."""
    sent: Any = None
    while not await request.is_disconnected():
        found = await asyncio.to_thread(changed)
        yield f"data: {json.dumps(found)}\n\n" if found != sent else ": nothing new\n\n"
        sent = found
        await asyncio.sleep(LOOK_S)


def _json(shown: Any) -> str:
    try:
        return json.dumps(shown, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(shown), allow_nan=False)


def _refusal(request: Request, token: str) -> Response | None:
    """Return the answer to a request that is not let in yet, or None. The token in ``?token=`` becomes a cookie."""
    if not token:
        name = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        return None if name in NAMES else JSONResponse({"detail": "unknown host"}, 421)
    offered = request.query_params.get("token")
    if offered is not None and _equal(offered, token):
        answer = RedirectResponse(request.url.path, 303)  # the address bar keeps no token
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return answer
    if not _equal(request.cookies.get(COOKIE, ""), token):
        return JSONResponse({"detail": "give the token, as in /?token=..."}, 401)
    return None


def _equal(offered: str, token: str) -> bool:
    return hmac.compare_digest(offered.encode(), token.encode())


def _finite(value: Any) -> Any:
    """Return a tree of JSON types in which numbers that are not finite are None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
