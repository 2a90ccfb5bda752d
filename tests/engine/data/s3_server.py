"""A server of the S3 protocol on this machine, with faults: it lists objects and sends their sizes and ranges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"


@dataclass
class S3Server:
    """The objects of one bucket, and the faults of requests.

    Attributes:
        objects: contents by key.
        most_bytes: bytes of an object that are sent. The rest is missing, although lists and heads count it.
        cut_at: bytes of an object after which the connection is closed, until `cuts` is 0.
        refuses_from: first byte of ranges that are refused with 403, and with them all lists if it is 0.
        delay_s: seconds before each response.
    """

    address: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    most_bytes: int = 1 << 60
    cut_at: int = 1 << 60
    cuts: int = 0
    refuses_from: int = 1 << 60
    delay_s: float = 0.0
    starts: list[int] = field(default_factory=list)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Context in which a server runs."""
    state = S3Server()

    class Handler(_Handler):
        server_state = state

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_state: S3Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        state, url = self.server_state, urlsplit(self.path)
        time.sleep(state.delay_s)
        _, bucket, *rest = unquote(url.path).split("/", 2)
        key, query = (rest or [""])[0], parse_qs(url.query)
        if bucket != BUCKET or (key and key not in state.objects):
            self._send(404, _error("NoSuchKey" if bucket == BUCKET else "NoSuchBucket") if with_body else b"")
        elif not key:
            body = _listed(state.objects, query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
            self._send(*((403, _error("AccessDenied")) if state.refuses_from == 0 else (200, body)))
        else:
            self._send_object(state.objects[key], with_body=with_body)

    def _send_object(self, content: bytes, *, with_body: bool) -> None:
        state, first, stop = self.server_state, 0, len(content)
        if with_body and (spec := self.headers.get("Range")):
            begin, _, last = spec.removeprefix("bytes=").partition("-")
            first, stop = int(begin), min(int(last) + 1, stop) if last else stop
        if first >= state.refuses_from:
            return self._send(403, _error("AccessDenied") if with_body else b"")
        state.starts += [first] if with_body else []
        headers = {"ETag": f'"{md5(content).hexdigest()}"', "Last-Modified": "Sat, 01 Nov 2025 00:00:00 GMT"}
        if not with_body:
            return self._send(200, b"", headers | {"Content-Length": str(len(content))})
        body = content[first : min(stop, state.most_bytes)]
        headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
        self._send(206, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        state = self.server_state
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if status == 206 and state.cuts and len(body) > state.cut_at:
            state.cuts -= 1
            self.wfile.write(body[: state.cut_at])
            self.close_connection = True
        else:
            self.wfile.write(body)


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code} of this server</Message></Error>".encode()


def _listed(objects: dict[str, bytes], prefix: str, delimiter: str) -> bytes:
    keys = sorted(key for key in objects if key.startswith(prefix))
    folders = {prefix + key[len(prefix) :].split("/")[0] + "/" for key in keys if "/" in key[len(prefix) :]}
    if not delimiter:
        folders = set()
    else:
        keys = [key for key in keys if "/" not in key[len(prefix) :]]
    rows = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(objects[key])}</Size>"
        f"<ETag>&quot;{md5(objects[key]).hexdigest()}&quot;</ETag>"
        "<LastModified>2025-11-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    rows += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders))
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()
