"""Steps on a terminal and in a file."""

import fcntl
import logging
import os
import pty
import struct
import termios
from io import StringIO

import pytest
import torch.distributed as dist

from weft.engine.distributed import init_distributed
from weft.recipes.shown import Shown, warn_once
from weft.recipes.train import main
from weft.tools.ranks import run_ranks


class Terminal(StringIO):
    def isatty(self):
        return True


def shown_in(stream, seconds_of_a_step, *, total=40, start=0, is_on=True):
    now = iter(range(10**6))
    shown = Shown(total=total, start=start, is_on=is_on, stream=stream, clock=lambda: seconds_of_a_step * next(now))
    for step in range(start + 1, total + 1):
        shown.step(step, f"loss {step}.0")
    shown.close()


def test_a_file_gets_a_line_every_ten_seconds_and_one_at_the_end(capsys):
    shown_in(StringIO(), 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1/40: loss 1.0, 0:00:39 left"
    assert [line.split("/")[0] for line in lines] == ["step 1", "step 11", "step 21", "step 31", "step 40"]
    assert lines[-1] == "step 40/40: loss 40.0, 0:00:00 left"


def test_a_file_gets_no_control_characters(capsys):
    stream = StringIO()
    shown_in(stream, 0.1)
    assert stream.getvalue() == ""
    assert "\r" not in capsys.readouterr().out


def test_what_is_left_is_judged_by_the_steps_of_this_attempt(capsys):
    shown_in(StringIO(), 6, total=110, start=100)
    assert capsys.readouterr().out.splitlines()[0] == "step 101/110: loss 101.0, 0:00:54 left"


def test_a_terminal_gets_a_bar(capsys):
    stream = Terminal()
    shown_in(stream, 100)
    assert "40/40" in stream.getvalue() and "\r" in stream.getvalue()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("stream", [StringIO, Terminal])
def test_nothing_is_shown_where_it_is_off(capsys, stream):
    opened = stream()
    shown_in(opened, 100, is_on=False)
    assert opened.getvalue() == "" and capsys.readouterr().out == ""


def test_steps_that_are_repeated_are_counted_again(capsys):
    shown = Shown(total=9, start=0, is_on=True, stream=StringIO(), clock=lambda: 0.0)
    shown.step(5, "a")
    shown.go_back(3)
    shown.note("back")
    assert capsys.readouterr().out == "step 5/9: a, 0:00:00 left\nback\n"


@pytest.mark.parametrize(("lines", "columns"), [(0, 0), (0, 80), (24, 0)])
def test_a_terminal_without_a_size_gets_lines(lines, columns, capsys):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    with open(slave, "w") as stream:
        shown_in(stream, 100)
    os.close(master)
    assert "step 40/40: loss 40.0" in capsys.readouterr().out


def test_a_terminal_behind_a_pipe_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("WEFT_COLUMNS", "90")
    stream = StringIO()
    shown_in(stream, 100)
    assert "40/40" in stream.getvalue() and max(map(len, stream.getvalue().strip().split("\r"))) <= 90
    assert capsys.readouterr().out == ""


def warnings_of_this_rank():
    stream = StringIO()
    warn_once(stream)
    log = logging.getLogger("weft.test")
    log.warning("before the rendezvous")
    init_distributed(60.0)
    log.warning("all ranks have this")
    log.warning("rank %d has this", dist.get_rank())
    dist.barrier()
    return stream.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_warning_of_all_ranks_is_printed_once():
    printed = [line for lines in run_ranks(2, warnings_of_this_rank, timeout_s=180) for line in lines]
    assert sorted(printed) == ["all ranks have this", "before the rendezvous", "rank 0 has this", "rank 1 has this"]


def test_a_dry_run_is_printed_by_rank_0_alone(monkeypatch, capsys):
    monkeypatch.setattr("weft.tools.dry_run.show", lambda config: print("the report"))
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["recipe=quickstart", "dry_run=true"]) == 0
    assert capsys.readouterr().out == "the report\n"
