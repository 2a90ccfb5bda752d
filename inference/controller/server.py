"""The controller process: its HTTP server and connection limits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.conf.host.processes import allow_files
from weft.conf.hosts import is_loopback
from weft.conf.schema import ControllerConfig, KvConnector, PrefillConfig, PrefillWorkerConfig, WeftConfig
from weft.inference.board.common_bubbles import stage_bubbles
from weft.inference.board.layout import boards_folder
from weft.inference.controller.clients import Clients
from weft.inference.controller.fleet import Fleet
from weft.inference.controller.peers import Peers
from weft.inference.controller.prompts import counter
from weft.inference.controller.reports import ReportedBubbles
from weft.inference.controller.service import Service
from weft.inference.controller.tls import Tls, tls_context
from weft.inference.controller.worker import Bubbles
from weft.inference.model_sizes import cache_bytes
from weft.inference.requests import Refusal
from weft.inference.worker.command import addresses, api_key, server_key
from weft.inference.worker.decoder import continues_answers, decode_url

KEEP_ALIVE_S = 30
LARGEST_HEADER = 16_384
IDLE_S = 1.0
"""Seconds that a connection may be without a request, however many there are."""
UNSENT_BYTES = 65_536
"""Bytes of a response that the kernel buffers before they can be sent."""
_BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in Linux's `tcp_info`."""


def app_of(config: WeftConfig, environment: Mapping[str, str]) -> Starlette:
    """Create the application that serves a configuration's workers.

    Raises:
        ValueError: it would be reachable by others without a key, a key cannot be sent, or the tokenizer, the clients
            or the certificate cannot be read.
    """
    settings, prefill = config.inference.controller, config.inference.prefill
    key = api_key(settings.api_key_env, environment)
    if not key and not settings.clients and not is_loopback(settings.host):
        raise ValueError(
            f"inference.controller.host={settings.host}: reachable by others, and there is no API key; set the "
            f"environment variable {settings.api_key_env}, inference.controller.clients, or "
            "inference.controller.host=127.0.0.1"
        )
    local = Path(prefill.model).expanduser() / "tokenizer.json"
    tokenizer = settings.tokenizer or (str(local) if prefill.model and local.is_file() else "")
    count = counter(tokenizer)
    named = addresses(config)
    bubbles = [_bubbles_of(address) for address in named]
    folders = [Path(board).parent for address in named for board in address.boards]
    peers = Peers(folders[0] if folders else boards_folder(config, os.getuid()))
    served = list(zip(named, bubbles, strict=True))
    fleet = Fleet(served, settings, prefill, peers=peers, cache_token_s=_cache_token_s(prefill))
    return Service(
        fleet,
        settings,
        count=count,
        clients=Clients(key, settings.clients, peers),
        server_key=server_key(config, environment),
        model_keys={model.name: api_key(model.api_key_env, environment) for model in settings.models},
        allow_decode=prefill.allow_decode,
        estimated=not tokenizer,
        decode_url=decode_url(config.inference.decode),
        continues=continues_answers(config),
    ).app()


def _cache_token_s(prefill: PrefillConfig) -> float:
    """Return the seconds that a token's cache takes from one site to another, or 0 if there is no limit."""
    if prefill.connector is not KvConnector.wan or not prefill.cache_mbps:
        return 0.0
    return cache_bytes(Path(prefill.model).expanduser(), 1) * 8e-6 / prefill.cache_mbps


def _bubbles_of(address: PrefillWorkerConfig) -> list[Bubbles]:
    """Return the bubbles of each stage of a worker, which reports them if no boards on this host are given."""
    if not address.boards:
        return [ReportedBubbles() for _ in range(address.stages)]
    return list(stage_bubbles(address.boards, address.stages))


def serve(app: Starlette, settings: ControllerConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    allow_files()  # one for each connection, and for those to workers
    uvicorn.Server(server_config(app, settings)).run()


def server_config(app: Starlette, settings: ControllerConfig) -> uvicorn.Config:
    """Return the HTTP server's configuration, with limits of connections."""

    class Protocol(_Connection):
        receive_timeout_s = settings.receive_timeout_s
        send_timeout_s = settings.send_timeout_s
        most = settings.max_connections
        idle: dict[_Connection, float] = {}

    context = tls_context(settings)

    def protocol(**given: Any) -> asyncio.BaseProtocol:
        return Protocol(**given) if context is None else Tls(Protocol(**given), context)

    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="asyncio",
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=ceil(settings.drain_s),
        h11_max_incomplete_event_size=LARGEST_HEADER,
        access_log=False,
        log_level="error",  # a warning for each request that is not HTTP would fill the host's shared memory
        server_header=False,
    )


class _Connection(H11Protocol):
    """A client's connection, for clients that are slow, silent, many or wrong. Uvicorn has no such limits.

    It is closed if a request header, with the TLS handshake before it, takes too long to arrive, or the rest of a
    request that was refused. It is aborted if its client reads nothing of a response for too long. Of more connections
    than `max_connections`, those without a request are closed, the oldest first.
    """

    receive_timeout_s: float
    send_timeout_s: float
    most: int
    idle: dict[_Connection, float]
    """Connections of the server that have no request in progress, and since when, oldest first."""

    def connection_made(self, transport: Any) -> None:
        self._too_slow: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        transport.set_write_buffer_limits(high=1)  # `pause_writing` if the kernel's buffer is full; with TLS at once
        self._limit(is_receiving=True)
        if len(self.connections) > self.most:
            oldest, since_s = next(iter(self.idle.items()))
            if self.loop.time() - since_s > IDLE_S:
                oldest.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(-1)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._stop_watching()
        super().connection_lost(exc)

    def close(self) -> None:
        self._forget()
        self.connections.discard(self)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in OpenAI's error format. Uvicorn calls this while it handles the exception."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        body = json.dumps(Refusal(status, f"invalid HTTP request: {error or msg}").answer).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = h11.Response(status_code=status, headers=list(headers.items()))
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _update(self) -> None:
        if self.transport.is_closing():
            self._forget()
        elif self.cycle is not None and not self.cycle.response_complete:
            self._forget()  # the service limits the time that a body takes
        else:  # IDLE with bytes left is the start of a header, SEND_BODY the rest of a request that was refused
            self._limit(is_receiving=self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0]))

    def _limit(self, *, is_receiving: bool) -> None:
        self.idle.setdefault(self, self.loop.time())
        if not is_receiving:
            self._stop_waiting()
        elif self._too_slow is None:
            self._too_slow = self.loop.call_later(self.receive_timeout_s, self.close)

    def _watch_reader(self, acked: int) -> None:
        """Abort the connection if the client has acknowledged no byte more than ``acked``."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        (now_acked,) = struct.unpack_from("Q", info, _BYTES_ACKED)
        if now_acked == acked:  # closing would wait until the client has read the rest, and the kernel longer
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(self.send_timeout_s, self._watch_reader, now_acked)

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _forget(self) -> None:
        self.idle.pop(self, None)
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None
