"""Memory checkpoints: copies in the memory of this host and of one other host, from which a supervised run recovers."""

from weft.engine.supervision.memory.checkpoints import MemoryCheckpoints
from weft.engine.supervision.memory.host_memory import HostMemory
from weft.engine.supervision.memory.hosts import partners
from weft.engine.supervision.memory.opening import attach_memory

__all__ = ["HostMemory", "MemoryCheckpoints", "attach_memory", "partners"]
