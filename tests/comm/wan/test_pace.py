"""The pace of a link: it fills the line, whatever has been, and leaves little to wait below it."""

import ctypes
from pathlib import Path

import pytest

import weft.comm.wan
from weft.comm.native import Kind, build

HERE = Path(__file__).parent
NEVER = 1 << 30


class Result(ctypes.Structure):
    _fields_ = (("carried", ctypes.c_double), ("backlog_ms", ctypes.c_double))


@pytest.fixture(scope="module")
def library():
    headers = Path(weft.comm.wan.__file__).parent
    sources = [HERE / "pace_line.cpp", headers / "pacer.hpp"]
    library = ctypes.CDLL(str(build(sources, kind=Kind.library, flags=[f"-I{headers}"])))
    library.pace_on_line.argtypes = [ctypes.c_double] * 4 + [ctypes.c_int] * 5
    library.pace_both_ways.argtypes = [ctypes.c_double] * 3 + [ctypes.c_int]
    library.pace_after_cut.argtypes = [ctypes.c_double] * 2 + [ctypes.c_int]
    library.pace_after_cut.restype = Result
    library.pace_after_small_talk.argtypes = [*[ctypes.c_double] * 3, *[ctypes.c_int] * 2, *[ctypes.c_double] * 2]
    library.pace_after_small_talk.restype = ctypes.c_double
    library.pace_on_line.restype = library.pace_both_ways.restype = Result
    return library


@pytest.fixture(scope="module")
def on_line(library):
    def run(mbps, rtt_ms, *, window=2.0, seconds=4, busy_ms=1, cycle_ms=1, cut=(NEVER, NEVER), later_rtt_ms=0):
        rate, later_rtt_ms = mbps * 1e6 / 8, later_rtt_ms or rtt_ms
        window_bytes = max(window * rate * later_rtt_ms / 1e3, 3 * 8192)
        return library.pace_on_line(rate, rtt_ms, later_rtt_ms, window_bytes, seconds, busy_ms, cycle_ms, *cut)

    return run


@pytest.mark.parametrize("mbps", [10, 50, 500, 5000])
@pytest.mark.parametrize("rtt_ms", [5, 20, 80, 200])
def test_a_line_that_is_always_wanted_is_full(on_line, mbps, rtt_ms):
    found = on_line(mbps, rtt_ms)
    assert found.carried > 0.97


@pytest.mark.parametrize("rtt_ms", [20, 80])
def test_bursts_wait_above_the_line_and_not_on_it(on_line, rtt_ms):
    freely = 0.06 / 2 * 1e3  # half a burst of 60 ms, if it all went at once
    found = on_line(50, rtt_ms, busy_ms=60, cycle_ms=100)
    assert found.backlog_ms < freely / 3
    assert found.carried > 0.5


def test_a_cut_of_five_seconds_is_forgotten(on_line):
    assert on_line(50, 80, seconds=9, cut=(2000, 7000)).carried > 0.97


@pytest.mark.parametrize("mbps", [10, 50, 500])
@pytest.mark.parametrize("rtt_ms", [20, 80, 200])
@pytest.mark.parametrize("cut_ms", [1000, 5000, 60_000])
def test_the_pace_is_that_of_before_a_cut_although_connections_start_slowly(library, mbps, rtt_ms, cut_ms):
    found = library.pace_after_cut(mbps * 1e6 / 8, rtt_ms, cut_ms)
    assert found.carried > 0.97
    assert found.backlog_ms < 0.5 * rtt_ms + 6 * 8192 * 8 / (mbps * 1e3)  # and some chunks, as always


@pytest.mark.parametrize("mbps", [50, 500])
@pytest.mark.parametrize("window", [2.0, 8.0])
def test_little_waits_on_a_line_that_is_always_wanted(on_line, mbps, window):
    assert on_line(mbps, 80, window=window).backlog_ms < 0.4 * 80  # the window alone would leave 1 and 7 times 80


@pytest.mark.parametrize("later_rtt_ms", [30, 120, 160, 400])
def test_a_way_that_gets_longer_or_shorter_is_filled_again(on_line, later_rtt_ms):
    found = on_line(50, 80, later_rtt_ms=later_rtt_ms, window=8.0, seconds=16)
    assert found.carried > 0.97


def test_a_peer_that_only_seemed_far_is_paced_no_longer(on_line):
    # Its first round trips are those of a busy machine; what it carried then is no measure.
    assert on_line(50, 80, later_rtt_ms=1, seconds=2, window=80.0).backlog_ms > 60


@pytest.mark.parametrize("mbps", [10, 50, 500, 5000])
@pytest.mark.parametrize("rtt_ms", [5, 20, 80, 200])
@pytest.mark.parametrize("ack_bytes", [0, 300])
@pytest.mark.parametrize("seconds", [8, 60])
def test_lines_that_are_wanted_both_ways_are_full_and_little_waits(library, mbps, rtt_ms, ack_bytes, seconds):
    # Acknowledgements wait behind the other direction's chunks, and neither line ever runs empty by itself.
    found = library.pace_both_ways(mbps * 1e6 / 8, rtt_ms, ack_bytes, seconds)
    assert found.carried > 0.97 * 8192 / (8192 + ack_bytes)
    chunk_ms = 8192 * 8e-3 / mbps
    if rtt_ms > 4 * chunk_ms:  # else the line holds less than a link's chunks outside of it
        assert found.backlog_ms < 0.2 * rtt_ms + 4 * chunk_ms + 8


def test_what_waits_on_a_line_that_never_rests_does_not_grow(on_line):
    assert on_line(50, 80, window=8.0, seconds=30).backlog_ms < 0.3 * 80


@pytest.mark.parametrize("mbps", [10, 50, 500, 5000])
@pytest.mark.parametrize("rtt_ms", [3, 20, 80, 200])
@pytest.mark.parametrize(
    "small_bytes, every_ms, together, reading_ms", [(100, 1, 1, 0), (100, 5, 1, 0), (8192, 20, 1, 0), (300, 50, 16, 2)]
)
def test_a_conversation_in_small_messages_is_no_measure_of_the_line(
    library, mbps, rtt_ms, small_bytes, every_ms, together, reading_ms
):
    rate = mbps * 1e6 / 8
    took_ms = library.pace_after_small_talk(rate, rtt_ms, small_bytes, every_ms, together, reading_ms, 1e6)
    line_ms = 8e3 / mbps + rtt_ms / 2
    waiting_ms = together * reading_ms  # of what was sent before
    assert 0 < took_ms < 1.3 * line_ms + rtt_ms + waiting_ms + 5
