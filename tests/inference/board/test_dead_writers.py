"""A board whose writer's process dies or is stopped grants nothing."""

import signal
import subprocess
import sys
import time

import pytest

from weft.inference.board.reader import BoardReader
from weft.inference.board.writer import board_path

WRITER = """
import sys, time
from pathlib import Path
from weft.inference.board.writer import BoardWriter
writer = BoardWriter(Path(sys.argv[1]), rank=0, plan=[], max_edges=8)
writer.begin(1)
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("blow", "word"), [(signal.SIGKILL, "dead"), (signal.SIGSTOP, "silent")])
def test_a_writer_that_dies_or_stops_is_recognised(tmp_path, blow, word):
    path = board_path(tmp_path / "boards", 3)
    path.parent.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "up\n"
            reader = BoardReader(path)
            assert reader.state().alive
            child.send_signal(blow)
            if blow is signal.SIGKILL:
                child.wait()
            deadline = time.monotonic() + 10
            while reader.state().alive and time.monotonic() < deadline:
                time.sleep(0.02)
            assert word in reader.state().why_not
        finally:
            child.kill()
