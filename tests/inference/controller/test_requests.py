"""The nesting of a body is found without parsing it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from weft.inference.requests import nests_deeper

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
