"""Values between ranks: what goes in comes out, and bytes of an attacker run nothing."""

import json
import math
import pickle
from dataclasses import dataclass
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.collectives.balanced import regular
from weft.comm.collectives import LinkClass
from weft.comm.collectives.collective import Collective, Primitive
from weft.comm.collectives.space import Choice
from weft.comm.values import decode, encode
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.tuples(st.integers(), st.text()), inner)
        | st.frozensets(st.integers())
    ),
)


@given(plain)
def test_plain_values_come_out_as_they_went_in(value):
    assert decode(encode(value)) == value


class Colour(Enum):
    red = "red"


@dataclass(frozen=True)
class Inner:
    colours: dict[tuple[Colour, int], float]


@dataclass(frozen=True)
class Outer:
    name: str
    parts: tuple[Inner, ...] = ()

    def __post_init__(self):
        if not self.name:
            raise ValueError("name=''")


def test_records_are_made_of_the_kinds_that_the_reader_names_and_of_what_those_hold():
    value = [Outer("a", (Inner({(Colour.red, 1): math.inf}),)), None]
    assert decode(encode(value), (Outer,)) == value
    for kinds in ((), (Inner,)):
        with pytest.raises(ValueError, match="cannot decode a value"):
            decode(encode(value), kinds)


def test_schedules_and_rewrites_of_collectives_survive():
    schedule = generate("w", Placement.fold(4), 8)
    assert decode(encode({1: schedule}), (Schedule,)) == {1: schedule}
    collective = Collective(Primitive.all_gather, regular(2, 2), (4,), 4)
    choice = Choice.plainly(collective)
    again = decode(encode(choice), (Choice,))
    assert again.rewrite == choice.rewrite and math.isnan(again.cost_s)
    assert decode(encode(LinkClass.intra), (LinkClass,)) is LinkClass.intra


@pytest.mark.parametrize(
    "said",
    [
        pickle.dumps(print),
        b"",
        b"[1]",
        b"{}",
        b'{"tuple": 1}',
        b'{"tuple": [], "list": []}',
        b'{"dict": [1]}',
        b'{"set": [{"list": []}]}',
        b'{"os.system": ["true"]}',
        b'{"Outer": []}',
        b'{"Outer": [""]}',
        b'{"Outer": ["", {"tuple": []}]}',
        b'{"Colour": "__class__"}',
        b'{"Colour": ["red"]}',
        b'{"list": [' * 100_000,
        b'{"list": [' * 100_000 + b"]}" * 100_000,
        b"\xff\xfe",
    ],
)
def test_other_bytes_are_refused_in_one_way(said):
    with pytest.raises(ValueError, match="cannot decode a value"):
        decode(said, (Outer, Colour))


def test_what_is_no_plain_value_does_not_leave():
    with pytest.raises(TypeError, match="only plain values"):
        encode({"f": print})
    json.loads(encode({"f": 1.0}))
