"""The page's web server: static files, views of a run as JSON, and server-sent events when there is something new.

Only this machine reaches it on loopback. On another address every request needs the token. Names of hosts are checked,
so that no other web site reaches it through the user's browser.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryFile
from threading import Lock
from time import monotonic
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, StreamingResponse

from weft.conf.hosts import is_loopback
from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import EXPLAIN_S, Views

PAGE = Path(__file__).parent / "page"
COOKIE = "weft_watch"
LOOK_S = 1.0
REST = 5.0
"""Least time between two simulations of what limits the run, as a multiple of the last one's."""
NAMES = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def new_token() -> str:
    """Return a token for a server that other machines reach."""
    return secrets.token_urlsafe(24)


def make_app(record: RunRecord, *, host: str, token: str = "") -> FastAPI:
    """Return the application that shows a run.

    Args:
        host: the address on which it listens.
        token: expected in ``?token=`` or in the cookie that this sets. Empty needs none.

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
    views, reading, explaining = Views(record), Lock(), Limits(record.folder)

    @app.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        name = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if not token and name not in NAMES:
            return JSONResponse({"detail": "unknown host"}, 421)
        if token:
            offered = request.query_params.get("token")
            if offered is not None and _equal(offered, token):
                answer: Response = RedirectResponse(request.url.path, 303)  # the address bar keeps no token
                answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
                return answer
            if not _equal(request.cookies.get(COOKIE, ""), token):
                return JSONResponse({"detail": "give the token, as in /?token=..."}, 401)
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
    def view(view: str, step: int | None = None, window: int = 20) -> Response:
        try:
            with reading:
                shown = views.show(view, step=step, window=max(1, min(window, 1000)))
        except KeyError:
            raise HTTPException(404) from None
        try:
            text = json.dumps(shown, allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(shown), allow_nan=False)
        return Response(text, media_type="application/json")

    @app.get("/events")
    async def events(request: Request) -> StreamingResponse:
        def changed() -> dict[str, Any] | None:
            with reading:
                return views.changed()

        async def stream() -> AsyncIterator[str]:
            sent: Any = None
            while not await request.is_disconnected():
                found = await asyncio.to_thread(changed)
                yield f"data: {json.dumps(found)}\n\n" if found != sent else ": nothing new\n\n"
                sent = found
                await asyncio.sleep(LOOK_S)

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


class Limits:
    """The limits of a run, by `weft explain --json` in another process, so that no view waits for it."""

    def __init__(self, run_folder: Path) -> None:
        self._command = [sys.executable, "-m", "weft.tools.watch.explain", str(run_folder), "--json"]
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Any = None
        self._text, self._begun, self._due = b"null", 0.0, 0.0

    def newest(self) -> bytes:
        """Return the newest limits as JSON, null before the first. If they are old, new ones are computed meanwhile."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._output.seek(0)
                self._text = self._output.read() if self._process.returncode == 0 else b"[]"  # no step is recorded yet
                self._due = monotonic() + max(EXPLAIN_S, REST * (monotonic() - self._begun))
                self._process = None
            if self._process is None and monotonic() >= self._due:
                self._begun, self._output = monotonic(), TemporaryFile()  # noqa: SIM115 (until it has been read)
                self._process = subprocess.Popen(
                    self._command, stdout=self._output, stderr=DEVNULL, preexec_fn=partial(os.nice, 10)
                )
            return self._text

    def close(self) -> None:
        """End the other process."""
        with self._lock:
            self._due = inf
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None


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
