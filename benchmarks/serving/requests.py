"""Requests of a trace, sent to prefill workers at their times."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weft.inference.placement.replay import read_trace as read_arrivals

NUM_SENDERS = 64
ANSWER_S = 60.0


@dataclass(frozen=True)
class Request:
    """A request of a trace."""

    after_s: float
    """Seconds after the first one."""
    tokens: int
    """Tokens of its prompt."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a request."""

    ttft_s: float
    status: int
    """HTTP status, or 0 if there was no answer."""
    first: int | None = None
    """Id of the first token, or None if the response has none."""


def read_trace(path: Path, count: int, *, most_tokens: int, over_s: float) -> list[Request]:
    """Return the first requests of an Azure LLM trace, scaled to a small model and a short time.

    Args:
        path: CSV with TIMESTAMP and ContextTokens.
        most_tokens: length of the longest prompt after scaling.
        over_s: seconds between the first and the last arrival after scaling.

    Raises:
        ValueError: the file does not exist, or is not such a trace.
    """
    trace = read_arrivals(path)[:count]
    scale, longest = over_s / max(trace[-1].at_s, 1e-9), max(arrival.tokens for arrival in trace)
    return [Request(a.at_s * scale, max(1, round(a.tokens * most_tokens / longest))) for a in trace]


def send(url: str, tokens: int, *, seed: int = 0, key: str = "") -> Answer:
    """Request the first token after a random prompt."""
    draw = random.Random(seed)
    body = {"prompt": [draw.randrange(256) for _ in range(tokens)], "max_tokens": 1, "temperature": 0}
    body["return_token_ids"] = True
    return _post(url, json.dumps(body).encode(), key)


def _post(url: str, body: bytes, key: str) -> Answer:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/v1/completions", data=body, headers=headers)
    sent_s, first = time.monotonic(), None
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            first, status = _first_token(answer.read()), answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    except OSError:
        status = 0
    return Answer(time.monotonic() - sent_s, status, first)


def _first_token(body: bytes) -> int | None:
    try:
        return json.loads(body)["choices"][0]["token_ids"][0]
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def replay(requests: Sequence[Request], urls: Sequence[str], *, key: str, seed: int = 0) -> list[Answer]:
    """Send each request at its time, to the workers in turn, and return all answers."""
    begin_s = time.monotonic()
    with ThreadPoolExecutor(NUM_SENDERS) as senders:
        waiting = []
        for number, request in enumerate(requests):
            time.sleep(max(0.0, begin_s + request.after_s - time.monotonic()))
            url = urls[number % len(urls)]
            waiting.append(senders.submit(send, url, request.tokens, seed=seed + number, key=key))
        return [answer.result() for answer in waiting]
