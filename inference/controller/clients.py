"""Clients of the controller: who may use it, and how much of it in a minute."""

from __future__ import annotations

import hmac
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import ceil, inf
from pathlib import Path
from typing import Any

from weft.conf.host.documents import read_yaml
from weft.inference.requests import Refusal

log = logging.getLogger(__name__)

MOST_FILE_BYTES = 2**20
MINUTE_S = 60.0
BUSY_RETRY_S = 1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one client.

    Attributes:
        requests_per_minute: on average; as many may arrive together.
        tokens_per_minute: prompt tokens, likewise. A single larger prompt is accepted, and delays the next ones.
        at_once: requests that are not answered yet.
    """

    requests_per_minute: float = inf
    tokens_per_minute: float = inf
    at_once: float = inf


class Client:
    """One client: its limits, and what it has used."""

    def __init__(self, name: str, key: str, limits: Limits) -> None:
        self.name, self.key, self.limits = name, key, limits
        self._running = 0
        self._buckets = [_Bucket(limits.requests_per_minute), _Bucket(limits.tokens_per_minute)]

    @contextmanager
    def admitted(self, tokens: int) -> Iterator[None]:
        """Count a request with ``tokens`` prompt tokens as running while the context lasts.

        Raises:
            Refusal: it exceeds a limit.
        """
        now_s = time.monotonic()
        if self._running >= self.limits.at_once:
            raise self._refusal(f"at_once={self.limits.at_once:g}", BUSY_RETRY_S)
        for field, bucket in zip(("requests_per_minute", "tokens_per_minute"), self._buckets, strict=True):
            if wait_s := bucket.wait_s(now_s):
                raise self._refusal(f"{field}={bucket.per_minute:g}", ceil(wait_s))
        for bucket, amount in zip(self._buckets, (1, tokens), strict=True):
            bucket.take(amount)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _refusal(self, limit: str, retry_after_s: int) -> Refusal:
        return Refusal(
            429, f"{self.name}: more than {limit} allows; retry in {retry_after_s} s", retry_after_s=retry_after_s
        )


class _Bucket:
    """A token bucket that may be overdrawn once, so that a request larger than the bucket is served too."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = self._level = per_minute
        self._at_s = time.monotonic()

    def wait_s(self, now_s: float) -> float:
        if self.per_minute == inf:
            return 0.0
        rate = self.per_minute / MINUTE_S
        self._level, self._at_s = min(self.per_minute, self._level + (now_s - self._at_s) * rate), now_s
        least = min(1.0, self.per_minute)
        return max(0.0, least - self._level) / rate

    def take(self, amount: float) -> None:
        self._level -= amount


class Clients:
    """All clients. Those in a file change with it."""

    def __init__(self, key: str, file: str = "") -> None:
        """Read the clients.

        Args:
            key: key of a client without limits, or empty.
            file: YAML file of clients, private to this user; see `inference.controller.clients`. It may be empty.

        Raises:
            ValueError: the file cannot be read, is not private, or has invalid clients.
        """
        self._unlimited = [Client("default", key, Limits())] if key else []
        self._path = Path(file).expanduser() if file else None
        self._version = self._stamp()
        self._listed = self._read()
        self._anybody = Client("anybody", "", Limits())

    def of(self, authorization: str) -> Client:
        """Return the client that sent the header ``authorization``. Raise Refusal if it has no valid key."""
        self._refresh()
        everyone = self._unlimited + self._listed
        if not everyone and self._path is None:
            return self._anybody
        scheme, _, key = authorization.partition(" ")
        # All keys are compared, so that the time tells nothing about them.
        equal = [client for client in everyone if hmac.compare_digest(key.strip().encode(), client.key.encode())]
        if scheme.lower() != "bearer" or not equal:
            raise Refusal(401, "missing or invalid API key; send it as `Authorization: Bearer KEY`")
        return equal[0]

    def _stamp(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _refresh(self) -> None:
        if (version := self._stamp()) == self._version:
            return
        self._version = version
        try:
            listed = self._read()
        except ValueError as error:
            log.warning("the clients stay as they were: %s", error)
            return
        before = {(client.name, client.key, client.limits): client for client in self._listed}
        self._listed = [before.get((client.name, client.key, client.limits), client) for client in listed]

    def _read(self) -> list[Client]:
        if self._path is None:
            return []
        where = f"inference.controller.clients={self._path}"
        try:
            mode = self._path.stat().st_mode
            value = read_yaml(self._path, most_bytes=MOST_FILE_BYTES)
        except OSError as error:
            raise ValueError(f"{where}: {error.strerror}; name a file of clients") from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if stat.S_IMODE(mode) & 0o077 or self._path.stat().st_uid not in (os.geteuid(), 0):
            raise ValueError(f"{where}: others can read or write its keys; chmod 600, and change the keys")
        if not isinstance(value, Mapping) or not value:
            raise ValueError(f"{where}: no clients; give lines such as `alice: {{key: SECRET, at_once: 8}}`")
        clients = [_client(str(name), client, where) for name, client in value.items()]
        keys = [client.key for client in self._unlimited + clients]
        for client in clients:
            if keys.count(client.key) > 1:
                raise ValueError(f"{where}: {client.name} has the key of another client; give it one of its own")
        return clients


def _client(name: str, value: Any, where: str) -> Client:
    known = [field.name for field in fields(Limits)]
    if not isinstance(value, Mapping) or not isinstance(value.get("key"), str) or not value["key"].strip():
        raise ValueError(f"{where}: {name} has no key; give it one in quotes, as in `{name}: {{key: 'SECRET'}}`")
    limits = {field: number for field, number in value.items() if field != "key"}
    for field, number in limits.items():
        if field not in known:
            raise ValueError(f"{where}: {name}.{field} is not a limit; the limits are {', '.join(known)}")
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
            raise ValueError(f"{where}: {name}.{field}={number!r}: give a number above 0")
    return Client(name, value["key"].strip(), Limits(**limits))
