"""A rank for tests of agents: it writes its environment, then does what its first argument says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from weft.engine.observability.watcher import Phase
from weft.engine.supervision.rank.agent_link import AgentLink, Heartbeat

KEPT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "WEFT_ATTEMPT", "MASTER_ADDR", "MASTER_PORT", "SECRET")


def done(_: Sequence[str]) -> int:
    """Succeed at once."""
    return 0


def run(arguments: Sequence[str]) -> int:
    """Run ``FOLDER MODE``, where mode is what an attempt does, by rank: ``wait``, ``wait 3:exit7``."""
    folder, mode, *others = arguments
    attempt, rank = os.environ["WEFT_ATTEMPT"], os.environ["RANK"]
    facts = {name: os.environ.get(name) for name in KEPT} | {"pid": os.getpid(), "argv": sys.argv}
    draft = Path(folder, f".{attempt}.{rank}")
    draft.write_text(json.dumps(facts))
    draft.rename(Path(folder, f"{attempt}.{rank}"))
    own = dict(other.split(":") for other in others)
    mode = own.get(rank, mode)
    print(f"rank {rank} does {mode}")
    print("and says so", file=sys.stderr)
    if mode == "flood":
        while True:
            os.write(2, b"a line of a rank that prints without end\n" * 1600)
    if mode == "early":
        progress = {"local_rank": int(os.environ["LOCAL_RANK"]), "rank": int(rank), "attempt": int(attempt)}
        heartbeat = Heartbeat(Path(os.environ["WEFT_PROGRESS"]), **progress)
        heartbeat.enter(Phase.steady)
        heartbeat.begin_step(18, 1)
        return 0
    if mode == "save":
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(143)))
        Path(folder, f"{rank}.ready").touch()
    if mode.startswith("exit"):
        return int(mode[4:])
    if mode == "leave":
        child = subprocess.Popen(["sleep", "600"])
        Path(folder, "child").write_text(str(child.pid))
        return 0
    if mode == "park":
        agent, asked = AgentLink.from_environment(os.environ), threading.Event()
        agent.begin(int(attempt), asked.set)
        asked.wait()
        assignment = agent.stand_by("asked")
        if assignment is None:
            return 1
        os.environ.update(assignment.environment)
        return run(assignment.arguments)
    if mode == "raise":
        print("Segmentation fault")
        raise RuntimeError("a rank failed")
    while mode in ("wait", "save"):
        time.sleep(60)
    return 0
