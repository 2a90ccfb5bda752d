"""The schema documents itself."""

import inspect
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.conf import schema
from weft.conf.fields import ELSEWHERE, docstrings, field_types, unknown
from weft.conf.schema import WeftConfig
from weft.conf.schema.ranges import Range, ranges

CLASSES = [
    kind for _, kind in inspect.getmembers(schema, inspect.isclass) if kind.__module__.startswith(schema.__name__)
]
DATACLASSES = [kind for kind in CLASSES if is_dataclass(kind)]


@pytest.mark.parametrize("kind", DATACLASSES)
def test_every_field_has_a_docstring_of_its_own(kind):
    docs = docstrings()[kind.__name__]
    for field in fields(kind):
        grouped = is_dataclass(field_types(kind)[field.name])
        assert grouped or docs.get(field.name, "").endswith("."), f"{kind.__name__}.{field.name}"
    assert kind.__doc__


def test_enum_members_are_spelt_as_their_values():
    for kind in CLASSES:
        if issubclass(kind, Enum) and len(kind):
            assert all(member.name == member.value == member.name.lower() for member in kind)


def test_fields_are_keyword_only():
    assert all(field.kw_only for kind in DATACLASSES for field in fields(kind))


def test_a_range_holds_its_default():
    for name, allowed in ranges(WeftConfig).items():
        default = attrgetter(name)(WeftConfig())
        if name != "cluster.master_port" and default is not None:
            assert default in allowed


@given(st.floats(-10, 10), st.floats(-10, 10), st.booleans(), st.booleans())
def test_a_range_holds_its_closed_ends_only(low, width, low_open, high_open):
    ends = Range(low, low + abs(width) + 1, low_open, high_open)
    assert (ends.low in ends) is not low_open
    assert (ends.high in ends) is not high_open
    assert (ends.low + ends.high) / 2 in ends


@given(st.sampled_from(sorted(field_types())), st.data())
def test_a_slip_in_a_name_is_answered_with_a_near_name(name, data):
    leaf_start = name.rfind(".") + 1
    at = data.draw(st.integers(leaf_start, len(name) - 1))
    slip = name[:at] + "q" + name[at:]
    assert "did you mean" in unknown(slip, field_types()) or len(name) - leaf_start < 4


def test_names_of_others_lead_to_fields_that_exist():
    assert set(ELSEWHERE.values()) <= field_types().keys()
    leaves = {name.rpartition(".")[2] for name in field_types()}
    assert not leaves & ELSEWHERE.keys()
