"""The controller process: its HTTP server and connection limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.conf.hosts import is_loopback
from weft.conf.schema import ControllerConfig, PrefillWorkerConfig, WeftConfig
from weft.inference.board.common_bubbles import CommonBubbles
from weft.inference.board.layout import boards_folder
from weft.inference.board.reader import BoardReader
from weft.inference.controller.clients import Clients
from weft.inference.controller.fleet import Fleet
from weft.inference.controller.peers import Peers
from weft.inference.controller.prompts import counter
from weft.inference.controller.service import make_app
from weft.inference.controller.worker import Bubbles
from weft.inference.worker.command import addresses, decode_url, server_key

KEEP_ALIVE_S = 30
LARGEST_HEADER = 16_384


def app_of(config: WeftConfig, environment: Mapping[str, str]) -> FastAPI:
    """Create the application that serves a configuration's workers.

    Raises:
        ValueError: it would be reachable by others without a key, or the tokenizer, the clients or the certificate
            cannot be read.
    """
    settings, prefill = config.inference.controller, config.inference.prefill
    api_key = environment.get(settings.api_key_env, "")
    if not api_key and not settings.clients and not is_loopback(settings.host):
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
    fleet = Fleet(list(zip(named, bubbles, strict=True)), settings, prefill, peers=peers)
    return make_app(
        fleet,
        settings,
        count=count,
        clients=Clients(api_key, settings.clients),
        server_key=server_key(config, environment),
        model_keys={model.name: environment.get(model.api_key_env, "") for model in settings.models},
        allow_decode=prefill.allow_decode,
        estimated=not tokenizer,
        decode_url=decode_url(config.inference.decode),
    )


def _bubbles_of(address: PrefillWorkerConfig) -> list[Bubbles]:
    """Return the bubbles of each stage of a worker."""
    boards, each = [BoardReader(board) for board in address.boards], len(address.boards) // address.stages
    return [CommonBubbles(boards[stage * each : (stage + 1) * each]) for stage in range(address.stages)]


def serve(app: FastAPI, settings: ControllerConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    uvicorn.Server(server_config(app, settings)).run()


def server_config(app: FastAPI, settings: ControllerConfig) -> uvicorn.Config:
    """Return the HTTP server's configuration, with limits per client."""

    class Protocol(_HeaderTimeout):
        header_timeout_s = settings.receive_timeout_s

    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
        http=Protocol,
        ws="none",
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=ceil(settings.drain_s),
        h11_max_incomplete_event_size=LARGEST_HEADER,
        access_log=False,
        log_level="warning",
        server_header=False,
    )


class _HeaderTimeout(H11Protocol):
    """Closes connections whose client takes too long to send a request header. Uvicorn has no such limit."""

    header_timeout_s = 10.0

    def connection_made(self, transport: Any) -> None:
        self._too_slow: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._wait_for_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # IDLE with bytes left: the start of a header.
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self.conn.trailing_data[0]:
            self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_header(self) -> None:
        if self._too_slow is None:
            self._too_slow = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None
