"""A rank that takes part in several attempts in one process, and counts what each leaves behind."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from weft.comm.channel import ChannelError
from weft.engine.supervision.messages import Assignment


class ManyAttempts:
    """Stands for the agent: each attempt is like the first, at another port."""

    leaving = False

    def __init__(self, argv: Sequence[str], count: int, port: int) -> None:
        self.argv, self.left, self.port = argv, count, port
        self.seen: list[dict[str, Any]] = []

    def begin(self, attempt: int, on_leave: object) -> None:
        self.began = monotonic()

    def tell_leaving(self) -> None:
        pass

    def stand_by(self, reason: str) -> Assignment | None:
        self.seen.append(census() | {"reason": reason})
        self.left -= 1
        self.port += 1
        number = str(len(self.seen))
        where = {"MASTER_PORT": str(self.port), "WEFT_ATTEMPT": number}
        return Assignment(where, self.argv) if self.left else None


def census() -> dict[str, Any]:
    """Return the census of this process: threads by name, of Python and of libraries, files by kind, engines."""
    from weft.engine.engine import WeftEngine

    tasks = Counter(Path("/proc/self/task", task, "comm").read_text().strip() for task in os.listdir("/proc/self/task"))
    files = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            files[os.readlink(f"/proc/self/fd/{descriptor}").partition(":")[0]] += 1
        except OSError:
            continue  # it was the listing's own
    return {
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "tasks": tasks,
        "files": files,
        "engines": sum(isinstance(each, WeftEngine) for each in gc.get_objects()),
    }


def attempts(settings: Sequence[str], count: int, port: int, lost_at: int, memory: str) -> list[dict[str, Any]]:
    """Train ``count`` times, each time until every rank loses its peers after ``lost_at`` more steps.

    Args:
        memory: folder of the memory checkpoints.
    """
    os.environ |= {
        "WEFT_ERROR_FILE": f"{memory}.error{os.environ['RANK']}",
        "WEFT_MEMORY": memory,
    }  # not by the test, whose server of ranks may have started before
    from weft.engine.engine import WeftEngine
    from weft.engine.supervision.rank.agent_link import AgentLink
    from weft.recipes.train import run

    agent = ManyAttempts(settings, count, port)
    AgentLink.from_environment = staticmethod(lambda _: agent)  # type: ignore[assignment, method-assign]
    step = WeftEngine.train_batch

    def train_batch(engine: WeftEngine, *args: Any) -> Any:
        engine.steps_here = getattr(engine, "steps_here", 0) + 1  # type: ignore[attr-defined]
        if engine.steps_here > lost_at:
            raise ChannelError("link rank 0 -> rank 9: the peer has exited")
        return step(engine, *args)

    WeftEngine.train_batch = train_batch  # type: ignore[method-assign]
    assert run(settings) == 1
    return agent.seen
