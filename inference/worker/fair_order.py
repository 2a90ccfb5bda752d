"""The order of waiting prompts: start-time fair queueing, so that no request waits behind many prompts of another.

A request to vLLM's API can bring many prompts, or many sequences of one. A prompt's start tag is the end tag of the
same request's previous prompt, and prompts run in the order of their start tags (Goyal, Vin and Chen, SIGCOMM 1996).
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

_PART = re.compile(r"(?:\d+_)?(?P<request>.+?)-[0-9a-f]{8}")
"""vLLM's id of a prompt: the number of its sequence, the API's id, random digits."""
_NUMBERED = re.compile(r"(?P<request>cmpl-.+)-\d+")
"""The API's id of one of a completion's prompts."""
MAX_ENDS = 256
"""Number of requests remembered before those that wait for nothing are dropped."""


def request_of(prompt_id: str) -> str:
    """Return the id of the API request that a prompt belongs to."""
    found = _PART.fullmatch(prompt_id)
    name = found["request"] if found else prompt_id
    found = _NUMBERED.fullmatch(name)
    return found["request"] if found else name


class FairOrder:
    """Start tags of waiting prompts, in tokens."""

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}
        self._starts: dict[str, int] = {}

    def place(self, prompt: Any, waiting: deque[Any]) -> None:
        """Move a prompt that was appended to ``waiting`` to its position in the order of tags.

        Args:
            prompt: has `request_id` and `num_tokens`.
            waiting: vLLM's queue. Preempted prompts at its front stay there.
        """
        if not waiting or waiting[-1] is not prompt:
            return
        if len(waiting) == 1:
            self._starts.clear()
        if len(self._ends) > MAX_ENDS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        request = request_of(prompt.request_id)
        start = self._starts[prompt.request_id] = max(self._now, self._ends.get(request, 0))
        self._ends[request] = start + prompt.num_tokens
        waiting.pop()
        index = len(waiting)
        while index and self._starts.get(waiting[index - 1].request_id, 0) > start:
            index -= 1
        waiting.insert(index, prompt)

    def began(self, prompt_id: str) -> None:
        """Record that a prompt runs, so that new requests start from its tag."""
        self._now = max(self._now, self._starts.pop(prompt_id, 0))
