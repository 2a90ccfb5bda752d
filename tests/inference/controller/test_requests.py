"""The nesting of a body is found without parsing it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.inference.requests import Refusal, check_prefill_only, nests_deeper, parse

VALUES = st.recursive(
    st.none() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def depth(value):
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(value=VALUES, limit=st.integers(0, 6), ascii_only=st.booleans())
def test_it_is_the_nesting_of_the_value(value, limit, ascii_only):
    assert nests_deeper(json.dumps(value, ensure_ascii=ascii_only).encode(), limit) == (depth(value) > limit)


@given(st.binary())
def test_any_bytes_have_an_answer(body):
    nests_deeper(body, 3)


@pytest.mark.parametrize(
    ("request_body", "served"),
    [
        ({"max_tokens": 1}, True),
        ({"max_tokens": 1, "n": 1}, True),
        ({"max_completion_tokens": 1}, True),
        ({"max_completion_tokens": 1, "max_tokens": 9}, True),
        ({"max_completion_tokens": 9, "max_tokens": 1}, False),
        ({"max_completion_tokens": None, "max_tokens": 1}, True),
        ({}, False),
        ({"max_tokens": 0}, False),
        ({"max_tokens": 2}, False),
        ({"max_tokens": 1, "n": 2}, False),
        ({"max_tokens": 1, "n": 0}, False),
        ({"max_tokens": 9, "n": 9, "kv_transfer_params": {"do_remote_decode": True}}, True),
        ({"max_tokens": 9, "kv_transfer_params": {"do_remote_decode": False}}, False),
        ({"max_tokens": 9, "kv_transfer_params": {}}, False),
        ({"max_tokens": 9, "kv_transfer_params": "do_remote_decode"}, False),
        ({"max_tokens": 1, "kv_transfer_params": None}, True),
    ],
)
def test_only_one_token_or_what_others_decode_is_served(request_body, served):
    if served:
        check_prefill_only(request_body)
        return
    with pytest.raises(Refusal, match="set max_tokens=1, or kv_transfer_params") as caught:
        check_prefill_only(request_body)
    assert (caught.value.status, caught.value.retry_after_s) == (400, 0)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (499, "invalid_request_error"), (500, "service_unavailable")]
)
def test_a_refusal_says_whose_fault_it_is(status, kind):
    answer = Refusal(status, "no luck", retry_after_s=3).answer
    assert answer == {"error": {"message": "no luck", "type": kind, "param": None, "code": status}}


def test_a_body_may_be_nested_as_deeply_as_is_said():
    assert parse(b'{"a": [1]}', max_depth=2) == {"a": [1]}
    with pytest.raises(Refusal, match="nested deeper than 1 levels"):
        parse(b'{"a": [1]}', max_depth=1)
