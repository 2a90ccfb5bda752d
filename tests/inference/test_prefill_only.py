"""The worker's API: what it does not serve is refused with what to do, and never crashes it."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.inference.vllm_prefill_only import MOST_BYTES, MOST_DEPTH, PrefillOnly, Refusal, judge

PREFILL = {"prompt": "hello", "max_tokens": 1}
REMOTE = {"kv_transfer_params": {"do_remote_decode": True}}


@pytest.mark.parametrize(
    "body",
    [
        PREFILL,
        {"messages": [], "max_completion_tokens": 1},
        PREFILL | REMOTE,
        {"prompt": "hello", "max_tokens": 9} | REMOTE,
    ],
)
def test_prefills_pass(body):
    judge(json.dumps(body).encode())


@pytest.mark.parametrize(
    "body",
    [{"prompt": "hello"}, PREFILL | {"max_tokens": 2}, PREFILL | {"n": 3}, {"prompt": "x", "kv_transfer_params": {}}],
)
def test_decoding_is_refused_with_what_to_do(body):
    with pytest.raises(Refusal, match="set max_tokens=1, or kv_transfer_params") as refusal:
        judge(json.dumps(body).encode())
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5, b"[" * 10**5 + b"]" * 10**5]
)
def test_what_is_no_request_is_refused(body):
    with pytest.raises(Refusal):
        judge(body)


@given(
    st.recursive(
        st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_text_in_a_flat_body_passes(value):
    judge(json.dumps(PREFILL | {"user": json.dumps(value)}).encode())


def call(body_parts, path="/v1/completions"):
    """What the app behind saw, and what was answered."""
    seen, sent = [], []

    async def app(scope, receive, send):
        seen.append((await receive())["body"])

    async def send(message):
        sent.append(message)

    parts = iter(body_parts)

    async def receive():
        part = next(parts, None)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": True} if part else {"type": "http.request"}

    scope = {"type": "http", "method": "POST", "path": path}
    asyncio.run(PrefillOnly(app)(scope, receive, send))
    return seen, sent


def test_a_body_that_comes_in_parts_is_handed_on_whole():
    body = json.dumps(PREFILL).encode()
    assert call([body[:5], body[5:], b""]) == ([body], [])


def test_a_body_without_end_is_cut_off():
    seen, sent = call([b" " * 2**20] * (MOST_BYTES // 2**20 + 2))
    assert not seen and sent[0]["status"] == 413


def test_a_caller_that_leaves_is_no_error():
    seen, sent = call([b"{"])
    assert not seen and sent[0]["status"] == 400


def test_depth_is_measured_outside_of_strings():
    judge(json.dumps(PREFILL | {"user": "[" * 2 * MOST_DEPTH + '\\"'}).encode())
