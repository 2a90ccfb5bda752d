"""Frames of a connection, and its heartbeats."""

import struct

import pytest

from tests.interpreter import python
from weft.engine.supervision.connection import MOST_BYTES, FrameError, Frames, Session, pack


def test_the_certificate_is_the_same_in_every_process_and_fits_any_clock():
    code = "from weft.comm.key import _certificate; print(_certificate(bytes(32)))"
    assert len({python("-c", code, check=True, timeout_s=60).stdout for _ in "ab"}) == 1


# --- frames


def test_frames_come_together_however_they_are_cut():
    values = [{"a": number, "b": ["x" * number, {"c": None}]} for number in range(50)]
    stream = b"".join(map(pack, values))
    for size in (1, 3, 7, 1000, len(stream)):
        frames, found = Frames(), []
        for start in range(0, len(stream), size):
            found += frames.feed(stream[start : start + size])
        assert found == values


def test_brackets_in_texts_are_no_depth():
    value = {"a": "[" * 1000 + '\\"{' * 50}
    assert list(Frames().feed(pack(value))) == [value]


def test_size_is_refused_when_it_is_announced():
    with pytest.raises(FrameError, match="most is 1048576"):
        list(Frames().feed(struct.pack("<I", MOST_BYTES + 1)))
    with pytest.raises(ValueError, match="most is"):
        pack({"x": "y" * MOST_BYTES})


def test_depth_is_bounded():
    def nested(depth):
        text = b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
        return struct.pack("<I", len(text)) + text

    assert list(Frames().feed(nested(32)))
    with pytest.raises(FrameError, match="32"):
        list(Frames().feed(nested(33)))


@pytest.mark.parametrize(
    "text",
    [b"", b"5", b"[]", b"null", b"{}{}", b'{"a":NaN}', b'{"a":1e999}', b'{"a":"\xff"}', b'{"a":"\\ud800"}', b"{'a':1}"],
)
def test_what_is_no_object_is_refused(text):
    with pytest.raises(FrameError):
        list(Frames().feed(struct.pack("<I", len(text)) + text))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_has_not_are_refused_where_they_are_sent(number):
    with pytest.raises(ValueError, match="JSON"):
        pack({"a": number})


def test_texts_arrive_less_what_utf8_has_not():
    assert list(Frames().feed(pack({"a": "é\u2028\x00\U0001f9f5 \udc80.pt"}))) == [{"a": "é\u2028\x00\U0001f9f5 ?.pt"}]


class Line:
    """A link that notes what is written."""

    def __init__(self):
        self.quiet, self.written = False, []

    def write(self, frame):
        self.written.append(frame)


def test_who_tells_something_regularly_gives_no_other_sign_of_life():
    """A driver of thousands of agents reads no empty messages in addition to their heartbeats."""
    line, session = Line(), Session(name="a")
    session.attach(line, Session(name="").greeting())
    session.give_sign()
    assert not line.written
    line.quiet = True
    session.give_sign()
    assert len(line.written) == 1
    line.quiet = False
    assert session.take({"number": 1, "message": {}}) == {}
    session.give_sign()
    session.give_sign()
    assert len(line.written) == 2  # one acknowledgement
