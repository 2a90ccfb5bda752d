"""`weft stacks` names the collective that a real rank over gloo has skipped, and a collector keeps it for later."""

import json
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

from tests.waiting import until
from weft.engine.observability.event_ring import RingReader, rings_folder
from weft.engine.observability.recorded_calls import calls_socket
from weft.tools.cli import main
from weft.tools.watch import FOLDER, stalls
from weft.tools.watch.calls import parse, read_rank
from weft.tools.watch.stalls import Stalls

RANK = textwrap.dedent("""
    import ctypes, sys
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from weft.engine.observability.event_ring import rings_folder
    from weft.engine.observability.event_timer import EventTimer
    from weft.engine.observability.flight_recorder import RecorderServer
    from weft.pipeline.action import parse_slot

    def train():
        timer.slot_begins(parse_slot(f"{rank}F0"))
        dist.all_reduce(torch.ones(3, 2), group=group)
        if rank == 0:
            dist.all_reduce(torch.ones(5), group=group)
        sys.stdin.readline()

    ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER: hosts with Yama let only a parent read
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    store = dist.FileStore(str(folder / "store"), 2)
    for attempt in range(2):  # the groups of the second have the names of the first
        dist.init_process_group("gloo", store=dist.PrefixStore(str(attempt), store), rank=rank, world_size=2)
        group = dist.new_group([0, 1])
        for _ in range(4 * (1 - attempt)):
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        if not attempt:
            dist.destroy_process_group()
    timer = EventTimer.open(folder, rank, 8, torch.device("cpu"))
    recorder = RecorderServer(rings_folder(folder), rank)
    print("ready", flush=True)
    train()
""")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_collective_that_a_rank_skips_is_named_live_and_later(tmp_path, capsys, monkeypatch):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    rings = rings_folder(tmp_path)
    try:
        for each in ranks:
            assert each.stdout.readline() == "ready\n"
        until(lambda: len(parse(read_rank(rings, 0)).calls) >= 2)
        time.sleep(1.0)
        expected = "gloo group 1 (ranks 0, 1): all_reduce 2: rank 1 has not called it, rank 0 did in train (<string>:"
        assert main(["stacks", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert expected in shown and "    examine rank 1 in 1F0 of step 0 for " in shown

        (tmp_path / FOLDER).mkdir()
        monkeypatch.setattr(stalls, "STALL_S", 0.5)
        doing = [RingReader(rings / f"rank{rank}").current() for rank in range(2)]
        followed = Stalls(tmp_path, rings, "host")
        followed._due_s = 0.5
        followed.follow(doing)
        until((tmp_path / FOLDER / "calls-host.json").exists)
        stored = json.loads((tmp_path / FOLDER / "calls-host.json").read_text())
        assert set(stored["ranks"]) == {"0", "1"} and stored["still"] < stored["at"]
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    with pytest.raises(ConnectionRefusedError):
        read_rank(rings, 0)
    assert calls_socket(rings, 0).exists() and main(["stacks", str(tmp_path)]) == 0
    assert expected in capsys.readouterr().out
    shutil.rmtree(rings)
