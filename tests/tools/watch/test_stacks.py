"""`weft stacks` finds the one rank that does something else, and says what it cannot read."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from weft.engine.observability.event_ring import RingReader, RingWriter, encode_slot, rings_folder
from weft.pipeline.action import parse_slot
from weft.tools.cli import main
from weft.tools.watch.stacks import Frame, find_py_spy, report

RANK = textwrap.dedent("""
    import ctypes, sys, threading, time
    from pathlib import Path

    from weft.engine.observability.event_ring import RingWriter, encode_slot, rings_folder
    from weft.pipeline.action import parse_slot

    def receives():
        print("ready", flush=True)
        while True:
            time.sleep(600)

    def computes():
        receives()

    ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER: hosts with Yama let only a parent read
    rank = int(sys.argv[2])
    ring = RingWriter(rings_folder(Path(sys.argv[1])), rank, 64)
    ring.begin(*encode_slot(parse_slot("1F2" if rank == 2 else "1RECV_F2")), 7, time.perf_counter())
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    computes() if rank == 2 else receives()
""")


@pytest.fixture
def ranks(tmp_path):
    found = []
    for rank in range(4):
        command = [sys.executable, "-c", RANK, str(tmp_path), str(rank)]
        found.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for each in found:
        assert each.stdout.readline() == "ready\n"
    yield found
    for each in found:
        each.kill()
        each.wait()
        each.stdout.close()


def test_the_rank_with_another_stack_comes_first_and_a_dead_one_not_at_all(ranks, tmp_path, capsys):
    ranks[3].kill()
    ranks[3].wait()
    assert main(["stacks", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    calls = lines.index("collective calls of 0 ranks:")
    assert [line.partition(" cannot be read")[0] for line in lines[calls + 1 :]] == [
        f"    rank {rank}: its calls" for rank in range(3)
    ]
    lines = lines[:calls]
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads[0].startswith("1 of 3 ranks: rank 2 in 1F2 of step 7 for ")
    assert heads[1].startswith("2 of 3 ranks: rank 0 in 1RECV_F2 of step 7 for ") and ", rank 1 in" in heads[1]
    stacks = [[line.split()[0] for line in lines[lines.index(head) + 1 :]] for head in heads]
    assert stacks[0][:3] == ["receives", "computes", "<module>"] and stacks[1] == ["receives", "<module>"]
    assert main(["stacks", str(tmp_path), "--threads"]) == 0
    assert capsys.readouterr().out.count("another thread") == 2


def test_a_run_without_a_living_rank_and_a_missing_program_are_named(tmp_path, capsys, monkeypatch):
    assert main(["stacks", str(tmp_path)]) == 2
    assert "no rank of it is alive on this host" in capsys.readouterr().err
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["stacks", str(tmp_path)]) == 2
    assert "weft stacks needs py-spy: pip install 'weft[watch]'" in capsys.readouterr().err


def test_a_process_that_cannot_be_read_is_reported_beside_the_others(tmp_path):
    ring = RingWriter(rings_folder(tmp_path), 0, 64)
    ring.begin(*encode_slot(parse_slot("0F0")), 3, time.perf_counter())
    reader = RingReader(rings_folder(tmp_path) / "rank0")
    stack = (Frame("wait", "a.py", 1),)
    lines = list(report({0: reader, 1: reader}, {0: (stack,), 1: "Permission denied"}))
    assert reader.pid == os.getpid() and find_py_spy()
    assert lines[1] == "    wait (a.py:1)" and lines[3] == "    cannot be read: Permission denied"
