"""Clients of the controller: who may use it, and how much of it and of others of the same workers in a minute."""

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
from weft.inference.controller.peers import Peers, Usage
from weft.inference.requests import UNSENDABLE, Refusal, is_sendable

log = logging.getLogger(__name__)

MOST_FILE_BYTES = 2**20
MINUTE_S = 60.0
LEAST_RATE, MOST = 1e-6, 1e12
"""Smallest rate in a minute, and largest limit."""
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


class Ledger:
    """The use of this controller by each client, which is published, and of others."""

    def __init__(self, peers: Peers | None = None) -> None:
        self._peers = peers
        self._own: dict[str, Usage] = {}

    def own(self, name: str) -> Usage:
        """Return what a client has used here."""
        return self._own.get(name, Usage())

    def add(self, name: str, requests: float, tokens: float, running: float) -> None:
        """Add to what a client has used here."""
        self._own[name] = self.own(name).plus(requests, tokens, running)
        if self._peers is not None:
            self._peers.publish_usage(self._own)

    def others(self, name: str) -> Usage:
        """Return what a client has used of other controllers."""
        return self._peers.usage().get(name, Usage()) if self._peers is not None else Usage()


class Client:
    """One client: its limits, and what it has used."""

    def __init__(self, name: str, key: str, limits: Limits, ledger: Ledger | None = None) -> None:
        self.name, self._ledger = name, ledger or Ledger()
        self._buckets = [_Bucket(inf, used) for used in self._ledger.others(name)[:2]]
        self.update(key, limits)

    def update(self, key: str, limits: Limits) -> None:
        """Replace key and limits. What the client has used stays counted."""
        self.key, self.limits = key, limits
        rates = limits.requests_per_minute, limits.tokens_per_minute
        for bucket, per_minute in zip(self._buckets, rates, strict=True):
            bucket.resize(per_minute)

    def count_others(self) -> float:
        """Count what the client has used of other controllers. Return its requests that are in progress there."""
        now_s, others = time.monotonic(), self._ledger.others(self.name)
        for bucket, used in zip(self._buckets, others, strict=False):
            bucket.count_others(now_s, used)
        return others.running

    @contextmanager
    def admitted(self, tokens: int) -> Iterator[None]:
        """Count a request with ``tokens`` prompt tokens as running while the context lasts.

        Raises:
            Refusal: it exceeds a limit.
        """
        if self.limits == Limits():
            yield
            return
        # Published before those of others are read: of two at the same time, at least one counts the other.
        self._ledger.add(self.name, 0, 0, 1)
        try:
            if self._ledger.own(self.name).running + self.count_others() > self.limits.at_once:
                raise self._refusal(f"at_once={self.limits.at_once:g}", BUSY_RETRY_S)
            for field, bucket in zip(("requests_per_minute", "tokens_per_minute"), self._buckets, strict=True):
                if wait_s := bucket.wait_s():
                    raise self._refusal(f"{field}={bucket.per_minute:g}", ceil(wait_s))
            for bucket, amount in zip(self._buckets, (1, tokens), strict=True):
                bucket.take(amount)
            self._ledger.add(self.name, 1, tokens, 0)
            yield
        finally:
            self._ledger.add(self.name, 0, 0, -1)

    def _refusal(self, limit: str, retry_after_s: int) -> Refusal:
        return Refusal(
            429, f"{self.name}: more than {limit} allows; retry in {retry_after_s} s", retry_after_s=retry_after_s
        )


class _Bucket:
    """A token bucket that may be overdrawn once, so that a request larger than the bucket is served too."""

    def __init__(self, per_minute: float, used_of_others: float) -> None:
        self.per_minute, self._used = per_minute, 0.0
        self._at_s, self._used_of_others = time.monotonic(), used_of_others

    def resize(self, per_minute: float) -> None:
        """Change the rate. A smaller bucket is at worst empty, or overdrawn by as much as before."""
        self._used = min(self._used, max(per_minute, self._used + per_minute - self.per_minute))
        self.per_minute = per_minute

    def count_others(self, now_s: float, used: float) -> None:
        """Fill the bucket, and take what others have used since the last call: little, if calls are frequent.

        Args:
            used: the total of others, which falls when one of them ends.
        """
        filled = (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._used, self._at_s = max(0.0, self._used - filled), now_s
        self.take(max(0.0, used - self._used_of_others))
        self._used_of_others = used

    def wait_s(self) -> float:
        if self.per_minute == inf:
            return 0.0
        least = min(1.0, self.per_minute)
        return max(0.0, least - (self.per_minute - self._used)) * MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        self._used += amount


class Clients:
    """All clients. Those in a file change with it."""

    def __init__(self, key: str, file: str = "", peers: Peers | None = None) -> None:
        """Read the clients.

        Args:
            key: key of a client without limits, or empty.
            file: YAML file of clients, private to this user; see `inference.controller.clients`. It may be empty.
            peers: other controllers, whose use by a client of the same name counts.

        Raises:
            ValueError: the file cannot be read, is not private, or has invalid clients.
        """
        self._ledger = Ledger(peers)
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

    def count_others(self) -> None:
        """Count what clients have used of other controllers. Call it every second or so."""
        for client in self._listed:
            client.count_others()

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
        before = {client.name: client for client in self._listed}
        self._listed = [before.get(client.name, client) for client in listed]
        for client, read in zip(self._listed, listed, strict=True):
            client.update(read.key, read.limits)

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
        clients = [_client(str(name), client, where, self._ledger) for name, client in value.items()]
        keys = [client.key for client in self._unlimited + clients]
        for client in clients:
            if keys.count(client.key) > 1:
                raise ValueError(f"{where}: {client.name} has the key of another client; give it one of its own")
        return clients


def _client(name: str, value: Any, where: str, ledger: Ledger) -> Client:
    known = [field.name for field in fields(Limits)]
    if not isinstance(value, Mapping) or not isinstance(value.get("key"), str) or not value["key"].strip():
        raise ValueError(f"{where}: {name} has no key; give it one in quotes, as in `{name}: {{key: 'SECRET'}}`")
    if not is_sendable(value["key"].strip()):
        raise ValueError(f"{where}: {name}: {UNSENDABLE}")
    limits = {field: number for field, number in value.items() if field != "key"}
    for field, number in limits.items():
        if field not in known:
            raise ValueError(f"{where}: {name}.{field} is not a limit; the limits are {', '.join(known)}")
        least, kind, what = (1, int, "an integer") if field == "at_once" else (LEAST_RATE, int | float, "a number")
        if isinstance(number, bool) or not isinstance(number, kind) or not least <= number <= MOST:
            why = f"give {what} from {least:g} to {MOST:g} without quotes, or leave it out for no limit"
            raise ValueError(f"{where}: {name}.{field}={number!r}: {why}")
    return Client(name, value["key"].strip(), Limits(**limits), ledger)
