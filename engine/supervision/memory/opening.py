"""Memory checkpoints of an engine, as a run's settings request them."""

from __future__ import annotations

from weft.conf.schema import WeftConfig
from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.distributed import SharedError, together
from weft.engine.engine import WeftEngine
from weft.engine.supervision.memory.checkpoints import MemoryCheckpoints
from weft.engine.supervision.memory.host_memory import HostMemory


def attach_memory(engine: WeftEngine, memory: HostMemory, *, share: float = 1.0) -> MemoryCheckpoints:
    """Let an engine take checkpoints in host memory. Collective call.

    Args:
        share: see `MemoryCheckpoints.open`.

    Raises:
        CheckpointError: on every rank, if a host has too little memory.
    """
    sites = [engine.layout.position(rank).site for rank in range(engine.layout.world_size)]
    checkpoints = MemoryCheckpoints.open(
        engine, memory, sites=sites, timeout_s=engine.weft.comm.timeout_s, share=share, whole=engine.watcher.kept
    )
    engine.memory = checkpoints
    engine.groups = [*engine.groups, checkpoints.group]
    return checkpoints


def open_memory(config: WeftConfig, engine: WeftEngine) -> str:
    """Attach the host memory that a supervisor keeps when ranks end. Collective call.

    Returns:
        Why there are no memory checkpoints, or empty if there are.
    """
    try:
        memory = together(HostMemory.of_environment)
        if memory is not None:
            attach_memory(engine, memory, share=config.checkpoint.memory_share)
            engine.set_up.done("memory open")
            return ""
    except (SharedError, CheckpointError) as error:  # on every rank
        every = config.checkpoint.every
        rest = f"every {every} steps" if every else "at the end alone; set checkpoint.every"
        return f"warning: no memory checkpoints: {error}. Checkpoints go to storage, {rest}"
    return (
        f"checkpoint.memory_every={config.checkpoint.memory_every}: only a supervisor keeps memory checkpoints; "
        "set supervise.enabled=true with weft launch"
    )
