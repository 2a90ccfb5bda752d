"""Tests of the terminal's output of several processes that print alike."""

from weft.engine.supervision.output import REPEATED_S, Repeats


def test_a_message_of_several_processes_is_shown_once():
    now = [0.0]
    repeats = Repeats(lambda: now[0])
    warning = b"weft: a warning that every rank has reason for\n"
    assert repeats.without(warning, "rank 0") == warning
    assert repeats.without(warning, "rank 0") == warning, "one process may say it again"
    assert repeats.without(warning + b"another one, of rank 1\n", "rank 1") == b"another one, of rank 1\n"
    now[0] = REPEATED_S + 1
    assert repeats.without(warning, "rank 1") == warning


def test_what_is_no_message_is_shown_for_every_process():
    repeats = Repeats()
    for text in (
        b"ok\n",
        b"\n",
        b'  File "train.py", line 3, in <module>\n',
        b"step 3: 12 tokens\r",
        b"the beginning of a line",
    ):
        assert repeats.without(text, "rank 0") == text == repeats.without(text, "rank 1")


def test_what_a_process_prints_without_end_is_not_remembered():
    repeats = Repeats(clock=lambda: 0.0)
    for number in range(5000):
        line = f"line {number} of a process that prints\n".encode()
        assert repeats.without(line, "one") == line
    assert len(repeats._first) < 1000
