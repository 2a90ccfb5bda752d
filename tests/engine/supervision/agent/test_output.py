"""Tests of the terminal's output of several processes that print alike."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from weft.engine.supervision.agent.output import REPEATED_S, Output, Repeats, Writer


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


def test_a_process_that_prints_without_pause_lets_heartbeats_through(tmp_path, monkeypatch):
    """Between two turns of the event loop at most one piece of each stream is read, however much there is."""
    code = "import os\nfor _ in range(1600): os.write(2, b'x' * 65535 + b'\\n')"  # 100 MB
    pieces, read = [0], Output._read

    def counting(output, descriptor):
        pieces[0] += 1
        return read(output, descriptor)

    async def most_between_turns():
        output = Output(tmp_path / "log", Writer())
        ends = output.open()
        process = subprocess.Popen([sys.executable, "-c", code], stdout=ends[0], stderr=ends[1])
        for end in ends:
            os.close(end)
        most = 0
        while process.poll() is None:
            before = pieces[0]
            await asyncio.sleep(0)
            most = max(most, pieces[0] - before)
        output.drain()
        return most

    monkeypatch.setattr(Output, "_read", counting)
    with Path(os.devnull).open("w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        assert 1 <= asyncio.run(most_between_turns()) <= 2
    assert pieces[0] >= 1600
